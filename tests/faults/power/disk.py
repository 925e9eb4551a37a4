"""A disk that may lose its power: which bytes and names are durable after each event, and which are only pending.

The model is POSIX's promise and no more (fsync(2)): no file system that exists is as bad as all of it at once.

- The bytes of a file are durable when it was synced after they were written. Until then each 512-byte sector of each
  write may be there or not, by itself, in any combination.
- A new size is pending like a write. What lies between what survived reads as zeros.
- A name is durable when its directory was synced after it was made, changed or removed; syncing the file does nothing
  for its name. Until then each change of a name may be there or not, by itself. A rename is one change: old or new.
- A file whose name did not survive is gone, however well its bytes were synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.power.events import Create, Event, Link, MakeDirectory, Remove, Rename, Sync, Told, Truncate, Write

SECTOR_BYTES = 512
ROOT = 0

Names = dict[tuple[int, str], int]  # (directory, name): inode


@dataclass(frozen=True, slots=True)
class Data:
    """A pending write to an inode."""

    inode: int
    offset: int
    data: bytes

    @property
    def sectors(self) -> range:
        return range(self.offset // SECTOR_BYTES, -(-(self.offset + len(self.data)) // SECTOR_BYTES))

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class Size:
    """A pending truncation; with `extend_only`, a size that reached the disk without its bytes."""

    inode: int
    size: int
    extend_only: bool = False


@dataclass(frozen=True, slots=True)
class Naming:
    """A pending change of names: `changes` happen together, each gives a name an inode or (None) takes it away."""

    inode: int  # of the directory whose sync makes it durable
    changes: tuple[tuple[int, str, int | None], ...]


Op = Data | Size | Naming
# Which sectors of a write survived; None for all of it.
Chosen = tuple[Op, frozenset[int] | None]


@dataclass(slots=True)
class Image:
    """Names and bytes, durable or live. `directories` are the inodes that are directories."""

    names: Names = field(default_factory=dict)
    content: dict[int, bytearray] = field(default_factory=dict)
    directories: set[int] = field(default_factory=lambda: {ROOT})

    def apply(self, op: Op, sectors: frozenset[int] | None = None) -> None:
        if isinstance(op, Naming):
            for directory, name, inode in op.changes:
                if inode is None:
                    self.names.pop((directory, name), None)
                else:
                    self.names[directory, name] = inode
            return
        content = self.content.setdefault(op.inode, bytearray())
        if isinstance(op, Size):
            if len(content) < op.size:
                content.extend(bytes(op.size - len(content)))
            elif not op.extend_only:
                del content[op.size :]
            return
        for start, end in [(op.offset, op.end)] if sectors is None else _runs(op, sectors):
            if len(content) < start:
                content.extend(bytes(start - len(content)))
            content[start:end] = op.data[start - op.offset : end - op.offset]

    def files(self) -> Iterator[tuple[str, bytes | None]]:
        """(path below the root, content), directories first and with None."""
        for path, inode in self.paths():
            yield path, None if inode in self.directories else bytes(self.content.get(inode, b""))

    def paths(self) -> Iterator[tuple[str, int]]:
        """(path below the root, inode), directories before what is in them."""
        below: dict[int, list[tuple[str, int]]] = {}
        for (directory, name), inode in self.names.items():
            below.setdefault(directory, []).append((name, inode))
        stack = [("", ROOT)]
        while stack:
            path, directory = stack.pop()
            for name, inode in sorted(below.get(directory, [])):
                full = f"{path}{name}"
                yield full, inode
                if inode in self.directories:
                    stack.append((f"{full}/", inode))

    def after_power_cut(self, survivors: Iterable[Chosen]) -> Image:
        """What is durable here with the pending operations that happened to reach the disk, in their order."""
        chosen = list(survivors)
        touched = {op.inode for op, _ in chosen if not isinstance(op, Naming)}
        content = {inode: bytearray(data) if inode in touched else data for inode, data in self.content.items()}
        image = Image(dict(self.names), content, self.directories)
        for op, sectors in chosen:
            image.apply(op, sectors)
        return image


def _runs(op: Data, sectors: frozenset[int]) -> Iterator[tuple[int, int]]:
    for sector in sorted(sectors):
        start, end = max(op.offset, sector * SECTOR_BYTES), min(op.end, (sector + 1) * SECTOR_BYTES)
        if start < end:
            yield start, end


class Disk:
    """Plays events. `live` is what a reader of the running machine sees, `durable` what no power cut takes."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._next = ROOT
        self.live = Image()
        self.durable = Image(directories=self.live.directories)
        self.pending: list[Op] = []

    def start_from(self, files: Iterable[tuple[str, bytes | None]]) -> None:
        """What was there, durable, before the first event."""
        for path, data in files:
            place = self._place(f"{self._root}/{path}")
            assert place is not None, "a folder is listed before what is in it"
            inode = self._new(directory=data is None)
            for image in (self.live, self.durable):
                image.names[place] = inode
                if data is not None:
                    image.content[inode] = bytearray(data)

    def play(self, event: Event) -> None:
        """What it changes becomes pending, or durable with a sync. A call that must have failed changes nothing."""
        match event:
            case Write():
                self._data(event.path, lambda inode: Data(inode, event.offset, event.data))
            case Truncate():
                self._data(event.path, lambda inode: Size(inode, event.size))
            case Create():
                self._create(event)
            case MakeDirectory():
                place = self._place(event.path)
                if place is not None and place not in self.live.names:
                    self._name(place[0], ((*place, self._new(directory=True)),))
            case Remove():
                place = self._place(event.path)
                if place in self.live.names:
                    self._name(place[0], ((*place, None),))
            case Rename():
                old, new = self._place(event.old), self._place(event.new)
                if old in self.live.names and new is not None:
                    self._name(new[0], ((*old, None), (*new, self.live.names[old])))
            case Link():
                inode, new = self._inode(event.old), self._place(event.new)
                if inode is not None and new is not None and new not in self.live.names:
                    self._name(new[0], ((*new, inode),))
            case Sync():
                self._sync(self._inode(event.path))
            case Told():
                pass

    def _create(self, event: Create) -> None:
        place = self._place(event.path)
        if place is None:
            return
        if place not in self.live.names:
            self._name(place[0], ((*place, self._new(directory=False)),))
        elif event.truncates:
            self._data(event.path, lambda inode: Size(inode, 0))

    def _data(self, path: str, op: Callable[[int], Op]) -> None:
        inode = self._inode(path)
        if inode is not None:
            self._do(op(inode))

    def _name(self, directory: int, changes: tuple[tuple[int, str, int | None], ...]) -> None:
        self._do(Naming(directory, changes))

    def _do(self, op: Op) -> None:
        self.live.apply(op)
        self.pending.append(op)

    def _sync(self, inode: int | None) -> None:
        """Earlier images of what is durable stay as they are: whoever holds one can still cut the power there."""
        kept: list[Op] = []
        synced: list[Chosen] = []
        for op in self.pending:
            if op.inode == inode:
                synced.append((op, None))
            else:
                kept.append(op)
        self.durable, self.pending = self.durable.after_power_cut(synced), kept

    def _new(self, *, directory: bool) -> int:
        self._next += 1
        if directory:
            self.live.directories.add(self._next)
        return self._next

    def _place(self, path: str) -> tuple[int, str] | None:
        """(inode of the directory, name) of a path in the live tree; None when the directory is not there."""
        *above, name = os.path.relpath(path, self._root).split("/")
        directory: int | None = ROOT
        for part in above:
            directory = self.live.names.get((directory, part))
            if directory is None:
                return None
        return directory, name

    def _inode(self, path: str) -> int | None:
        if path == self._root:
            return ROOT
        place = self._place(path)
        return self.live.names.get(place) if place is not None else None


def write_out(files: Iterable[tuple[str, bytes | None]], folder: Path, like: Path) -> None:
    """Make real files of an image's, for a program to open. Owners and modes are those of the same files in `like`."""
    for path, data in files:
        target, known = folder / path, like / path
        if data is None:
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(data)
        if known.exists():
            about = known.stat()
            os.chown(target, about.st_uid, about.st_gid)
            target.chmod(about.st_mode & 0o7777)
        else:  # gone again by the end: the state's own, or a staged file
            target.chmod(0o700 if data is None else 0o600)
