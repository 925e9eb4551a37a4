"""Stops a process at its system calls, so that it can be killed at any chosen step of what it does.

Only the process itself is traced, not what it starts: the worker's tracer is the launcher, and there can be but one.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from confine import syscalls

_SYSCALL, _DETACH, _SETOPTIONS, _INTERRUPT = 24, 17, 0x4200, 0x4207  # ptrace(2)
_SYSGOOD, _TRACEFORK, _EVENT_FORK = 1, 2, 1
_ENDED = -1
_AT_SYSCALL = signal.SIGTRAP | 0x80


class Stepper:
    """One traced process, standing still but for advance(). `forked` are its children that came and stand still too."""

    def __init__(self, pid: int, *, children: bool = False) -> None:
        self.pid = pid
        self.gone = False
        syscalls.ptrace(syscalls.PTRACE_SEIZE, pid, _SYSGOOD | (_TRACEFORK if children else 0))
        syscalls.ptrace(_INTERRUPT, pid)
        self._wait()

    def advance(self, steps: int, ended: Callable[[], bool] = lambda: False) -> int:
        """Lets it run to its next system call, or to that one's end, `steps` times, or until it has `ended`.

        How often it did. `ended` is asked while it runs too, and believed at once: what it has seen it may not see
        again, and the process may then wait in its call for ever.
        """
        for done in range(steps):
            if self.gone or ended():
                return done
            self._continue(_SYSCALL)
            if self._wait(ended) == _ENDED:
                return done
        return steps

    def advance_to_init(self) -> "Stepper":
        """Until it has started a process in a pid namespace of its own, which is handed over; the rest runs free."""
        while True:
            self._continue(_SYSCALL)
            event = self._wait()
            if event != _EVENT_FORK:
                continue
            task = f"/proc/{self.pid}/task/{self.pid}/children"
            for child in map(int, Path(task).read_text().split()):
                if not _traced_by_us(child):
                    continue
                os.waitpid(child, syscalls.WAIT_ALL)
                syscalls.ptrace(_SETOPTIONS, child, _SYSGOOD)
                if len(_status(child, "NSpid").split()) > 1:
                    self.release()
                    init = Stepper.__new__(Stepper)
                    init.pid, init.gone, init._signal = child, False, 0
                    return init
                syscalls.ptrace(_DETACH, child)

    def release(self) -> None:
        if not self.gone:
            syscalls.ptrace(_DETACH, self.pid)

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)
            while not self.gone:
                self._wait()

    def _continue(self, request: int) -> None:
        try:
            syscalls.ptrace(request, self.pid, self._signal)
        except ProcessLookupError:
            pass  # killed meanwhile: the wait below says so

    def _wait(self, meanwhile: Callable[[], bool] | None = None) -> int:
        """The event of the stop; 0 for a system call's or a signal's, which is then delivered with the next step.

        _ENDED, with the process running, when `meanwhile` says so before it stops.
        """
        self._signal = 0
        pid, status = os.waitpid(self.pid, syscalls.WAIT_ALL | (os.WNOHANG if meanwhile else 0))
        while pid == 0 and meanwhile is not None:
            if meanwhile():
                return _ENDED
            pid, status = os.waitpid(self.pid, syscalls.WAIT_ALL | os.WNOHANG)
        if not os.WIFSTOPPED(status):
            self.gone = True
            return 0
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == 0 and number != _AT_SYSCALL:
            self._signal = number
        return event


def _traced_by_us(pid: int) -> bool:
    return int(_status(pid, "TracerPid")) == os.getpid()


def _status(pid: int, name: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value
    raise KeyError(name)
