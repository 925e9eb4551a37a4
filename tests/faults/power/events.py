"""What happened to the recorded files, in order, from the boundaries of a supervised run.

A boundary is told just before its call is let through, so a call that failed is told too: the disk takes what can be
done and leaves the rest, and the recording holds the outcome against the real folder. A write counts as
pending, a promise as made and a sync as done from there on; the next call of the same process shows that it had ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.boundaries import Boundary

# Calls on a recorded file that the model cannot replay: no conclusion may be drawn then.
_UNSUPPORTED = frozenset(
    {"copy_file_range", "sendfile", "fallocate", "sync_file_range", "syncfs", "symlink", "symlinkat"}
)


class Unsupported(Exception):
    """A recorded file was changed in a way that the model does not know."""


@dataclass(frozen=True, slots=True)
class Write:
    path: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Create:
    """An open that may have made the file; if it did not, `truncates` says whether it was emptied."""

    path: str
    truncates: bool


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str


@dataclass(frozen=True, slots=True)
class Remove:
    """unlink or rmdir."""

    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Link:
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync or fdatasync, of a file or a directory."""

    path: str


@dataclass(frozen=True, slots=True)
class Told:
    """Something left for another process."""


Event = Write | Truncate | Create | MakeDirectory | Remove | Rename | Link | Sync | Told


def events(boundaries: Iterable[Boundary], folder: Path, roots: tuple[str, ...]) -> list[tuple[int, Event]]:
    """(number of the boundary, event), of the files in some roots of a folder and of all that was told.

    Raises `Unsupported`.
    """
    inside = tuple(f"{folder / root}/" for root in roots)
    return [(boundary.number, event) for boundary in boundaries for event in _events(boundary, inside, str(folder))]


def _events(boundary: Boundary, inside: tuple[str, ...], folder: str) -> Iterator[Event]:
    if boundary.kind in ("socket", "pipe"):
        yield Told()
        return
    path, call = boundary.path, boundary.call
    if boundary.kind != "file" or path.endswith(" (deleted)"):
        return
    if path != folder and not f"{path}/".startswith(inside):
        return
    match call:
        case "write" | "pwrite64" | "writev" | "pwritev" | "pwritev2":
            assert boundary.data is not None
            yield Write(path, boundary.offset, boundary.data)
        case "ftruncate" | "truncate":
            yield Truncate(path, boundary.length)
        case "open" | "openat" | "creat":
            yield Create(path, call == "creat" or bool(boundary.flags & os.O_TRUNC))
        case "mkdir" | "mkdirat":
            yield MakeDirectory(path)
        case "unlink" | "unlinkat" | "rmdir":
            yield Remove(path)
        case "rename" | "renameat" | "renameat2":
            yield Rename(path, boundary.second)
        case "link" | "linkat":
            yield Link(path, boundary.second)
        case "fsync" | "fdatasync":
            yield Sync(path)
        case _ if call in _UNSUPPORTED:
            raise Unsupported(f"{call} of {boundary.target}")
