"""One real launch after another, and what came of each."""

import json
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from confine import (
    ConfineError,
    Event,
    Exited,
    Launcher,
    LaunchFailed,
    LaunchSpec,
    Observed,
    check_limits,
    claim_identity,
    launch_spec,
    load_profile,
    plan_mounts,
    plan_unconfined,
    require_cgroups,
)

PYTHON = "/usr/bin/python3"
PATIENCE_SECONDS = 20


def _not_to_be_had() -> tuple[str, ...]:
    """What the machine does not give an ordinary user, who then gives it up by name. Root gives up nothing."""
    if os.geteuid() == 0:
        return ()
    names = []
    try:
        claim_identity().close()
    except ConfineError:
        names.append("distinct-uids")
    try:
        require_cgroups("required", ())
    except ConfineError:
        names.append("cgroup")
    return tuple(names)


WITHOUT = _not_to_be_had()
needs_distinct_uids = pytest.mark.skipif("distinct-uids" in WITHOUT, reason="this user has no uids to give: subuid(5)")
needs_cgroups = pytest.mark.skipif("cgroup" in WITHOUT, reason="this user was given no cgroup to make others in")


@dataclass
class Ended:
    """What came of one attempt. `observed` is None when the launch failed."""

    observed: Observed | None
    event: Exited | LaunchFailed

    @property
    def exited(self) -> Exited:
        assert isinstance(self.event, Exited), self.event
        return self.event

    @property
    def failed(self) -> LaunchFailed:
        assert isinstance(self.event, LaunchFailed), self.event
        return self.event

    def field(self, name: str) -> Any:
        assert self.observed is not None, self.event
        return next(field for field in self.observed.fields if field.name == name)

    def json(self) -> Any:
        """What the worker printed; its stderr is shown where it failed instead."""
        assert self.exited.exit_code == 0, (self.exited.exit_code, self.exited.signal, self.exited.stderr.decode())
        return json.loads(self.exited.stdout)


class Runner:
    """Launches one attempt after another in one launcher, and waits for each."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.number = 0
        self._lock: int | None = None

    def spec(
        self,
        argv: Sequence[str],
        cwd: Path,
        *,
        limits: Mapping[str, int] | None = None,
        timeout_ms: int = 20_000,
        confined: bool = True,
        state_dir: str | None = None,
        profile: str = "worker",
        without: Sequence[str] = (),
        **plan: Any,
    ) -> tuple[LaunchSpec, int | None]:
        """A spec and the descriptor of its identity's lock."""
        chosen = load_profile(profile)
        if confined:
            mounts = plan_mounts(argv=argv, cwd=str(cwd), state_dir=state_dir, **plan)
        else:
            mounts = plan_unconfined(argv=argv, cwd=str(cwd), **plan)
        given_up = (*WITHOUT, *without)
        identity = claim_identity(given_up) if confined else None
        spec = launch_spec(mounts, chosen, check_limits(limits or {}, chosen.limits), timeout_ms, identity, given_up)
        return spec, identity.fd if identity else None

    def start(self, spec: LaunchSpec, lock_fd: int | None, stdin: bytes = b"") -> str:
        """Sends the launch. The lock is init's to hold from then on, and ours until the next start: a uid that is
        looked for when its attempt is dead is nobody else's then."""
        self.number += 1
        name = f"attempt-{self.number}"
        stdin_fd = os.memfd_create("stdin")
        os.write(stdin_fd, stdin)
        os.lseek(stdin_fd, 0, os.SEEK_SET)
        self.launcher.launch(name, spec, stdin_fd, [] if lock_fd is None else [lock_fd])
        os.close(stdin_fd)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock_fd
        return name

    def events(self) -> Iterator[Event]:
        """Events as they come; one that is long in coming fails the test."""
        poll = select.poll()
        poll.register(self.launcher, select.POLLIN)
        while True:
            assert poll.poll(PATIENCE_SECONDS * 1000), "the launcher said nothing"
            yield from self.launcher.receive()

    def finish(self, at_exec: Callable[[Observed], None] | None = None) -> Ended:
        """Resumes the one attempt that is under way and waits for its end."""
        observed = None
        for event in self.events():
            if not isinstance(event, Observed):
                return Ended(observed, event)
            observed = event
            if at_exec is not None:
                at_exec(event)
            self.launcher.resume(event.attempt)
        raise AssertionError("unreachable")

    def run(self, argv: Sequence[str], cwd: Path, *, stdin: bytes = b"", at_exec: Any = None, **options: Any) -> Ended:
        self.start(*self.spec(argv, cwd, **options), stdin)
        return self.finish(at_exec)

    def python(self, script: str, cwd: Path, *arguments: str, **options: Any) -> Ended:
        return self.run([PYTHON, "-c", script, *arguments], cwd, **options)

    def changed(self, argv: Sequence[str], folder: Path, /, **changes: Any) -> Ended:
        """Launches a spec that was tampered with after it was planned; keys name members of spec or of its plan."""
        spec, lock_fd = self.spec(argv, folder)
        for name, value in changes.items():
            if hasattr(spec, name):
                spec = replace(spec, **{name: value})
            else:
                spec = replace(spec, plan=replace(spec.plan, **{name: value}))
        self.start(spec, lock_fd)
        return self.finish()
