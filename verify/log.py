"""The Merkle log: leaves, roots, checkpoints, proofs.

Hashing and proofs are RFC 9162 (sections 2.1.1, 2.1.3.2 and 2.1.4.2), which for these is RFC 6962 unchanged.
A checkpoint is a C2SP tlog-checkpoint in a C2SP signed-note. A proof shows that nothing was changed or left out
against a checkpoint that somebody else kept; alone it shows only that the log agrees with itself.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from verify.keys import PublicKey
from verify.receipts import Receipt
from verify.verdict import VerifyError

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
MAX_NOTE_BYTES = 1024 * 1024
MAX_TREE_SIZE = 2**63 - 1
_ED25519_NOTE_TYPE = b"\x01"  # C2SP signed-note, "Signature types"
_SIGNATURE_LINE = re.compile(r"— (?P<name>[^\s+]+) (?P<signature>[A-Za-z0-9+/]+={0,2})")
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


def root_of(leaf_hashes: Iterable[bytes]) -> tuple[int, bytes]:
    """(size, root) of a tree, in memory that grows with its height alone."""
    subtrees: list[bytes] = []  # roots of the perfect subtrees so far, the largest first
    size = 0
    for current in leaf_hashes:
        size += 1
        # As many merges as the new size has trailing zero bits: each completes a perfect subtree.
        for _ in range((size & -size).bit_length() - 1):
            current = node_hash(subtrees.pop(), current)
        subtrees.append(current)
    if not subtrees:
        return 0, EMPTY_ROOT
    root = subtrees.pop()
    while subtrees:
        root = node_hash(subtrees.pop(), root)
    return size, root


def verify_checkpoint(note: bytes, log_key: PublicKey, origin: str) -> Checkpoint:
    """Reads a checkpoint and checks the log's own signature on it. Lines of other signers are left alone."""
    text = verify_note(note, log_key, origin)
    lines = text.decode("utf-8").split("\n")
    # Extension lines are allowed by C2SP and never written by this log: what is not known is refused.
    if len(lines) != 4:
        _refuse_checkpoint("a checkpoint is three lines: origin, size, root")
    if lines[0] != origin:
        _refuse_checkpoint(f"the origin is not {origin}")
    if _SIZE.fullmatch(lines[1]) is None or int(lines[1]) > MAX_TREE_SIZE:
        _refuse_checkpoint("the tree size is not a decimal number")
    root = _base64(lines[2])
    if len(root) != HASH_BYTES:
        _refuse_checkpoint(f"the root is not {HASH_BYTES} bytes")
    return Checkpoint(origin, int(lines[1]), root)


def verify_note(note: bytes, key: PublicKey, name: str) -> bytes:
    """The text of a signed note, ending in a newline, if `key` signed it under `name`."""
    if len(note) > MAX_NOTE_BYTES:
        _refuse_checkpoint(f"over {MAX_NOTE_BYTES} bytes")
    try:
        decoded = note.decode("utf-8")
    except UnicodeDecodeError as error:
        raise VerifyError("not UTF-8", check="checkpoint") from error
    if any(character < " " and character != "\n" for character in decoded):
        _refuse_checkpoint("a control character")
    text, blank, signatures = decoded.rpartition("\n\n")
    if not blank or not signatures.endswith("\n"):
        _refuse_checkpoint("not a signed note: text, a blank line, signature lines")
    text += "\n"
    key_id = hashlib.sha256(name.encode() + b"\n" + _ED25519_NOTE_TYPE + bytes.fromhex(key.hex)).digest()[:4]
    signed = False
    for line in signatures.removesuffix("\n").split("\n"):
        found = _SIGNATURE_LINE.fullmatch(line)
        if found is None:
            _refuse_checkpoint("a signature line is malformed")
        signature = _base64(found["signature"])
        if found["name"] == name and signature[:4] == key_id:
            _verify_note_signature(text.encode(), signature[4:], key)
            signed = True
    if not signed:
        _refuse_checkpoint(f"no signature of the pinned log key under the name {name}")
    return text.encode()


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Checks that the leaf with this hash is number `index` (from 0) of the tree (RFC 9162, section 2.1.3.2)."""
    if not 0 <= index < size:
        raise VerifyError(f"leaf {index} is not in a tree of {size}", check="inclusion")
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
    if old.size in (0, new.size):
        # Every tree appends to the empty one, and a tree to itself: there is nothing that a proof could show.
        if proof:
            _refuse_consistency("a proof where none is needed")
        if old.root != (EMPTY_ROOT if old.size == 0 else new.root):
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


def _verify_note_signature(text: bytes, signature: bytes, key: PublicKey) -> None:
    try:
        key.verify(text, signature)
    except VerifyError as error:
        raise VerifyError("the log key's signature does not hold", check="checkpoint") from error


def _base64(text: str) -> bytes:
    """Standard base64 with padding, in its only canonical spelling (RFC 4648, section 3.5)."""
    try:
        decoded = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise VerifyError("not base64", check="checkpoint") from error
    if base64.b64encode(decoded).decode() != text:
        _refuse_checkpoint("not canonical base64")
    return decoded


def _refuse_checkpoint(why: str) -> NoReturn:
    raise VerifyError(why, check="checkpoint")


def _refuse_consistency(why: str) -> NoReturn:
    raise VerifyError(why, check="consistency")
