"""Broken variants of the product that only a power cut shows: each must be caught by what it breaks.

A kill test sees none of them: what a process has written stays written when it dies.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.faults.controls import CONTROLS as KILLED
from tests.faults.controls import Control, Edit, variant
from tests.faults.power.run import PowerResult
from tests.faults.power.shards import QUICK, SCENARIOS, sweep_power

_DATABASE = "chio/kernel/database.py"
_FULL = '"synchronous": "full"'

CONTROLS: Final = (
    Control("synchronous off", (Edit(_DATABASE, _FULL, '"synchronous": "off"'),), "checkpoints", "acknowledged"),
    Control("synchronous normal", (Edit(_DATABASE, _FULL, '"synchronous": "normal"'),), "checkpoints", "acknowledged"),
    Control(
        "the state's parent not synced",
        (Edit("chio/kernel/initialize.py", "    statedir.sync_parent(path)\n", ""),),
        "init", "acknowledged",
    ),
    Control(
        "keys not synced",
        (Edit("chio/statedir.py", "            view = view[os.write(fd, view) :]\n        os.fsync(fd)\n",
              "            view = view[os.write(fd, view) :]\n"),),
        "init", "acknowledged",
    ),
    Control(
        "a deletion that leaves its key on the disk",
        (Edit("chio/kernel/control.py", "        if kernel.store.erase_log():\n", "        if True:\n"),),
        "deletion", "destroyed",
    ),
    *(
        replace(control, name=f"{control.name}, seen by a power cut")
        for control in KILLED if control.name == "reply before the commit"
    ),
)  # fmt: skip

_STATES = QUICK[0], 0


def catch(control: Control, work: Path) -> str:
    """The invariant that caught it and where; empty when nothing did."""
    folder = work / "power-controls" / control.name.replace(" ", "-").replace("'", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = sweep_power(SCENARIOS[control.scenario], folder, variant(control, folder / "product"), *_STATES)
    caught = _first(result, control.caught_by)
    shutil.rmtree(folder)
    return caught


def _first(result: PowerResult, invariant: str) -> str:
    for cut in result.cuts:
        if invariant in cut.violations:
            return f"{invariant}, at {cut.boundary}: {cut.survived}"
    return ""


def catch_all(work: Path) -> dict[str, str]:
    """{control: what caught it}."""
    return {control.name: catch(control, work) for control in CONTROLS}
