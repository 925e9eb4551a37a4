"""Exports: staged, committed with the exit record, renamed."""

from __future__ import annotations

import json
from hashlib import sha256

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import Project, Worker, scenario
from tests.faults.snapshot import Snapshot

FILES = ["one.txt", "two.txt", "three.txt"]
_PROJECT = Project(
    (
        Worker(
            "exporter", "exporter.mjs", input={"files": FILES},
            exports={"directory": "out", "files": ["*.txt"], "max_bytes": 1 << 20},
        ),
    ),
    folders=("out",),
)  # fmt: skip


def published(_: Scenario, case: Case, __: History) -> list[str]:
    """What an exit record says was exported is there, with these bytes, and nothing else is."""
    snapshot = Snapshot.of(case.state)
    out = case.project / "out"
    there = {path.name: sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    told: dict[str, str] = {}
    for leaf in snapshot["leaf"] if snapshot else []:
        if leaf["type"] == "exit":
            told |= {entry["file"]: entry["sha256"] for entry in json.loads(leaf["body"])["exports"]}
    wrong = [f"{name}: told as exported, and missing or other bytes" for name, digest in told.items()
             if there.get(name) != digest]  # fmt: skip
    return wrong + [f"{name}: published, and in no exit record" for name in sorted(there.keys() - told.keys())]


def unrecorded(scenario: Scenario, case: Case, history: History) -> list[str]:
    """Right after the fault: no file has its final name before the record that names it is on disk."""
    return [what for what in published(scenario, case, history) if "in no exit record" in what and ".chio-" not in what]


SCENARIO = scenario(
    "harvest",
    "exports: staged, recorded, renamed",
    _PROJECT,
    checks={"published": published},
    after_fault={"recorded_first": unrecorded},
)
