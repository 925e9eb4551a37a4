"""Canonical JSON (RFC 8785): the one encoder of signed bytes, and the one strict reader of received text.

`orjson` with sorted keys writes exactly RFC 8785 when keys are ASCII, integers lie within the safe range and there
are no floats; everything else goes through `rfc8785`. Readers take duplicate keys silently, so `parse` first proves
that there are none: text that re-encodes to itself cannot hold a duplicate, any other text is read by the slow
reader that counts them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

MAX_DEPTH = 64
MAX_SAFE_INTEGER = 2**53 - 1

_SORTED = orjson.OPT_SORT_KEYS


class NotCanonical(ValueError):
    """Text or a value outside the profile; the message says which rule, and where when it is known."""


def encode(value: object) -> bytes:
    """`value` as RFC 8785 bytes. Raises `NotCanonical` for what the profile does not hold."""
    return orjson.dumps(value, option=_SORTED) if scan(value) else _encode_general(value)


def encode_plain(value: object) -> bytes:
    """`encode` for a document of ours: ASCII keys, safe integers, no floats (not checked again)."""
    return orjson.dumps(value, option=_SORTED)


def encode_scanned(value: object, plain: bool) -> bytes:
    """`encode` for a value that `scan` has already judged."""
    return orjson.dumps(value, option=_SORTED) if plain else _encode_general(value)


def _encode_general(value: object) -> bytes:
    import rfc8785

    try:
        return rfc8785.dumps(value)  # type: ignore[arg-type]
    except rfc8785.CanonicalizationError as error:
        raise NotCanonical(str(error)) from error


def parse(text: bytes) -> Any:
    """The value of one JSON text in the profile. Raises `NotCanonical`."""
    value, _plain = parse_scanned(text)
    return value


def parse_scanned(text: bytes) -> tuple[Any, bool]:
    """`parse`, and whether the value needs only the fast encoder (what `scan` returned)."""
    try:
        value = orjson.loads(text)
        same = orjson.dumps(value) == text
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        same = False
    if not same:
        value = _parse_counting(text)
    return value, scan(value)


def _parse_counting(text: bytes) -> Any:
    """The slow reader: refuses duplicate names, which every fast reader takes silently."""
    try:
        decoded = text.decode("utf-8", "strict")
        return json.loads(decoded, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise NotCanonical("not UTF-8") from error
    except RecursionError as error:
        raise NotCanonical("nested too deep") from error
    except json.JSONDecodeError as error:
        raise NotCanonical(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise NotCanonical(f"duplicate field `{name}`")
            seen.add(name)
    return members


def _constant(name: str) -> Any:
    raise NotCanonical(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > 17:
        raise NotCanonical("an integer beyond 2^53-1")
    return int(digits)


def scan(value: object) -> bool:
    """Check depth, numbers and strings of a parsed value; true when the fast encoder is exact for it."""
    plain = True
    level: list[Any] = [value]
    depth = 0
    while level:
        deeper: list[Any] = []
        containers = False
        for item in level:
            kind = type(item)
            if kind is str:
                if not item.isascii():
                    _check_text(item)
            elif kind is dict:
                for name in item:
                    if not name.isascii():
                        _check_text(name)
                        plain = False
                containers = True
                deeper.extend(item.values())
            elif kind is list:
                containers = True
                deeper.extend(item)
            elif kind is int:
                if not -MAX_SAFE_INTEGER <= item <= MAX_SAFE_INTEGER:
                    raise NotCanonical("an integer beyond 2^53-1")
            elif kind is float:
                _check_float(item)
                plain = False
            elif item is not None and kind is not bool:
                raise NotCanonical(f"a {kind.__name__} is not JSON")
        depth += containers  # an empty one is a level too
        if depth > MAX_DEPTH:
            raise NotCanonical(f"nested deeper than {MAX_DEPTH}")
        level = deeper
    return plain


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8", "strict")
    except UnicodeEncodeError as error:
        raise NotCanonical("a lone surrogate in a string") from error


def _check_float(number: float) -> None:
    if not math.isfinite(number):
        raise NotCanonical("a number that is not finite")
    if number.is_integer() and abs(number) > MAX_SAFE_INTEGER:
        raise NotCanonical("a number beyond 2^53-1")
