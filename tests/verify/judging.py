"""Judging an attested call as a reviewer, and changing it one member at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.verify import observed
from verify.calls import CallVerdict
from verify.verdict import VerifyError

Judge = Callable[..., CallVerdict]


def failed(verdict: CallVerdict) -> list[str]:
    return [check.name for check in verdict.findings.failed]


def outcome(judged: Callable[[], CallVerdict]) -> list[str]:
    """The checks that failed; where the artifact could not even be read, the one that refused it."""
    try:
        return failed(judged())
    except VerifyError as error:
        return [error.check]


UNREADABLE = {"fields", "text", "canonical"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document that holds a scalar or something empty."""
    if isinstance(value, dict | list) and value:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, name))
    else:
        yield path


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    at(document, path[:-1])[path[-1]] = value


# A member of one of these sets is changed into its neighbour, so that the document keeps its shape.
WORDS = (
    ["completed", "unknown", "compensated", "reconciled"],
    ["allow", "deny", "incomplete"],
    ["default", "known_outcome_only"],
    ["applied", "not_applied"],
    ["value", "text"],
    ["invoke", "delegate"],
    [observed.ORIGINAL, observed.READBACK, "no_custody_claim"],
)


def another(value: Any) -> Any:
    """Something else of the same shape."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        for words in WORDS:
            if value in words:
                return words[(words.index(value) + 1) % len(words)]
        if value.startswith("process:"):
            return "process:" + another(value[8:])
        last = value[-1]
        return value[:-1] + ("0" if last != "0" else "1")
    return "something else"
