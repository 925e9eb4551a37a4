"""Strict reading of JSON as it was received, and RFC 8785 encoding.

A general JSON reader forgives what a verifier must not: the same member twice (two readers see two documents),
integers that a double cannot hold, lone surrogates, any depth. What is accepted here is one document and the same one
for every reader. Signed text is never rebuilt: `split` hands out the received bytes of each member.

This repeats the host's encoder on purpose: the verifier must not trust the signer's code.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

import rfc8785

from verify.verdict import VerifyError

MAX_DEPTH = 64
MAX_SAFE_INTEGER = 2**53 - 1  # the largest n for which n and n + 1 are both exact doubles (RFC 7493, section 2.2)
_MAX_INTEGER_CHARACTERS = len(str(-MAX_SAFE_INTEGER))


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: its value, and the bytes that said so."""

    value: Any
    received: bytes


def encode(value: Any) -> bytes:
    """RFC 8785 bytes of a value that `parse` or `split` returned."""
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise VerifyError(f"not a value of the profile: {error}", check="text") from error


def parse(text: bytes, *, canonical: bool) -> Any:
    """The value of one JSON text. With `canonical`, the text must be RFC 8785 too."""
    decoded = _utf8(text)
    start = 0 if canonical else len(decoded) - len(decoded.lstrip(" \t\r\n"))
    value, end = _read(decoded, start)
    if decoded[end:].strip("" if canonical else " \t\r\n"):
        raise VerifyError(f"something follows the JSON text at character {end + 1}", check="text")
    if canonical and not _is_canonical(value, decoded):
        raise VerifyError("not canonical JSON (RFC 8785)", check="canonical")
    return value


def is_canonical(text: bytes) -> bool:
    """Whether this is one JSON text of the profile, in RFC 8785.

    What the standard library reads and writes again as the very same text has no member twice, no other order, white
    space or escape. Numbers and depth it does not judge, so a text with anything of the kind is read the long way.
    """
    try:
        decoded = text.decode()
        if _is_usual(decoded) and text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
            return _ENCODER.encode(_READER.raw_decode(decoded)[0]) == decoded
        parse(text, canonical=True)
    except (VerifyError, ValueError):
        return False
    return True


def split(text: bytes, names: tuple[str, ...]) -> dict[str, Member]:
    """The members of a canonical object that has exactly `names`, which come in canonical order."""
    decoded = _utf8(text)
    members: dict[str, Member] = {}
    end = 0
    for name in names:
        opening = f'{"," if members else "{"}"{name}":'
        if not decoded.startswith(opening, end):
            _refuse_object(text, names)
        start = end + len(opening)
        value, end = _read(decoded, start)
        received = decoded[start:end]
        if not _is_canonical(value, received):
            raise VerifyError("not canonical JSON (RFC 8785)", check="canonical", place=name)
        members[name] = Member(value, received.encode())
    if decoded[end:] != "}":
        _refuse_object(text, names)
    return members


def _is_canonical(value: Any, received: str) -> bool:
    """Whether a text is the RFC 8785 encoding of the value that was read from it.

    The standard library's encoder writes the same text much faster unless there are floats, which it spells
    differently, or characters beyond the Basic Multilingual Plane, by which it sorts members in another order.
    """
    if _is_usual(received) and _ENCODER.encode(value) == received:
        return True
    return encode(value) == received.encode()


def _is_usual(text: str) -> bool:
    """Whether the standard library's encoder writes what is in this text as RFC 8785 does."""
    return (
        text[:1] in '{["tfn'
        and _UNUSUAL_NUMBER.search(text) is None
        and (text.isascii() or _BEYOND_THE_BASIC_PLANE.search(text) is None)
    )


def _refuse_object(text: bytes, names: tuple[str, ...]) -> NoReturn:
    """Says which rule a text broke that is not the object asked for."""
    value = parse(text, canonical=True)
    if not isinstance(value, dict):
        raise VerifyError("not a JSON object", check="fields")
    for name in names:
        if name not in value:
            raise VerifyError(f"the member `{name}` is missing", check="fields")
    unknown = next(name for name in value if name not in names)
    raise VerifyError(f"the member {json.dumps(unknown)} is not known", check="fields")


def _utf8(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise VerifyError(f"not UTF-8 at byte {error.start + 1}", check="text") from error


def _read(text: str, start: int) -> tuple[Any, int]:
    """One value of the profile that begins at `start`, and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise VerifyError(f"not JSON: {error.msg} at character {error.pos + 1}", check="text") from error
    except RecursionError as error:
        raise VerifyError(f"nested deeper than {MAX_DEPTH}", check="text") from error
    # Both questions are answered for most texts without walking through the value.
    if text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH:
        _refuse_depth(value)
    if "\\u" in text[start:end]:
        _refuse_surrogates(value)
    return value, end


def _refuse_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []  # a string may be full of brackets
    for _ in range(MAX_DEPTH):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return
    raise VerifyError(f"nested deeper than {MAX_DEPTH}", check="text")


def _refuse_surrogates(value: Any) -> None:
    level = [value]
    while level:
        for item in level:
            if isinstance(item, str) and not item.isascii():
                try:
                    item.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise VerifyError("a lone surrogate in a string", check="text") from error
        level = [item for container in level if isinstance(container, dict | list) for item in _items(container)]


def _items(container: dict[str, Any] | list[Any]) -> list[Any]:
    """What a container holds, an object's names included."""
    return container if isinstance(container, list) else [*container, *container.values()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise VerifyError(f"the member {json.dumps(name)} is there twice", check="text")
            seen.add(name)
    return members


def _integer(digits: str) -> int:
    if len(digits) > _MAX_INTEGER_CHARACTERS or abs(int(digits)) > MAX_SAFE_INTEGER:
        raise VerifyError("an integer beyond 2^53 - 1", check="text")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    # Every double beyond the safe integers is an integer, or the infinity that an overflow reads as.
    if abs(number) > MAX_SAFE_INTEGER:
        raise VerifyError("a number beyond 2^53 - 1", check="text")
    return number


def _constant(name: str) -> NoReturn:
    raise VerifyError(f"{name} is not a JSON number", check="text")


# In text without white space a number follows one of these characters, unless the text is a number. Unusual are one
# with a point or an exponent, one that may be beyond 2^53, and what is no number in JSON (NaN, Infinity).
_UNUSUAL_NUMBER = re.compile("[:,\\[](?:-?[0-9]+[.eE]|-?[0-9]{16}|N|-?I)")
_BEYOND_THE_BASIC_PLANE = re.compile("[\U00010000-\U0010ffff]")
_READER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant)
