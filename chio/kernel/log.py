"""The append-only Merkle log: typed leaves, RFC 9162 hashing, C2SP checkpoints.

A leaf is `JCS({"body","signature","type"})`. In memory the log is its frontier, the roots of the full subtrees that
the tree of its size consists of; nothing else is needed to append or to give the root (RFC 9162 section 2.1).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from chio.signing import SigningKey, holds

MAX_LEAVES_PER_CHECKPOINT = 1000


def leaf_bytes(kind: str, body: bytes, signature: str | None) -> bytes:
    quoted = b'"' + signature.encode() + b'"' if signature is not None else b"null"
    return b'{"body":' + body + b',"signature":' + quoted + b',"type":"' + kind.encode() + b'"}'


def leaf_hash(kind: str, body: bytes, signature: str | None) -> bytes:
    return sha256(b"\0" + leaf_bytes(kind, body, signature)).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


def _grown(frontier: tuple[bytes, ...], size: int, hashed: bytes) -> tuple[bytes, ...]:
    """The frontier of a tree of `size` leaves after one more."""
    roots = list(frontier)
    node = hashed
    while size & 1:
        node = _node(roots.pop(), node)
        size >>= 1
    return (*roots, node)


def _root(frontier: tuple[bytes, ...]) -> bytes:
    if not frontier:
        return sha256(b"").digest()
    node = frontier[-1]
    for left in reversed(frontier[:-1]):
        node = _node(left, node)
    return node


class NotACheckpoint(ValueError):
    """A text that is no checkpoint of this log; the message says why."""


@dataclass(slots=True)
class Log:
    """`size` leaves; `frontier` holds one root for each set bit of `size`, largest subtree first."""

    origin: str
    key: SigningKey
    size: int = 0
    frontier: tuple[bytes, ...] = ()
    checkpointed: int = 0

    def append(self, hashed: bytes) -> int:
        """Add one leaf hash; the leaf's index."""
        index = self.size
        self.frontier = _grown(self.frontier, index, hashed)
        self.size = index + 1
        return index

    def root(self) -> bytes:
        """The tree head's root hash; of an empty log, the hash of nothing."""
        return _root(self.frontier)

    def note(self) -> bytes:
        """The C2SP tlog-checkpoint of this size, signed under the log key."""
        text = f"{self.origin}\n{self.size}\n{base64.b64encode(self.root()).decode()}\n"
        return self.key.sign_note(self.origin, text.encode())

    def mark(self) -> tuple[int, tuple[bytes, ...], int]:
        return self.size, self.frontier, self.checkpointed

    def restore(self, mark: tuple[int, tuple[bytes, ...], int]) -> None:
        """Back to a mark, when the commit that appended was rolled back."""
        self.size, self.frontier, self.checkpointed = mark


def proof_ranges(index: int, size: int) -> list[tuple[int, int]]:
    """The inclusion proof of a leaf, from the leaf's own level up: each sibling as its half-open range of leaves.

    The proof's hashes are the roots of these ranges (RFC 9162 section 2.1.3.1).
    """
    ranges: list[tuple[int, int]] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + (1 << (end - start - 1).bit_length() - 1)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    return ranges[::-1]


def root_of(hashes: Iterable[bytes]) -> bytes:
    frontier: tuple[bytes, ...] = ()
    for size, hashed in enumerate(hashes):
        frontier = _grown(frontier, size, hashed)
    return _root(frontier)


def read_note(note: bytes, name: str, public: str) -> tuple[int, bytes]:
    """(size, root) of a C2SP tlog-checkpoint that this log's own key signed. Raises `NotACheckpoint`."""
    text, blank, signatures = note.rpartition(b"\n\n")
    lines = (text + b"\n").split(b"\n")
    if not blank or len(lines) != 4 or lines[0] != name.encode() or not lines[1].isdigit():
        raise NotACheckpoint(f"it is not a checkpoint of {name}")
    mark = b"\xe2\x80\x94 " + name.encode() + b" "
    for line in signatures.splitlines():
        if line.startswith(mark):
            try:
                signature, root = (base64.b64decode(part, validate=True) for part in (line[len(mark) :], lines[2]))
            except ValueError as error:
                raise NotACheckpoint("it is not base64") from error
            if holds(public, text + b"\n", signature[4:]):
                return int(lines[1]), root
    raise NotACheckpoint("the log's key did not sign it")


def origin(runtime_id: str) -> str:
    return f"chio.invalid/{runtime_id}"
