"""Strict reading of deterministic CBOR (RFC 8949, section 4.2.1), and of sequences of it (RFC 8742).

A general CBOR reader forgives what a verifier must not: a length written longer than need be, an indefinite length, the
same key twice, keys in any order. Then one document has many encodings, and what was signed is not the one thing that
every reader sees. What is read here has exactly one encoding. The few types that a bundle uses are known and no others:
unsigned integers, byte strings, text strings, arrays, and maps whose keys are text.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from verify.verdict import VerifyError

UNSIGNED, BYTES, TEXT, ARRAY, MAP, TAG = 0, 2, 3, 4, 5, 6
MAX_DEPTH = 8
MAX_ITEMS = 65_536  # of one array or map; what is longer is a sequence

# The additional information that says how many bytes of argument follow, and the least that is written so.
_WIDTHS = {24: (1, 24), 25: (2, 1 << 8), 26: (4, 1 << 16), 27: (8, 1 << 32)}

Take = Callable[[int], bytes]
"""Hands out exactly so many further bytes, or raises `VerifyError`."""


def head(take: Take) -> tuple[int, int]:
    """(major type, argument) of the next data item, in its shortest form."""
    first = take(1)[0]
    major, information = first >> 5, first & 0x1F
    if information < 24:
        return major, information
    if information not in _WIDTHS:
        _refuse("an indefinite length, or no CBOR")
    width, least = _WIDTHS[information]
    argument = int.from_bytes(take(width), "big")
    if argument < least:
        _refuse("a number that is written longer than need be")
    return major, argument


def read(take: Take, depth: int = 0) -> Any:
    """One data item as int, bytes, str, list or dict."""
    major, argument = head(take)
    if major == UNSIGNED:
        return argument
    if major == BYTES:
        return take(argument)
    if major == TEXT:
        return _text(take(argument))
    if major not in (ARRAY, MAP):
        _refuse(f"a data item of major type {major}, which has no place here")
    if depth >= MAX_DEPTH or argument > MAX_ITEMS:
        _refuse(f"nested deeper than {MAX_DEPTH}, or more than {MAX_ITEMS} in one place")
    if major == ARRAY:
        return [read(take, depth + 1) for _ in range(argument)]
    return _map(take, argument, depth)


def _map(take: Take, pairs: int, depth: int) -> dict[str, Any]:
    members: dict[str, Any] = {}
    before = (-1, b"")
    for _ in range(pairs):
        major, length = head(take)
        if major != TEXT:
            _refuse("a key that is not text")
        encoded = take(length)
        # Bytewise order of the encodings: of two texts the shorter is first, since its head says so.
        if (length, encoded) <= before:
            _refuse("a key twice, or keys out of order")
        before = (length, encoded)
        members[_text(encoded)] = read(take, depth + 1)
    return members


def whole(data: bytes) -> Any:
    """The one data item that these bytes are."""
    source = Bytes(data)
    value = read(source.take)
    if source.at != len(data):
        _refuse("something follows the data item")
    return value


class Bytes:
    """Bytes in memory, taken from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            _refuse("it ends inside a data item")
        taken = self._data[self.at : end]
        self.at = end
        return taken


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode("utf-8")
    except UnicodeDecodeError as error:
        raise VerifyError("a text that is not UTF-8", check="encoding") from error


def _refuse(why: str) -> NoReturn:
    raise VerifyError(why, check="encoding")
