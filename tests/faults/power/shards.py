"""Power cuts in processes of their own, as the recorder wants it: one thread, no other children."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.faults.cases import folder_of
from tests.faults.power import long_log
from tests.faults.power.run import PowerResult, run_power
from tests.faults.scenario import Case, Scenario
from tests.faults.scenarios import ALL

SCENARIOS: dict[str, Scenario] = {**ALL, long_log.SCENARIO.name: long_log.SCENARIO}
"""Those that are killed, too, and one whose power is cut and nothing else."""

QUICK = 120, 2
"""Of each scenario: states that the kernel reopens, states that the scenario is resumed from."""
WHOLE = None, 24


def sweep_power(
    scenario: Scenario,
    work: Path,
    chio: tuple[str, ...],
    most: int | None,
    resumed: int,
    *,
    only: str | None = None,
) -> PowerResult:  # fmt: skip
    """One scenario by name, `*QUICK` or `*WHOLE`; `work` holds its case."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_run, scenario.name, str(work), chio, most, resumed, only).result()


def _run(name: str, work: str, chio: tuple[str, ...], most: int | None, resumed: int, only: str | None) -> PowerResult:
    scenario = SCENARIOS[name]
    folder = folder_of(Path(work) / "power", scenario, os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return run_power(scenario, Case(folder, chio), most=most, resumed=resumed, only=only)
