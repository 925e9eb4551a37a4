"""The checks that look at the machine: each sees what it is there for, on a case that was sound before."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults import checks, sweep
from tests.faults.cases import run_once
from tests.faults.scenario import Case, History
from tests.faults.scenarios import ALL

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="confinement, and a filter that asks, need root"),
    pytest.mark.timeout(300),
]


def _plant(case: Case, statement: str) -> None:
    with closing(sqlite3.connect(case.state / "authority.db")) as database:
        database.execute(statement)
        database.commit()


def seen(folder: str) -> dict[str, list[list[str]]]:
    """What each check says before and after something was spoilt for it."""
    scenario, case, history = ALL["harvest"], Case(Path(folder) / "case", (sys.executable, "-m", "chio")), History()
    case.prepared(scenario)
    run_once(scenario, case, history, None)
    said: dict[str, list[list[str]]] = {}

    def look(name: str) -> None:
        said.setdefault(name, []).append(scenario.checks[name](scenario, case, history))

    for name in ("nothing_left", "published", "second_recovery", "verify", "reported"):
        look(name)
    (case.state / "stray").write_text("")
    look("nothing_left")
    (case.project / "out" / "one.txt").write_text("other")
    look("published")
    history.stdout.append([history.stdout[0][0].replace(b'"complete": true', b'"complete": false')])
    look("reported")
    _plant(case, "UPDATE attempt SET state = 'running', outcome = NULL")
    look("second_recovery")
    return said


def test_a_check_of_the_machine_sees_what_it_is_there_for(tmp_path: Path) -> None:
    said = sweep.alone(seen, str(tmp_path))
    assert {name: found[0] for name, found in said.items()} == {name: [] for name in said}
    spoilt = {name: found[1:] for name, found in said.items() if len(found) > 1}
    assert spoilt["nothing_left"] == [["an unknown file: stray"]]
    assert spoilt["published"] == [["one.txt: told as exported, and missing or other bytes"]]
    assert spoilt["reported"] == [["the last run was not complete"]]
    assert [what.partition(":")[0] for what in spoilt["second_recovery"][0]] == ["attempt", "leaf", "log_checkpoint"]


def unverifiable(folder: str) -> tuple[list[str], list[str]]:
    scenario, case, history = ALL["effect"], Case(Path(folder) / "case", (sys.executable, "-m", "chio")), History()
    case.prepared(scenario)
    run_once(scenario, case, history, None)
    sound = checks.verify(scenario, case, history)
    _plant(case, "UPDATE leaf SET body = replace(body, '\"allow\"', '\"deny\"') WHERE type = 'receipt'")
    return sound, checks.verify(scenario, case, history)


def test_a_receipt_that_was_changed_does_not_verify(tmp_path: Path) -> None:
    sound, changed = sweep.alone(unverifiable, str(tmp_path))
    assert sound == []
    assert changed
    assert changed[0].startswith("chio-verify receipts: ")
