"""Runs a plan: attempts, dependencies, retries, deadlines, exports, the report.

One loop over three things that can speak: the kernel, the launcher, and signals. An attempt is reserved by the kernel
before anything is launched, its launch record is committed before the worker's first instruction, and its end, logs
and exports are committed in one commit.
"""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import orjson

from chio import schema
from chio.errors import HostFault, StateError
from chio.host import Host
from chio.plans import ExportTarget, PlanReader, Prepared, reserved_match
from chio.records import launch_record
from chio.servers import NAME_PREFIX, ToolServers, prepare
from chio.signals import stop_signals
from chio.sockets import SocketDirectory
from confine import (
    SOCKET_PATH,
    Collected,
    ConfineError,
    Exited,
    ExportRefused,
    Identity,
    Launcher,
    LaunchFailed,
    Observed,
    claim_identity,
    collect_exports,
    discard_staged,
    for_attempt,
    launch_spec,
    publish_staged,
    stage_exports,
)

RETRY_S = 1.0
MAX_INTERRUPTIONS = 16
MAX_LOG_BYTES = 64 * 1024
INTERRUPTED = "host_interrupted"
CANCELLED = "process_cancelled"

_REDACTED = b"[REDACTED]"
_KILLED_FOR = {"not_enforced": "launch_failed", "not_resumed": "launch_failed"}


@dataclass(slots=True, eq=False)
class Attempt:
    """One live attempt and what the host holds for it."""

    number: int
    connection: dict[str, Any]
    socket: socket.socket
    identity: Identity | None
    launch_id: str | None = None
    pid_namespace: tuple[int, int] = (0, 0)

    def release(self) -> None:
        self.socket.close()
        if self.identity is not None:
            self.identity.close()


@dataclass(slots=True, eq=False)
class Work:
    """One worker of the plan, as the kernel's rows and this run know it. `not_before` is monotonic seconds."""

    prepared: Prepared
    ended: list[dict[str, Any]] = field(default_factory=list)
    attempt: Attempt | None = None
    not_before: float = 0.0
    settled: str | None = None  # an outcome without an attempt: dependency_failed, process_cancelled

    @property
    def name(self) -> str:
        return self.prepared.worker.process

    @property
    def completed(self) -> bool:
        return bool(self.ended) and self.ended[-1]["outcome"] == "exit_0"

    @property
    def failed(self) -> bool:
        if self.settled is not None:
            return True
        interrupted = sum(1 for attempt in self.ended if attempt["outcome"] == INTERRUPTED)
        counted = len(self.ended) - interrupted
        return not self.completed and (counted >= self.prepared.worker.max_attempts or interrupted >= MAX_INTERRUPTIONS)

    @property
    def state(self) -> str:
        if self.attempt is not None:
            return "running"
        return "completed" if self.completed else "failed" if self.failed else "pending"

    def report(self) -> dict[str, Any]:
        last = self.ended[-1] if self.ended else {}
        return {
            "process": self.name,
            "state": self.state,
            "attempts": len(self.ended),
            "suspensions": 0,
            "outcome": self.settled or last.get("outcome"),
            "peak_resident_bytes": last.get("peak_resident_bytes"),
            "cpu_ms": last.get("cpu_ms"),
            "confined": self.prepared.confined,
            "launch_id": last.get("launch_id"),
        }


class Runner:
    """One run of one plan on one opened host."""

    def __init__(
        self, host: Host, reader: PlanReader, progress: Callable[[list[Work]], None], without: Sequence[str] = ()
    ) -> None:
        """`without`: the layers of confinement that the operator gave up by name."""
        self._host = host
        self._kernel = host.kernel
        self._progress = progress
        self._without = tuple(without)
        self._stopping = False
        self.refusal: StateError | HostFault | ConfineError | None = None
        self._max_parallel = reader.plan.max_parallel
        if host.replay_only:
            raise StateError(
                "a restored state runs nothing before it is accepted",
                file=str(host.path),
                why="what was done after its backup is not known here",
                fix="see what was lost, then `chio process accept`; until then `serve` replays",
            )
        reader.require_processes(host.processes)
        kept = self._kernel.call("freeze", plan=None)
        frozen = kept["plan"]
        reader.forget_inputs(kept["deleted"])
        prepared = reader.prepare(orjson.loads(frozen) if frozen else None)
        mine = reader.frozen_text(prepared)
        if frozen:
            reader.require_same_resolution(mine, frozen)
        self._mine = mine
        self._frozen = frozen
        self._work = {entry.worker.process: Work(entry) for entry in prepared}
        self._sockets = SocketDirectory(host.runtime_id)
        self._servers_prepared = prepare(
            schema.host_config(host.config_text.encode(), host.config_path),
            host.config_path,
            host.path,
            reader.runtime_roots,
            self._without,
        )
        self._servers: ToolServers
        self._launcher: Launcher

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """To the end, or until told to stop; the report. `refusal` then says why work was left, if an error did it."""
        try:
            self._load()
            if not self._done():
                self._require_live_grants()
                with Launcher.start((self._host.lock,)) as self._launcher, self._sockets, stop_signals() as wakeup:
                    self._servers = ToolServers(self._servers_prepared, self._launcher, self._kernel)
                    self._loop(wakeup)
            self._kernel.call("finish")
        except (StateError, HostFault, ConfineError) as error:
            self.refusal = error
        return self.report()

    def report(self) -> dict[str, Any]:
        """`chio.process.run-report.v1`."""
        workers = sorted(self._work.values(), key=lambda work: work.name)
        return {
            "schema": "chio.process.run-report.v1",
            "complete": all(work.completed for work in workers),
            "pending_container_records": sum(1 for work in workers if work.attempt is not None),
            "abandoned_socket_intents": self._sockets.abandoned,
            "workers": [work.report() for work in workers],
        }

    def _load(self) -> None:
        """Where an earlier run stopped; and finish the renames that it had committed to."""
        progress = self._kernel.call("progress")
        self._grants_live = progress["grants_live"]
        for attempt in progress["attempts"]:
            work = self._work.get(attempt["process"])
            if work is None:
                continue
            work.ended.append(attempt)
            exports = work.prepared.exports
            if attempt["exports"] is not None:
                staged = orjson.loads(attempt["exports"])
                with _directory(staged["directory"]) as target:
                    publish_staged(target, [(entry["staged"], entry["file"]) for entry in staged["files"]])
                self._kernel.call("settled", process=work.name, number=attempt["number"])
            elif exports is not None and attempt["outcome"] == INTERRUPTED:
                with _directory(exports.directory) as target:
                    discard_staged(target, self._token(work, attempt["number"]))
        self._cancel(progress["cancelled"])

    def _require_live_grants(self) -> None:
        if not self._grants_live:
            raise StateError(
                "no grant is still valid",
                file=str(self._host.path),
                why="they expired",
                fix="grants are never renewed: start a new state",
            )

    def _loop(self, wakeup: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._kernel, selectors.EVENT_READ, self._kernel_spoke)
            selector.register(self._launcher, selectors.EVENT_READ, self._launcher_spoke)
            selector.register(wakeup, selectors.EVENT_READ, lambda: self._stop(wakeup))
            self._servers.start_all()
            while not self._stopping:
                self._kernel_spoke()
                self._servers.require_usable(self._host.path)
                if self._servers.ready:
                    break
                for key, _ in selector.select():
                    key.data()
            if self._frozen is None and not self._stopping:
                self._kernel.call("freeze", plan=self._mine)
            while not self._done():
                self._kernel_spoke()
                self._start_ready()
                self._progress(list(self._work.values()))
                if self._done():
                    break
                if self._kernel.pending:  # it arrived while an answer was waited for: the socket will not say so again
                    continue
                for key, _ in selector.select(self._patience()):
                    key.data()
            self._servers.stop()
            while self._servers.alive:
                for key, _ in selector.select():
                    key.data()
        self._progress(list(self._work.values()))

    def _done(self) -> bool:
        if self._running():
            return False
        return self._stopping or all(work.completed or work.failed for work in self._work.values())

    def _running(self) -> list[Work]:
        return [work for work in self._work.values() if work.attempt is not None]

    def _patience(self) -> float | None:
        """How long nothing can happen but an event: until the next retry."""
        if self._stopping:
            return None
        waits = [work.not_before for work in self._work.values() if work.state == "pending" and self._ready(work)]
        return max(0.0, min(waits) - time.monotonic()) if waits and len(self._running()) < self._max_parallel else None

    def _ready(self, work: Work) -> bool:
        return all(self._work[name].completed for name in work.prepared.worker.depends_on)

    def _start_ready(self) -> None:
        for work in self._work.values():
            if work.state == "pending" and any(self._work[name].failed for name in work.prepared.worker.depends_on):
                work.settled = "dependency_failed"
        if self._stopping:
            return
        for work in self._work.values():
            if len(self._running()) >= self._max_parallel:
                return
            if work.state == "pending" and self._ready(work) and time.monotonic() >= work.not_before:
                try:
                    self._start(work)
                except StateError as error:  # its grants ended: nothing more can start, what runs is ended in order
                    self.refusal = error
                    self._end_all()
                    return

    # --- one attempt ---------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        prepared = work.prepared
        identity = claim_identity(self._without) if prepared.confined else None
        reserved = self._kernel.call("reserve", process=work.name, confined=prepared.confined)
        number, connection = reserved["number"], reserved["connection"]
        listening, path = self._sockets.bind(f"{work.name}-{number}")
        work.attempt = Attempt(number, connection, listening, identity)
        connection["socket_path"] = SOCKET_PATH if prepared.confined else path
        bootstrap = {
            "schema": "chio.process.worker-bootstrap.v1",
            "connection": connection,
            "attempt": number,
            "input": prepared.worker.input,
        }
        try:
            mounts = for_attempt(prepared.mounts, path) if prepared.confined else prepared.mounts
        except ConfineError as error:
            self._ended(work, "launch_failed", None, _message(f"chio: {error}\n"), None)
            return
        timeout_ms = prepared.worker.timeout_seconds * 1000
        spec = launch_spec(mounts, prepared.profile, prepared.limits, timeout_ms, identity, self._without)
        with _sealed(orjson.dumps(bootstrap)) as stdin:
            self._launcher.launch(work.name, spec, stdin, (identity.fd,) if identity else ())

    def _launcher_spoke(self) -> None:
        for event in self._launcher.receive():
            if event.attempt.startswith(NAME_PREFIX):
                self._servers.launcher_said(event)
                continue
            work = self._work[event.attempt]
            if isinstance(event, Observed):
                self._observed(work, event)
            elif isinstance(event, LaunchFailed):
                self._launch_failed(work, event)
            else:
                self._exited(work, event)

    def _observed(self, work: Work, event: Observed) -> None:
        """The exec stop: commit what holds, then let the kernel serve the attempt, then let the worker run."""
        attempt = work.attempt
        assert attempt is not None
        attempt.pid_namespace = pid_namespace(event.pid)
        prepared = work.prepared
        record = launch_record(event, prepared.confined) | {
            "process_id": work.name,
            "attempt": attempt.number,
            "asked": {
                "command": prepared.worker.command,
                "cwd": prepared.worker.cwd,
                "profile": prepared.profile.name if prepared.confined else "none",
                "profile_sha256": prepared.profile.digest if prepared.confined else None,
                "timeout_seconds": prepared.worker.timeout_seconds,
                "limits": prepared.worker.limits,
                "without": list(self._without),
            },
        }
        attempt.launch_id = self._kernel.call("launched", process=work.name, number=attempt.number, record=record)[
            "launch_id"
        ]
        if not event.satisfied or self._stopping:
            return
        self._kernel.call(
            "listen",
            (attempt.socket.fileno(),),
            process=work.name,
            number=attempt.number,
            credential=attempt.connection["credential"],
            launch_id=attempt.launch_id,
            uid=attempt.identity.uid if attempt.identity else None,
        )
        self._launcher.resume(work.name)

    def _launch_failed(self, work: Work, event: LaunchFailed) -> None:
        why = os.strerror(event.errno) if event.errno else "failed"
        where = f"{event.step}, {event.path or 'no path'}, {why}; {event.hint or 'see the step'}"
        outcome = CANCELLED if work.settled == CANCELLED else INTERRUPTED if self._stopping else "launch_failed"
        self._ended(work, outcome, None, _message(f"chio: the launch failed ({where})\n"), None)

    def _exited(self, work: Work, event: Exited) -> None:
        attempt, exports = work.attempt, work.prepared.exports
        assert attempt is not None
        if event.killed_for is not None:
            outcome = _KILLED_FOR.get(event.killed_for, event.killed_for)
        else:
            outcome = f"exit_{event.exit_code}" if event.exit_code is not None else f"signal_{event.signal}"
        secret = attempt.connection["credential"].encode()
        logs = {
            name: (data.replace(secret, _REDACTED)[:MAX_LOG_BYTES], written)
            for name, data, written in (
                ("stdout", event.stdout, event.stdout_bytes),
                ("stderr", event.stderr, event.stderr_bytes),
            )
        }
        published: list[dict[str, Any]] = []
        staged = None
        if event.exports_fd is not None:
            try:
                if exports is not None and event.exit_code is not None and event.killed_for is None:
                    staged, published = self._stage(work, exports, event.exports_fd)
            except (ExportRefused, OSError) as error:
                outcome = "export_refused"
                text = f"\nchio: {error}\n".encode()
                kept, written = logs["stderr"]
                logs["stderr"] = (kept[: MAX_LOG_BYTES - len(text)] + text, written)
            finally:
                os.close(event.exports_fd)
        record = {
            "process_id": work.name,
            "attempt": attempt.number,
            "launch_id": attempt.launch_id,
            "observer": "host",
            "outcome": outcome,
            "status": {"exit": event.exit_code} if event.exit_code is not None else {"signal": event.signal},
            "usage": asdict(event.usage),
            "output": {"stdout_bytes": event.stdout_bytes, "stderr_bytes": event.stderr_bytes},
            "limits_hit": list(event.limits_hit),
            "exports": published,
        }
        self._ended(work, outcome, record, logs, staged)

    def _ended(
        self,
        work: Work,
        outcome: str,
        record: dict[str, Any] | None,
        logs: dict[str, tuple[bytes, int]],
        staged: dict[str, Any] | None,
    ) -> None:
        """Commit the end of an attempt, then publish what it exported."""
        attempt = work.attempt
        assert attempt is not None
        self._kernel.call(
            "ended",
            process=work.name,
            number=attempt.number,
            outcome=outcome,
            record=record,
            exports=staged,
            logs={name: [base64.b64encode(kept).decode(), written] for name, (kept, written) in logs.items()},
        )
        if staged is not None:
            with _directory(staged["directory"]) as target:
                publish_staged(target, [(entry["staged"], entry["file"]) for entry in staged["files"]])
            self._kernel.call("settled", process=work.name, number=attempt.number)
        usage = record["usage"] if record else {}
        work.ended.append({"number": attempt.number, "outcome": outcome, "launch_id": attempt.launch_id, **usage})
        work.not_before = time.monotonic() + RETRY_S
        self._drop(work)

    def _drop(self, work: Work) -> None:
        if work.attempt is not None:
            self._sockets.remove(f"{work.name}-{work.attempt.number}")
            work.attempt.release()
            work.attempt = None

    def _stage(
        self, work: Work, exports: ExportTarget, scratch: int
    ) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Copy the declared files beside their place. (what recovery needs, what the exit record says)."""
        assert work.attempt is not None
        collected: list[Collected] = collect_exports(scratch, exports.patterns, exports.max_bytes)
        try:
            if os.path.realpath(self._host.path) == exports.directory:
                for entry in collected:
                    if reserved_match(entry.name) is not None:
                        raise ExportRefused(entry.name, "the host keeps a file of that name")
            if not collected:
                return None, []
            with _directory(exports.directory) as target:
                staged = {
                    final: name
                    for name, final in stage_exports(collected, target, self._token(work, work.attempt.number))
                }
            published = [{"file": entry.name, "bytes": entry.bytes, "sha256": entry.sha256} for entry in collected]
            files = [{"staged": staged[entry.name], "file": entry.name} for entry in collected]
            return {"directory": exports.directory, "files": files}, published
        finally:
            for entry in collected:
                entry.close()

    def _token(self, work: Work, number: int) -> str:
        """Names the staged files of one attempt of one state, for whoever finishes or discards them."""
        return f"{sha256(self._host.runtime_id.encode()).hexdigest()[:12]}-{work.name}-{number}"

    # --- being told ----------------------------------------------------------------------------------------------

    def _kernel_spoke(self) -> None:
        """All that the kernel has said, also what arrives while one of these is being seen to."""
        while self._kernel.pending:
            for event, fds in self._kernel.events():
                self._kernel_said(event, fds)

    def _kernel_said(self, event: dict[str, Any], fds: list[int]) -> None:
        if event["event"] == "cancelled":
            self._cancel(event["processes"])
        elif event["event"] in ("server", "server_needed"):
            self._servers.kernel_said(event)
        else:
            (pidfd,) = fds
            work = self._work[event["process"]]
            live = work.attempt is not None and work.attempt.number == event["number"]
            inside = live and work.attempt is not None and in_pid_namespace(pidfd, work.attempt.pid_namespace)
            os.close(pidfd)
            self._kernel.call("peer", ticket=event["ticket"], inside=inside)

    def _cancel(self, names: list[str]) -> None:
        """Cancelling is for good: end what runs, start nothing more."""
        for name in names:
            work = self._work.get(name)
            if work is not None and not work.completed:
                work.settled = CANCELLED
                if work.attempt is not None:
                    self._launcher.kill(name, CANCELLED)

    def _stop(self, wakeup: socket.socket) -> None:
        wakeup.recv(64)
        self._end_all()

    def _end_all(self) -> None:
        self._stopping = True
        for work in self._running():
            self._launcher.kill(work.name, INTERRUPTED)


def _message(text: str) -> dict[str, tuple[bytes, int]]:
    """The logs of an attempt that never ran: what the host has to say, as its stderr."""
    data = text.encode()
    return {"stderr": (data[:MAX_LOG_BYTES], len(data))}


def pid_namespace(pid: int) -> tuple[int, int]:
    """What names the pid namespace a process is in (namespaces(7)); (0, 0) when it is gone."""
    try:
        found = os.stat(f"/proc/{pid}/ns/pid")
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def in_pid_namespace(pidfd: int, namespace: tuple[int, int]) -> bool:
    """Whether the process is alive and in it. Looked at by number, then the pidfd says the number was its own."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        pid = next(int(line.split()[1]) for line in info if line.startswith("Pid:"))
    inside = pid > 0 and pid_namespace(pid) == namespace != (0, 0)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return False
    return inside


@contextlib.contextmanager
def _directory(path: str) -> Iterator[int]:
    """A descriptor of the folder that exports go to, never through a link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            "exports cannot be published",
            file=path,
            why=os.strerror(error.errno or 0),
            fix="restore the directory and run the same command again",
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """The bootstrap as a sealed memfd at its start: of any size, and nobody can change it (memfd_create(2))."""
    import fcntl

    fd = os.memfd_create("bootstrap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
        yield fd
    finally:
        os.close(fd)
