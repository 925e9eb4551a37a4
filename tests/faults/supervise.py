"""Runs a command call by call: numbers its boundaries, and at a chosen one kills a process or makes the call fail.

One process at a time moves past a boundary, in the order in which this lets them. To kill *before* a boundary is
certain: the call waits here and is never made. To kill *after* it, the call is let through while everybody else who
comes to a boundary is kept waiting, and the caller is killed when it is seen outside the call: at its next boundary, or
blocked in another call (/proc/PID/syscall).

The supervisor must have one thread and no other children: it is the reaper of whatever the command leaves behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.boundaries import Boundary, Describer, Role, copied, process
from tests.faults.notify import Asking, Notification, number_of

BEFORE: Final = "before"
AFTER: Final = "after"
SHORT: Final = "short"
TORN: Final = "torn"
LATE: Final = "late"
KILLS: Final = (BEFORE, AFTER, TORN, LATE)
HALVES: Final = (SHORT, TORN)
SCARCE: Final = ("EMFILE", "ENOMEM")
"""Faults at calls that take a descriptor, a process or memory, which are asked about only for their sake."""
_SET_CHILD_SUBREAPER = 36
_TURN_MS = 100
_LEAVING_S = 5.0
_QUIET_MS = 300
ALONE_S = 20.0  # how long what a dead command started may live


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do at the boundary `place`: a kill (before; after; `late`: after, once nobody else
    has anything to do; `torn`: in the middle of a write), `short` (half
    the bytes are written), or the name of an errno.

    `victim`: the role to kill; empty for whoever made the call.
    """

    place: str
    action: str
    victim: str = ""

    @property
    def name(self) -> str:
        return f"{self.place}={self.action}" + (f":{self.victim}" if self.victim else "")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """`kernel/write:pipe#2=before`, `host/fsync:state#3=EIO`, `kernel/write:socket#1=after:host`. ValueError."""
        place, _, what = text.rpartition("=")
        action, *victim = what.split(":")
        if not place or (action not in (*KILLS, SHORT) and not hasattr(errno, action)):
            known = ", ".join((*KILLS, SHORT))
            raise ValueError(f"{text}: not PLACE=ACTION, with an action of {known}, or the name of an errno")
        return cls(place, action, *victim)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One supervised run. `hit` is the boundary at which the fault happened, None when the run never came to it.

    `exit_code` is negative for a signal, as subprocess has it; `survivors` are command lines that outlived the command
    without help, `stuck` says that it had to be ended after its time. `made`: without the one that was kept back.
    """

    exit_code: int
    boundaries: list[Boundary]
    hit: Boundary | None
    survivors: list[str]
    stuck: bool
    seconds: float
    made: list[Boundary]


class Supervisor:
    """For the commands of one run, one after another: its boundaries are numbered through all of them."""

    def __init__(
        self,
        roots: Mapping[str, Path],
        role: Role,
        *,
        data: bool = False,
        resources: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        """`roots`: folders by the names that boundaries are told under. `data`: keep what is written, too. `resources`:
        look at what takes a descriptor, a process or memory, too."""
        self._resources = resources
        self._describer = Describer(roots, role, data=data)
        self._timeout_s = timeout_s
        self._exit_code: int | None = None
        self._waiting: deque[Notification] = deque()
        self._roles: dict[str, int] = {}

    def run(
        self,
        command: Sequence[str],
        fault: Fault | None,
        *,
        cwd: Path,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
    ) -> Outcome:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        begun = time.monotonic()
        self._asking = Asking.start(command, cwd, environment, stdout, stderr, resources=self._resources)
        self._exit_code = None
        self._waiting.clear()
        self._describer.said_in = str(stdout)
        boundaries: list[Boundary] = []
        hit, stuck, ended_at = None, False, 0.0
        try:
            while not self._asking.deserted or self._waiting:
                now = time.monotonic()
                self._reap()
                if self._exit_code is not None:
                    ended_at = ended_at or now
                if (ended_at and now - ended_at > ALONE_S) or now - begun > self._timeout_s:
                    stuck = not ended_at
                    break
                asked = self._next(_TURN_MS)
                if asked is None:
                    continue
                boundary = self._describer.describe(asked)
                if boundary is None or boundary.path == str(stderr):
                    self._asking.let(asked)
                    continue
                boundaries.append(boundary)
                self._roles[boundary.role] = boundary.pid
                victim = self._victim(fault, boundary) if fault is not None and hit is None else None
                if fault is not None and victim is not None:
                    hit = boundary
                    self._inflict(fault, asked, boundary, victim, boundaries)
                else:
                    self._asking.let(asked)
            survivors = [] if stuck else _descendants()
            self._end_everything()
        finally:
            self._asking.close()
        assert self._exit_code is not None
        kept_back = hit is not None and fault is not None and fault.action not in (AFTER, LATE, *HALVES)
        made = [boundary for boundary in boundaries if not (kept_back and boundary is hit)]
        return Outcome(self._exit_code, boundaries, hit, survivors, stuck, time.monotonic() - begun, made)

    # --- what happens at the boundary ----------------------------------------------------------------------------

    def _victim(self, fault: Fault, boundary: Boundary) -> int | None:
        """Whom the fault concerns if it happens here; None when it does not, or there is nobody of that role yet."""
        if boundary.place != fault.place:
            return None
        return self._roles.get(fault.victim) if fault.victim else boundary.pid

    def _inflict(
        self, fault: Fault, asked: Notification, boundary: Boundary, victim: int, boundaries: list[Boundary]
    ) -> None:
        if fault.action == AFTER:
            self._asking.let(asked)
            self._until_left(asked)
        if fault.action == LATE:
            self._asking.let(asked)
            boundaries += self._until_quiet(boundary.pid)
        if fault.action == TORN:
            self._half(boundary)
        if fault.action in KILLS:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            if victim == boundary.pid:
                self._until_dead(victim)
            if fault.action not in (AFTER, LATE):
                self._asking.let(asked)  # nobody waits for it any more, unless another was the victim
        elif fault.action == SHORT:
            written = self._half(boundary)
            if written is None:
                self._asking.fail(asked, errno.EAGAIN)
            else:
                self._asking.answer(asked, written)
        else:
            self._asking.fail(asked, getattr(errno, fault.action))

    def _until_left(self, asked: Notification) -> None:
        """Until the caller is seen outside the call that it was let into."""
        give_up = time.monotonic() + _LEAVING_S
        number = str(number_of(asked.call))
        while time.monotonic() < give_up:
            following = self._asking.wait(1)
            if following is not None:
                self._waiting.append(following)
                if following.tid == asked.tid:
                    return
            try:
                with open(f"/proc/{asked.tid}/syscall") as file:
                    where = file.read().split()[0]
            except OSError:
                return  # it is gone
            if where not in ("running", number):
                return

    def _until_quiet(self, pid: int) -> list[Boundary]:
        """Everybody else goes on for as long as anybody has something to do; that process stands at its next
        boundary."""
        passed: list[Boundary] = []
        held: list[Notification] = []
        give_up = time.monotonic() + _LEAVING_S
        while time.monotonic() < give_up and (asked := self._next(_QUIET_MS)) is not None:
            other = self._describer.describe(asked)
            if other is not None and other.pid == pid:
                held.append(asked)
                continue
            if other is not None:
                passed.append(other)
                self._roles[other.role] = other.pid
            self._asking.let(asked)
        self._waiting.extend(held)
        return passed

    def _until_dead(self, pid: int) -> None:
        """SIGKILL takes effect before anyone else goes on."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            waiting.poll(int(_LEAVING_S * 1000))
        finally:
            os.close(pidfd)

    def _half(self, boundary: Boundary) -> int | None:
        """Half the bytes are written, by us on the caller's open file (write(2) may do no more); how many. None when
        none could be."""
        fd = copied(boundary.pid, boundary.fd)
        data = (boundary.data or b"")[: max(1, boundary.length // 2)]
        if fd is None or not data:
            return None
        try:
            at = boundary.offset
            return os.pwrite(fd, data, at) if boundary.call == "pwrite64" else os.write(fd, data)
        except BlockingIOError:
            return None
        finally:
            os.close(fd)

    # --- processes -----------------------------------------------------------------------------------------------

    def _next(self, timeout_ms: int) -> Notification | None:
        return self._waiting.popleft() if self._waiting else self._asking.wait(timeout_ms)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._asking.pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)

    def _end_everything(self) -> None:
        """Whatever is left of the command, parents before children, until there is nobody."""
        give_up = time.monotonic() + 2 * ALONE_S
        while (not self._asking.deserted or self._exit_code is None) and time.monotonic() < give_up:
            for pid in _children(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            asked = self._next(20)
            if asked is not None:
                self._asking.let(asked)
            self._reap()
        self._reap()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _descendants() -> list[str]:
    """Command lines of everything below us that is alive."""
    found, queue = [], _children(os.getpid())
    while queue:
        pid = queue.pop()
        queue += _children(pid)
        about = process(pid)
        if about is not None and about.command:
            found.append(" ".join(about.command)[:120])
    return sorted(found)
