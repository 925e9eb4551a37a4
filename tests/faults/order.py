"""That nothing is told before it is on disk, read from the order of the calls themselves.

For each process of a role that promises something: what it wrote to a durable file, and the folder in which it made or
renamed one, is owed a sync from then on; whoever tells somebody something (a socket, a pipe) while it owes one has
broken the promise. A kill cannot show this (the Linux kernel keeps what a dead process wrote), and a power cut shows
it only where its model loses the right block; the order shows it every time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.faults.boundaries import Boundary
from tests.faults.notify import SYNCS, WRITES

PROMISING = frozenset({"kernel", "host"})
TELLING = frozenset({"socket", "pipe", "said"})
_NOT_KEPT = ("-shm", "/authority.db", "/receipts.ndjson", "/lock")
"""Rebuilt (-shm); a copy of what the write-ahead log holds until it is synced (the database itself,
sqlite.org/wal.html); a convenience (receipts.ndjson: the log is the truth); empty for ever (lock)."""
_REFUSAL = b'"ok":false'
"""An answer that says no, of Chio's protocols, promises nothing."""
_MAKES = frozenset({"rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"})


def told_too_early(made: Iterable[Boundary], roots: Iterable[str], promising: frozenset[str] = PROMISING) -> list[str]:
    """One line for each time something was told while a sync was owed. `roots`: the folders whose files are durable;
    `promising`: the roles that are held to it."""
    folders = tuple(f"{root}/" for root in roots)
    debts: dict[int, _Debts] = {}
    wrong = []
    for boundary in made:
        if boundary.role.partition(".")[0] not in promising:
            continue
        mine = debts.setdefault(boundary.pid, _Debts())
        if boundary.kind in TELLING:
            refuses = boundary.data is not None and _REFUSAL in boundary.data
            if mine.owed and boundary.length and not refuses:
                wrong.append(f"{boundary.place}: told while {', '.join(sorted(mine.owed.values()))} is owed a sync")
                mine.owed.clear()  # told once is enough
        elif boundary.call in SYNCS:
            mine.pay(boundary.path)
        elif f"{boundary.second or boundary.path}/".startswith(folders):
            mine.incur(boundary)
    return wrong


@dataclass(slots=True)
class _Debts:
    """Of one process: what it owes a sync, {path: why}, and the files that it made, whose names owe one once something
    is in them."""

    owed: dict[str, str] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)

    def pay(self, path: str) -> None:
        self.owed.pop(path, None)
        self.new = {file for file in self.new if os.path.dirname(file) != path}

    def incur(self, boundary: Boundary) -> None:
        path = boundary.second or boundary.path
        why = f"{boundary.call} {os.path.basename(path)}"
        if path.endswith(_NOT_KEPT):
            return
        if boundary.call.startswith("unlink"):
            self.owed.pop(path, None)
            self.new.discard(path)
        if boundary.call.startswith("mkdir"):
            if boundary.new:
                self.owed[os.path.dirname(path)] = why
        elif boundary.new:
            self.new.add(path)
        elif boundary.call in WRITES or boundary.call in ("ftruncate", "truncate", "fallocate"):
            self.owed[path] = why
            if path in self.new:
                self.owed[os.path.dirname(path)] = f"the name of {os.path.basename(path)}"
        elif boundary.call in _MAKES:
            self.owed[os.path.dirname(path)] = why
