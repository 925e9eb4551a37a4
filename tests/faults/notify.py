"""A command under a seccomp filter that asks before each chosen system call, and what may be answered.

The filter is put on before the command is executed and everything that descends from it inherits it, whatever it does:
new namespaces, other uids, filters of its own. No tracer is involved, so a program that traces its own children (the
launcher does) is not disturbed. seccomp_unotify(2), linux/seccomp.h.

A filter that the program adds itself and that answers with an errno goes before ours (seccomp(2), the order of
actions): such a call is never seen here, and does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from confine.syscalls import pidfd_getfd

WRITES: Final = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "copy_file_range", "sendfile")
SYNCS: Final = ("fsync", "fdatasync", "sync_file_range", "syncfs")
SIZES: Final = ("truncate", "ftruncate", "fallocate")
NAMES: Final = (
    "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "symlink", "symlinkat", "mkdir",
    "mkdirat", "rmdir",
)  # fmt: skip
SENDS: Final = ("sendmsg", "sendto", "sendmmsg")
EXECS: Final = ("execve", "execveat")
MOUNTS: Final = ("mount", "umount2", "pivot_root", "move_mount", "open_tree", "fsconfig", "fsmount", "mount_setattr")
OPENS: Final = ("open", "creat", "openat")
"""Only with O_CREAT or O_TRUNC, unless resources are asked for."""
RESOURCES: Final = (
    "accept", "accept4", "socket", "socketpair", "pipe", "pipe2", "memfd_create", "eventfd2", "epoll_create1", "clone",
    "clone3", "fork", "vfork", "mmap",
)  # fmt: skip
"""What takes a descriptor, a process or memory: asked about only where such a fault is to happen."""
CALLS: Final = (*WRITES, *SYNCS, *SIZES, *NAMES, *SENDS, *EXECS, *MOUNTS)

_OPEN_FLAGS_ARGUMENT = {"open": 1, "openat": 2}
_CREATES = os.O_CREAT | os.O_TRUNC

_NEW_LISTENER, _WAIT_KILLABLE_RECV, _SET_MODE_FILTER = 1 << 3, 1 << 5, 1
_RECV, _SEND, _ID_VALID, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082102, 0x40082104
_SYNC_WAKE_UP = 1  # hand the CPU over instead of waking another (since Linux 6.6)
_CONTINUE = 1
_NOTIFY, _ALLOW = 0x7FC0_0000, 0x7FFF_0000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_INSTRUCTION = struct.Struct("=HBBI")
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_RESPONSE = struct.Struct("=QqiI")  # struct seccomp_notif_resp
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}[platform.machine()]
_SECCOMP = {"x86_64": 317, "aarch64": 277}[platform.machine()]
_SET_PDEATHSIG = 1
_LISTENER_FD = 900  # where the command's process leaves it for us, above whatever the shell had open


@cache
def _numbers() -> dict[str, int]:
    """This machine's numbers of the calls that it has (seccomp_syscall_resolve_name(3))."""
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
    found = {name: int(resolve(name.encode())) for name in (*CALLS, *OPENS, *RESOURCES)}
    return {name: number for name, number in found.items() if number >= 0}


@cache
def _names() -> dict[int, str]:
    return {number: name for name, number in _numbers().items()}


def number_of(call: str) -> int:
    return _numbers()[call]


def _program(resources: bool) -> bytes:
    """Notify for the calls of `CALLS`, for an open that creates or truncates, allow everything else. With `resources`
    for every open and for `RESOURCES`, too."""
    numbers = {name: number for name, number in _numbers().items() if resources or name not in RESOURCES}
    some = {} if resources else _OPEN_FLAGS_ARGUMENT
    plain = [number for name, number in numbers.items() if name not in some]
    body: list[tuple[int, int, int, int]] = []
    for name, argument in some.items():
        if name in numbers:
            # Not this call: past the three; its flags: the low word of the argument, at 16 in struct seccomp_data.
            body += [(_JUMP_EQUAL, 0, 3, numbers[name]), (_LOAD, 0, 0, 16 + 8 * argument)]
            body += [(_JUMP_SET, 0, 1, _CREATES), (_RETURN, 0, 0, _NOTIFY)]
            body += [(_LOAD, 0, 0, 0)]
    code = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0), *body]
    for position, number in enumerate(plain):
        code.append((_JUMP_EQUAL, len(plain) - position, 0, number))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def _install(resources: bool) -> int:
    """Puts the filter on this process, for good; the listener's descriptor. Needs CAP_SYS_ADMIN."""
    program = _program(resources)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("=HxxxxxxQ", len(program) // _INSTRUCTION.size, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_NEW_LISTENER | _WAIT_KILLABLE_RECV)
    fd = int(libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, header))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


@dataclass(frozen=True, slots=True)
class Notification:
    """One call that waits to be let through. `tid` is the calling thread's, as we see it."""

    id: int
    tid: int
    call: str
    arguments: tuple[int, ...]


class Asking:
    """A command that was started under the filter, and everything that it started."""

    def __init__(self, pid: int, listener: int) -> None:
        self.pid = pid
        self.listener = listener
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
        *,
        resources: bool = False,
    ) -> Asking:
        """Fork, filter, execute. The command leads a process group of its own; its stdin is /dev/null."""
        pid = os.fork()
        if pid == 0:
            _become(command, cwd, environment, stdout, stderr, resources)
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise ChildProcessError(f"{command[0]}: the filter could not be put on (see {stderr})")
        pidfd = os.pidfd_open(pid)
        try:
            listener = pidfd_getfd(pidfd, _LISTENER_FD)
            assert listener is not None
        finally:
            os.close(pidfd)
        with suppress(OSError):
            fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)
        os.kill(pid, signal.SIGCONT)
        return cls(pid, listener)

    def wait(self, timeout_ms: int) -> Notification | None:
        """The next call that waits. None when the time is over or nothing is left alive (`deserted`)."""
        events = self._poll.poll(timeout_ms)
        if not events or not events[0][1] & select.POLLIN:
            return None
        buffer = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(self.listener, _RECV, buffer)
        except OSError as error:
            if error.errno == errno.ENOENT:  # the caller was killed meanwhile
                return None
            raise
        identity, tid, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
        return Notification(identity, tid, _names()[number], tuple(arguments))

    @property
    def deserted(self) -> bool:
        """Whether no process is left that was started by the command: the filter itself has no user any more."""
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def valid(self, asked: Notification) -> bool:
        """Whether the caller still waits, so that what was read of it meanwhile was read of it and not of another."""
        try:
            fcntl.ioctl(self.listener, _ID_VALID, struct.pack("=Q", asked.id))
        except OSError:
            return False
        return True

    def let(self, asked: Notification) -> None:
        """The call is made."""
        self._respond(_RESPONSE.pack(asked.id, 0, 0, _CONTINUE))

    def fail(self, asked: Notification, number: int) -> None:
        """The call is not made and fails with this errno."""
        self._respond(_RESPONSE.pack(asked.id, 0, -number, 0))

    def answer(self, asked: Notification, value: int) -> None:
        """The call is not made and returns this value: whoever says so has done for the caller what was to be done."""
        self._respond(_RESPONSE.pack(asked.id, value, 0, 0))

    def _respond(self, response: bytes) -> None:
        try:
            fcntl.ioctl(self.listener, _SEND, response)
        except FileNotFoundError:
            pass  # killed meanwhile

    def close(self) -> None:
        """Calls that still ask would fail with ENOSYS from here on (seccomp_unotify(2))."""
        os.close(self.listener)


def _become(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], stdout: Path, stderr: Path, resources: bool
) -> None:
    """In the forked child; never returns."""
    try:
        os.setpgid(0, 0)
        os.chdir(cwd)
        for number, path, flags in (
            (0, "/dev/null", os.O_RDONLY),
            (1, str(stdout), os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, str(stderr), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            fd = os.open(path, flags, 0o600)
            os.dup2(fd, number)
            if fd != number:
                os.close(fd)
        os.closerange(3, 1024)
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # nobody answers any more
        fd = _install(resources)
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LISTENER_FD)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.execvpe(command[0], list(command), dict(environment))
    finally:
        os._exit(127)
