"""The Merkle log: leaves, roots, checkpoints, proofs.

Hashing and proofs are RFC 9162 (sections 2.1.1, 2.1.3.2 and 2.1.4.2), which for these is RFC 6962 unchanged.
A checkpoint is a C2SP tlog-checkpoint in a C2SP signed-note. A proof shows that nothing was changed or left out
against a checkpoint that somebody else kept; alone it shows only that the log agrees with itself.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from verify.keys import PublicKey
from verify.notes import ED25519, Note, VerifierKey, note_base64, read_note, refuse_note
from verify.receipts import Receipt
from verify.verdict import VerifyError

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
MAX_TREE_SIZE = 2**63 - 1
_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state of the log: how many leaves, and the root over them."""

    origin: str
    size: int
    root: bytes


def receipt_leaf(receipt: Receipt) -> bytes:
    """The leaf that the log holds for a receipt, put together from received text; `disclosed` is not part of it."""
    return b'{"body":' + receipt.body_text + b',"signature":"' + receipt.signature.encode() + b'","type":"receipt"}'


def leaf_hash(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """A tree that leaves are added to, in memory that grows with its height alone."""

    def __init__(self) -> None:
        self.size = 0
        self._subtrees: list[bytes] = []  # roots of the perfect subtrees so far, the largest first

    def add(self, leaf: bytes) -> None:
        """One more leaf, by its hash."""
        self.size += 1
        current = leaf
        # As many merges as the new size has trailing zero bits: each completes a perfect subtree.
        for _ in range((self.size & -self.size).bit_length() - 1):
            current = node_hash(self._subtrees.pop(), current)
        self._subtrees.append(current)

    def root(self) -> bytes:
        """The root over all leaves so far (RFC 9162, section 2.1.1)."""
        if not self._subtrees:
            return EMPTY_ROOT
        *rest, root = self._subtrees
        for left in reversed(rest):
            root = node_hash(left, root)
        return root


def root_of(leaf_hashes: Iterable[bytes]) -> tuple[int, bytes]:
    """(size, root) of a tree."""
    tree = Tree()
    for leaf in leaf_hashes:
        tree.add(leaf)
    return tree.size, tree.root()


def verify_checkpoint(note: bytes, log_key: PublicKey, origin: str) -> Checkpoint:
    """Reads a checkpoint and checks the log's own signature on it. Lines of other signers are left alone."""
    read = read_note(note)
    VerifierKey(origin, ED25519, log_key).verify(read)
    return read_checkpoint(read, origin)


def read_checkpoint(note: Note, origin: str) -> Checkpoint:
    """What a note says of the log of this origin. Whose note it is has been checked."""
    lines = note.text.decode("utf-8").split("\n")
    # Extension lines are allowed by C2SP and never written by this log: what is not known is refused.
    if len(lines) != 4:
        refuse_note("a checkpoint is three lines: origin, size, root")
    if lines[0] != origin:
        refuse_note(f"the origin is not {origin}")
    if _SIZE.fullmatch(lines[1]) is None or int(lines[1]) > MAX_TREE_SIZE:
        refuse_note("the tree size is not a decimal number")
    root = note_base64(lines[2])
    if len(root) != HASH_BYTES:
        refuse_note(f"the root is not {HASH_BYTES} bytes")
    return Checkpoint(origin, int(lines[1]), root)


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Checks that the leaf with this hash is number `index` (from 0) of the tree (RFC 9162, section 2.1.3.2)."""
    if not 0 <= index < size:
        raise VerifyError(f"leaf {index} is not in a tree of {size}", check="inclusion")
    if len(leaf) != HASH_BYTES:
        raise VerifyError(f"the leaf's hash is not {HASH_BYTES} bytes", check="inclusion")
    node, last = index, size - 1
    current = leaf
    for sibling in proof:
        if last == 0 or len(sibling) != HASH_BYTES:
            raise VerifyError("the proof does not have the tree's height", check="inclusion")
        if node & 1 or node == last:
            current = node_hash(sibling, current)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            current = node_hash(current, sibling)
        node, last = node >> 1, last >> 1
    if last != 0:
        raise VerifyError("the proof does not have the tree's height", check="inclusion")
    if current != root:
        raise VerifyError("the proof does not lead to the checkpoint's root", check="inclusion")


def verify_consistency(old: Checkpoint, new: Checkpoint, proof: Sequence[bytes]) -> None:
    """Checks that `new` only appends to `old` (RFC 9162, section 2.1.4.2)."""
    if old.origin != new.origin:
        _refuse_consistency("the checkpoints are of different logs")
    if old.size > new.size:
        _refuse_consistency(f"the log shrank from {old.size} to {new.size}")
    if old.size == 0:
        # Every tree appends to the empty one; this log has its first leaf before its first checkpoint.
        _refuse_consistency("a checkpoint of no leaves, which shows nothing")
    if old.size == new.size:
        if proof:
            _refuse_consistency("a proof where none is needed")
        if old.root != new.root:
            _refuse_consistency(f"two roots for {old.size} leaves")
        return
    path = list(proof)
    if old.size & (old.size - 1) == 0:
        path.insert(0, old.root)  # a perfect old tree is itself the first node
    if not path or any(len(sibling) != HASH_BYTES for sibling in path):
        _refuse_consistency("the proof is too short")
    node, last = old.size - 1, new.size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    old_root = new_root = path[0]
    for sibling in path[1:]:
        if last == 0:
            _refuse_consistency("the proof is too long")
        if node & 1 or node == last:
            old_root = node_hash(sibling, old_root)
            new_root = node_hash(sibling, new_root)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            new_root = node_hash(new_root, sibling)
        node, last = node >> 1, last >> 1
    if last != 0:
        _refuse_consistency("the proof is too short")
    if old_root != old.root or new_root != new.root:
        _refuse_consistency("the proof does not lead to both roots")


def _refuse_consistency(why: str) -> NoReturn:
    raise VerifyError(why, check="consistency")
