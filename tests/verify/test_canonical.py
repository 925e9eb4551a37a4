"""The reader takes one document per text, and the encoder and the reader agree."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify import canonical
from verify.verdict import VerifyError

_SAFE = canonical.MAX_SAFE_INTEGER
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-_SAFE, _SAFE)
    | st.floats(-_SAFE, _SAFE, allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=5),
    max_leaves=20,
)


@given(_VALUES)
def test_what_is_encoded_reads_back_as_the_same_value_and_encodes_to_the_same_bytes(value: Any) -> None:
    text = canonical.encode(value)
    assert canonical.parse(text, canonical=True) == value
    assert canonical.encode(canonical.parse(text, canonical=True)) == text


@given(_VALUES)
def test_a_pretty_printed_text_is_the_same_value_but_canonical_only_if_its_bytes_are(value: Any) -> None:
    text = json.dumps(value, indent=1).encode()
    assert canonical.parse(text, canonical=False) == value
    if text != canonical.encode(value):
        with pytest.raises(VerifyError) as refused:
            canonical.parse(text, canonical=True)
        assert refused.value.check == "canonical"


@given(st.binary(max_size=60) | st.text('{}[]",:\\u0d8e+-.1 ', max_size=40).map(str.encode))
def test_any_bytes_are_one_value_or_refused(text: bytes) -> None:
    try:
        value = canonical.parse(text, canonical=True)
    except VerifyError as error:
        refused_by: str | None = error.check
    else:
        refused_by = None
        assert canonical.encode(value) == text
    assert refused_by in {None, "text", "canonical"}


@given(_VALUES, _VALUES)
def test_split_hands_out_the_very_bytes_of_each_member(first: Any, second: Any) -> None:
    texts = canonical.encode(first), canonical.encode(second)
    members = canonical.split(b'{"a":' + texts[0] + b',"b":' + texts[1] + b"}", ("a", "b"))
    assert (members["a"].received, members["b"].received) == texts
    assert (members["a"].value, members["b"].value) == (first, second)


@pytest.mark.parametrize("levels", [1, 63, 64])
def test_sixty_four_levels_are_read(levels: int) -> None:
    canonical.parse(b"[" * levels + b"]" * levels, canonical=True)
    canonical.parse(b'{"a":' * levels + b"1" + b"}" * levels, canonical=True)


@pytest.mark.parametrize("text", [b"[" * 65 + b"]" * 65, b'{"a":' * 65 + b"1" + b"}" * 65, b'{"a":[' * 33 + b"]}" * 33])
def test_a_sixty_fifth_level_is_refused(text: bytes) -> None:
    with pytest.raises(VerifyError, match="nested deeper"):
        canonical.parse(text, canonical=True)


def test_many_containers_side_by_side_are_not_depth() -> None:
    assert len(canonical.parse(b"[" + b"[]," * 1000 + b"{}]", canonical=True)) == 1001


@pytest.mark.parametrize("text", [b" [1] ", b"\n{}\n", b"\t1\r\n"])
def test_white_space_around_a_text_is_taken_only_where_canonical_form_is_not_asked_for(text: bytes) -> None:
    canonical.parse(text, canonical=False)
    with pytest.raises(VerifyError):
        canonical.parse(text, canonical=True)


@pytest.mark.parametrize("text", [b'["\\ud800"]', b'{"\\udc00":1}', b'[["\\ud800\\u0041"]]', b'{"a":{"b":"\\udfff"}}'])
def test_a_lone_surrogate_is_refused_without_canonical_form_too(text: bytes) -> None:
    with pytest.raises(VerifyError, match="lone surrogate"):
        canonical.parse(text, canonical=False)


@pytest.mark.parametrize("number", ["9007199254740992", "-9007199254740992", "9007199254740992.0", "1e400"])
def test_a_number_that_readers_disagree_about_is_refused_without_canonical_form_too(number: str) -> None:
    with pytest.raises(VerifyError, match="beyond"):
        canonical.parse(f"[{number}]".encode(), canonical=False)


def test_an_escaped_surrogate_pair_is_one_character() -> None:
    assert canonical.parse(b'["\\ud83d\\ude00"]', canonical=False) == ["\U0001f600"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, b"0"), (-0.0, b"0"), (1.0, b"1"), (0.1, b"0.1"), (1e-6, b"0.000001"), (1e-7, b"1e-7"),
        (5e-324, b"5e-324"), (-1.5, b"-1.5"), (123456789012345.6, b"123456789012345.6"),
    ],
)
def test_doubles_are_written_as_ecmascript_writes_them(number: float, text: bytes) -> None:
    assert canonical.encode(number) == text


def test_a_string_full_of_brackets_is_no_deep_text() -> None:
    text = b'"' + b"[" * 100 + b'"'
    assert canonical.parse(text, canonical=True) == "[" * 100


def test_members_are_ordered_by_utf_16_and_not_by_code_point() -> None:
    """RFC 8785, section 3.2.3: U+1F600 comes before U+E000, since its first code unit is U+D83D."""
    right, wrong = '{"\U0001f600":1,"\ue000":2}'.encode(), '{"\ue000":2,"\U0001f600":1}'.encode()
    assert canonical.parse(right, canonical=True) == {"\U0001f600": 1, "\ue000": 2}
    assert (canonical.is_canonical(right), canonical.is_canonical(wrong)) == (True, False)
    with pytest.raises(VerifyError) as refused:
        canonical.parse(wrong, canonical=True)
    assert refused.value.check == "canonical"
