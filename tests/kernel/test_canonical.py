"""The signer's encoder and reader against the verifier's, which share no code: they must agree on every text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chio import canonical
from verify import canonical as independent
from verify.verdict import VerifyError

SAFE = 2**53 - 1
NAMES = st.text(max_size=6)
TEXTS = st.text(max_size=12)
SCALARS = (
    st.none() | st.booleans() | st.integers(-SAFE, SAFE) | TEXTS | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=30
)


def representable(value: Any) -> bool:
    """Integral floats beyond the safe range are outside the profile: readers take them for integers."""
    if isinstance(value, float):
        return not value.is_integer() or abs(value) <= SAFE
    if isinstance(value, list):
        return all(map(representable, value))
    return not isinstance(value, dict) or all(map(representable, value.values()))


@settings(max_examples=200, deadline=None)
@given(VALUES.filter(representable))
def test_both_encoders_write_the_same_bytes(value: Any) -> None:
    text = canonical.encode(value)
    assert text == independent.encode(value)
    assert canonical.encode(canonical.parse(text)) == text


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_a_request_in_any_spelling_is_read_as_the_same_value_by_both(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert outcome(canonical.parse, text.encode()) == outcome(independently, text.encode())


JSON_TEXT = st.lists(
    st.sampled_from(
        [
            "{", "}", "[", "]", ",", ":", '"a"', '"b"', '"\\u0061"', '"\\ud800"', '"\\ud83d\\ude00"', '"é"', "0", "-0",
            "1", "-1", "01", "1.0", "1e2", "1e400", "1e-400", "9007199254740991", "9007199254740992", "1e16", "true",
            "null", "NaN", "Infinity", " ", "\n", "\t", "\x0b", "\ufeff", '"\\x"', '"\x01"', '"', "\\",
        ]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@settings(max_examples=800, deadline=None)
@given(JSON_TEXT)
def test_both_readers_take_and_refuse_the_same_texts(text: str) -> None:
    assert outcome(canonical.parse, text.encode()) == outcome(independently, text.encode())


EDGES = [
    b'{"a":1,"a":1}', b'{"a":1,"\\u0061":1}', b'[{"b":{"a":1,"a":2}}]', b"9007199254740992", b"-9007199254740992",
    b"1e16", b"9007199254740993.0", b"18446744073709551616", b"1e400", b"-1e400", b"NaN", b"-Infinity", b"01", b"+1",
    b".5", b"1.", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", b"", b" ",
    b"1 2", b'"\t"', b"[1,]", b'{"a":1,}', b"{1:1}", b"[" * 65 + b"]" * 65, b"[" * 100_000 + b"]" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", EDGES, ids=lambda text: repr(text[:24]))
def test_a_text_outside_the_profile_is_refused_by_both(text: bytes) -> None:
    assert outcome(canonical.parse, text) == outcome(independently, text) == "refused"


def independently(text: bytes) -> Any:
    return independent.parse(text, canonical=False)


def outcome(read: Any, text: bytes) -> Any:
    try:
        value = read(text)
    except (canonical.NotCanonical, VerifyError):
        return "refused"
    return "read", typed(value)


def typed(value: Any) -> Any:
    """With 1, 1.0 and True told apart, and -0.0 from 0.0."""
    if isinstance(value, dict):
        return {name: typed(item) for name, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value).__name__, repr(value))
