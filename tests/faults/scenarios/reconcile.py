"""The operator's statement about an unknown outcome, and a worker that waits for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from tests.faults.scenario import Case
from tests.faults.scenarios.project import WORKERS, Project, Worker, chio, environment, init, run, scenario
from tests.faults.scenarios.serve import serving

_PROJECT = Project(
    (Worker("asker", "asker.mjs", ("ledger/pay", "ledger/vanish")),), ledger=True, scripts=("client_of_serve.mjs",)
)


def _prepare(case: Case) -> None:
    """A state in which one effect happened and its answer never came: its server ended."""
    _PROJECT.write(case)
    (case.project / "evidence.txt").write_text("The owner's books show it.\n")
    for command in (init(case), serving(case, "asker", [["vanish-1", "vanish"]])):
        subprocess.run(command, check=True, capture_output=True, env=environment(case))


def _commands(case: Case) -> list[list[str]]:
    said = chio(
        case, "process", "reconcile", "--process", "asker", "--key", "vanish-1", "--outcome", "applied",
        "--evidence", str(case.project / "evidence.txt"), "--by", "the operator",
    )  # fmt: skip
    return [[sys.executable, str(WORKERS / "reconciling.py"), *said], *run(case)]


SCENARIO = replace(
    scenario("reconcile", "an unknown outcome, the operator's statement, and who waits for it", _PROJECT),
    prepare=_prepare,
    commands=_commands,
)
