"""Every change of an artifact is refused, or is one of those that mean nothing, each listed with its reason.

Which check caught how many is printed (`pytest -s`); `python -m tests.verify.mutation` makes every change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.verify.mutation.changes import Mutation, lines, members, regions, rewritten, text_of
from tests.verify.mutation.matrix import Harmless, tally
from tests.verify.mutation.subjects import receipt, subjects
from verify.verdict import Verdict

NAMES = (
    "receipt", "receipts file", "export of leaves", "checkpoint", "cosigned checkpoint", "tlog-proof",
    "consistency proof", "pins", "call observation (reconciled)", "call observation (completed)",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_artifact_is_refused_unless_the_change_means_nothing(name: str, tmp_path: Path) -> None:
    found = tally(subjects(tmp_path)[name])
    print(found.text())
    assert found.uncaught == []
    assert found.caught.total() > 40


def test_every_kind_of_artifact_is_here(tmp_path: Path) -> None:
    assert tuple(subjects(tmp_path)) == NAMES


def test_what_is_accepted_by_mistake_is_counted_as_not_caught(tmp_path: Path) -> None:
    """The control: an auditor who accepts everything, and one who crashes."""
    lenient = replace(receipt(tmp_path), judge=lambda text: Verdict("all is well"), draw=3)
    found = tally(lenient)
    assert not found.caught
    assert len(found.uncaught) > 20
    assert "NOT CAUGHT" in found.text()
    broken = replace(lenient, judge=lambda text: Verdict("all is well") if text == lenient.good else 1 // 0)
    with pytest.raises(ZeroDivisionError):
        tally(broken)


def test_a_good_artifact_that_is_refused_shows_nothing(tmp_path: Path) -> None:
    subject = receipt(tmp_path)
    with pytest.raises(AssertionError, match="itself is refused"):
        tally(replace(subject, good=subject.good[:-9]))


def test_an_excuse_that_excuses_nothing_is_told_where_every_change_is_made(tmp_path: Path) -> None:
    subject = receipt(tmp_path)
    few = replace(subject, mutations=lambda: [Mutation("removed", "all", lambda: b"{}\n")])
    idle = replace(few, harmless=(Harmless("nothing is like this", where="nowhere"),))
    assert tally(idle, everything=True).uncaught == ["stale: nothing is like this"]


# --- the changes themselves -------------------------------------------------------------------------------------------


def made(mutations: list[Mutation], how: str) -> list[bytes]:
    return [mutation.make() for mutation in mutations if mutation.how == how]


def test_members_are_changed_in_every_way() -> None:
    found = list(members({"a": 1, "b": ["x", None]}, {"a": 7}))
    assert made(found, "removed") == [b'{"b":["x",null]}', b'{"a":1}', b'{"a":1,"b":[null]}', b'{"a":1,"b":["x"]}']
    assert made(found, "duplicated")[0] == b'{"a":1,"a":1,"b":["x",null]}'
    assert made(found, "another run's") == [b'{"a":7,"b":["x",null]}']
    assert made(found, "another type")[0] == b'{"a":"1","b":["x",null]}'
    assert made(found, "null")[-1] == b'{"a":1,"b":[null,null]}'
    assert made(found, "re-ordered") == [b'{"a":1,"b":[null,"x"]}']
    assert made(found, "added") == [b'{"a":1,"b":["x",null],"unknown":1}']


def test_lines_and_bytes_are_changed_in_every_way() -> None:
    ways = {mutation.how: mutation.make() for mutation in lines(b"7\nx\n", b"8\nx\n") if mutation.where == "line 1"}
    assert ways == {
        "removed": b"x\n", "duplicated": b"7\n7\nx\n", "null": b"null\nx\n", "another type": b"seven\nx\n",
        "emptied": b"\nx\n", "another value": b"8\nx\n", "another run's": b"8\nx\n", "re-ordered": b"x\n7\n",
    }  # fmt: skip
    found = list(regions(b"abcd", 2))
    assert made(found, "removed bytes") == [b"cd", b"ab", b"abc"]
    assert made(found, "duplicated bytes") == [b"ababcd", b"abcdcd"]
    assert made(found, "truncated") == [b"", b"ab"]
    assert made(found, "flipped")[:2] == [b"`ccd", b"ABcd"]
    assert made(found, "concatenated")[0] == b"abcdabcd"


def test_another_encoding_is_never_the_canonical_one() -> None:
    document = {"schema": "x", "a": [1, {"s": 2, "r": 3}]}
    assert text_of(document) not in [mutation.make() for mutation in rewritten(document)]
