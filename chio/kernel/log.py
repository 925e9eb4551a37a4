"""The append-only Merkle log: typed leaves, RFC 9162 hashing, C2SP checkpoints.

A leaf is `JCS({"body","signature","type"})`. In memory the log is its frontier, the roots of the full subtrees that
the tree of its size consists of; nothing else is needed to append or to give the root (RFC 9162 section 2.1).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from hashlib import sha256

from chio.signing import SigningKey

MAX_LEAVES_PER_CHECKPOINT = 1000


def leaf_bytes(kind: str, body: bytes, signature: str | None) -> bytes:
    quoted = b'"' + signature.encode() + b'"' if signature is not None else b"null"
    return b'{"body":' + body + b',"signature":' + quoted + b',"type":"' + kind.encode() + b'"}'


def leaf_hash(kind: str, body: bytes, signature: str | None) -> bytes:
    return sha256(b"\0" + leaf_bytes(kind, body, signature)).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return sha256(b"\1" + left + right).digest()


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
        roots = list(self.frontier)
        node = hashed
        bits = index
        while bits & 1:
            node = _node(roots.pop(), node)
            bits >>= 1
        roots.append(node)
        self.frontier = tuple(roots)
        self.size = index + 1
        return index

    def root(self) -> bytes:
        """The tree head's root hash; of an empty log, the hash of nothing."""
        if not self.frontier:
            return sha256(b"").digest()
        node = self.frontier[-1]
        for left in reversed(self.frontier[:-1]):
            node = _node(left, node)
        return node

    def note(self) -> bytes:
        """The C2SP tlog-checkpoint of this size, signed under the log key."""
        text = f"{self.origin}\n{self.size}\n{base64.b64encode(self.root()).decode()}\n"
        return self.key.sign_note(self.origin, text.encode())

    def mark(self) -> tuple[int, tuple[bytes, ...], int]:
        return self.size, self.frontier, self.checkpointed

    def restore(self, mark: tuple[int, tuple[bytes, ...], int]) -> None:
        """Back to a mark, when the commit that appended was rolled back."""
        self.size, self.frontier, self.checkpointed = mark


def origin(runtime_id: str) -> str:
    return f"chio.invalid/{runtime_id}"
