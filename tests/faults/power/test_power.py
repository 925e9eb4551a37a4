"""The power of Chio's own scenarios is cut, and nothing that was told is lost; broken variants are caught."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults.power import controls
from tests.faults.power.shards import QUICK, SCENARIOS, sweep_power

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="a filter over other users' processes, and confinement, need root"),
]
_PRODUCT = (sys.executable, "-m", "chio")


@pytest.mark.parametrize("name", ["effect", "checkpoints"])
def test_no_power_cut_takes_what_was_told(tmp_path: Path, name: str) -> None:
    result = sweep_power(SCENARIOS[name], tmp_path, _PRODUCT, *QUICK)
    assert [(cut.boundary, cut.survived, cut.violations) for cut in result.cuts] == []
    assert (result.power_cuts, result.resumed) == QUICK


@pytest.mark.parametrize("name", ["synchronous normal", "the state's parent not synced"])
def test_a_variant_that_syncs_too_little_is_caught(tmp_path: Path, name: str) -> None:
    control = next(control for control in controls.CONTROLS if control.name == name)
    assert controls.catch(control, tmp_path).startswith(control.caught_by)
