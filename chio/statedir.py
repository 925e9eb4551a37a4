"""The state directory: private, exclusive, on a disk that keeps fsync's promise, and never reached through a link.

Everything here works on a directory descriptor; names below it are relative and opened with O_NOFOLLOW.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from chio.errors import StateError

DATABASE = "authority.db"
KEYS = "keys.json"
KERNEL_PUB = "kernel.pub"
PINS = "pins.json"
BOOTSTRAP = "bootstrap.json"
CONFIG = "host.json"
POLICY = "policy.yaml"
LOCK = "lock"
RECEIPTS = "receipts.ndjson"
BLOBS = ".chio-blobs"

# What a host keeps in its state directory: an export may never take one of these names.
RESERVED_NAMES = frozenset(
    {
        DATABASE,
        f"{DATABASE}-wal",
        f"{DATABASE}-shm",
        f"{DATABASE}-journal",
        KEYS,
        KERNEL_PUB,
        PINS,
        BOOTSTRAP,
        CONFIG,
        POLICY,
        LOCK,
        RECEIPTS,
        BLOBS,
    }
)
RESERVED_PREFIX = ".chio"

# Local file systems on which an fsynced file and an fsynced directory survive power loss.
_DURABLE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"})
_LOCK_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What lies under the state. `durable` is false for tmpfs, network and unknown file systems."""

    name: str
    durable: bool


def create(path: Path) -> int:
    """Make or take the empty directory `path`, mode 0700; its descriptor. Never overwrites anything."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        directory = _open(path)
        if os.listdir(directory):
            half = "it holds a state already" if DATABASE in os.listdir(directory) else "it is not empty"
            os.close(directory)
            raise StateError(
                "a state cannot be created here", file=str(path), why=half, fix="choose an empty or new directory"
            ) from None
        os.fchmod(directory, 0o700)
        return directory
    except OSError as error:
        raise StateError(
            "a state cannot be created here",
            file=str(path),
            why=os.strerror(error.errno or 0),
            fix="choose a directory that can be made",
        ) from error
    return _open(path)


def open_existing(path: Path) -> int:
    """The descriptor of a state directory that is a host's and private. Raises `StateError`."""
    directory = _open(path)
    held = os.fstat(directory)
    problem = None
    if held.st_uid != os.geteuid():
        problem = ("it belongs to another user", "run as the user that created it")
    elif stat.S_IMODE(held.st_mode) & 0o077:
        problem = ("others can enter it", f"chmod 700 {path}")
    elif not _is_file(directory, DATABASE):
        problem = (f"it has no {DATABASE}", "run `chio process init` into a new directory")
    if problem:
        os.close(directory)
        raise StateError("not a usable state directory", file=str(path), why=problem[0], fix=problem[1])
    return directory


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        why = (
            "it is a link or no directory"
            if error.errno in (errno.ELOOP, errno.ENOTDIR)
            else os.strerror(error.errno or 0)
        )
        raise StateError(
            "not a usable state directory", file=str(path), why=why, fix="name a directory made by `chio process init`"
        ) from error


def _is_file(directory: int, name: str) -> bool:
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()


def lock(directory: int, path: Path) -> int:
    """Take the state for one host: a descriptor that every process of the host keeps until it is dead."""
    held = _lock_file(directory, path)
    if not _flock(held):
        os.close(held)
        raise StateError(
            "the state is locked", file=str(path), why="a host is running on it", fix="stop that host first"
        )
    return held


def _flock(fd: int) -> bool:
    """Take the exclusive lock, waiting a little: who holds it for long is running."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            # A host that was just killed is followed by its children within milliseconds; a reader copies for as long.
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def lock_for_reading(directory: int, path: Path) -> int | None:
    """A shared hold on a stopped state, or None when a host is live."""
    held = _lock_file(directory, path)
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    return held


def _lock_file(directory: int, path: Path) -> int:
    try:
        return os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        raise StateError(
            "not a usable state directory",
            file=str(path),
            field=LOCK,
            why=os.strerror(error.errno or 0),
            fix="a state that `init` did not finish cannot be served: remove it and run init again",
        ) from error


def sync_parent(path: Path) -> None:
    """Make the name of a new directory or file durable."""
    parent = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def write_new(directory: int, name: str, data: bytes, mode: int = 0o600) -> None:
    """Create `name` with its final mode and synced content; an existing name is an error."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)
    try:
        os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def read(directory: int, name: str, limit: int = 16 * 1024 * 1024) -> bytes:
    """The content of a regular file of the state. Raises `OSError`."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)


def file_system(directory: int) -> FileSystem:
    """What the directory lies on, from the mount table (proc_pid_mountinfo(5))."""
    with open(f"/proc/self/fdinfo/{directory}") as info:
        mount_id = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
    with open("/proc/self/mountinfo") as table:
        for line in table:
            if line.split(" ", 1)[0] == mount_id:
                kind, _source, options = line.split(" - ", 1)[1].rstrip("\n").split(" ", 2)
                return FileSystem(kind, kind in _DURABLE or (kind == "overlay" and _durable_upper(options)))
    return FileSystem("unknown", False)


def _durable_upper(options: str) -> bool:
    """Whether an overlay's writable layer can be seen from here and lies on a durable file system."""
    members = options.split(",")
    upper = next((member[len("upperdir=") :] for member in members if member.startswith("upperdir=")), None)
    if upper is None or "volatile" in members:
        return False
    try:
        fd = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        below = file_system(fd)
        return below.durable and below.name != "overlay"
    finally:
        os.close(fd)


def require_durable(directory: int, path: Path, allow_volatile: bool) -> FileSystem:
    """The file system, or a refusal when it does not keep fsync's promise and the operator did not accept that."""
    found = file_system(directory)
    if not found.durable and not allow_volatile:
        raise StateError(
            "the state would not survive power loss",
            file=str(path),
            why=f"its file system is {found.name}",
            fix=f"use one of {', '.join(sorted(_DURABLE))}, or pass --allow-volatile to accept the loss",
        )
    return found
