"""JSON documents of up to 8 MiB, kept in a process's blobs so that what repeats is stored once.

A document's canonical text is cut into fragments (`chio_process.fragments`), each of them one blob. The *index* is a
JSON array of the parts in order: `{"bytes":N,"sha256":"…"}` for a fragment, a string for text that is too short for a
blob of its own. The index is cut into blobs in the same way, and the *reference* names those:

    {"schema": "chio.process.json-snapshot.v1",
     "bytes": N, "sha256": "…",                             of the document's canonical text
     "index": {"bytes": N, "sha256": "…", "blobs": ["…"]}}  of the index's canonical text, and the blobs that it is in

A reference is a few hundred bytes, 5 KiB at most, and belongs into a checkpoint.

SnapshotError.code, beside what any call of the client can end with (`chio_process.errors`):

    invalid_request     write: the document is not JSON of the protocol; nothing was sent
    snapshot_too_large  write: its canonical text is over 8 MiB; nothing was sent
    limit_reached       write: the new blobs do not fit into the tree's storage, and nothing was written; or the kernel
                        refused one after others were stored, which stay charged (the message says how many): another
                        process of the tree used up the room meanwhile
    blob_missing        read: a blob that the reference needs is not among this process's
    invalid_snapshot    read: the reference, the index or a part is not what it must be
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NoReturn

from chio_process.client import ProcessClient
from chio_process.errors import WorkerError
from chio_process.fragments import NotJson, Sizes, Text, TooLarge, encode, split

SCHEMA: Final = "chio.process.json-snapshot.v1"
MAX_DOCUMENT_BYTES: Final = 8 * 1024 * 1024

# They decide which bytes a blob has. Others would read the same snapshots and share no fragment with those written.
_DOCUMENT: Final = Sizes(least=20 * 1024, spread=12 * 1024, most=64 * 1024, glue=256)
_INDEX: Final = Sizes(least=4 * 1024, spread=4 * 1024, most=16 * 1024, glue=0)

# At most 410 fragments of a document (8 MiB / `least`) and one glue more, each 256 bytes that are escaped to 512.
_MAX_INDEX_BYTES: Final = 256 * 1024
_MAX_INDEX_BLOBS: Final = 64
_MAX_PART_BYTES: Final = 1024 * 1024  # a blob's

_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")

Blobs = dict[str, memoryview]  # by digest, in the order in which they are stored


class SnapshotError(WorkerError):
    """A document that could not be written or read. `code` is for programs, the message for people."""


class JsonSnapshot:
    """Writes and reads documents over one client.

    It remembers which blobs it has stored or read, and sends none of them again: after `read(reference)`, writing an
    edited document sends what is new. Blobs cannot be deleted, so that what was once stored stays.
    """

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._stored: set[str] = set()

    def write(self, document: object) -> dict[str, Any]:
        """Stores `document` (None, bool, int, float, str, and list and dict of them) and returns its reference.

        Raises `SnapshotError` and, from the calls, `WorkerError`. Whatever it raises, the same document can be written
        again; fragments that were stored are not charged twice. A written snapshot is not yet part of any state: the
        reference has to go into a checkpoint.
        """
        reference, blobs = _snapshot(document)
        fitting = self._fitting({digest: data for digest, data in blobs.items() if digest not in self._stored})
        # The index comes last: where it is, all that it names is.
        for number, (digest, data) in enumerate(fitting.items()):
            try:
                self._client.put_blob(bytes(data))
            except WorkerError as error:
                if error.code != "limit_reached":
                    raise
                stored = f"{number} of {len(fitting)} new blobs are stored and stay charged"
                raise SnapshotError("limit_reached", f"refused by the kernel, and {stored}") from error
            self._stored.add(digest)
        return reference

    def read(self, reference: object) -> Any:
        """The document that `write` returned this reference for; everything about it is checked.

        Raises `SnapshotError` and, from the calls, `WorkerError`.
        """
        named = _reference(reference)
        used: set[str] = set()
        index = _parsed(self._index(named.index, named.blobs, used), named.index, "the index")
        parts = _parts(index, named.whole.bytes)
        document = _parsed(self._document(parts, named.whole, used), named.whole, "the document")
        self._stored |= used
        return document

    def _fitting(self, blobs: Blobs) -> Blobs:
        """What has to be sent of `blobs`. Raises `limit_reached` if that is more than the tree has room for.

        Whether a blob is stored is only asked when it matters: a repeat costs nothing, so while all of them would fit,
        sending one that is there already is as good.
        """
        if not blobs:
            return blobs
        free = _room(self._client.inspect())
        if not _fits(blobs, free):
            blobs = {digest: data for digest, data in blobs.items() if not self._is_stored(digest)}
        if not _fits(blobs, free):
            needed = f"{len(blobs)} new blobs of {sum(len(data) for data in blobs.values())} bytes"
            left = f"{free[1]} blobs and {free[0]} bytes"
            raise SnapshotError("limit_reached", f"nothing was written: {needed}, and the tree has room for {left}")
        return blobs

    def _is_stored(self, digest: str) -> bool:
        try:
            self._client.read_blob(digest)
        except WorkerError as error:
            if error.code != "blob_missing":
                raise
            return False
        self._stored.add(digest)
        return True

    def _index(self, index: _Sum, blobs: list[str], used: set[str]) -> bytearray:
        text = bytearray()
        for digest in blobs:
            text += self._blob(digest, used)
            if len(text) > index.bytes:
                _invalid("the index is longer than the reference says")
        _check(text, index, "the index")
        return text

    def _document(self, parts: list[str | _Sum], whole: _Sum, used: set[str]) -> bytearray:
        text = bytearray()
        placed: dict[str, int] = {}  # where the bytes of a fragment stand already
        for part in parts:
            if isinstance(part, str):
                text += part.encode()
            elif part.sha256 in placed:
                start = placed[part.sha256]
                text += text[start : start + part.bytes]
            else:
                data = self._blob(part.sha256, used)
                if len(data) != part.bytes:
                    _invalid(f"fragment {part.sha256} has {len(data)} bytes, and {part.bytes} in the index")
                placed[part.sha256] = len(text)
                text += data
        _check(text, whole, "the document")
        return text

    def _blob(self, digest: str, used: set[str]) -> bytes:
        try:
            data = self._client.read_blob(digest)
        except WorkerError as error:
            if error.code != "blob_missing":
                raise
            raise SnapshotError("blob_missing", f"this process has no blob {digest}") from error
        used.add(digest)
        return data


@dataclass(frozen=True, slots=True)
class _Sum:
    """What a text must be: so many bytes with this digest."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Reference:
    whole: _Sum
    index: _Sum
    blobs: list[str]


def _snapshot(document: object) -> tuple[dict[str, Any], Blobs]:
    """The reference of `document`, and all its blobs, those of the index last."""
    try:
        text = encode(document, _DOCUMENT.least, MAX_DOCUMENT_BYTES)
    except NotJson as error:
        raise SnapshotError("invalid_request", f"the document is not JSON: {error} (at {error.pointer()!r})") from error
    except TooLarge as error:
        raise SnapshotError("snapshot_too_large", f"the document is over {MAX_DOCUMENT_BYTES} bytes") from error
    blobs: Blobs = {}
    parts = list(_store(text, _DOCUMENT, blobs))
    index = encode(parts, _INDEX.least, _MAX_INDEX_BYTES)
    digests = [part["sha256"] for part in _store(index, _INDEX, blobs) if isinstance(part, dict)]
    reference = {"schema": SCHEMA, **_sum(text.data), "index": {**_sum(index.data), "blobs": digests}}
    return reference, blobs


def _store(text: Text, sizes: Sizes, blobs: Blobs) -> Iterator[dict[str, Any] | str]:
    """The parts of `text` as an index lists them; the fragments go into `blobs`."""
    view = memoryview(text.data)
    for part in split(text, sizes):
        data = view[part.start : part.end]
        if part.glue:
            yield str(data, "utf-8")
        else:
            described = _sum(data)
            blobs.setdefault(described["sha256"], data)
            yield described


def _sum(data: bytearray | memoryview) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": sha256(data).hexdigest()}


def _room(inspected: dict[str, Any]) -> tuple[int, int]:
    """(bytes, blobs) that the tree's storage still has room for."""
    match inspected:
        case {
            "storage": {
                "limits": {"max_bytes": int(max_bytes), "max_blobs": int(max_blobs)},
                "tree_bytes": int(tree_bytes),
                "tree_blobs": int(tree_blobs),
            }
        }:
            return max_bytes - tree_bytes, max_blobs - tree_blobs
    raise WorkerError("invalid_response", "the result has no storage with its limits and the tree's usage")


def _fits(blobs: Blobs, free: tuple[int, int]) -> bool:
    return sum(len(data) for data in blobs.values()) <= free[0] and len(blobs) <= free[1]


def _reference(reference: object) -> _Reference:
    match reference:
        case {"schema": str(schema)} if schema != SCHEMA:
            _invalid(f"the reference's schema is {schema!r}, not {SCHEMA!r}")
        case {"schema": str(), "bytes": size, "sha256": digest, "index": {"blobs": list(blobs), **index}}:
            whole = _sum_of({"bytes": size, "sha256": digest}, MAX_DOCUMENT_BYTES, "the reference")
            listed = _sum_of(index, _MAX_INDEX_BYTES, "the reference's index")
            if len(reference) == 4 and 1 <= len(blobs) <= _MAX_INDEX_BLOBS and all(map(_is_digest, blobs)):
                return _Reference(whole, listed, blobs)
    _invalid("the reference is not one: schema, bytes, sha256 and index {bytes, sha256, blobs} are its members")


def _parts(index: object, total: int) -> list[str | _Sum]:
    if type(index) is not list:
        _invalid("the index is not an array")
    parts: list[str | _Sum] = []
    length = 0
    for part in index:
        if type(part) is str:
            size = len(part.encode())
            if not 1 <= size <= _DOCUMENT.glue:
                _invalid(f"a part of the index is text of {size} bytes")
            parts.append(part)
        else:
            fragment = _sum_of(part, _MAX_PART_BYTES, "a part of the index")
            size = fragment.bytes
            parts.append(fragment)
        length += size
    if length != total:
        _invalid(f"the index lists {length} bytes, and the reference {total}")
    return parts


def _sum_of(value: object, max_bytes: int, what: str) -> _Sum:
    match value:
        case {"bytes": size, "sha256": digest} if type(size) is int and _is_digest(digest) and len(value) == 2:
            if 1 <= size <= max_bytes:
                return _Sum(size, digest)
            _invalid(f"{what} has {size} bytes, at most {max_bytes} are possible")
    _invalid(f"{what} lacks bytes or sha256, or has other members")


def _is_digest(value: object) -> bool:
    return type(value) is str and _DIGEST.match(value) is not None


def _check(text: bytearray, expected: _Sum, what: str) -> None:
    if len(text) != expected.bytes or sha256(text).hexdigest() != expected.sha256:
        _invalid(f"{what} does not match the reference's length and digest")


def _parsed(text: bytearray, expected: _Sum, what: str) -> Any:
    """The value of `text`, which must be canonical: writing the value again must give the same digest.

    Without that, a name that stands twice or a number beyond 2^53 would be read as something that was not written.
    """
    try:
        value = json.loads(text)
        del text  # up to 8 MiB that nobody else holds, and writing takes as much again
        again = encode(value, _DOCUMENT.least, MAX_DOCUMENT_BYTES).data
    except (ValueError, RecursionError) as error:
        raise SnapshotError("invalid_snapshot", f"{what} is not canonical JSON: {error}") from error
    if sha256(again).hexdigest() != expected.sha256:
        _invalid(f"{what} is not canonical JSON")
    return value


def _invalid(why: str) -> NoReturn:
    raise SnapshotError("invalid_snapshot", why)
