"""`chio process serve` with a Node worker that somebody else launched, and tool calls."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from tests.faults.scenario import Case
from tests.faults.scenarios.project import ROOT, Project, Worker, scenario

_PROJECT = Project((Worker("guest", "client_of_serve.mjs", ("ledger/pay", "ledger/look")),), ledger=True)
NODE = str(ROOT / ".node/bin/node")
_CALLS = [["pay-1", "pay"], ["look-1", "look"], ["pay-1", "pay"], ["pay-2", "pay"]]


def serving(case: Case, process: str, calls: list[list[str]]) -> list[str]:
    """The driver, a host and its client, in Node: the client makes these calls under the process's name."""
    return served(case, process, [NODE, str(case.project / "client_of_serve.mjs"), json.dumps(calls)])


def served(case: Case, process: str, client: list[str]) -> list[str]:
    """The driver, a host and this client of it, whose last argument will be its connection descriptor's path."""
    driver = [sys.executable, str(case.project / "serving.py"), str(case.state), process]
    return [*driver, str(case.project / "guest.sock"), *case.chio, "--", *client]


SCENARIO = replace(
    scenario("serve", "serve, a credential, and a worker that somebody else launched", _PROJECT),
    commands=lambda case: [serving(case, "guest", _CALLS)],
)
