"""`chio process export-log`: the log of a state as files, for whoever watches it or keeps its checkpoints.

Leaves, one per line; or a proof that one leaf is in the log (C2SP tlog-proof); or a proof that the log only grew since
it had so many leaves (the body of an `add-checkpoint` request, C2SP tlog-witness). All stand on the newest checkpoint:
leaves after it are not yet in them. Nothing is signed and nothing is opened that is sealed.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chio import statedir
from chio.errors import InputError
from chio.kernel.log import consistency_ranges, leaf_bytes, proof_ranges, root_of
from chio.kernel.reader import Reader, open_state

_PROOF_HEADER = b"c2sp.org/tlog-proof@v1\n"


def export_log(state: Path, out: Path, leaf: int | None, since: int | None, checkpoint: Path | None) -> dict[str, Any]:
    """Write `out`, and the checkpoint if asked; what the command prints. Raises `InputError`, `StateError`."""
    with open_state(state) as reader:
        size, note = reader.checkpoint()
        if leaf is not None:
            content: Iterable[bytes] = [_inclusion(reader, leaf, size, note)]
        elif since is not None:
            content = [_consistency(reader, since, size, note)]
        else:
            content = _lines(reader, size)
        _write(out, "--out", content)
        if checkpoint is not None:
            _write(checkpoint, "--checkpoint", [note.encode()])
    return {"schema": "chio.log.export.v1", "file": str(out), "leaves": size, "checkpoint": note}


def _lines(reader: Reader, size: int) -> Iterator[bytes]:
    for kind, body, signature in reader.leaves(0, size):
        yield leaf_bytes(kind, body.encode(), signature) + b"\n"


def _inclusion(reader: Reader, leaf: int, size: int, note: str) -> bytes:
    if not leaf < size:
        raise _refused("--leaf", f"the checkpoint is over {size} leaves, numbered from 0")
    ((kind, body, signature),) = reader.leaves(leaf, leaf + 1)
    lines = [f"extra {_base64(leaf_bytes(kind, body.encode(), signature))}", f"index {leaf}"]
    lines += [_root(reader, *siblings) for siblings in proof_ranges(leaf, size)]
    return _PROOF_HEADER + "\n".join(lines).encode() + b"\n\n" + note.encode()


def _consistency(reader: Reader, old: int, size: int, note: str) -> bytes:
    if not 0 <= old <= size:
        raise _refused("--since", f"the checkpoint is over {size} leaves")
    ranges = consistency_ranges(old, size) if 0 < old < size else []
    lines = [f"old {old}", *(_root(reader, *leaves) for leaves in ranges)]
    return "\n".join(lines).encode() + b"\n\n" + note.encode()


def _root(reader: Reader, start: int, end: int) -> str:
    """The root over a half-open range of leaves."""
    return _base64(root_of(reader.leaf_hashes(start, end)))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _write(path: Path, option: str, content: Iterable[bytes]) -> None:
    """A new file; nothing is left of one that could not be written whole."""
    made = False
    try:
        with open(path, "xb") as file:
            made = True
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        statedir.sync_parent(path)  # an export that was told as written outlasts a power cut
    except OSError as error:
        if made:
            os.unlink(path)
        raise InputError(
            "the export cannot be written",
            file=str(path),
            field=option,
            why=os.strerror(error.errno or 0),
            fix="name a new file in a directory that exists",
        ) from error


def _refused(option: str, why: str) -> InputError:
    return InputError("there is no such leaf", field=option, why=why, fix="see `chio process status`")
