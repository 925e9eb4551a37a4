"""Random histories of saves, crashes and resumes by several writers, each equal to some serial history.

Every save and read that was acknowledged is in the serial history, with the answer that it got and in the order that
whoever waited for answers can tell; one that was not acknowledged may be in it, once, at a place before the next start.

`CHIO_HISTORIES` sets how many are tried (12 without it).
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.host.commands import accepted
from tests.kernel.serving import Line, State, child, config
from tests.state.served import Served

HISTORIES = int(os.environ.get("CHIO_HISTORIES", "12"))
pytestmark = pytest.mark.timeout(120 + 15 * HISTORIES)

WRITERS = 3
SIZES = (0, 100, 20_000)


# --- what is asked ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Against the newest revision that anybody was told of, or one beside it. `pad` makes its value larger."""

    offset: int
    pad: int


@dataclass(frozen=True, slots=True)
class Look:
    """An `inspect`."""


@dataclass(frozen=True, slots=True)
class Put:
    """A `blob_put` of new bytes."""


Step = Save | Look | Put


@dataclass(frozen=True, slots=True)
class Turn:
    """What each writer sends at once, one request behind the other on its own connection."""

    sent: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class Life:
    """One run of the host. Its last turn meets the end: `heard` answers are waited for before a kill."""

    turns: tuple[Turn, ...]
    end: str
    heard: int


STEPS = st.one_of(
    st.builds(Save, st.sampled_from([0, 0, 0, 0, 1, -1]), st.sampled_from(SIZES)),
    st.builds(Look),
    st.builds(Put),
)
TURNS = st.builds(Turn, st.tuples(*[st.lists(STEPS, max_size=3).map(tuple)] * WRITERS))
LIVES = st.builds(
    Life,
    st.lists(TURNS, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["host", "kernel", "stop"]),
    st.integers(0, 3),
)


# --- what came of it -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Asked:
    """One request. `answer` is its reply, or None when nothing was heard."""

    step: Step
    frame: bytes
    expected: str | None = None
    value: Any = None
    digest: str | None = None
    answer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """A checkpoint: revision and the value's JSON text."""

    revision: int
    text: str


def register(checkpoint: dict[str, Any]) -> Register:
    assert str(int(checkpoint["revision"])) == checkpoint["revision"]
    return Register(int(checkpoint["revision"]), json.dumps(checkpoint["value"]))


def after(asked: Asked, before: Register) -> Register | None:
    """The register after this request at this place of a serial history; None when it cannot stand there."""
    answer = asked.answer
    if isinstance(asked.step, Put):
        return before
    if isinstance(asked.step, Look):
        return before if answer is None or register(answer["result"]["checkpoint"]) == before else None
    fits = str(before.revision) == asked.expected
    if not fits:
        refusal = {"protocol": "chio.process.v1", "ok": False, "error": {"code": "checkpoint_conflict"}}
        return before if answer in (None, refusal) else None
    saved = Register(before.revision + 1, json.dumps(asked.value))
    return saved if answer is None or (answer["ok"] and register(answer["result"]) == saved) else None


def serial_ends(turn: list[list[Asked]], starts: set[Register]) -> set[Register]:
    """Every register that a serial history of one turn can end with.

    Each writer's requests keep their order. One without an answer may be missing, and then so is all that its writer
    sent after it, since a connection's requests are taken one by one.
    """
    ends: set[Register] = set()
    seen: set[tuple[tuple[int, ...], Register]] = set()

    def go_on(done: tuple[int, ...], now: Register) -> None:
        if (done, now) in seen:
            return
        seen.add((done, now))
        waiting = [(writer, asked[done[writer]]) for writer, asked in enumerate(turn) if done[writer] < len(asked)]
        if all(asked.answer is None for _, asked in waiting):
            ends.add(now)
        for writer, asked in waiting:
            then = after(asked, now)
            if then is not None:
                go_on((*done[:writer], done[writer] + 1, *done[writer + 1 :]), then)

    for start in starts:
        go_on((0,) * len(turn), start)
    return ends


# --- a history against a real host -----------------------------------------------------------------------------------


@dataclass(slots=True)
class History:
    """Plays lives on one host and keeps the registers that are possible now."""

    served: Served
    possible: set[Register]
    known: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))
    stored: set[str] = field(default_factory=set)
    unheard: set[str] = field(default_factory=set)

    def play(self, life: Life) -> None:
        self.served.start()
        self._look_back()
        lines = [Line(self.served.path) for _ in range(WRITERS)]
        for turn in life.turns[:-1]:
            self._take(lines, turn, None, 0)
        self._take(lines, life.turns[-1], None if life.end == "stop" else life.end, life.heard)
        for line in lines:
            line.close()
        if life.end == "stop":
            self.served.stop()
        kept = accepted("process", "state", "--state", self.served.state.path, "--process", self.served.process)
        self._narrow(register(kept["data"]["checkpoint"]))

    def _take(self, lines: list[Line], turn: Turn, killed: str | None, heard: int) -> None:
        """Send a turn and hear its answers; `killed` is that process's end after so many of them, then the rest."""
        asked = [[self._asked(step, place) for place, step in enumerate(sent)] for sent in turn.sent]
        for line, requests in zip(lines, asked, strict=True):
            line.send(b"".join(request.frame for request in requests))
        in_order = [(line, request) for line, requests in zip(lines, asked, strict=True) for request in requests]
        for position, (line, request) in enumerate(in_order):
            if killed is not None and position == heard:
                self.served.kill(killed)
            request.answer = self._hear(line)
            assert request.answer is not None or (killed is not None and position >= heard)
        if killed is not None and heard >= len(in_order):
            self.served.kill(killed)
        self._remember(asked)
        self.possible = serial_ends(asked, self.possible)
        assert self.possible, f"no serial history explains {asked}"

    def _hear(self, line: Line) -> dict[str, Any] | None:
        try:
            text = line.read()
        except ConnectionResetError:
            return None
        return dict(json.loads(text)) if text.endswith(b"\n") else None

    def _asked(self, step: Step, place: int) -> Asked:
        number = next(self.numbers)
        match step:
            case Save(offset, pad):
                expected, value = str(max(0, self.known + place + offset)), {"number": number, "pad": "x" * pad}
                frame = self.served.frame("checkpoint", expected_revision=expected, value=value)
                return Asked(step, frame, expected=expected, value=value)
            case Look():
                return Asked(step, self.served.frame("inspect"))
            case Put():
                data = f"{self.known} {number}".encode()
                digest = sha256(data).hexdigest()
                encoded = base64.b64encode(data).decode()
                return Asked(step, self.served.frame("blob_put", sha256=digest, data_base64=encoded), digest=digest)

    def _remember(self, asked: list[list[Asked]]) -> None:
        for request in [request for requests in asked for request in requests]:
            if request.digest is not None:
                if request.answer is not None:
                    assert request.answer["ok"], request.answer
                (self.unheard if request.answer is None else self.stored).add(request.digest)
            elif request.answer is not None and request.answer["ok"]:
                told = request.answer["result"]
                self.known = max(self.known, int(told.get("checkpoint", told)["revision"]))

    def _narrow(self, seen: Register) -> None:
        assert seen in self.possible, f"{seen} is not among {self.possible}"
        self.possible, self.known = {seen}, seen.revision

    def _look_back(self) -> None:
        """After a start: the checkpoint is a possible one, and every acknowledged blob is there."""
        self._narrow(register(self.served.checkpoint()))
        for digest in self.stored:
            assert self.served.ask("blob_read", sha256=digest)["sha256"] == digest
        there = self.served.ask("inspect")["storage"]["process_blobs"]
        assert len(self.stored) <= there <= len(self.stored | self.unheard)


@settings(max_examples=HISTORIES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(lives=st.lists(LIVES, min_size=1, max_size=4))
def test_a_history_of_saves_crashes_and_resumes_equals_a_serial_one(lives: list[Life]) -> None:
    with tempfile.TemporaryDirectory(prefix="chio-test-", dir=os.environ.get("TMPDIR")) as folder:
        state = State.make(Path(folder) / "folder", config(child("a")))
        with Served(state, "a") as served:
            history = History(served, {Register(0, "null")})
            for life in lives:
                history.play(life)


# --- the judge itself ------------------------------------------------------------------------------------------------


def saving(expected: int, value: str, answer: int | str | None) -> Asked:
    """A save and what it was told: a revision, a refusal's code, or nothing."""
    reply: dict[str, Any] | None = None
    if isinstance(answer, int):
        reply = {"ok": True, "result": {"revision": str(answer), "value": value}}
    elif answer is not None:
        reply = {"protocol": "chio.process.v1", "ok": False, "error": {"code": answer}}
    return Asked(Save(0, 0), b"", expected=str(expected), value=value, answer=reply)


START = {Register(0, "null")}


def test_the_judge_accepts_what_a_register_could_have_done() -> None:
    one, two = Register(1, '"a"'), Register(2, '"b"')
    assert serial_ends([[saving(0, "a", 1)], [saving(0, "b", "checkpoint_conflict")]], START) == {one}
    assert serial_ends([[saving(1, "b", 2)], [saving(0, "a", 1)]], START) == {two}
    assert serial_ends([[saving(0, "a", None)]], START) == START | {one}
    assert serial_ends([[saving(0, "a", None), saving(1, "b", None)]], START) == START | {one, two}
    # A conflict with a save of which nothing was heard proves that save.
    assert serial_ends([[saving(0, "a", None)], [saving(0, "b", "checkpoint_conflict")]], START) == {one}


@pytest.mark.parametrize(
    "turn",
    [
        [[saving(0, "a", 1)], [saving(0, "b", 1)]],  # two writers on one revision
        [[saving(0, "a", "checkpoint_conflict")]],  # a conflict with nobody
        [[saving(1, "a", 2)]],  # a revision from the future
        [[saving(0, "a", 2)]],  # a revision skipped
        [[saving(1, "b", 2), saving(0, "a", 1)]],  # out of its connection's order
        [[saving(0, "a", "runtime_error")]],
    ],
)
def test_the_judge_refuses_what_no_register_does(turn: list[list[Asked]]) -> None:
    assert serial_ends(turn, START) == set()
