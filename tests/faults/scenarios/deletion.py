"""Deletion in an encrypted state: a process's key is destroyed, and everything else still verifies."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios import project
from tests.faults.scenarios.project import Project, Worker, chio, init, run, scenario
from tests.faults.snapshot import Snapshot

_PROJECT = Project(
    (Worker("keeper", "blobs.mjs"), Worker("payer", "payer.mjs", ("ledger/pay", "ledger/look"))), ledger=True
)


def key_file(case: Case) -> Path:
    return case.folder / "key"


def _environment(case: Case) -> dict[str, str]:
    return {**project.environment(case), "CHIO_KEY_FILE": str(key_file(case))}


def _prepare(case: Case) -> None:
    _PROJECT.write(case)
    key = [*case.chio, "process", "key", "--out", str(key_file(case))]
    for command in (key, init(case), *run(case), chio(case, "process", "cancel", "--process", "keeper")):
        subprocess.run(command, check=True, capture_output=True, env=_environment(case))


def _commands(case: Case) -> list[list[str]]:
    return [chio(case, "process", "delete", "--process", "keeper", "--by", "the operator")]


def destroyed(_: Scenario, case: Case, __: History) -> list[str]:
    """The key is nowhere in the state any more, nor is what it opened; a tombstone says so, once."""
    before, now = Snapshot.of(case.template / "state"), Snapshot.of(case.state)
    assert before is not None
    assert now is not None
    wrapped = {row["process"]: row["wrapped"] for row in before["data_key"]}["keeper"]
    wrong = [
        f"the wrapped key is still in {path.name}" for path in case.state.iterdir()
        if path.is_file() and wrapped in path.read_bytes()
    ]  # fmt: skip
    if {row["process"]: row["wrapped"] for row in now["data_key"]}["keeper"] is not None:
        wrong.append("the key's row is still there")
    wrong += [f"a row of {name} is left" for name in ("blob", "worker_checkpoint")
              if any(row["process"] == "keeper" for row in now[name])]  # fmt: skip
    tombstones = sum(leaf["type"] == "tombstone" for leaf in now["leaf"])
    return wrong if tombstones == 1 else [*wrong, f"{tombstones} tombstones"]


def all_or_nothing(_: Scenario, case: Case, __: History) -> list[str]:
    """Right after the fault: the key is gone exactly if the tombstone is there."""
    now = Snapshot.of(case.state)
    assert now is not None
    gone = any(row["process"] == "keeper" and row["wrapped"] is None for row in now["data_key"])
    told = any(leaf["type"] == "tombstone" for leaf in now["leaf"])
    return (
        []
        if gone == told
        else [f"the key is {'gone' if gone else 'there'}, the tombstone {'there' if told else 'not'}"]
    )


SCENARIO = replace(
    scenario(
        "deletion", "deletion in an encrypted state", _PROJECT,
        checks={"destroyed": destroyed}, after_fault={"all_or_nothing": all_or_nothing},
        more={"key_file": key_file, "withheld": True},
    ),
    prepare=_prepare,
    commands=_commands,
    environment=_environment,
)  # fmt: skip
