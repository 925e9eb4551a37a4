"""Nothing is read that was not written: each length, digest and shape is checked, in both clients."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from tests.clients.snapshots.documents import noise, read_index, records, refusal, usage
from tests.clients.snapshots.driving import Snapshots, opened
from tests.kernel.serving import Worker

pytestmark = pytest.mark.timeout(60)

SCHEMA = "chio.process.json-snapshot.v1"


def put(worker: Worker, data: bytes) -> str:
    digest = sha256(data).hexdigest()
    worker.ask("blob_put", sha256=digest, data_base64=base64.b64encode(data).decode())
    return digest


def sum_of(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": sha256(data).hexdigest()}


def canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def reference_of(worker: Worker, whole: dict[str, Any], index: bytes) -> dict[str, Any]:
    """A reference whose own lengths and digests are right."""
    return {"schema": SCHEMA, **whole, "index": {**sum_of(index), "blobs": [put(worker, index)]}}


DOCUMENT = {"a": {"text": noise(1, 50_000)}, "b": {"text": noise(1, 50_000)}, "rows": records(400)}
OTHER = "0" * 64


def test_a_reference_forged_right_is_read(snapshots: Snapshots, worker: Worker) -> None:
    """So that the refusals below are for what each of them changes."""
    text = b'{"a":[1,2.5,"x"],"b":null}'
    index = canonical([{"bytes": 10, "sha256": put(worker, text[:10])}, text[10:].decode()])
    assert snapshots.read(reference_of(worker, sum_of(text), index)) == {"a": [1, 2.5, "x"], "b": None}


# --- the reference ---------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda reference: [reference],
    "none": lambda reference: None,
    "another schema": lambda reference: {**reference, "schema": "chio.process.json-snapshot.v2"},
    "no schema": lambda reference: {name: value for name, value in reference.items() if name != "schema"},
    "an unknown member": lambda reference: {**reference, "note": 1},
    "an unknown member of the index": lambda reference: {**reference, "index": {**reference["index"], "note": 1}},
    "no index": lambda reference: {**reference, "index": None},
    "a byte more": lambda reference: {**reference, "bytes": reference["bytes"] + 1},
    "a byte less": lambda reference: {**reference, "bytes": reference["bytes"] - 1},
    "bytes as text": lambda reference: {**reference, "bytes": str(reference["bytes"])},
    "bytes as truth": lambda reference: {**reference, "bytes": True},
    "no bytes": lambda reference: {**reference, "bytes": 0},
    "negative bytes": lambda reference: {**reference, "bytes": -1},
    "too many bytes": lambda reference: {**reference, "bytes": 8 * 1024 * 1024 + 1},
    "another digest": lambda reference: {**reference, "sha256": OTHER},
    "a digest in capitals": lambda reference: {**reference, "sha256": reference["sha256"].upper()},
    "a digest with a newline": lambda reference: {**reference, "sha256": reference["sha256"] + "\n"},
    "another digest of the index": lambda reference: {**reference, "index": {**reference["index"], "sha256": OTHER}},
    "a longer index": lambda reference: {**reference, "index": {**reference["index"], "bytes": 100_000}},
    "a shorter index": lambda reference: {**reference, "index": {**reference["index"], "bytes": 10}},
    "a huge index": lambda reference: {**reference, "index": {**reference["index"], "bytes": 1 << 30}},
    "no blobs": lambda reference: {**reference, "index": {**reference["index"], "blobs": []}},
    "blobs that are no list": lambda reference: {**reference, "index": {**reference["index"], "blobs": OTHER}},
    "a blob too many": lambda reference: {
        **reference, "index": {**reference["index"], "blobs": [*reference["index"]["blobs"] * 2]}
    },
    "too many blobs": lambda reference: {**reference, "index": {**reference["index"], "blobs": [OTHER] * 65}},
    "a blob that is no digest": lambda reference: {**reference, "index": {**reference["index"], "blobs": ["0"]}},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_reference_is_refused(snapshots: Snapshots, change: str) -> None:
    reference = snapshots.write(DOCUMENT)
    assert refusal(snapshots.read, CHANGES[change](copy.deepcopy(reference))).code == "invalid_snapshot"
    assert snapshots.read(reference) == DOCUMENT


def test_a_reference_gives_another_process_nothing(
    client: str, snapshots: Snapshots, make_worker: Callable[[], Worker]
) -> None:
    reference = snapshots.write(DOCUMENT)
    with opened(client, make_worker()) as strangers:
        assert refusal(strangers.read, reference).code == "blob_missing"


# --- the index -------------------------------------------------------------------------------------------------------


def fragments(index: list[Any]) -> list[int]:
    return [place for place, part in enumerate(index) if isinstance(part, dict)]


def swapped(index: list[Any]) -> list[Any]:
    first, second = fragments(index)[0], fragments(index)[-1]
    index[first], index[second] = index[second], index[first]
    return index


def changed(**members: Any) -> Callable[[list[Any]], list[Any]]:
    def change(index: list[Any]) -> list[Any]:
        index[fragments(index)[0]].update(members)
        return index

    return change


INDEXES: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "two parts swapped": ("invalid_snapshot", swapped),
    "the last part gone": ("invalid_snapshot", lambda index: index[:-1]),
    "a part twice": ("invalid_snapshot", lambda index: [*index, index[-1]]),
    "a part that was never stored": ("blob_missing", changed(sha256=OTHER)),
    "a part with an unknown member": ("invalid_snapshot", changed(note=1)),
    "a part of no bytes": ("invalid_snapshot", changed(bytes=0)),
    "a part of negative bytes": ("invalid_snapshot", changed(bytes=-5)),
    "a part over a blob's size": ("invalid_snapshot", changed(bytes=1024 * 1024 + 1)),
    "a part that is a number": ("invalid_snapshot", lambda index: [1, *index]),
    "a part that is null": ("invalid_snapshot", lambda index: [None, *index]),
    "a part that is empty": ("invalid_snapshot", lambda index: ["", *index]),
    "other text between": ("invalid_snapshot", lambda index: [index[0].replace("a", "b"), *index[1:]]),
    "an object": ("invalid_snapshot", lambda index: {"parts": index}),
    "null": ("invalid_snapshot", lambda index: None),
}


@pytest.mark.parametrize("change", INDEXES)
def test_a_changed_index_is_refused(snapshots: Snapshots, worker: Worker, change: str) -> None:
    reference = snapshots.write(DOCUMENT)
    code, apply = INDEXES[change]
    index = canonical(apply(read_index(worker, reference)))
    whole = {"bytes": reference["bytes"], "sha256": reference["sha256"]}
    assert refusal(snapshots.read, reference_of(worker, whole, index)).code == code


@pytest.mark.parametrize("count", [1, 2000])
def test_an_index_that_lists_more_than_the_document_is_refused_before_any_of_it_is_read(
    snapshots: Snapshots, worker: Worker, count: int
) -> None:
    text = b"[1]"
    index = canonical([text.decode(), *[{"bytes": 1024 * 1024, "sha256": OTHER}] * count])
    refused = refusal(snapshots.read, reference_of(worker, sum_of(text), index))
    assert refused.code == "invalid_snapshot"  # and not blob_missing
    assert f"lists {3 + count * 1024 * 1024} bytes" in str(refused)


def test_a_part_whose_blob_has_another_length_is_refused(snapshots: Snapshots, worker: Worker) -> None:
    """Two lengths that are wrong and still add up."""
    text = canonical([noise(1, 100), noise(2, 100)])
    first, second = put(worker, text[:100]), put(worker, text[100:])
    index = canonical([{"bytes": 99, "sha256": first}, {"bytes": len(text) - 99, "sha256": second}])
    refused = refusal(snapshots.read, reference_of(worker, sum_of(text), index))
    assert (refused.code, "has 100 bytes, and 99 in the index" in str(refused)) == ("invalid_snapshot", True)


def test_text_in_the_index_that_is_too_long_for_it_is_refused(snapshots: Snapshots, worker: Worker) -> None:
    text = canonical("x" * 300)
    refused = refusal(snapshots.read, reference_of(worker, sum_of(text), canonical([text.decode()])))
    assert (refused.code, "text of 302 bytes" in str(refused)) == ("invalid_snapshot", True)


# --- what the text itself must be ------------------------------------------------------------------------------------

NOT_CANONICAL = {
    "nothing but a space": b" ",
    "a space": b"[1, 2]",
    "a newline at the end": b"[1]\n",
    "members out of order": b'{"b":1,"a":2}',
    "a name twice": b'{"a":1,"a":2}',
    "a number in another spelling": b"[1.0]",
    "a number beyond 2^53": b"[9007199254740993]",
    "an endless integer": b"[" + b"9" * 5000 + b"]",
    "a number that overflows": b"[1e400]",
    "NaN": b"[NaN]",
    "an escape too many": b'["\\u0061"]',
    "a lone surrogate": b'["\\ud800"]',
    "a lone surrogate in bytes": b'["\xed\xa0\x80"]',
    "bytes that are not UTF-8": b'["\xff"]',
    "a byte order mark": b"\xef\xbb\xbf[1]",
    "UTF-16": "[1]".encode("utf-16-le"),
    "65 levels": b"[" * 65 + b"]" * 65,
    "a hundred thousand levels": b"[" * 100_000 + b"]" * 100_000,
    "text behind the end": b"[1]]",
    "no end": b"[1,",
}


@pytest.mark.parametrize("name", NOT_CANONICAL)
def test_a_document_or_index_that_is_not_canonical_is_refused_whatever_its_digests_say(
    snapshots: Snapshots, worker: Worker, name: str
) -> None:
    text = NOT_CANONICAL[name]
    index = canonical([{"bytes": len(text), "sha256": put(worker, text)}])
    as_document = reference_of(worker, sum_of(text), index)
    as_index = reference_of(worker, sum_of(b"[1]"), text)
    for reference, what in ((as_document, "the document is not"), (as_index, "the index is not")):
        refused = refusal(snapshots.read, reference)
        assert (refused.code, what in str(refused)) == ("invalid_snapshot", True)


def test_reading_writes_nothing(snapshots: Snapshots, worker: Worker) -> None:
    reference = snapshots.write(DOCUMENT)
    before = usage(worker)
    snapshots.read(reference)
    refusal(snapshots.read, {**reference, "sha256": OTHER})
    assert usage(worker) == before
