"""Proofs as files: C2SP `tlog-proof` for inclusion, and what a log sends a witness for consistency.

An inclusion proof (c2sp.org/tlog-proof) carries the checkpoint that it stands on, and here in `extra` also the leaf
itself, which the proof then authenticates:

    c2sp.org/tlog-proof@v1
    extra <base64 of the leaf>
    index <of the leaf, from 0>
    <base64 of each node, from the leaf's sibling up>

    <checkpoint>

A consistency proof is the body of an `add-checkpoint` request (c2sp.org/tlog-witness): `old <size>`, the nodes, an
empty line and the newer checkpoint.
"""

import re
from dataclasses import dataclass
from typing import NoReturn, Self

from verify.log import HASH_BYTES, MAX_TREE_SIZE
from verify.notes import MAX_NOTE_BYTES, note_base64
from verify.verdict import VerifyError

INCLUSION_HEADER = b"c2sp.org/tlog-proof@v1\n"
CONSISTENCY_HEADER = b"old "
MAX_NODES = 63  # of any proof in a tree of at most 2^63 leaves
MAX_PROOF_BYTES = MAX_NOTE_BYTES + 12 * 1024 * 1024  # a checkpoint, the nodes, and a leaf in base64
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """`leaf` are the bytes in `extra`, or None. Nothing is verified yet; `checkpoint` is a signed note."""

    index: int
    nodes: list[bytes]
    leaf: bytes | None
    checkpoint: bytes

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Raises `VerifyError` (check `inclusion`) for what is no tlog-proof."""
        if not text.startswith(INCLUSION_HEADER):
            _refuse("it does not begin with c2sp.org/tlog-proof@v1", "inclusion")
        lines, checkpoint = _split(text, "inclusion")
        lines = lines[1:]
        leaf = None
        if lines and lines[0].startswith("extra "):
            leaf = _base64(lines.pop(0).removeprefix("extra "), "inclusion")
        if not lines or not lines[0].startswith("index "):
            _refuse("there is no line `index` where there must be one", "inclusion")
        index = _number(lines.pop(0).removeprefix("index "), "inclusion")
        return cls(index, _nodes(lines, "inclusion"), leaf, checkpoint)


@dataclass(frozen=True, slots=True)
class ConsistencyProof:
    """From the tree of `old_size` leaves to the one of `checkpoint`, a signed note."""

    old_size: int
    nodes: list[bytes]
    checkpoint: bytes

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Raises `VerifyError` (check `consistency`) for what is no such proof."""
        lines, checkpoint = _split(text, "consistency")
        if not lines[0].startswith("old "):
            _refuse("it does not begin with `old` and a size", "consistency")
        return cls(_number(lines[0].removeprefix("old "), "consistency"), _nodes(lines[1:], "consistency"), checkpoint)


def _split(text: bytes, check: str) -> tuple[list[str], bytes]:
    """The lines up to the first empty one, and the checkpoint after it."""
    head, blank, checkpoint = text.partition(b"\n\n")
    if not blank:
        _refuse("there is no empty line and no checkpoint after it", check)
    try:
        return head.decode("ascii").split("\n"), checkpoint
    except UnicodeDecodeError as error:
        raise VerifyError(f"not ASCII at byte {error.start + 1}", check=check) from error


def _number(text: str, check: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) > MAX_TREE_SIZE:
        _refuse("not a decimal number", check)
    return int(text)


def _nodes(lines: list[str], check: str) -> list[bytes]:
    if len(lines) > MAX_NODES:
        _refuse(f"more than {MAX_NODES} nodes", check)
    nodes = [_base64(line, check) for line in lines]
    if any(len(node) != HASH_BYTES for node in nodes):
        _refuse(f"a node that is not {HASH_BYTES} bytes", check)
    return nodes


def _base64(text: str, check: str) -> bytes:
    try:
        return note_base64(text)
    except VerifyError as error:
        raise VerifyError(error.what, check=check) from error


def _refuse(why: str, check: str) -> NoReturn:
    raise VerifyError(why, check=check)
