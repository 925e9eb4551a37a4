"""Changes of one artifact. Each is named by how and where, and made when it is asked for."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.verify import judging
from tests.verify.judging import at
from tests.verify.signed import jcs

_AGAIN = "\x01"  # at the end of a name: the member before it once more, under the same name
_WRITTEN_AGAIN = re.compile(rb"\\u0001(?=\":)")
_KEPT = object()  # there is no such change

Path = tuple[Any, ...]
Write = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change. `make` gives the changed artifact."""

    how: str
    where: str
    make: Callable[[], bytes]

    @property
    def pattern(self) -> str:
        """Where, whatever the position in an array: `body.fields.*.name`."""
        return re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "*", self.where)


# --- members of a JSON document ---------------------------------------------------------------------------------------


def members(document: Any, other: Any = None, write: Write | None = None, prefix: str = "") -> Iterator[Mutation]:
    """Each member at any depth removed, there twice, of another value, of another type, null, or another run's.

    `write` makes the artifact of a changed document; a name that ends in `_AGAIN` is undone by `text_of`.
    """
    write = write or text_of
    for path in _paths(document):
        value = at(document, path)
        where = _where(prefix, document, path)
        taken = _of_other(other, path, value)
        for how, new in (
            ("another value", _another(value)),
            ("another type", _another_type(value)),
            ("null", None if value is not None else _KEPT),
            ("another run's", taken),
        ):
            if new is not _KEPT and (new != value or type(new) is not type(value)):
                yield Mutation(how, where, lambda path=path, new=new: write(_replaced(document, path, new)))
        yield Mutation("removed", where, lambda path=path: write(_removed(document, path)))
        yield Mutation("duplicated", where, lambda path=path: write(_doubled(document, path)))
    for path in [(), *_paths(document)]:
        container = at(document, path)
        if isinstance(container, dict):
            where = _where(prefix, document, path) + ".unknown"
            yield Mutation("added", where, lambda path=path: write(_replaced(document, (*path, "unknown"), 1)))
        elif isinstance(container, list) and len(container) > 1 and container[0] != container[-1]:
            where = _where(prefix, document, path)
            turned = list(reversed(container))
            yield Mutation("re-ordered", where, lambda path=path, new=turned: write(_replaced(document, path, new)))


def text_of(document: Any) -> bytes:
    """Canonical text, but for a member that is there twice."""
    return _WRITTEN_AGAIN.sub(b"", jcs(document))


def _where(prefix: str, document: Any, path: Path) -> str:
    """The path in words; what has a name in an array goes by it."""
    parts, at = [prefix] if prefix else [], document
    for step in path:
        at = at[step]
        named = at.get("name") if isinstance(step, int) and isinstance(at, dict) else None
        parts.append(named if isinstance(named, str) else str(step))
    return ".".join(parts)


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, name))


def _replaced(document: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    made = copy.deepcopy(document)
    judging.put(made, path, new)
    return made


def _removed(document: Any, path: Path) -> Any:
    made = copy.deepcopy(document)
    del at(made, path[:-1])[path[-1]]
    return made


def _doubled(document: Any, path: Path) -> Any:
    made = copy.deepcopy(document)
    container, name = at(made, path[:-1]), path[-1]
    if isinstance(container, list):
        container.insert(name, copy.deepcopy(container[name]))
    else:
        container[name + _AGAIN] = copy.deepcopy(container[name])
    return made


def _another(value: Any) -> Any:
    if value is None or isinstance(value, dict | list):
        return _KEPT
    return judging.another(value) if value != "" else "x"


def _another_type(value: Any) -> Any:
    match value:
        case bool() | None:
            return 1
        case int() | float():
            return str(value)
        case str():
            return 1
        case list():
            return {}
    return []


def _of_other(other: Any, path: Path, value: Any) -> Any:
    try:
        found = at(other, path)
    except (KeyError, IndexError, TypeError):
        return _KEPT
    return found if found != value else _KEPT


# --- lines of a text --------------------------------------------------------------------------------------------------


def lines(good: bytes, other: bytes = b"") -> Iterator[Mutation]:
    """Each line removed, there twice, empty, another run's, of another value or type, or in its neighbour's place."""
    parts = good.split(b"\n")
    others = other.split(b"\n")
    for number, line in enumerate(parts):
        where = f"line {number + 1}"
        news = {
            "removed": [],
            "duplicated": [line, line],
            "null": [b"null"],
            "another type": [b"seven" if line.isdigit() else b"7"],
            "emptied": [b""],
            "another value": [b"%d" % (int(line) + 1) if line.isdigit() else judging.another(line.decode()).encode()]
            if line
            else [b"", b""],
        }
        if number < len(others) and others[number] != line:
            news["another run's"] = [others[number]]
        for how, new in news.items():
            yield Mutation(how, where, lambda at=number, new=new: _joined(parts[:at], new, parts[at + 1 :]))
        if number + 1 < len(parts):
            turned = [parts[number + 1], line]
            yield Mutation("re-ordered", where, lambda at=number, new=turned: _joined(parts[:at], new, parts[at + 2 :]))


def _joined(*groups: list[bytes]) -> bytes:
    return b"\n".join(line for group in groups for line in group)


# --- bytes ------------------------------------------------------------------------------------------------------------


def step_of(good: bytes) -> int:
    """Every byte of a small artifact, windows of a larger one."""
    return 1 if len(good) <= 2048 else 16 if len(good) <= 32_768 else 64


def regions(good: bytes, step: int = 0) -> Iterator[Mutation]:
    """Each region flipped, removed, there twice; the text cut at it; and all of it twice."""
    step = step or step_of(good)
    for start in range(0, len(good), step):
        where, end = f"bytes {start}-{min(start + step, len(good))}", start + step
        region = good[start:end]
        for mask in (0x01, 0x20, 0x80):
            flipped = bytes(byte ^ mask for byte in region)
            yield Mutation("flipped", where, lambda start=start, end=end, new=flipped: good[:start] + new + good[end:])
        yield Mutation("removed bytes", where, lambda start=start, end=end: good[:start] + good[end:])
        yield Mutation("duplicated bytes", where, lambda start=start, end=end: good[:end] + good[start:])
        yield Mutation("truncated", where, lambda start=start: good[:start])
    yield Mutation("removed bytes", "the last", lambda: good[:-1])
    yield Mutation("concatenated", "with itself", lambda: good + good)
    yield Mutation("concatenated", "with itself, on a line of its own", lambda: good + b"\n" + good)


def rewritten(document: Any) -> Iterator[Mutation]:
    """The same document as other tools write it: another encoding of the same thing."""
    for where, text in (
        ("spaced", json.dumps(document, sort_keys=True)),
        ("indented", json.dumps(document, sort_keys=True, indent=1)),
        ("escaped", json.dumps(document, sort_keys=True, separators=(",", ":")).replace("s", "\\u0073")),
        ("in another order", json.dumps(_turned(document), separators=(",", ":"))),
    ):
        yield Mutation("re-encoded", where, lambda text=text: text.encode())


def _turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _turned(value[name]) for name in sorted(value, reverse=True)}
    return [_turned(item) for item in value] if isinstance(value, list) else value
