"""The tool servers as the host runs them: each a confined process of its own, whose two pipes the kernel holds.

A server is launched like a worker, under its own profile. It is started with the host, and again when the kernel needs
one that has ended; its stderr is kept as a bounded log with the record of its end.
"""

from __future__ import annotations

import base64
import os
import select
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chio import schema
from chio.errors import InputError, StateError
from chio.host import KernelProcess
from chio.records import launch_record, named_profile
from confine import (
    ConfineError,
    Event,
    Exited,
    Identity,
    Launcher,
    LaunchFailed,
    Limits,
    MountPlan,
    Observed,
    Profile,
    check_limits,
    claim_identity,
    for_attempt,
    launch_spec,
    load_profile,
    plan_mounts,
    require_cgroups,
)

NAME_PREFIX = "server:"
MAX_LOG_BYTES = 64 * 1024
_FOREVER_MS = 10 * 365 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server, ready to be launched."""

    server: schema.Server
    profile: Profile
    limits: Limits
    mounts: MountPlan
    without: tuple[str, ...]


def prepare(
    config: schema.HostConfig, file: str, state: Path, roots: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> list[Prepared]:
    """Every server of a host config. Paths are relative to the config's folder. Raises `InputError`.

    `without`: the layers of confinement that the operator gave up by name.
    """
    folder = str(Path(os.path.realpath(file)).parent)
    found = []
    for position, server in enumerate(config.servers):
        try:
            profile = load_profile(_profile_name(server.confinement.profile, folder))
            mounts = plan_mounts(
                argv=server.command,
                cwd=folder,
                state_dir=str(state) if state.exists() else None,  # at init there is none yet
                read=server.confinement.read,
                write=server.confinement.write,
                runtime_roots=roots,
            )
            require_cgroups(profile.cgroup, {}, without)
            found.append(Prepared(server, profile, check_limits({}, profile.limits), mounts, without))
        except ConfineError as error:
            raise InputError(
                error.what, file=file, field=f"servers[{position}]", why=error.path, fix=error.fix
            ) from error
    return found


def _profile_name(name: str, folder: str) -> str:
    """A profile given by path is relative to the config's folder; a bare name is one of the project's."""
    return os.path.join(folder, name) if "/" in name or name.endswith(".yaml") else name


def _launch(launcher: Launcher, name: str, entry: Prepared) -> tuple[Identity, tuple[int, int]]:
    """Launch one server; its identity, and the kernel's ends of its stdin and stdout. ConfineError leaves nothing."""
    mounts = for_attempt(entry.mounts, None)
    identity = claim_identity(entry.without)
    stdin, to_server = os.pipe2(os.O_CLOEXEC)
    from_server, stdout = os.pipe2(os.O_CLOEXEC)
    try:
        spec = launch_spec(mounts, entry.profile, entry.limits, _FOREVER_MS, identity, entry.without)
        launcher.launch(name, spec, stdin, (identity.fd,), stdout_fd=stdout)
    except ConfineError:
        identity.close()
        os.close(to_server)
        os.close(from_server)
        raise
    finally:
        os.close(stdin)
        os.close(stdout)
    return identity, (to_server, from_server)


@contextmanager
def start_for_init(prepared: list[Prepared], file: str) -> Iterator[tuple[int, ...]]:
    """Start every server once; the kernel's ends of their pipes, stdin and stdout of each in order.

    They end when the block does. Raises `InputError` naming the server that cannot be launched.
    """
    with Launcher.start() as launcher, ExitStack() as held:
        positions = {entry.server.id: position for position, entry in enumerate(prepared)}
        fds: list[int] = []
        for entry in prepared:
            identity, ours = _launch(launcher, entry.server.id, entry)
            held.callback(identity.close)
            for fd in ours:
                held.callback(os.close, fd)
            fds += ours
        waiting = set(positions)
        while waiting:
            select.select([launcher], [], [])
            for event in launcher.receive():
                waiting.discard(event.attempt)
                if isinstance(event, Observed) and event.satisfied:
                    launcher.resume(event.attempt)
                else:
                    why = (
                        event.hint or event.step if isinstance(event, LaunchFailed) else "its confinement does not hold"
                    )
                    raise InputError(
                        "a tool server cannot be launched",
                        file=file,
                        field=f"servers[{positions[event.attempt]}].command",
                        why=why,
                        fix="run it with `chio-confine run` to see what it needs",
                    )
        yield tuple(fds)


@dataclass(slots=True, eq=False)
class _Running:
    """One live server. `ours` are the kernel's ends of its stdin and stdout, until they are handed over."""

    identity: Identity
    ours: tuple[int, ...]
    number: int = 0
    up: bool = False
    wanted: bool = False  # again, as soon as this one is dead


class ToolServers:
    """The servers of one host. `refusals` says of each that is not usable why."""

    def __init__(self, prepared: list[Prepared], launcher: Launcher, kernel: KernelProcess) -> None:
        self._prepared = {entry.server.id: entry for entry in prepared}
        self._launcher = launcher
        self._kernel = kernel
        self._running: dict[str, _Running] = {}
        self.refusals: dict[str, str] = {}

    def start_all(self) -> None:
        for name in self._prepared:
            self.start(name)

    @property
    def ready(self) -> bool:
        """Every server answered its handshake with the tools that were pinned (each once; it may have ended since)."""
        return not self.refusals and all(self._running.get(name, _NONE).up for name in self._prepared)

    @property
    def alive(self) -> bool:
        return bool(self._running)

    def require_usable(self, state: Path) -> None:
        """While they start: a server that cannot be used refuses the host. Raises `StateError`."""
        for name, why in self.refusals.items():
            raise StateError(
                "a tool server cannot be used",
                file=str(state),
                field=f"servers.{name}",
                why=why,
                fix="run its command with `chio-confine run`; a changed tool list needs a new state",
            )

    def start(self, name: str) -> None:
        """Launch one server; what becomes of it arrives as events of the launcher."""
        try:
            identity, ours = _launch(self._launcher, NAME_PREFIX + name, self._prepared[name])
        except ConfineError as error:
            self._refuse(name, str(error))
            return
        self._running[name] = _Running(identity, ours)

    def launcher_said(self, event: Event) -> None:
        """One event of the launcher about one of these servers."""
        name = event.attempt.removeprefix(NAME_PREFIX)
        if isinstance(event, Observed):
            if event.satisfied:
                self._observed(name, event)
        elif isinstance(event, LaunchFailed):
            why = os.strerror(event.errno) if event.errno else "failed"
            self._down(name, f"its launch failed ({event.step}, {event.path or 'no path'}, {why}; {event.hint or ''})")
        else:
            self._exited(name, event)

    def kernel_said(self, event: dict[str, Any]) -> None:
        """`server_needed`: a call waits for one that has ended. `server`: how a handshake went."""
        name = event["server"]
        if event["event"] == "server_needed":
            if name in self._running:
                self._running[name].wanted = True
                self._launcher.kill(NAME_PREFIX + name, "stopped_answering")
            else:
                self.start(name)
        elif event["up"]:
            if name in self._running:
                self._running[name].up = True
        else:
            self.refusals[name] = event["why"]
            if name in self._running:
                self._launcher.kill(NAME_PREFIX + name, "refused")

    def _observed(self, name: str, event: Observed) -> None:
        """Its exec stop: the launch record is committed, the pipes handed over, then it runs."""
        running, entry = self._running[name], self._prepared[name]
        named, texts = named_profile(entry.profile)
        record = launch_record(event, True) | {
            "process_id": None,
            "server": name,
            "asked": {"command": entry.server.command, **named, "without": list(entry.without)},
        }
        started = self._kernel.call("server_started", running.ours, server=name, record=record, texts=texts)
        running.number = started["number"]
        self._close_ours(running)
        self._launcher.resume(NAME_PREFIX + name)

    def _exited(self, name: str, event: Exited) -> None:
        running = self._running.pop(name)
        running.identity.close()
        self._close_ours(running)
        if event.exports_fd is not None:
            os.close(event.exports_fd)
        ended = f"exit_{event.exit_code}" if event.exit_code is not None else f"signal_{event.signal}"
        if running.number == 0:  # it ended at its exec stop: nothing was handed over
            self.refusals[name] = f"its confinement does not hold ({event.killed_for or ended})"
            self._kernel.call("server_failed", server=name)
            return
        log = [base64.b64encode(event.stderr[:MAX_LOG_BYTES]).decode(), event.stderr_bytes]
        self._kernel.call(
            "server_ended", server=name, number=running.number, outcome=event.killed_for or ended, stderr=log
        )
        if running.wanted:
            self.start(name)

    def _down(self, name: str, why: str) -> None:
        """It could not be launched."""
        running = self._running.pop(name)
        running.identity.close()
        self._close_ours(running)
        self._refuse(name, why)

    def _refuse(self, name: str, why: str) -> None:
        """Whoever waits for it is told."""
        self.refusals[name] = why
        self._kernel.call("server_failed", server=name)

    def _close_ours(self, running: _Running) -> None:
        for fd in running.ours:
            os.close(fd)
        running.ours = ()

    def stop(self) -> None:
        """End what runs; the launcher's events say when it is dead."""
        for name in self._running:
            self._launcher.kill(NAME_PREFIX + name, "host_stopping")


_NONE = _Running(Identity(-1, -1, -1), ())
