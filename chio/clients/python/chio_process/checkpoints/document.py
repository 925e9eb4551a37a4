"""JSON values as a checkpoint may hold them, checked on the way in and written one way.

The bounds are the kernel's (docs/formats.md): integers within ±(2^53-1), no NaN or infinity, no lone surrogate. A
value may nest 56 deep, so that it still fits the kernel's 64 with the envelope and the frame around it. An integral
float is the integer that RFC 8785 writes for it, so that a value reads back equal to what was saved.
"""

import json
import math
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NoReturn, TypeAlias

from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind

JsonValue: TypeAlias = Any
JsonObject: TypeAlias = dict[str, JsonValue]

MAX_INTEGER = 2**53 - 1
MAX_DEPTH = 56
MAX_NAME_BYTES = 256


def checked_object(value: object, field: str) -> JsonObject:
    """A copy of a JSON object that shares nothing with what was given."""
    if not isinstance(value, Mapping):
        invalid(f"{field} is not a JSON object")
    checked = _checked(value, field, MAX_DEPTH)
    assert isinstance(checked, dict)
    return checked


def checked_value(value: object, field: str) -> JsonValue:
    """A copy of any JSON value."""
    return _checked(value, field, MAX_DEPTH)


def checked_integer(value: object, field: str, least: int = 0) -> int:
    if type(value) is not int:  # bool is an int to isinstance
        invalid(f"{field} is not an integer")
    if not least <= value <= MAX_INTEGER:
        invalid(f"{field} is not between {least} and 2^53-1")
    return value


def checked_name(value: object, field: str) -> str:
    """A name as the kernel takes operation keys: 1-256 bytes of UTF-8, no white space at its edges, no controls."""
    if type(value) is not str:
        invalid(f"{field} is not a string")
    size = len(_utf8(value, field))
    if not 1 <= size <= MAX_NAME_BYTES or value != value.strip():
        invalid(f"{field} is not 1-{MAX_NAME_BYTES} bytes without white space at its edges")
    if any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in value):
        invalid(f"{field} holds a control character")
    return value


def checked_fields(document: object, names: tuple[str, ...], field: str) -> JsonObject:
    """The same object, which has exactly these members."""
    if type(document) is not dict:
        invalid(f"{field} is not a JSON object")
    missing = [name for name in names if name not in document]
    if missing:
        invalid(f"{field} has no {missing[0]}")
    unknown = sorted(str(name) for name in document.keys() - set(names))
    if unknown:
        invalid(f"{field} has an unknown member {unknown[0]!r}")
    return document


def encode(value: JsonValue) -> str:
    """One text for one value: members sorted, no white space. For values that were checked."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def digest(value: JsonValue) -> str:
    return sha256(encode(value).encode("utf-8")).hexdigest()


def decode(text: str) -> JsonValue:
    """A value of one JSON text; duplicate members, NaN and numbers that Python would round are refused."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(CheckpointErrorKind.INVALID, f"not JSON: {error}") from error


def invalid(why: str) -> NoReturn:
    raise CheckpointError(CheckpointErrorKind.INVALID, why)


def _checked(value: object, field: str, depth: int) -> JsonValue:
    match value:
        case None | bool():
            return value
        case str():
            _utf8(value, field)
            return str(value)
        case int():
            if not -MAX_INTEGER <= value <= MAX_INTEGER:
                invalid(f"{field} holds an integer beyond 2^53-1")
            return int(value)
        case float():
            return _checked_float(value, field)
    if depth == 0:
        invalid(f"{field} nests deeper than {MAX_DEPTH}")
    match value:
        case list() | tuple():
            return [_checked(item, field, depth - 1) for item in value]
        case Mapping():
            checked = {}
            for name, item in value.items():
                if type(name) is not str:
                    invalid(f"{field} has a member whose name is not a string")
                _utf8(name, field)
                checked[name] = _checked(item, field, depth - 1)
            return checked
    invalid(f"{field} holds a {type(value).__name__}, which is not JSON")


def _checked_float(value: float, field: str) -> int | float:
    if not math.isfinite(value):
        invalid(f"{field} holds {value}, which is not JSON")
    if not value.is_integer():
        return value
    if abs(value) > MAX_INTEGER:
        invalid(f"{field} holds an integer beyond 2^53-1")
    return int(value)


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        invalid(f"{field} holds a lone surrogate")


def _without_duplicates(members: list[tuple[str, JsonValue]]) -> JsonObject:
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("a member stands twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
