"""One clock that follows the log and never runs backwards."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from chio.errors import StateError
from chio.kernel.clock import Clock
from tests.kernel.serving import State, child, config

MINUTE_MS = 60_000
YEAR_MS = 365 * 24 * 3600 * 1000


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_clock_without_a_past_is_the_wall_clock() -> None:
    before = wall_ms()
    now = Clock(0).now_ms()
    assert before <= now <= wall_ms() + 1000


def test_time_stands_still_until_it_has_caught_up_with_the_newest_record() -> None:
    newest = wall_ms() + MINUTE_MS // 2
    clock = Clock(newest)
    assert [clock.now_ms() for _ in range(100)] == [newest] * 100


def test_time_never_runs_backwards() -> None:
    clock = Clock(wall_ms() - 1000)
    times = [clock.now_ms() for _ in range(10_000)]
    assert times == sorted(times)


@pytest.mark.parametrize("ahead_ms", [MINUTE_MS + 5000, YEAR_MS, -6 * YEAR_MS], ids=["minutes", "a year", "long ago"])
def test_a_step_that_no_machine_takes_is_refused_with_the_fix(ahead_ms: int) -> None:
    with pytest.raises(StateError, match="set the clock"):
        Clock(wall_ms() + ahead_ms)


@pytest.mark.parametrize("age_ms", [0, YEAR_MS, 4 * YEAR_MS])
def test_a_state_may_rest_for_years(age_ms: int) -> None:
    assert Clock(wall_ms() - age_ms).now_ms() >= wall_ms() - 1000


@pytest.mark.timeout(60)
def test_a_host_whose_machine_lost_its_time_is_refused_and_adds_nothing(make_state: Callable[..., State]) -> None:
    """The log's newest record is of next year: as if the machine's clock had been set back since."""
    state = make_state(config(child("a")))
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        (body,) = database.execute("SELECT body FROM leaf").fetchone()
        later = json.dumps({**json.loads(body), "time_ms": wall_ms() + YEAR_MS})
        database.execute("UPDATE leaf SET body = ?", (later,))
    with pytest.raises(StateError, match="implausible") as refused:
        state.serve()
    assert "set the clock" in str(refused.value)
    assert state.rows("SELECT count(*) FROM leaf") == [(1,)]
