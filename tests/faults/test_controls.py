"""Broken variants of the product: one that is not caught means that the tool sees less than it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.controls import CONTROLS, Control, catch

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a filter over other users' processes, and confinement, need root"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("control", CONTROLS, ids=[control.name for control in CONTROLS])
def test_a_broken_variant_is_caught_by_the_invariant_that_it_breaks(tmp_path: Path, control: Control) -> None:
    caught = catch(control, tmp_path, 1)
    assert caught.partition(",")[0] == control.caught_by


def test_there_are_nine_at_least() -> None:
    assert len({control.name for control in CONTROLS}) >= 9
