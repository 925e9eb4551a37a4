"""Every scenario by name, in the order in which they are run.

A new command of Chio's that writes something gets a scenario here: `project.scenario` makes one from a project, with
every invariant of Chio's.
"""

from __future__ import annotations

from tests.faults.scenario import Scenario
from tests.faults.scenarios import (
    backup,
    blobs,
    checkpoints,
    deletion,
    effect,
    evidence,
    harvest,
    init,
    launch,
    migration,
    receive,
    reconcile,
    report,
    serve,
    snapshots,
)

_MODULES = (
    report, effect, checkpoints, blobs, snapshots, receive, init, harvest, launch, reconcile, serve, backup, deletion,
    evidence, migration,
)  # fmt: skip
ALL: dict[str, Scenario] = {module.SCENARIO.name: module.SCENARIO for module in _MODULES}
