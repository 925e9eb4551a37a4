"""Documents as blobs, with their references in a checkpoint."""

from __future__ import annotations

import json

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import Project, Worker, scenario
from tests.faults.snapshot import Snapshot


def referred(_: Scenario, case: Case, __: History) -> list[str]:
    """A checkpoint never names a document that is not whole: its index, and so its parts, were stored before it."""
    snapshot = Snapshot.of(case.state)
    there = {row["sha256"] for row in snapshot["blob"]} if snapshot else set()
    wrong = []
    for row in snapshot["worker_checkpoint"] if snapshot else []:
        wrong += [
            f"{digest[:12]}: named, and missing"
            for digest in json.loads(row["value"])["index"]["blobs"]
            if digest not in there
        ]
    return wrong


SCENARIO = scenario(
    "snapshots",
    "documents of many blobs, an edit, and their references in a checkpoint",
    Project((Worker("keeper", "snapshots.mjs"),)),
    checks={"referred": referred},
    after_fault={"referred": referred},
)
