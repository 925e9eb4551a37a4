"""Histories of the kernel's own decisions and recoveries, each judged by a reference written apart from them."""

from __future__ import annotations

import pytest

from tests.faults.simulation.__main__ import play
from tests.faults.simulation.broken import DEFECTS

HISTORIES = 400
_SEEDS_FOR_A_DEFECT = 300
_BATCH = 20

pytestmark = pytest.mark.timeout(300)


def test_every_history_is_one_that_may_be() -> None:
    told = play(range(HISTORIES))
    assert [(entry.seed, entry.wrong) for entry in told if entry.wrong] == []
    assert sum(entry.crashes for entry in told) > HISTORIES / 2, "a history without a crash shows little"
    assert sum(entry.calls for entry in told) > 5 * HISTORIES


def test_a_seed_plays_the_same_history_again() -> None:
    first, again = play(range(7, 9)), play(range(7, 9))
    assert [(entry.steps, entry.crashes, entry.calls) for entry in first] == [
        (entry.steps, entry.crashes, entry.calls) for entry in again
    ]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_kernel_with_a_defect_is_caught(name: str) -> None:
    said: list[str] = []
    for first in range(0, _SEEDS_FOR_A_DEFECT, _BATCH):
        said += [what for entry in play(range(first, first + _BATCH), name) for what in entry.wrong]
        if any(DEFECTS[name].caught_by in what for what in said):
            return
    pytest.fail(f"{_SEEDS_FOR_A_DEFECT} histories, and none says {DEFECTS[name].caught_by!r}; they say {said[:5]}")
