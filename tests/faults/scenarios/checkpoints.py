"""Two writers of one worker's checkpoint."""

from __future__ import annotations

import json

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import Project, Worker, scenario
from tests.faults.snapshot import Snapshot


def every_save(_: Scenario, case: Case, __: History) -> list[str]:
    """As many revisions as saves, and the last one counts three of each writer: none was lost, none made twice."""
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    (row,) = snapshot["worker_checkpoint"]
    saves = json.loads(row["value"])["saves"]
    if (row["revision"], saves) == ("6", {"first": 3, "second": 3}):
        return []
    return [f"revision {row['revision']} with {saves}"]


SCENARIO = scenario(
    "checkpoints",
    "two writers of one checkpoint, each giving way to the other",
    Project((Worker("writer", "writer.mjs"),)),
    checks={"every_save": every_save},
)
