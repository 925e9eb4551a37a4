"""`chio process serve` with a Node worker that somebody else launched, and tool calls."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from tests.faults.scenario import Case
from tests.faults.scenarios.project import ROOT, Project, Worker, scenario

_PROJECT = Project((Worker("guest", "client_of_serve.mjs", ("ledger/pay", "ledger/look")),), ledger=True)
_CALLS = [["pay-1", "pay"], ["look-1", "look"], ["pay-1", "pay"], ["pay-2", "pay"]]


def serving(case: Case, process: str, calls: list[list[str]]) -> list[str]:
    """The driver, a host and its client: the client makes these calls under the process's name."""
    client = [str(ROOT / ".node/bin/node"), str(case.project / "client_of_serve.mjs"), json.dumps(calls)]
    socket = str(case.project / "guest.sock")
    return [
        sys.executable,
        str(case.project / "serving.py"),
        str(case.state),
        process,
        socket,
        *case.chio,
        "--",
        *client,
    ]


SCENARIO = replace(
    scenario("serve", "serve, a credential, and a worker that somebody else launched", _PROJECT),
    commands=lambda case: [serving(case, "guest", _CALLS)],
)
