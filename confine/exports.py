"""Leaving the scratch directory: collect what was declared, stage it beside its place, publish by rename.

The scratch directory is hostile: everything in it was made by the worker. It is read through the descriptor held
since launch, with openat2 beneath it, through no link of any kind, after every process of the attempt is dead.
The target directory is the operator's. The caller records what was staged before the first rename; after a crash it
calls publish_staged() with that record, or discard_staged() where there is none.
"""

import errno
import fnmatch
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from confine import syscalls
from confine.errors import ExportRefused

MAX_FILES = 1_024
_MAX_ENTRIES = 65_536
_CHUNK_BYTES = 1 << 20
_STAGED = ".chio-staged-"
_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS


@dataclass(frozen=True, slots=True)
class Collected:
    """One file to export: `name` relative to the directory, `fd` open for reading and the caller's to close."""

    name: str
    bytes: int
    sha256: str
    fd: int

    def close(self) -> None:
        os.close(self.fd)


def collect_exports(scratch_fd: int, patterns: Sequence[str], max_bytes: int) -> list[Collected]:
    """The files that match, by name. No match is an empty list.

    A pattern without a slash matches at the top level; with one, it is matched part by part. ExportRefused names the
    first match that may not leave: not a regular file, more than one link, a name that is not UTF-8 text, or more
    than `max_bytes` in all. Nothing is open then.
    """
    collected: list[Collected] = []
    left = max_bytes
    try:
        for name in sorted(_matches(scratch_fd, patterns)):
            if len(collected) == MAX_FILES:
                raise ExportRefused(name, f"more than {MAX_FILES} files match")
            collected.append(_collect(scratch_fd, name, left))
            left -= collected[-1].bytes
    except BaseException:
        for file in collected:
            file.close()
        raise
    return collected


def _matches(scratch_fd: int, patterns: Sequence[str]) -> Iterator[str]:
    split = [pattern.split("/") for pattern in patterns]
    entries = 0

    def walk(directory_fd: int, above: tuple[str, ...]) -> Iterator[str]:
        nonlocal entries
        with os.scandir(directory_fd) as listing:
            for entry in listing:
                entries += 1
                if entries > _MAX_ENTRIES:
                    raise ExportRefused(entry.name, f"the directory holds more than {_MAX_ENTRIES} entries")
                parts = (*above, entry.name)
                if any(_fits(parts, pattern) for pattern in split):
                    yield "/".join(parts)
                elif any(_fits(parts, pattern[: len(parts)]) for pattern in split if len(pattern) > len(parts)):
                    # A directory on the way; what is none (a link, say) leads to no match.
                    try:
                        below = syscalls.openat2(directory_fd, entry.name, os.O_RDONLY | os.O_DIRECTORY, _BENEATH)
                    except OSError as error:
                        raise ExportRefused("/".join(parts), _why(error)) from None
                    try:
                        yield from walk(below, parts)
                    finally:
                        os.close(below)

    return walk(scratch_fd, ())


def _fits(parts: tuple[str, ...], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _collect(scratch_fd: int, name: str, left: int) -> Collected:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ExportRefused(ascii(name), "its name is not UTF-8") from None
    try:
        fd = syscalls.openat2(scratch_fd, name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, _BENEATH)
    except OSError as error:
        raise ExportRefused(name, _why(error)) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ExportRefused(name, "not a regular file")
        if status.st_nlink != 1:
            raise ExportRefused(name, f"{status.st_nlink} links to it")
        if status.st_size > left:
            raise ExportRefused(name, f"over the size allowed, by {status.st_size - left} bytes")
        digest = hashlib.sha256()
        offset = 0
        while chunk := os.pread(fd, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
            if offset > left:
                raise ExportRefused(name, "it grew while it was read")
    except BaseException:
        os.close(fd)
        raise
    return Collected(name, offset, digest.hexdigest(), fd)


def _why(error: OSError) -> str:
    named = {errno.ELOOP: "a symbolic link", errno.EXDEV: "it leads outside", errno.ENXIO: "not a regular file"}
    return named.get(error.errno or 0, error.strerror or "cannot be opened")


def stage_exports(collected: Iterable[Collected], target_fd: int, token: str) -> list[tuple[str, str]]:
    """Copies each file into the target directory under a staging name; everything is on disk when this returns.

    Returns (staged name, final name), in order; the caller records the list before it publishes. `token` belongs to
    the attempt alone. ExportRefused when a final name cannot be taken; OSError (disk full). Both leave nothing.
    """
    staged: list[tuple[str, str]] = []
    try:
        for number, file in enumerate(collected):
            _check_final(target_fd, file.name)
            name = f"{_STAGED}{token}-{number}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o644, dir_fd=target_fd)
            try:
                _copy(file, fd)
                os.fsync(fd)
            finally:
                os.close(fd)
            staged.append((name, file.name))
        os.fsync(target_fd)
    except BaseException:
        discard_staged(target_fd, token)
        raise
    return staged


def publish_staged(target_fd: int, staged: Iterable[tuple[str, str]]) -> None:
    """Renames each staged file to its final name and syncs. Also what recovery calls with the recorded list: a file
    that is not there any more was renamed before the crash. OSError when a rename fails."""
    for name, final in staged:
        folder_fd = _folder(target_fd, final)
        try:
            os.rename(name, os.path.basename(final), src_dir_fd=target_fd, dst_dir_fd=folder_fd)
        except FileNotFoundError:
            continue
        finally:
            os.fsync(folder_fd)
            os.close(folder_fd)
    os.fsync(target_fd)


def discard_staged(target_fd: int, token: str) -> None:
    """Removes whatever was staged under this token, recorded or not."""
    with os.scandir(target_fd) as listing:
        names = [entry.name for entry in listing if entry.name.startswith(f"{_STAGED}{token}-")]
    for name in names:
        os.unlink(name, dir_fd=target_fd)
    os.fsync(target_fd)


def _folder(target_fd: int, final: str) -> int:
    folder = os.path.dirname(final) or "."
    return syscalls.openat2(target_fd, folder, os.O_RDONLY | os.O_DIRECTORY, _BENEATH)


def _check_final(target_fd: int, final: str) -> None:
    try:
        folder_fd = _folder(target_fd, final)
    except OSError as error:
        raise ExportRefused(final, f"its folder outside: {_why(error)}") from None
    try:
        status = os.stat(os.path.basename(final), dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    finally:
        os.close(folder_fd)
    if not stat.S_ISREG(status.st_mode):
        raise ExportRefused(final, "something that is not a regular file has that name outside")


def _copy(file: Collected, fd: int) -> None:
    """Exactly the bytes that were digested: nothing of the attempt lives to change them, but a check is cheap."""
    digest = hashlib.sha256()
    offset = 0
    while offset < file.bytes:
        chunk = os.pread(file.fd, min(_CHUNK_BYTES, file.bytes - offset), offset)
        if not chunk:
            break
        digest.update(chunk)
        offset += len(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]
    if digest.hexdigest() != file.sha256:
        raise ExportRefused(file.name, "it changed while it was copied")
