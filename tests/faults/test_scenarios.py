"""A representative part of every scenario: some boundaries of each sort. All of them: `make faults`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults import clock, sweep
from tests.faults.__main__ import faults_of, scarce
from tests.faults.scenarios import ALL
from tests.faults.supervise import SCARCE, Fault

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a filter over other users' processes, and confinement, need root"),
    pytest.mark.timeout(600),
]
CHIO = (sys.executable, "-m", "chio")
KILLS = 2


@pytest.fixture
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: the sockets of `serve` lie below it, and theirs have at most 107 bytes (unix(7))."""
    return tmp_path_factory.mktemp("w")


@pytest.mark.parametrize("name", ALL)
def test_whatever_is_cut_off_nothing_is_lost_or_done_twice(work: Path, name: str) -> None:
    scenario = ALL[name]
    boundaries, clean = sweep.clean(scenario, work, CHIO)
    assert clean.violations == {}
    faults = faults_of(scenario, boundaries, KILLS)
    results = sweep.sweep(scenario, faults, work, CHIO, 1, lambda _: None)
    assert {result.fault: result.violations for result in results if result.violations} == {}
    assert sum(bool(result.hit) for result in results) >= KILLS


def test_without_descriptors_or_memory_nothing_is_lost_either(work: Path) -> None:
    scenario = ALL["effect"]
    boundaries, _ = sweep.clean(scenario, work, CHIO, resources=True)
    every = scarce(scenario, boundaries, 0)
    faults: list[Fault] = []
    for action in SCARCE:
        faults += sweep.sample([fault for fault in every if fault.action == action], boundaries, 3)
    assert len(faults) == 3 * len(SCARCE)
    results = sweep.sweep(scenario, faults, work, CHIO, 1, lambda _: None)
    assert {result.fault: result.violations for result in results if result.violations} == {}


def test_a_clock_that_jumps_is_followed_or_refused_and_changes_nothing_that_was_kept(work: Path) -> None:
    results = sweep.alone(clock.jumps, "effect", work)
    assert {result.fault: result.violations for result in results} == {step.name: {} for step in clock.JUMPS}
