"""The report project: a Python producer, a durable mailbox, a Node consumer, exports into the state's own folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.faults import checks, roles
from tests.faults.scenario import Case, Scenario

ROOT = Path(__file__).resolve().parents[3]
_ATTEMPTS = 12  # each kind of fault may cost one, and none may be the last


def prepare(case: Case) -> None:
    subprocess.run([ROOT / ".ci/report-env", case.project], check=True, capture_output=True)
    plan = json.loads((case.project / "process.json").read_text())
    for worker in plan["workers"]:
        worker["max_attempts"] = _ATTEMPTS
        worker["input"]["directory"] = worker["confinement"]["exports"]["directory"] = "../state"
    (case.project / "plan.json").write_text(json.dumps(plan))
    init = [*case.chio, "process", "init", "--config", str(case.project / "host.json"), "--state", str(case.state)]
    subprocess.run(init, check=True, capture_output=True)


def commands(case: Case) -> list[list[str]]:
    plan = str(case.project / "plan.json")
    return [[*case.chio, "process", "run", "--state", str(case.state), "--plan", plan]]


def environment(_: Case) -> dict[str, str]:
    """The project's own Node before the machine's."""
    return {**os.environ, "PATH": f"{ROOT}/.node/bin:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}


_EXPORTED = {"result.json"} | {f"{name}-{n}.json" for name in ("producer", "consumer") for n in range(1, 40)}

SCENARIO = Scenario(
    name="report",
    about="the report run: mailbox, checkpoint, exports, two languages",
    prepare=prepare,
    commands=commands,
    environment=environment,
    role=roles.chio,
    cut=roles.not_of_a_launch,
    checks=checks.ALWAYS,
    after_fault=checks.AFTER_FAULT,
    more={"exported": _EXPORTED},
)
