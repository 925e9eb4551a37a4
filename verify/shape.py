"""The exact members and types of a document, as data.

A shape is a function that takes a value and the path to it and raises `VerifyError` (check `fields`) when the value
is anything else. Unknown members are refused: what a verifier does not know, it cannot have checked.

Most shapes also know how their values are usually written: `plain` is a regular expression of canonical texts (RFC
8785) of the shape, in printable ASCII without escapes. Text that it matches needs no other check of its form, which
makes reading a million records quick; text that it does not match is read the long way, and may be as good.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from verify.verdict import VerifyError

Shape = Callable[[Any, str], None]

MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Plain:
    """A shape that knows its usual spelling."""

    check: Shape
    plain: str

    def __call__(self, value: Any, path: str) -> None:
        self.check(value, path)


def plain_of(shape: Shape) -> str | None:
    return shape.plain if isinstance(shape, Plain) else None


def _with_plain(check: Shape, plain: str | None) -> Shape:
    return Plain(check, plain) if plain is not None else check


def _record_plain(required: Mapping[str, Shape], known: Mapping[str, Shape]) -> str | None:
    """Members in canonical order; one that is optional takes a comma with it. None if a member has no spelling."""
    names = sorted(known)
    first_required = min(required, default=None)
    if first_required is None or not "".join(names).isascii():
        return None
    text = ""
    for name in names:
        value = plain_of(known[name])
        if value is None:
            return None
        member = f'"{name}":{value}'
        if name in required:
            text += member if name == first_required else f",{member}"
        else:
            text += f"(?:{member},)?" if name < first_required else f"(?:,{member})?"
    return "\\{" + text + "\\}"


def record(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """An object with all of `required`, any of `optional`, and nothing else."""
    known = {**required, **(optional or {})}

    def check(value: Any, path: str) -> None:
        if type(value) is not dict:
            _refuse("is not an object", path)
        for name in required:
            if name not in value:
                _refuse("is missing", _join(path, name))
        for name, member in value.items():
            shape = known.get(name)
            if shape is None:
                _refuse("is not known", _join(path, json.dumps(name).strip('"')[:80]))
            shape(member, _join(path, name))

    return _with_plain(check, _record_plain(required, known))


def array(element: Shape) -> Shape:
    def check(value: Any, path: str) -> None:
        if type(value) is not list:
            _refuse("is not an array", path)
        for position, item in enumerate(value):
            element(item, f"{path}[{position}]")

    plain = plain_of(element)
    return _with_plain(check, None if plain is None else rf"\[(?:{plain}(?:,{plain})*)?\]")


def nullable(shape: Shape) -> Shape:
    def check(value: Any, path: str) -> None:
        if value is not None:
            shape(value, path)

    plain = plain_of(shape)
    return _with_plain(check, None if plain is None else f"(?:null|{plain})")


def one_of(*values: str) -> Shape:
    def check(value: Any, path: str) -> None:
        if value not in values:
            _refuse(f"is not one of {', '.join(values)}", path)

    return Plain(check, f'"(?:{"|".join(map(re.escape, values))})"')


def matching(pattern: str, meaning: str) -> Shape:
    """A string that `pattern` matches from end to end, only of characters that JSON does not escape.

    `meaning` is for the message.
    """
    compiled = re.compile(pattern)

    def check(value: Any, path: str) -> None:
        if type(value) is not str or compiled.fullmatch(value) is None:
            _refuse(f"is not {meaning}", path)

    return Plain(check, f'"{pattern}"')


def at_least(minimum: int) -> Shape:
    def check(value: Any, path: str) -> None:
        # bool is an int to isinstance, and true is not a number.
        if type(value) is not int or value < minimum:
            _refuse(f"is not an integer of at least {minimum}", path)

    # Fifteen digits are below 2^53, and a positive number is at least 1.
    return _with_plain(check, {0: "(?:0|[1-9][0-9]{0,14})", 1: "[1-9][0-9]{0,14}"}.get(minimum))


def _boolean(value: Any, path: str) -> None:
    if type(value) is not bool:
        _refuse("is not true or false", path)


def _null(value: Any, path: str) -> None:
    if value is not None:
        _refuse("is not null", path)


def _text(value: Any, path: str) -> None:
    if type(value) is not str or not value:
        _refuse("is not a string with something in it", path)


def _string(value: Any, path: str) -> None:
    if type(value) is not str:
        _refuse("is not a string", path)


def anything(value: Any, path: str) -> None:
    """Takes every value: its meaning is the application's."""


def object_of_anything(value: Any, path: str) -> None:
    if type(value) is not dict:
        _refuse("is not an object", path)


def true(value: Any, path: str) -> None:
    """A member that is either true or absent."""
    if value is not True:
        _refuse("is there and not true", path)


def _name(value: Any, path: str) -> None:
    """What names an operation, a server or a tool."""
    if type(value) is not str or not 1 <= len(value.encode()) <= MAX_NAME_BYTES:
        _refuse(f"is not a string of 1 to {MAX_NAME_BYTES} bytes", path)
    if value != value.strip() or any(unicodedata.category(character) == "Cc" for character in value):
        _refuse("has white space at an end or a control character", path)


_CHARACTER = r"[ !#-\[\]-~]"  # printable ASCII but the quotation mark and the backslash
boolean = Plain(_boolean, "(?:true|false)")
null = Plain(_null, "null")
text = Plain(_text, f'"{_CHARACTER}+"')
string = Plain(_string, f'"{_CHARACTER}*"')
name = Plain(_name, rf'"[!#-\[\]-~](?:{_CHARACTER}{{0,254}}[!#-\[\]-~])?"')
digest = matching("[0-9a-f]{64}", "64 lower-case hex digits")
signature = matching("[0-9a-f]{128}", "128 lower-case hex digits")
salt = matching("[0-9a-f]{32}", "32 lower-case hex digits")
runtime_id = matching("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "a lower-case UUID")
request_id = matching("process:[0-9a-f]{64}", "process: and 64 lower-case hex digits")
process_id = matching("[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, _ or -")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse(why: str, path: str) -> NoReturn:
    raise VerifyError(f"`{path}` {why}", check="fields")
