"""Blobs, and a checkpoint that refers to them."""

from __future__ import annotations

import json
from hashlib import sha256

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import Project, Worker, scenario
from tests.faults.snapshot import Snapshot


def whole(_: Scenario, case: Case, __: History) -> list[str]:
    """Every blob has the bytes of its digest, and every digest in the checkpoint has its blob."""
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    wrong = [
        f"{row['sha256'][:12]}: other bytes" for row in snapshot["blob"]
        if sha256(row["data"]).hexdigest() != row["sha256"] or len(row["data"]) != row["bytes"]
    ]  # fmt: skip
    there = {row["sha256"] for row in snapshot["blob"]}
    for row in snapshot["worker_checkpoint"]:
        wrong += [f"{digest[:12]}: named by the checkpoint, and missing" for digest in json.loads(row["value"])
                  if digest not in there]  # fmt: skip
    return wrong


SCENARIO = scenario(
    "blobs", "blobs, a repeated and a large one among them, and a checkpoint that names them",
    Project((Worker("keeper", "blobs.mjs"),)),
    checks={"whole_blobs": whole},
)  # fmt: skip
