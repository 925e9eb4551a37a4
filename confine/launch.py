"""The host's half of a launch: the launcher process, as one object with a descriptor to wait on."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from confine import cgroups, frames, landlock
from confine.errors import LauncherLost
from confine.events import event_from_wire
from confine.identities import Identity
from confine.profile import Profile
from confine.seccomp import load_filter
from confine.spec import Event, LaunchSpec, Limits, MountPlan, spec_to_wire

_CLOSE_SECONDS = 10
# -I: no path, variable or user site of the operator's decides what a privileged process imports.
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from confine.launcher import main; main({fd}, {kept!r})"


def launch_spec(
    plan: MountPlan,
    profile: Profile,
    limits: Limits,
    timeout_ms: int,
    identity: Identity | None,
    without: Sequence[str] = (),
) -> LaunchSpec:
    """What a launch under `profile` is asked to be, but for the layers in `without`; identity None means unconfined,
    as the operator."""
    if identity is None:
        inherited = tuple((name, os.environ[name]) for name in ("PATH", "HOME") if name in os.environ)
        cgroup = cgroups.wanted("best-effort", without)
        return LaunchSpec(False, plan, inherited, os.getuid(), os.getgid(), limits, timeout_ms, cgroup=cgroup)
    return LaunchSpec(
        confined=True,
        plan=plan,
        environment=tuple(profile.environment.items()),
        uid=identity.uid,
        gid=identity.gid,
        limits=limits,
        timeout_ms=timeout_ms,
        hostname=profile.hostname,
        tmp_bytes=profile.tmp_bytes,
        shm_bytes=profile.shm_bytes,
        inodes=profile.inodes,
        uid_ranges=identity.uid_ranges,
        gid_ranges=identity.gid_ranges,
        without=tuple(without),
        network=profile.network,
        seccomp=None if "seccomp" in without else load_filter(profile.seccomp),
        landlock=None if "landlock" in without else landlock.rights(profile.network, profile.landlock),
        cgroup=cgroups.wanted(profile.cgroup, without),
    )


class Launcher:
    """One launcher process. Not for several threads. Everything it started ends with it, and with this process."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._socket = sock

    @classmethod
    def start(cls, keep_fds: Sequence[int] = ()) -> "Launcher":
        """Starts it. `keep_fds` stay open in it and in every init until they end (a lock that must not be free
        earlier), never in a worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = _PROGRAM.format(root=str(Path(__file__).parent.parent), fd=theirs.fileno(), kept=tuple(keep_fds))
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *keep_fds),
                env={"LANG": "C.UTF-8"},
                cwd="/",
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def launch(
        self,
        attempt: str,
        spec: LaunchSpec,
        stdin_fd: int,
        held_fds: Sequence[int] = (),
        echo_fds: tuple[int, int] | None = None,
        stdout_fd: int | None = None,
    ) -> None:
        """Starts an attempt; Observed or LaunchFailed follows. The descriptors stay the caller's. LauncherLost.

        held_fds (an identity's lock) stay open in init until everything of the attempt is dead. echo_fds get all of
        stdout and stderr while they are written; the launcher then waits for their reader, so only for a launcher
        with one attempt.
        """
        message = {"op": "launch", "attempt": attempt, "spec": spec_to_wire(spec), "echo": echo_fds is not None}
        message["stdout"] = stdout_fd is not None
        stdout = () if stdout_fd is None else (stdout_fd,)
        self._send(message, [stdin_fd, *stdout, *(echo_fds or ()), *held_fds])

    def resume(self, attempt: str) -> None:
        """Lets an observed worker run its first instruction; its timeout starts now. LauncherLost."""
        self._send({"op": "resume", "attempt": attempt}, [])

    def kill(self, attempt: str, reason: str) -> None:
        """Ends an attempt in any phase; Exited (killed_for=reason) or LaunchFailed follows. LauncherLost."""
        self._send({"op": "kill", "attempt": attempt, "reason": reason}, [])

    def receive(self) -> list[Event]:
        """Every event that is there; never blocks. LauncherLost when the launcher is gone and all was received."""
        events: list[Event] = []
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while poll.poll(0):
            received = frames.receive(self._socket)
            if received is None:
                if events:
                    break
                raise LauncherLost("the launcher ended", fix="see the lines above on stderr")
            events.append(event_from_wire(*received))
        return events

    def close(self) -> None:
        """Ends everything it started and waits for that; what a stuck launcher holds dies with it."""
        self._socket.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: dict[str, object], fds: list[int]) -> None:
        try:
            frames.send(self._socket, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            raise LauncherLost("the launcher ended", fix="see the lines above on stderr") from None
