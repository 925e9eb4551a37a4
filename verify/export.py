"""An export of a log's leaves, one per line in order: each leaf judged by itself, and the tree that they make.

Chunks of lines are judged by all processors; what needs the order of the whole is put together here.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from verify.keys import Pins, PublicKey
from verify.leaves import LogLeaf, read_leaf_text
from verify.lines import MAX_LINE_BYTES, judge_lines
from verify.log import HASH_BYTES, Tree, leaf_hash
from verify.notes import VerifierKey
from verify.verdict import VerifyError


@dataclass(frozen=True, slots=True)
class LogTrust:
    """What an auditor holds of a log. Without pins, only its key and origin."""

    log_key: PublicKey
    origin: str
    pins: Pins | None = None
    witnesses: tuple[VerifierKey, ...] = ()

    @classmethod
    def of_pins(cls, pins: Pins, witnesses: tuple[VerifierKey, ...] = ()) -> Self:
        return cls(pins.log_key, f"chio.invalid/{pins.runtime_id}", pins, witnesses)


@dataclass(slots=True)
class Export:
    """What came of the leaves: the tree, what it was at the sizes that matter, and the first failure of each check."""

    tree: Tree = field(default_factory=Tree)
    roots: dict[int, bytes] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    failed: dict[str, VerifyError] = field(default_factory=dict)

    def fail(self, error: VerifyError, path: str, index: int) -> None:
        self.failed.setdefault(error.check, error.located(path, f"leaf {index}"))


@dataclass(slots=True)
class _Chunk:
    """What came of some lines. Positions count from the chunk's first line."""

    first: bytes
    hashes: bytes = b""
    failed: dict[str, tuple[int, VerifyError]] = field(default_factory=dict)
    indexes: list[tuple[int, int]] = field(default_factory=list)  # position, and the index that it has to have
    epochs: list[tuple[int, int, str]] = field(default_factory=list)  # position, size, root
    first_ms: int | None = None
    last_ms: int = 0

    def fail(self, position: int, error: VerifyError, check: str | None = None) -> None:
        name = check or error.check
        self.failed.setdefault(name, (position, error if name == error.check else renamed(error, name)))


def renamed(error: VerifyError, check: str) -> VerifyError:
    return VerifyError(error.what, check=check, place=error.place)


def _judge_chunk(kernel_key: PublicKey | None, runtime_id: str | None, text: bytes) -> _Chunk:
    lines = text.removesuffix(b"\n").split(b"\n")
    chunk = _Chunk(lines[0])
    hashes = []
    for position, line in enumerate(lines):
        hashes.append(leaf_hash(line))
        try:
            if len(line) > MAX_LINE_BYTES:
                raise VerifyError(f"over {MAX_LINE_BYTES} bytes", check="leaves")
            leaf = read_leaf_text(line)
        except VerifyError as error:
            chunk.fail(position, error, "leaves")
            continue
        _judge_leaf(chunk, position, leaf, kernel_key, runtime_id)
    chunk.hashes = b"".join(hashes)
    return chunk


def _judge_leaf(
    chunk: _Chunk, position: int, leaf: LogLeaf, kernel_key: PublicKey | None, runtime_id: str | None
) -> None:
    body = leaf.body
    if runtime_id is not None and body.get("runtime_id", runtime_id) != runtime_id:
        chunk.fail(position, VerifyError("of a run that is not the pinned one", check="runtime_pin"))
    if kernel_key is not None:
        try:
            if leaf.kind == "receipt" and body["kernel_key"] != kernel_key.hex:
                raise VerifyError("a receipt of another kernel key", check="leaf_signatures")
            leaf.verify(kernel_key)
        except VerifyError as error:
            chunk.fail(position, error, "leaf_signatures")
    if leaf.kind == "receipt":
        chunk.indexes.append((position, body["log_index"]))
    elif leaf.kind == "bootstrap":
        chunk.indexes.append((position, 0))
    elif leaf.kind == "epoch":
        chunk.epochs.append((position, body["size"], body["root"]))
    time_ms = body.get("time_ms")
    if time_ms is not None:
        if chunk.first_ms is None:
            chunk.first_ms = time_ms
        if time_ms < chunk.last_ms:
            chunk.fail(position, VerifyError("its time is before that of a leaf before it", check="order"))
        chunk.last_ms = max(chunk.last_ms, time_ms)


def read_export(path: str, trust: LogTrust, sizes: set[int], indexes: set[int]) -> Export:
    """Reads it once. Kept are the root at each of `sizes` and the hash of the leaf at each of `indexes`."""
    pins, export = trust.pins, Export()
    judge = partial(_judge_chunk, pins.kernel_key if pins else None, pins.runtime_id if pins else None)
    last_ms = 0
    chunks = judge_lines(path, judge)
    with closing(chunks):
        for chunk in chunks:
            base = export.tree.size
            if base == 0:
                _require_bootstrap(export, path, chunk.first, trust)
            for position, error in chunk.failed.values():
                export.fail(error, path, base + position)
            for position, index in chunk.indexes:
                if index != base + position:
                    why = VerifyError(f"its place is leaf {index}", check="order")
                    export.fail(why, path, base + position)
                    break
            if chunk.first_ms is not None and chunk.first_ms < last_ms:
                export.fail(VerifyError("its time is before that of a leaf before it", check="order"), path, base)
            last_ms = max(last_ms, chunk.last_ms)
            _grow(export, path, chunk, sizes, indexes)
    return export


def _grow(export: Export, path: str, chunk: _Chunk, sizes: set[int], indexes: set[int]) -> None:
    epochs = {position: (size, root) for position, size, root in chunk.epochs}
    for position, hashed in enumerate(_hashes(chunk.hashes)):
        size = export.tree.size
        if position in epochs and epochs[position] != (size, export.tree.root().hex()):
            export.fail(VerifyError("it does not stand on the log before it", check="epochs"), path, size)
        if size in indexes:
            export.hashes[size] = hashed
        export.tree.add(hashed)
        if export.tree.size in sizes:
            export.roots[export.tree.size] = export.tree.root()


def _hashes(joined: bytes) -> Iterator[bytes]:
    return (joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))


def _require_bootstrap(export: Export, path: str, text: bytes, trust: LogTrust) -> None:
    try:
        leaf = read_leaf_text(text)
        if leaf.kind != "bootstrap":
            raise VerifyError(f"it is of type {leaf.kind}", check="bootstrap")
        pinned = {"log_origin": trust.origin, "log_key": trust.log_key.hex}
        if trust.pins is not None:
            pinned["kernel_key"] = trust.pins.kernel_key.hex
            pinned["authority_key"] = trust.pins.authority_key.hex
            pinned |= {name: getattr(trust.pins, name) for name in ("runtime_id", "config_digest", "policy_digest")}
        for name, value in pinned.items():
            if leaf.body[name] != value:
                raise VerifyError(f"its `{name}` is not the pinned one", check="bootstrap")
    except VerifyError as error:
        export.fail(renamed(error, "bootstrap"), path, 0)
