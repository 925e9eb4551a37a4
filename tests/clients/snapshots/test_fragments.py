"""Canonical text and its cuts: for any document right, and the same in both languages."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from chio_process.fragments import MAX_SAFE_INTEGER, Part, Sizes, encode, number, split
from tests.clients.drive import ROOT, node
from tests.clients.snapshots.driving import DRIVERS

# As small as can be, so that small documents have every kind of part.
SIZES = Sizes(least=64, spread=32, most=256, glue=16)
MAX_BYTES = 1 << 20

texts = st.text(max_size=20) | st.integers(1, 400).flatmap(lambda n: st.text("ab€\U0001f600\n", min_size=n, max_size=n))
floats = st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda value: not (value.is_integer() and abs(value) > MAX_SAFE_INTEGER)
)
scalars = st.none() | st.booleans() | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER) | floats | texts
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(texts, inner, max_size=20), max_leaves=200
)


def parts_of(document: Any) -> tuple[bytes, list[Part]]:
    text = encode(document, SIZES.least, MAX_BYTES)
    return bytes(text.data), split(text, SIZES)


def fragments_of(document: Any) -> set[bytes]:
    text, parts = parts_of(document)
    return {text[part.start : part.end] for part in parts if not part.glue}


@pytest.fixture(scope="module")
def node_parts() -> Iterator[Any]:
    with subprocess.Popen(
        [node(), DRIVERS / "layout.mjs", ROOT / "chio/clients/node"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PATH": os.defpath},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None

        def parts(document: Any) -> tuple[bytes, list[Part]]:
            assert process.stdin is not None
            assert process.stdout is not None
            asked = {"document": document, "sizes": asdict(SIZES), "max_bytes": MAX_BYTES}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            return base64.b64decode(answer["text"]), [Part(*part) for part in answer["parts"]]

        yield parts
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@given(documents)
def test_the_text_is_rfc_8785_in_both_languages_and_cut_at_the_same_places(node_parts: Any, document: Any) -> None:
    text, parts = parts_of(document)
    assert text == rfc8785.dumps(document)
    assert json.loads(text) == document
    assert node_parts(document) == (text, parts)


@given(documents)
def test_the_parts_are_the_whole_text_and_within_their_sizes(document: Any) -> None:
    text, parts = parts_of(document)
    assert b"".join(text[part.start : part.end] for part in parts) == text
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        length = part.end - part.start
        text[part.start : part.end].decode()  # no cut inside a character
        if part.glue:
            assert 1 <= length <= SIZES.glue
            assert after is None or not after.glue
        else:
            assert length < SIZES.most + SIZES.least
            assert length >= SIZES.least or after is None


regions = texts.filter(lambda text: len(text) > SIZES.least) | st.lists(
    st.booleans() | st.integers(-99, 99) | st.text(max_size=5), min_size=SIZES.least
)


@given(regions, st.sampled_from(["[%s]", '{"a":%s}', '[1,{"b":[%s]}]', '{"a":1,"b":%s,"c":2}']))
def test_the_fragments_of_a_region_do_not_depend_on_what_stands_around_it(document: Any, around: str) -> None:
    text, _ = parts_of(document)
    assert fragments_of(document) <= fragments_of(json.loads(around % text.decode()))


@pytest.mark.parametrize("seed", range(20))
def test_an_edit_leaves_the_fragments_far_from_it_alone(seed: int) -> None:
    random_ = random.Random(seed)
    rows = [random_.randrange(1_000_000) for _ in range(2000)]
    place = random_.randrange(2000)
    before = fragments_of(rows)
    assert len(before) > 80
    for edited in ([*rows[:place], 7, *rows[place:]], [*rows[:place], *rows[place + 1 :]], [*rows[:place], 7]):
        assert len(fragments_of(edited) - before) <= 12


# --- numbers ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]))
def test_a_number_of_any_bits_is_written_as_rfc_8785_has_it_or_refused(value: float) -> None:
    if not math.isfinite(value) or (value.is_integer() and abs(value) > MAX_SAFE_INTEGER):
        with pytest.raises(ValueError, match="a number"):
            number(value)
    else:
        assert number(value).encode() == rfc8785.dumps(value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (-0.0, "0"), (0.1, "0.1"), (1e-5, "0.00001"), (1.5e-6, "0.0000015"), (-1e-6, "-0.000001"), (1e-7, "1e-7"),
        (-1.25e-7, "-1.25e-7"), (5e-324, "5e-324"), (1e15, "1000000000000000"), (123456789.5, "123456789.5"),
        (9007199254740991.0, "9007199254740991"), (2.2250738585072014e-308, "2.2250738585072014e-308"),
    ],
)  # fmt: skip
def test_notation_changes_where_ecmascript_changes_it(value: float, written: str) -> None:
    assert number(value) == written
