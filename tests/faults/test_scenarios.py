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
KILLS = 3


@pytest.mark.parametrize("name", ALL)
def test_whatever_is_cut_off_nothing_is_lost_or_done_twice(tmp_path: Path, name: str) -> None:
    scenario = ALL[name]
    boundaries, clean = sweep.clean(scenario, tmp_path, CHIO)
    assert clean.violations == {}
    faults = faults_of(scenario, boundaries, KILLS)
    results = sweep.sweep(scenario, faults, tmp_path, CHIO, 1, lambda _: None)
    assert {result.fault: result.violations for result in results if result.violations} == {}
    assert sum(bool(result.hit) for result in results) >= KILLS


def test_without_descriptors_or_memory_nothing_is_lost_either(tmp_path: Path) -> None:
    scenario = ALL["effect"]
    boundaries, _ = sweep.clean(scenario, tmp_path, CHIO, resources=True)
    every = scarce(scenario, boundaries, 0)
    faults: list[Fault] = []
    for action in SCARCE:
        faults += sweep.sample([fault for fault in every if fault.action == action], boundaries, 3)
    assert len(faults) == 3 * len(SCARCE)
    results = sweep.sweep(scenario, faults, tmp_path, CHIO, 1, lambda _: None)
    assert {result.fault: result.violations for result in results if result.violations} == {}


def test_a_clock_that_jumps_is_followed_or_refused_and_changes_nothing_that_was_kept(tmp_path: Path) -> None:
    results = sweep.alone(clock.jumps, "effect", tmp_path)
    assert {result.fault: result.violations for result in results} == {step.name: {} for step in clock.JUMPS}
