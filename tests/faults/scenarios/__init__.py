"""Every scenario by name, in the order in which they are run.

A new command of Chio's that writes something gets a scenario here: export and evidence, backup and restore, deletion,
schema migration. `project.scenario` makes one from a project, with every invariant of Chio's.
"""

from __future__ import annotations

from tests.faults.scenario import Scenario
from tests.faults.scenarios import blobs, checkpoints, effect, harvest, init, launch, receive, reconcile, report, serve

_MODULES = (report, effect, checkpoints, blobs, receive, init, harvest, launch, reconcile, serve)
ALL: dict[str, Scenario] = {module.SCENARIO.name: module.SCENARIO for module in _MODULES}
