"""`init`, with a tool server whose tools it pins, and a first run on what it made."""

from __future__ import annotations

import sys
from dataclasses import replace

from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import WORKERS, Project, Worker, run, scenario
from tests.faults.snapshot import Snapshot

_PROJECT = Project((Worker("one", "nothing.mjs"),), ledger=True)


def whole_or_refused(_: Scenario, case: Case, history: History) -> list[str]:
    """Right after the fault: a state whose `init` reported success can be served; no other claims to be whole."""
    said = any(b'"initialized": true' in text or b'"initialized":true' in text for text in history.stdout[-1])
    snapshot = Snapshot.of(case.state)
    if said and (snapshot is None or not snapshot.usable):
        return ["init reported success, and the state cannot be served"]
    names = {path.name for path in case.state.iterdir()} if case.state.exists() else set()
    needed = {"keys.json", "kernel.pub", "pins.json", "bootstrap.json", "host.json", "policy.yaml"}
    if snapshot is not None and snapshot.usable and needed - names:
        return [f"the state says that it is ready, without {', '.join(sorted(needed - names))}"]
    return []


def _commands(case: Case) -> list[list[str]]:
    config = str(case.project / "host.json")
    remake = [sys.executable, str(WORKERS / "remake.py"), str(case.state), config, "--", *case.chio]
    return [remake, *run(case)]


SCENARIO = replace(
    scenario("init", "init with a tool server, then a first run", _PROJECT,
             after_fault={"whole_or_refused": whole_or_refused}),
    prepare=_PROJECT.write,
    commands=_commands,
)  # fmt: skip
