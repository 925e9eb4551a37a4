"""A short soak: some workers, kills at random, then every invariant. `python -m tests.faults.soak` is the long one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults import soak

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="confining the tool server needs root"),
]


def test_nothing_is_lost_or_done_twice_while_processes_are_killed_at_random(tmp_path: Path) -> None:
    report = soak.run(tmp_path, seconds=15, workers=6, seed=3)
    assert report["violations"] == {}
    assert report["answers"] > 100
    assert sum(report["kills"].values()) >= 3


def test_growth_is_told() -> None:
    flat = soak.Sample(20_000, 11)
    held = soak.Soak(Path(), 1, random.Random(1))
    held.samples = {"kernel": [flat, flat, flat]}
    held.sizes = {"authority.db-wal": [1, 2]}
    assert held.growth() == []
    held.samples = {"kernel": [flat, flat, soak.Sample(20_000, 30)], "host": [flat, flat, soak.Sample(90_000, 11)]}
    held.sizes = {"authority.db-wal": [1, 1 << 30]}
    assert [what.split()[0] for what in held.growth()] == ["kernel:", "host:", "the"]
