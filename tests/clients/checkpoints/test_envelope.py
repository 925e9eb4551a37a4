"""The envelope's own rules: what a checkpoint may hold, and what its document must look like."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chio_process.checkpoints import Checkpoint, CheckpointError, CheckpointErrorKind, new_checkpoint_id
from chio_process.checkpoints.document import MAX_DEPTH, MAX_INTEGER, decode, encode

DOCUMENT: dict[str, Any] = {
    "id": "order-42",
    "run_id": "run-1",
    "revision": 4,
    "kind": "acme.order",
    "schema_version": 1,
    "payload": {"phase": "ready"},
    "updated_at": 1_764_460_800_000,
}


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = [value]
    return {"v": value} if levels else {}


LOOP: list[Any] = []
LOOP.append(LOOP)


def test_a_document_is_read_back_as_it_was_written() -> None:
    checkpoint = Checkpoint.from_document(DOCUMENT)
    assert checkpoint.to_document() == DOCUMENT
    assert Checkpoint.from_document(decode(checkpoint.encoded())) == checkpoint


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("id", ""), ("id", 7), ("id", None), ("id", " a"), ("id", "a\n"), ("id", "a\x7fb"), ("id", "é" * 129),
        ("id", "\ud800"), ("run_id", ""), ("run_id", ["a"]),
        ("revision", -1), ("revision", "4"), ("revision", True), ("revision", 4.0), ("revision", MAX_INTEGER + 1),
        ("revision", None),
        ("kind", "order"), ("kind", "acme."), ("kind", ".order"), ("kind", "Acme.order"), ("kind", "acme.order\n"),
        ("kind", "acme..order"), ("kind", "a." + "b" * 127), ("kind", 1),
        ("schema_version", 0), ("schema_version", True), ("schema_version", "1"), ("schema_version", 1.5),
        ("payload", None), ("payload", []), ("payload", "{}"), ("payload", 1),
        ("updated_at", -1), ("updated_at", 1.0), ("updated_at", False), ("updated_at", MAX_INTEGER + 1),
    ],
)  # fmt: skip
def test_a_member_that_is_not_one_is_refused_by_its_name(member: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.from_document({**DOCUMENT, member: value})
    assert error.value.kind is CheckpointErrorKind.INVALID
    assert error.value.message.startswith(member)


@pytest.mark.parametrize("member", list(DOCUMENT))
def test_a_missing_member_is_refused(member: str) -> None:
    rest = {name: value for name, value in DOCUMENT.items() if name != member}
    with pytest.raises(CheckpointError, match=f"invalid: checkpoint has no {member}"):
        Checkpoint.from_document(rest)


@pytest.mark.parametrize("document", [{**DOCUMENT, "lease": 1}, [], None, "{}", 1])
def test_a_document_of_another_shape_is_refused(document: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.from_document(document)
    assert error.value.kind == "invalid"


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), float("inf"), MAX_INTEGER + 1, -MAX_INTEGER - 1, 2.0**53, 1e300, "\ud800", {"\udfff": 1}, {1: 1},
        {None: 1}, {1, 2}, b"bytes", object(), 1j, nested(MAX_DEPTH), LOOP,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_payload_that_is_not_json_of_the_kernel_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.initial("a", "run-1", "acme.order", 1, {"v": value})
    assert error.value.kind == "invalid"


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', "NaN", "[Infinity]", "{", "", "[" * 100_000])
def test_a_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError) as error:
        decode(text)
    assert error.value.kind == "invalid"


def test_the_deepest_payload_and_the_largest_integers_are_taken() -> None:
    payload = {**nested(MAX_DEPTH - 1), "n": [MAX_INTEGER, -MAX_INTEGER]}
    assert Checkpoint.initial("a", "run-1", "acme.order", 1, payload).payload == payload


def test_a_checkpoint_over_a_mebibyte_is_too_large() -> None:
    room = 1024 * 1024 - len(Checkpoint.initial("a", "r", "acme.order", 1, {"v": ""}, now=1).encoded())
    assert len(Checkpoint.initial("a", "r", "acme.order", 1, {"v": "x" * room}, now=1).encoded()) == 1024 * 1024
    with pytest.raises(CheckpointError) as error:
        Checkpoint.initial("a", "r", "acme.order", 1, {"v": "é" * (room // 2) + "xx"}, now=1)
    assert error.value.kind == "too_large"


def test_a_payload_is_the_checkpoints_own() -> None:
    given_payload = {"done": ["a"]}
    checkpoint = Checkpoint.initial("a", "run-1", "acme.order", 1, given_payload)
    given_payload["done"].append("b")
    checkpoint.to_document()["payload"]["done"].append("c")
    assert checkpoint.payload == {"done": ["a"]}


def test_a_payload_that_was_changed_in_place_is_checked_again_before_it_is_stored() -> None:
    checkpoint = Checkpoint.initial("a", "run-1", "acme.order", 1, {"done": []})
    for value, kind in ((float("nan"), "invalid"), ("x" * 1024 * 1024, "too_large")):
        checkpoint.payload["done"] = value
        with pytest.raises(CheckpointError) as error:
            checkpoint.encoded()
        assert error.value.kind == kind


def test_there_is_no_revision_after_the_last() -> None:
    with pytest.raises(CheckpointError, match="revision is not between"):
        Checkpoint.from_document({**DOCUMENT, "revision": MAX_INTEGER}).next({})


def test_an_id_that_is_drawn_is_a_new_one() -> None:
    first, second = new_checkpoint_id(), new_checkpoint_id()
    assert first != second
    assert Checkpoint.initial(first, "run-1", "acme.order", 1, {}).id == first


def test_an_error_survives_the_way_out_of_a_pool() -> None:
    carried = pickle.loads(pickle.dumps(CheckpointError(CheckpointErrorKind.CONFLICT, "why", {"verdict": "deny"})))
    assert (carried.kind, carried.response, str(carried)) == ("conflict", {"verdict": "deny"}, "conflict: why")


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-MAX_INTEGER, MAX_INTEGER) | st.floats(-MAX_INTEGER, MAX_INTEGER)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_every_value_reads_back_equal_and_has_one_text(value: Any) -> None:
    checkpoint = Checkpoint.initial("a", "run-1", "acme.order", 1, {"v": value})
    assert checkpoint.payload["v"] == value
    read = Checkpoint.from_document(decode(checkpoint.encoded()))
    assert read == checkpoint
    assert read.encoded() == checkpoint.encoded() == encode(json.loads(checkpoint.encoded()))
