"""What a call that waits is about: which process makes it, to what file, with which bytes, under which stable name."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from confine import syscalls
from tests.faults.notify import EXECS, MOUNTS, OPENS, RESOURCES, SENDS, WRITES, Notification

_AT_FDCWD = 0xFFFF_FF9C
_MAP_ANONYMOUS = 0x20
_CACHE = "/__pycache__"  # of Python's own: written by whoever comes first
_PATH_BYTES = 4096
_MOST_BYTES = 64 * 1024 * 1024
_UNSTABLE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{12,}|(?<=/)\d+(?=/)")
_TEMPORARY = re.compile(r"(?<=^/tmp/)([^/]*-)?[a-z0-9_]{8}(?=/|$)")  # as Python's tempfile makes names

# Which argument is what: (descriptor, path, second path). A folder's descriptor stands one before the path.
_PATHS: Mapping[str, tuple[int | None, int | None]] = {
    "rename": (0, 1), "renameat": (1, 3), "renameat2": (1, 3), "link": (0, 1), "linkat": (1, 3), "unlink": (0, None),
    "unlinkat": (1, None), "symlink": (1, None), "symlinkat": (2, None), "mkdir": (0, None), "mkdirat": (1, None),
    "rmdir": (0, None), "truncate": (0, None), "open": (0, None), "creat": (0, None), "openat": (1, None),
    "execve": (0, None), "execveat": (1, None), "mount": (1, None), "umount2": (0, None), "pivot_root": (0, 1),
    "move_mount": (3, None), "open_tree": (1, None),
}  # fmt: skip
_AT = frozenset({
    "renameat", "renameat2", "linkat", "unlinkat", "symlinkat", "mkdirat", "openat", "execveat", "move_mount",
    "open_tree",
})  # fmt: skip
_FLAGS = {"open": 1, "openat": 2, "unlinkat": 2, "renameat2": 4}
_OUT_FIRST = {"copy_file_range": 2}


@dataclass(frozen=True, slots=True)
class Boundary:
    """One call that makes something last, or tells somebody, just before it is made.

    `number` counts the whole recording from 0, `ordinal` those of the same role, call and target from 1: counted that
    way, what comes more or less often in another run does not move the others. `place` is what `--boundary` takes.
    `offset` of a file write is where it goes, `length` the bytes it was given (for ftruncate the new size), `data`
    those bytes: always to a socket, to a file or pipe where they were asked for. `peer` is the process at the other
    end of a socket, 0 when unknown. `new`: this file or folder
    is made.
    """

    number: int
    role: str
    ordinal: int
    call: str
    kind: str
    path: str
    target: str
    second: str
    pid: int
    fd: int
    offset: int
    length: int
    flags: int
    data: bytes | None
    peer: int
    new: bool

    @property
    def place(self) -> str:
        return f"{self.role}/{self.call}:{self.target}#{self.ordinal}"

    @property
    def sort(self) -> str:
        """What boundaries have in common that are alike: `--quick` takes some of each."""
        base = self.role.partition(".")[0]
        return f"{base}:{self.call}:{re.sub('[0-9]+', '#', self.target)}"


@dataclass(frozen=True, slots=True)
class Process:
    """What a role is told from. `inside` are its numbers in every pid namespace from ours inwards."""

    pid: int
    parent: int
    command: tuple[str, ...]
    inside: tuple[int, ...]


Role = Callable[[Process, Callable[[int], Process | None]], str]


def process(pid: int) -> Process | None:
    """None when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = tuple(os.fsdecode(word) for word in file.read().split(b"\0")[:-1])
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(int(status["Tgid"]), int(status["PPid"]), command, tuple(map(int, status["NSpid"].split())))


class Describer:
    """Numbers the boundaries of one run. `roots` are the folders that names are told relative to."""

    def __init__(self, roots: Mapping[str, Path], role: Role, *, data: bool) -> None:
        self._roots = sorted(((str(path), name) for name, path in roots.items()), key=lambda root: -len(root[0]))
        self._role = role
        self._data = data
        self.said_in = ""  # the file that is the command's standard output: what is written there is said to somebody
        self._kept_open = (*(root for root, _ in self._roots), "/run/", "/sys/fs/cgroup/", "/proc/")
        self._instances: dict[str, list[int]] = {}
        self._counted: dict[str, int] = {}
        self._number = 0

    def describe(self, asked: Notification) -> Boundary | None:
        """None for a call that is no boundary: to a terminal, an event counter, /dev/null, a file nobody keeps."""
        try:
            caller = process(asked.tid)
            if caller is None:
                return None
            return self._boundary(asked, caller)
        except (OSError, ValueError):  # killed while it was looked at
            return None

    def _boundary(self, asked: Notification, caller: Process) -> Boundary | None:
        call, fd, path, second, kind = asked.call, -1, "", "", ""
        if call in RESOURCES:
            kind, path = self._resource(asked, caller)
        elif call in _PATHS:
            first, other = _PATHS[call]
            assert first is not None
            path = _path(asked, first, call in _AT)
            second = _path(asked, other, call in _AT) if other is not None else ""
            kind = "exec" if call in EXECS else "mount" if call in MOUNTS else _kind_of_path(path)
            if call in OPENS and not _creates(asked):  # only where resources are looked at
                kind = "resource" if kind and path.startswith(self._kept_open) else ""
        elif call in MOUNTS:
            kind, path = "mount", call
        else:
            fd = _signed(asked.arguments[_OUT_FIRST.get(call, 0)])
            path = os.readlink(f"/proc/{asked.tid}/fd/{fd}")
            kind = _kind_of_descriptor(path)
        if not kind or _CACHE in path:
            return None
        if path == self.said_in:
            kind, path = "said", "stdout"
        elif kind in ("socket", "pipe"):
            path = kind
        length = _length(asked)
        keeps = call in (*WRITES, *SENDS) and (kind == "socket" or (self._data and kind in ("file", "pipe")))
        data = _data(asked, length) if keeps else None
        if data is not None:
            length = len(data)
        if kind == "socket" and not length:
            return None  # the rest of a message of which nothing is left
        role, target = self._named(caller), self.stable(path)
        alike = f"{role}/{call}:{target}"
        self._counted[alike] = ordinal = self._counted.get(alike, 0) + 1
        self._number += 1
        flags = asked.arguments[_FLAGS[call]] & 0xFFFF_FFFF if call in _FLAGS else os.O_CREAT if call == "creat" else 0
        return Boundary(
            number=self._number - 1,
            role=role,
            ordinal=ordinal,
            call=call,
            kind=kind,
            path=path,
            target=target,
            second=second,
            pid=caller.pid,
            fd=fd,
            offset=_offset(asked, fd) if kind == "file" and call in WRITES else 0,
            length=length,
            flags=flags,
            data=data,
            peer=_peer(caller.pid, fd) if kind == "socket" else 0,
            new=call in (*OPENS, "mkdir", "mkdirat") and not os.path.lexists(path),
        )

    def _resource(self, asked: Notification, caller: Process) -> tuple[str, str]:
        """(kind, path). Memory is looked at where a fault of it matters most, in the process that keeps the
        promises."""
        if asked.call != "mmap":
            return "resource", asked.call
        private = asked.arguments[3] & _MAP_ANONYMOUS
        return ("resource", "memory") if private and self._role(caller, process) == "kernel" else ("", "")

    def _named(self, caller: Process) -> str:
        """The role, and from the second process of a role on its number."""
        base = self._role(caller, process)
        known = self._instances.setdefault(base, [])
        if caller.pid not in known:
            known.append(caller.pid)
        position = known.index(caller.pid) + 1
        return base if position == 1 else f"{base}.{position}"

    def stable(self, path: str) -> str:
        """The path as another run would have it: below a root's name, without identifiers and numbers."""
        for root, name in self._roots:
            if path == root or path.startswith(f"{root}/"):
                path = name + path[len(root) :]
                break
        return _UNSTABLE.sub("*", _TEMPORARY.sub(r"\1*", path))


def _creates(asked: Notification) -> bool:
    return asked.call == "creat" or bool(asked.arguments[_FLAGS[asked.call]] & (os.O_CREAT | os.O_TRUNC))


def _signed(argument: int) -> int:
    return int(struct.unpack("=i", struct.pack("=I", argument & 0xFFFF_FFFF))[0])


def _path(asked: Notification, position: int, at: bool) -> str:
    """An absolute path where one can be told; a name in another root stays as the caller gave it."""
    text = _string(asked.tid, asked.arguments[position])
    if text.startswith("/"):
        return text
    folder = asked.arguments[position - 1] & 0xFFFF_FFFF if at else _AT_FDCWD
    link = "cwd" if folder == _AT_FDCWD else f"fd/{folder}"
    try:
        base = os.readlink(f"/proc/{asked.tid}/{link}")
    except FileNotFoundError:
        base = "?"
    return os.path.normpath(f"{base}/{text}") if text else base


def _string(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        with suppress(OSError):
            return os.fsdecode(memory.read(_PATH_BYTES).partition(b"\0")[0])
        page = 4096 - address % 4096  # the string ends before the next page, which is not there
        memory.seek(address)
        return os.fsdecode(memory.read(page).partition(b"\0")[0])


def _kind_of_descriptor(path: str) -> str:
    if path.startswith("socket:"):
        return "socket"
    if path.startswith("pipe:"):
        return "pipe"
    return _kind_of_path(path) if path.startswith("/") else ""


def _kind_of_path(path: str) -> str:
    if path.startswith(("/dev/", "/memfd:")):
        return ""
    if path.startswith("/sys/fs/cgroup/"):
        return "cgroup"
    return "proc" if path.startswith("/proc/") else "file"


def _length(asked: Notification) -> int:
    call, arguments = asked.call, asked.arguments
    if call in ("write", "pwrite64", "sendto"):
        return arguments[2]
    if call in ("truncate", "ftruncate"):
        return arguments[1]
    return 0


def _data(asked: Notification, length: int) -> bytes | None:
    call, arguments = asked.call, asked.arguments
    if call in ("write", "pwrite64", "sendto"):
        return syscalls.read_memory(asked.tid, arguments[1], min(length, _MOST_BYTES))
    if call in ("writev", "pwritev", "pwritev2"):
        return _gathered(asked.tid, arguments[1], arguments[2])
    if call == "sendmsg":
        header = syscalls.read_memory(asked.tid, arguments[1], 32)  # struct msghdr: name, its length, iov, count
        _, _, vector, count = struct.unpack("=QQQQ", header)
        return _gathered(asked.tid, vector, count)
    return None


def _gathered(pid: int, vector: int, count: int) -> bytes:
    parts = []
    for base, length in struct.iter_unpack("=QQ", syscalls.read_memory(pid, vector, 16 * count)):
        parts.append(syscalls.read_memory(pid, base, min(length, _MOST_BYTES)) if length else b"")
    return b"".join(parts)


def _offset(asked: Notification, fd: int) -> int:
    if asked.call in ("pwrite64", "pwritev", "pwritev2"):
        return asked.arguments[3]
    position, flags = 0, 0
    with open(f"/proc/{asked.tid}/fdinfo/{fd}") as info:
        for line in info:
            if line.startswith("pos:"):
                position = int(line.split()[1])
            elif line.startswith("flags:"):
                flags = int(line.split()[1], 8)
    if flags & os.O_APPEND:
        return os.stat(f"/proc/{asked.tid}/fd/{fd}").st_size
    return position


def _peer(pid: int, fd: int) -> int:
    copy = copied(pid, fd)
    if copy is None:
        return 0
    try:
        with socket.socket(fileno=copy) as ours:
            return int(struct.unpack("=iII", ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    except OSError:
        return 0


def copied(pid: int, fd: int) -> int | None:
    """A descriptor of ours for the same open file as one of another process."""
    pidfd = os.pidfd_open(pid)
    try:
        return syscalls.pidfd_getfd(pidfd, fd)
    finally:
        os.close(pidfd)
