"""Each invariant of rows, on what a sound run left: it holds, and one changed row or answer breaks it."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import sweep
from tests.faults.cases import run_once
from tests.faults.exchanges import Exchange, exchanges
from tests.faults.invariants import ROWS, SETTLED, Facts, broken, effects
from tests.faults.scenario import Case, History
from tests.faults.scenarios import ALL
from tests.faults.scenarios.project import ledger
from tests.faults.snapshot import Snapshot
from verify.keys import Pins

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="confinement, and a filter that asks, need root"),
    pytest.mark.timeout(300),
]
CHECKS = {**ROWS, **SETTLED}
Left = tuple[Facts, list[tuple[str, str]]]


def run(name: str, folder: str) -> tuple[Snapshot, list[Exchange], list[tuple[str, str]]]:
    case, history = Case(Path(folder) / "case", (sys.executable, "-m", "chio")), History()
    case.prepared(ALL[name])
    run_once(ALL[name], case, history, None)
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    return snapshot, exchanges(history.made[0]), ledger(case)


def left_by(name: str, folder: Path) -> Left:
    snapshot, told, done = sweep.alone(run, name, str(folder))
    pins = Pins.from_file(str(folder / "case/state/pins.json"))
    return Facts(snapshot, pins, told, reads=frozenset({("ledger", "look")})), done


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return left_by("report", tmp_path_factory.mktemp("report"))[0]


@pytest.fixture(scope="module")
def paid(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return left_by("effect", tmp_path_factory.mktemp("effect"))


def changed(facts: Facts, table: str, change: Callable[[list[dict[str, Any]]], object]) -> Facts:
    snapshot = copy.deepcopy(facts.snapshot)
    change(snapshot[table])
    return replace(facts, snapshot=snapshot)


def test_everything_that_was_asked_and_answered_is_heard(report: Facts, paid: Left) -> None:
    told = {(exchange.op, bool(exchange.digest)) for exchange in [*report.exchanges, *paid[0].exchanges]}
    workers = {("invoke", True), ("inspect", True), ("checkpoint", True)}
    host = {(op, False) for op in ("open", "freeze", "reserve", "launched", "listen", "ended", "settled", "finish")}
    assert workers | host <= told
    assert ("", False) not in told
    assert sum(exchange.op == "invoke" for exchange in paid[0].exchanges) == 8


def test_what_a_sound_run_left_breaks_nothing(report: Facts, paid: Left) -> None:
    assert broken(report, CHECKS) == {}
    assert broken(paid[0], CHECKS) == {}
    assert effects(*paid) == []


def swap(rows: list[dict[str, Any]]) -> None:
    rows[1], rows[2] = {**rows[2], "idx": 1}, {**rows[1], "idx": 2}


CHANGES: dict[str, tuple[str, str, Callable[[list[dict[str, Any]]], object]]] = {
    "a receipt is gone": ("log", "leaf", lambda rows: rows.pop()),
    "a leaf in the middle is gone": ("log", "leaf", lambda rows: rows.pop(3)),
    "a leaf was changed": ("log", "leaf", lambda rows: rows[2].update(body=rows[2]["body"].replace("1", "2", 1))),
    "two leaves changed places": ("log", "leaf", swap),
    "a save is gone": ("acknowledged", "worker_checkpoint", lambda rows: rows.clear()),
    "a save is another": ("acknowledged", "worker_checkpoint", lambda rows: rows[0].update(value=b"7")),
    "an attempt is gone": ("acknowledged", "attempt", lambda rows: rows.pop()),
    "the plan is not kept": ("acknowledged", "host", lambda rows: rows[0].update(plan=None)),
    "a call was not counted": ("budgets", "usage", lambda rows: rows[0].update(calls=rows[0]["calls"] - 1)),
    "a call is gone": ("log", "call", lambda rows: rows.pop()),
    "an attempt has no end": ("attempts", "attempt", lambda rows: rows[0].update(state="running", outcome=None)),
    "exports were not settled": ("attempts", "attempt", lambda rows: rows[0].update(exports="[]")),
    "a call is still on its way": ("calls_settled", "call", lambda rows: rows[0].update(state="dispatched")),
    "a message is there twice": ("mailboxes", "message", lambda rows: rows.append({**rows[0], "sequence": 2})),
    "a message nobody sent": ("mailboxes", "message", lambda rows: rows[0].update(sender="consumer")),
    "an acknowledgement is lost": ("mailboxes", "mailbox", lambda rows: rows[0].update(acknowledged_through=0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_row_breaks_its_invariant(report: Facts, what: str) -> None:
    invariant, table, change = CHANGES[what]
    assert invariant in broken(changed(report, table, change), CHECKS)


def test_a_grant_that_is_refunded_twice_breaks_the_budgets(paid: Left) -> None:
    facts = changed(paid[0], "grant_usage", lambda rows: rows[0].update(used=rows[0]["used"] - 1))
    assert list(broken(facts, CHECKS)) == ["budgets"]


def again(exchange: Exchange, change: Callable[[dict[str, Any]], object]) -> Exchange:
    """The same question answered once more, and differently."""
    answer = json.loads(exchange.raw)
    change(answer["result"])
    return replace(exchange, answer=answer, raw=json.dumps(answer).encode())


def test_another_answer_for_the_same_key_breaks_the_replies(paid: Left) -> None:
    facts, _ = paid
    invoke = next(exchange for exchange in facts.exchanges if exchange.op == "invoke")
    other = again(invoke, lambda result: result.update(output=None))
    assert "replies" in broken(replace(facts, exchanges=[*facts.exchanges, other]), ROWS)
    said = again(invoke, lambda result: result.update(reconciliation={"outcome": "applied"}))
    assert "replies" not in broken(replace(facts, exchanges=[*facts.exchanges, said]), ROWS)
    unsaid = [*facts.exchanges, said, invoke]
    assert "replies" in broken(replace(facts, exchanges=unsaid), ROWS)


def test_two_saves_from_the_same_revision_break_the_history(report: Facts) -> None:
    save = next(exchange for exchange in report.exchanges if exchange.op == "checkpoint")
    assert "checkpoint_history" in broken(replace(report, exchanges=[*report.exchanges, save]), ROWS)


def test_a_log_that_is_shorter_than_a_checkpoint_once_seen_is_not_believed(report: Facts) -> None:
    notes = frozenset(row["note"] for row in report.snapshot["log_checkpoint"])
    newest = max(row["size"] for row in report.snapshot["log_checkpoint"])

    def shorten(rows: list[dict[str, Any]]) -> None:
        del rows[newest - 1 :]

    shorter = changed(changed(report, "leaf", shorten), "log_checkpoint", lambda rows: rows.clear())
    assert any("was seen" in what for what in broken(replace(shorter, notes=notes), ROWS)["log"])


def test_the_owners_record_decides_about_effects(paid: Left) -> None:
    facts, done = paid
    assert effects(facts, [*done, done[0]]) == [f"payer/{done[0][1]}: 2 effects"]
    assert effects(facts, done[1:]) == [f"payer/{done[0][1]}: told as completed, and no effect"]
    assert effects(facts, [*done, ("payer", "never")]) == ["payer/never: an effect, and no call"]
