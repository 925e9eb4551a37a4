"""Backup, restore into a new epoch, acceptance, and a run on what was restored."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import WORKERS, Project, Worker, environment, init, run, scenario
from tests.faults.snapshot import Snapshot

_PROJECT = Project((Worker("payer", "payer.mjs", ("ledger/pay", "ledger/look")),), ledger=True)


def _prepare(case: Case) -> None:
    """A state whose plan has been run, under another name: the state of the case is the restored one."""
    _PROJECT.write(case)
    for command in (init(case), *run(case)):
        subprocess.run(command, check=True, capture_output=True, env=environment(case))
    case.state.rename(case.folder / "original")


def _commands(case: Case) -> list[list[str]]:
    folders = [str(case.folder / name) for name in ("original", "backup", "state")]
    return [[sys.executable, str(WORKERS / "keeping.py"), *folders, "--", *case.chio], *run(case)]


def continued(_: Scenario, case: Case, __: History) -> list[str]:
    """The restored log is the original's, one new epoch and what came after it; the original is as it was."""
    kept, restored = Snapshot.of(case.folder / "original"), Snapshot.of(case.state)
    before = Snapshot.of(case.template / "original")
    assert kept is not None
    assert restored is not None
    assert before is not None
    wrong = [f"the original changed: {what}" for what in before.differences(kept)]
    size = len(kept["leaf"])
    if [leaf["hash"] for leaf in restored["leaf"][:size]] != [leaf["hash"] for leaf in kept["leaf"]]:
        wrong.append("the restored log does not begin with the original's")
    events = [json.loads(leaf["body"])["event"] for leaf in restored["leaf"] if leaf["type"] == "epoch"]
    return wrong if events == ["restored", "accepted"] else [*wrong, f"epochs: {events}"]


SCENARIO = replace(
    scenario(
        "backup", "backup, restore, acceptance, and a run on what was restored", _PROJECT,
        checks={"continued": continued},
    ),
    prepare=_prepare,
    commands=_commands,
    roots=("original", "backup", "state", "project", "owner"),
)  # fmt: skip
