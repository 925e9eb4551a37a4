"""Documents in blobs: what either client writes, both read, and the tree is charged for no fragment twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from chio_process import WorkerError
from tests.clients.snapshots.documents import nested, noise, numbers, records, refusal, usage
from tests.clients.snapshots.driving import NodeSnapshots, Snapshots, opened
from tests.kernel.serving import State, Worker, child, config

pytestmark = pytest.mark.timeout(120)

LIMIT = 8 * 1024 * 1024
CLIENTS = ("python", "node")

LARGE = {
    "records": lambda: records(29_000),
    "one string": lambda: noise(1, LIMIT - 2),
    "one string of four-byte characters": lambda: "\U0001f600" * ((LIMIT - 2) // 4),
    "numbers": lambda: numbers(500_000),
    "a million zeros": lambda: [0] * 1_000_000,
    "nested": lambda: nested(64, noise(2, LIMIT - 2048)),
    # Each value just large enough for a fragment of its own, each name as long as glue can be and escaped once more.
    "the most parts": lambda: {f"{n:03}" + '"' * 124: noise(n, 20 * 1024) for n in range(404)},
    "long names": lambda: {noise(n, 100_000): n for n in range(80)},
}

SMALL = [
    None, True, 0, -1, 2**53 - 1, 1.5, 1e-7, 5e-324, "", "\x00\x1f\"\\/\x7f\u2028é€😀", [], {}, [[]], {"": {}},
    {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\u00f6": 7},
    {"__proto__": [1], "a~/b": None},
]  # fmt: skip


@pytest.mark.parametrize("document", SMALL, ids=lambda document: repr(document)[:30])
def test_a_small_document_comes_back_as_it_was(snapshots: Snapshots, document: Any) -> None:
    assert snapshots.read(snapshots.write(document)) == document


@pytest.mark.parametrize("shape", LARGE)
def test_a_document_of_any_shape_up_to_8_mib_comes_back_from_few_blobs_in_both_languages(
    make_worker: Callable[[], Worker], shape: str
) -> None:
    document = LARGE[shape]()
    references, used = [], []
    for writer, reader in (("python", "node"), ("node", "python")):
        worker = make_worker()
        with opened(writer, worker) as snapshots:
            references.append(snapshots.write(document))
        with opened(reader, worker) as snapshots:
            assert snapshots.read(references[-1]) == document
        used.append(usage(worker))
    assert references[0] == references[1]
    assert used[0] == used[1]
    assert used[0][1] < (480 if shape == "the most parts" else 300)
    assert len(json.dumps(references[0])) < 5 * 1024


def test_the_limit_is_8_mib_of_canonical_text(snapshots: Snapshots, worker: Worker) -> None:
    exact = "x" * (LIMIT - 2)
    reference = snapshots.write(exact)
    assert (reference["bytes"], reference["sha256"]) == (LIMIT, sha256(f'"{exact}"'.encode()).hexdigest())
    before = usage(worker)
    for document in (exact + "x", [exact], {exact: 0}, "€" * (LIMIT // 3 + 1), [0] * LIMIT, nested(60, exact)):
        assert refusal(snapshots.write, document).code == "snapshot_too_large"
    assert usage(worker) == before


# --- what repeats is stored once -------------------------------------------------------------------------------------


def test_what_appears_at_many_places_is_stored_once(snapshots: Snapshots, worker: Worker) -> None:
    part = {"lines": [noise(n, 60) for n in range(600)]}
    size = len(json.dumps(part, separators=(",", ":")))
    snapshots.write({"first": part, "others": [{"id": n, "deep": {"part": part}} for n in range(100)]})
    assert usage(worker)[0] < size + 30_000
    assert usage(worker)[1] <= 8


EDITS = {
    "one field": lambda rows: rows[15_000].update(name="edited"),
    "a row before all": lambda rows: rows.insert(0, {"id": -1}),
    "the first row gone": lambda rows: rows.pop(0),
    "a row after all": lambda rows: rows.append({"id": -1}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_stores_the_fragments_that_it_touched_and_a_piece_of_the_index(
    snapshots: Snapshots, worker: Worker, edit: str
) -> None:
    rows = records(29_000)
    snapshots.write({"rows": rows, "title": "t"})
    before = usage(worker)
    EDITS[edit](rows)
    reference = snapshots.write({"rows": rows, "title": "t"})
    after = usage(worker)
    assert 0 < after[0] - before[0] < 200_000
    assert 0 < after[1] - before[1] <= 6
    assert snapshots.read(reference) == {"rows": rows, "title": "t"}


def test_an_edit_in_a_string_of_8_mib_stores_what_it_touched(snapshots: Snapshots, worker: Worker) -> None:
    text = noise(5, LIMIT - 100)
    snapshots.write(text)
    before = usage(worker)
    for edited in ("inserted" + text, text[: LIMIT // 2] + text[LIMIT // 2 + 3 :]):
        snapshots.write(edited)
    after = usage(worker)
    assert 0 < after[0] - before[0] < 400_000
    assert 0 < after[1] - before[1] <= 12


def test_the_same_document_again_costs_nothing_whoever_writes_it(
    snapshots: Snapshots, worker: Worker, client: str
) -> None:
    document = records(1000)
    reference = snapshots.write(document)
    before = usage(worker)
    assert snapshots.write(document) == reference
    for other in CLIENTS:
        with opened(other, worker) as others:
            assert others.write(document) == reference
    assert usage(worker) == before


def test_what_was_written_or_read_is_not_sent_again(tmp_path: Path, client: str) -> None:
    """Which shows when there is nobody left to send it to."""
    document = records(1000)
    serving = State.make(tmp_path).serve()
    with opened(client, serving.worker("a")) as writing, opened(client, serving.worker("a")) as reading:
        reference = writing.write(document)
        assert reading.read(reference) == document
        serving.close()
        assert writing.write(document) == reading.write(document) == reference
        with pytest.raises(WorkerError) as unreachable:
            writing.write([*document, "new"])
    assert unreachable.value.code == "transport_error"


# --- what is refused before anything is written ----------------------------------------------------------------------


def arrays(levels: int, core: Any) -> Any:
    for _ in range(levels):
        core = [core]
    return core


LOOP: list[Any] = []
LOOP.append(LOOP)
WIDE: list[Any] = ["x" * 9000]
for _ in range(40):
    WIDE = [WIDE, WIDE]  # a terabyte of text, and next to nothing in memory

# The document as Python and as JavaScript writes it, and where in it the fault is.
NOT_JSON = [
    ({"a": [0, float("nan")]}, "{a: [0, NaN]}", "/a/1"),
    ([float("-inf")], "[-Infinity]", "/0"),
    ([2**53], "[2 ** 53]", "/0"),
    ([-(2**53)], "[-(2 ** 53)]", "/0"),
    ([1e300], "[1e300]", "/0"),
    (["\ud800"], "['\\ud800']", "/0"),
    ({"\udfff": 1}, "{'\\udfff': 1}", None),
    ({"a/b~": (1, 2)}, "{'a/b~': new Map()}", "/a~1b~0"),
    ({1: 2}, "{[Symbol('1')]: 2}", ""),
    ([b"bytes"], "[1n]", "/0"),
    ([object()], "[undefined]", "/0"),
    ([{1}], "[() => 1]", "/0"),
    (arrays(65, 1), "Array.from({length: 65}).reduce((core) => [core], 1)", "/0" * 63),
    (arrays(64, []), "Array.from({length: 64}).reduce((core) => [core], [])", "/0" * 63),
    (LOOP, "(() => { const loop = []; loop.push(loop); return loop; })()", "/0" * 64),
    ([type("Named", (dict,), {})()], "[new (class Named {})()]", "/0"),
]


@pytest.mark.parametrize(("python", "javascript", "place"), NOT_JSON, ids=[case[1] for case in NOT_JSON])
def test_what_is_not_json_is_refused_with_its_place_and_nothing_is_written(
    snapshots: Snapshots, worker: Worker, python: Any, javascript: str, place: str | None
) -> None:
    if isinstance(snapshots, NodeSnapshots):
        refused = refusal(snapshots.evaluate, javascript)
    else:
        refused = refusal(snapshots.write, python)
    assert refused.code == "invalid_request"
    if place is not None:
        assert place in str(refused)
    assert usage(worker) == (0, 0)


def test_64_levels_are_not_too_deep(snapshots: Snapshots) -> None:
    for document in (nested(64, 1), nested(63, {})):
        assert snapshots.read(snapshots.write(document)) == document


def test_a_document_that_shares_its_parts_is_refused_by_its_text_and_not_unfolded(snapshots: Snapshots) -> None:
    if isinstance(snapshots, NodeSnapshots):
        source = "Array.from({length: 40}).reduce((wide) => [wide, wide], 'x'.repeat(9000))"
        assert refusal(snapshots.evaluate, source).code == "snapshot_too_large"
    else:
        assert refusal(snapshots.write, WIDE).code == "snapshot_too_large"


# --- the tree's storage ----------------------------------------------------------------------------------------------


def limited(folder: Path, **limits: int) -> State:
    return State.make(folder, config(child("a"), child("b"), state=limits))


@pytest.fixture
def document() -> Any:
    return {"rows": records(2000), "title": "t"}


@pytest.fixture
def charged(client: str, make_worker: Callable[[], Worker], document: Any) -> tuple[int, int]:
    """What the document costs where nothing is stored yet."""
    worker = make_worker()
    with opened(client, worker) as snapshots:
        snapshots.write(document)
    return usage(worker)


def test_a_document_that_just_fits_is_written_and_can_be_written_again(
    tmp_path: Path, client: str, document: Any, charged: tuple[int, int]
) -> None:
    with limited(tmp_path, max_bytes=charged[0], max_blobs=charged[1]).serve() as serving:
        for _ in range(2):
            with opened(client, serving.worker("a")) as snapshots:
                assert snapshots.read(snapshots.write(document)) == document
                assert snapshots.write(document)
        assert usage(serving.worker("a")) == charged
        with opened(client, serving.worker("b")) as others:
            assert refusal(others.write, document).code == "limit_reached"
            assert usage(serving.worker("b")) == (0, 0)


@pytest.mark.parametrize(("bytes_less", "blobs_less"), [(1, 0), (0, 1)])
def test_nothing_is_written_of_a_document_that_does_not_fit(
    tmp_path: Path, client: str, document: Any, charged: tuple[int, int], bytes_less: int, blobs_less: int
) -> None:
    limits = {"max_bytes": charged[0] - bytes_less, "max_blobs": charged[1] - blobs_less}
    with limited(tmp_path, **limits).serve() as serving, opened(client, serving.worker("a")) as snapshots:
        refused = refusal(snapshots.write, document)
        assert refused.code == "limit_reached"
        assert f"{charged[1]} new blobs of {charged[0]} bytes" in str(refused)
        assert usage(serving.worker("a")) == (0, 0)


def test_what_is_stored_already_needs_no_room(
    tmp_path: Path, client: str, document: Any, charged: tuple[int, int]
) -> None:
    """Also for a client that has stored nothing itself and has to ask."""
    with limited(tmp_path, max_bytes=charged[0] + 120_000, max_blobs=charged[1] + 4).serve() as serving:
        with opened(client, serving.worker("a")) as snapshots:
            snapshots.write(document)
        document["rows"][1000]["name"] = "edited"
        with opened(client, serving.worker("a")) as snapshots:
            assert snapshots.read(snapshots.write(document)) == document
        before = usage(serving.worker("a"))
        document["rows"] = records(2000)[::-1]
        with opened(client, serving.worker("a")) as snapshots:
            assert refusal(snapshots.write, document).code == "limit_reached"
        assert usage(serving.worker("a")) == before


def test_when_a_sibling_takes_the_room_meanwhile_the_error_says_what_is_stored(
    tmp_path: Path, client: str, document: Any, charged: tuple[int, int]
) -> None:
    with limited(tmp_path, max_bytes=charged[0] + 100, max_blobs=charged[1] + 100).serve() as serving:
        sibling, worker = serving.worker("b"), serving.worker("a")
        with opened("python", sibling) as others, opened(client, worker) as snapshots:
            refused = refusal(snapshots.write, document, lambda: others.write(noise(1, 5000)))
        assert refused.code == "limit_reached"
        stored = usage(worker)[1]
        assert 0 < stored < charged[1]
        assert f"{stored} of {charged[1]} new blobs are stored and stay charged" in str(refused)
