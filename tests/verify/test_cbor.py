"""Deterministic CBOR is read, and every other spelling of the same thing is refused (RFC 8949, section 4.2.1)."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.bundled import encode
from verify import cbor
from verify.verdict import VerifyError

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.integers(0, 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=30), inner, max_size=4),
    max_leaves=12,
)


def shallow(value: Any, depth: int = 0) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth <= cbor.MAX_DEPTH and all(shallow(item, depth + 1) for item in items)


@given(VALUES.filter(shallow))
def test_what_is_encoded_deterministically_reads_as_itself(value: Any) -> None:
    assert cbor.whole(encode(value)) == value


@given(st.binary(max_size=200))
def test_what_is_read_has_exactly_the_bytes_that_it_was_read_from(data: bytes) -> None:
    with contextlib.suppress(VerifyError):
        assert encode(cbor.whole(data)) == data


@pytest.mark.parametrize(
    "spelling",
    [
        "1800",  # 0 in two bytes
        "1817",  # 23 in two bytes
        "1900ff",  # 255 in three
        "1a0000ffff",
        "1b00000000ffffffff",
        "5801ff",  # a byte string whose length has a byte of its own
        "7f616161ff",  # an indefinite text
        "5f4100ff",
        "9fff",
        "bfff",
        "a2616100616101",  # the key a twice
        "a2616200616100",  # b before a
        "a26261610061620a",  # aa before b: the shorter is first
        "a10000",  # a key that is no text
        "61ff",  # not UTF-8
        "20",  # -1
        "f5",  # true
        "f6",  # null
        "f97e00",  # a float
        "c100",  # a tag
        "1c",  # reserved
        "ff",
        "00" * 2,  # two items
        "44616263",  # it ends inside
        "9bffffffffffffffff",  # more items than there can be
        "",
    ],
)
def test_another_spelling_is_refused(spelling: str) -> None:
    with pytest.raises(VerifyError) as refused:
        cbor.whole(bytes.fromhex(spelling))
    assert refused.value.check == "encoding"


def test_ten_thousand_arrays_inside_each_other_are_refused() -> None:
    with pytest.raises(VerifyError, match="nested"):
        cbor.whole(b"\x81" * 10_000 + b"\x00")


def test_a_length_of_four_gigabytes_takes_no_memory() -> None:
    with pytest.raises(VerifyError, match="ends inside"):
        cbor.whole(bytes.fromhex("5b00000001000000000000"))
