"""The states that a power cut may leave after each event of a trace: a bounded set of what the model allows.

After every event: nothing of what is pending survived; all of it did; all but the last, torn operation did. And where
most is pending (just before a sync) or was promised (a reply left): each prefix, each operation lost alone, each
surviving alone, each torn, and random subsets of operations and of sectors, some with sizes that came without their
bytes. States are told apart by the digest of their content; each is checked against the most that was ever promised of
it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

from tests.faults.power.disk import Chosen, Data, Disk, Image, Naming, Op, Size
from tests.faults.power.events import Event, Sync, Told

_SINGLES, _FEW, _MANY = 24, 4, 2000  # of one boundary, each kind: 24 of up to 83 pending operations, 4 of 500 and more
_RANDOM = 6
_REBUILT = "-shm"
_DENSE, _SPARSE = 32, 48  # pending operations of which each is a boundary; of more only every so many
Files = tuple[tuple[str, bytes | None], ...]


@dataclass(slots=True)
class State:
    """What a cut leaves: the durable image and what survived of the rest.

    `boundary` is the number of the last boundary that had been passed at the latest cut that leaves this content;
    `bare` says that it is also left when nothing survives but what was synced.
    """

    durable: Image
    survivors: list[Chosen]
    boundary: int
    cut: str
    bare: bool

    def files(self) -> Files:
        """Without the index of the write-ahead log: SQLite rebuilds it at the first open after a cut."""
        image = self.durable.after_power_cut(self.survivors)
        return tuple((path, data) for path, data in image.files() if not path.endswith(_REBUILT))


def states(
    disk: Disk, events: list[tuple[int, Event]], seed: int, counts: Callable[[str], bool], first: int = 0
) -> list[State]:
    """The distinct states of a trace, in the order of their latest cut; they differ in the files that count.

    `first`: the boundary before which no power is cut.
    """
    rng, digests = random.Random(seed), _Digests(counts)
    found: dict[bytes, State] = {}
    for at, (number, event) in enumerate(events):
        disk.play(event)
        following = events[at + 1][1] if at + 1 < len(events) else None
        many = len(disk.pending)
        full = following is None or isinstance(following, Sync) or isinstance(event, Told)
        if number < first or (not full and many > _DENSE and many % _SPARSE):
            continue
        if isinstance(event, Told) and not disk.pending and at + 1 < len(events):
            # Nothing hangs in the air, but more was promised of what is there.
            cuts: Iterator[tuple[str, list[Chosen]]] = iter([("nothing pending", [])])
        else:
            cuts = _cuts(disk.pending, full, rng)
        for name, survivors in cuts:
            state = State(disk.durable, survivors, number, name, not survivors)
            digest = digests.of(state)
            known = found.pop(digest, None)  # its latest cut is the one where most was promised
            state.bare |= known is not None and known.bare
            found[digest] = state
    return list(found.values())


class _Digests:
    """Of states. What is durable stays as it is, so each file of it is read once."""

    def __init__(self, counts: Callable[[str], bool]) -> None:
        self._counts = counts
        self._known: dict[int, tuple[bytearray, bytes]] = {}  # by the identity of a content that is kept

    def of(self, state: State) -> bytes:
        image = state.durable.after_power_cut(state.survivors)
        hashed = sha256()
        for path, inode in image.paths():
            if not self._counts(path) or path.endswith(_REBUILT):
                continue
            content = image.content.get(inode)
            kept = content is not None and content is state.durable.content.get(inode)
            hashed.update(f"{path}\0{inode in image.directories}\0{len(content or b'')}\0".encode())
            if content is not None:
                hashed.update(self._kept(content) if kept else sha256(content).digest())
        return hashed.digest()

    def _kept(self, content: bytearray) -> bytes:
        known = self._known.get(id(content))
        if known is None:
            known = self._known[id(content)] = content, sha256(content).digest()
        return known[1]


def _whole(ops: list[Op]) -> list[Chosen]:
    return [(op, None) for op in ops]


def _cuts(pending: list[Op], full: bool, rng: random.Random) -> Iterator[tuple[str, list[Chosen]]]:
    yield "all lost", []
    if not pending:
        return
    yield "all survived", _whole(pending)
    for name, torn in _torn(pending[-1]):
        yield f"the last torn: {name}", [*_whole(pending[:-1]), *torn]
    if not full:
        return
    numbers = list(range(len(pending)))
    most = max(_FEW, min(_SINGLES, _MANY // len(numbers)))
    some = numbers if len(numbers) <= most else sorted(rng.sample(numbers, most))
    for number in some:
        rest = pending[:number] + pending[number + 1 :]
        yield f"only the first {number}", _whole(pending[:number])
        yield f"without {number}", _whole(rest)
        yield f"{number} alone", _whole([pending[number]])
        for name, torn in _torn(pending[number]):
            yield f"{number} torn: {name}", [*_whole(pending[:number]), *torn, *_whole(pending[number + 1 :])]
    for draw in range(_RANDOM):
        yield f"random operations {draw}", _whole([op for op in pending if rng.random() < 0.5])
        yield f"random sectors {draw}", list(_sectors(pending, rng, sizes=bool(draw % 2)))


def _torn(op: Op) -> Iterator[tuple[str, list[Chosen]]]:
    """A write of several sectors of which some survived; a size that came without its bytes."""
    if not isinstance(op, Data):
        return
    sectors = list(op.sectors)
    if len(sectors) > 1:
        half = len(sectors) // 2
        yield "first half", [(op, frozenset(sectors[:half]))]
        yield "second half", [(op, frozenset(sectors[half:]))]
        yield "all but its last sector", [(op, frozenset(sectors[:-1]))]
    yield "its size only", [(Size(op.inode, op.end, extend_only=True), None)]


def _sectors(pending: list[Op], rng: random.Random, sizes: bool) -> Iterator[Chosen]:
    for op in pending:
        if isinstance(op, Data):
            if sizes:
                yield Size(op.inode, op.end, extend_only=True), None
            yield op, frozenset(sector for sector in op.sectors if rng.random() < 0.5)
        elif isinstance(op, Naming | Size) and rng.random() < 0.5:
            yield op, None
