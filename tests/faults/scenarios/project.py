"""Writes the project of a scenario: policy, host config, plan, workers, and the state that `init` makes of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import checks, roles
from tests.faults.scenario import Case, Check, Scenario

ROOT = Path(__file__).resolve().parents[3]
WORKERS = Path(__file__).resolve().parents[1] / "workers"
PYTHON = "/usr/bin/python3"
ATTEMPTS = 12
"""Each fault may cost an attempt, and none may be the last."""
LEDGER = "ledger.py"


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of the plan. `routes` are `server/tool`; `exports` the plan's member of that name."""

    process: str
    script: str
    routes: tuple[str, ...] = ()
    input: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    exports: dict[str, Any] | None = None
    share: int = 2000

    @property
    def command(self) -> list[str]:
        return ["node", self.script] if self.script.endswith(".mjs") else [PYTHON, "-I", self.script]


@dataclass(frozen=True, slots=True)
class Project:
    """What the documents say. With a `ledger`, there is a tool server `ledger` whose effects lie in the owner's
    folder."""

    workers: tuple[Worker, ...]
    mailboxes: tuple[str, ...] = ()
    ledger: bool = False
    ledger_timeout_s: int = 20
    grants: tuple[dict[str, Any], ...] = ()
    parallel: int = 1
    folders: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()

    def write(self, case: Case) -> None:
        case.project.mkdir()
        case.owner.mkdir()
        for name in self.folders:
            (case.project / name).mkdir()
        for worker in self.workers:
            shutil.copyfile(WORKERS / worker.script, case.project / worker.script)
        for script in (LEDGER, "client.mjs", "serving.py", *self.scripts):
            shutil.copyfile(WORKERS / script, case.project / script)
        shutil.copytree(ROOT / "chio/clients/node", case.project / "node_modules/@chio-protocol/process")
        documents = {"policy.yaml": self._policy(), "host.json": self._host(case), "plan.json": self._plan(case)}
        for name, document in documents.items():
            (case.project / name).write_text(json.dumps(document, indent=1))
        subprocess.run(["chmod", "-R", "go+rX", str(case.project)], check=True)

    def _policy(self) -> dict[str, Any]:
        servers = (["chio-ipc"] if self.mailboxes else []) + (["ledger"] if self.ledger else [])
        everything = [{"server": server, "tool": "*"} for server in servers]
        tools = [
            {"operations": ["invoke", "delegate"], "ttl": 86_400, **grant} for grant in (self.grants or everything)
        ]
        kernel = {"max_capability_ttl": 86_400, "delegation_depth_limit": 4, "durable_admission_mode": "all"}
        return {"kernel": kernel, "capabilities": {"default": {"tools": tools}}}

    def _host(self, case: Case) -> dict[str, Any]:
        server = {
            "id": "ledger",
            "command": [PYTHON, "-I", LEDGER, str(case.owner)],
            "request_timeout_seconds": self.ledger_timeout_s,
            "confinement": {"write": [str(case.owner)]},
        }
        children = []
        for worker in self.workers:
            routes = [dict(zip(("server_id", "tool_name"), route.split("/"), strict=True)) for route in worker.routes]
            children.append({"id": worker.process, "parent": "root", "tools": routes, "budget_share_bps": worker.share})
        return {
            "schema": "chio.process.host.v1",
            "policy": "policy.yaml",
            "limits": {"max_processes": 8, "max_depth": 2, "max_calls": 1000},
            "mailboxes": [{"id": name} for name in self.mailboxes],
            "servers": [server] if self.ledger else [],
            "children": children,
        }

    def _plan(self, case: Case) -> dict[str, Any]:
        return {
            "schema": "chio.process.run.v2",
            "max_parallel": self.parallel,
            "workers": [
                {
                    "process": worker.process,
                    "command": worker.command,
                    "cwd": ".",
                    "input": worker.input,
                    "depends_on": list(worker.after),
                    "max_attempts": ATTEMPTS,
                    "timeout_seconds": 30,
                    "confinement": {"exports": worker.exports} if worker.exports else {},
                }
                for worker in self.workers
            ],
        }


def chio(case: Case, *words: str) -> list[str]:
    """A command of the product under test, on the case's state."""
    return [*case.chio, *words, "--state", str(case.state)]


def init(case: Case) -> list[str]:
    return chio(case, "process", "init", "--config", str(case.project / "host.json"))


def run(case: Case) -> list[list[str]]:
    return [chio(case, "process", "run", "--plan", str(case.project / "plan.json"))]


def environment(_: Case) -> dict[str, str]:
    """The project's own Node before the machine's."""
    return {**os.environ, "PATH": f"{ROOT}/.node/bin:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}


def ledger(case: Case) -> list[tuple[str, str]]:
    """(process, key) of every effect, as their owner wrote them down."""
    file = case.owner / "effects.ndjson"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(entry["process"], entry["key"]) for entry in map(json.loads, lines)]


def scenario(name: str, about: str, project: Project, **more: Any) -> Scenario:
    """A run of the project's plan, with every invariant of Chio's; `more` are members of `Scenario`, added to these."""

    def prepare(case: Case) -> None:
        project.write(case)
        subprocess.run(init(case), check=True, capture_output=True, env=environment(case))

    reads = {("ledger", "look")} if project.ledger else set()
    own: dict[str, Any] = {"reads": reads, "effects": ledger, **more.pop("more", {})}
    kept: dict[str, Check] = {**checks.ALWAYS, **(checks.EFFECTS if project.ledger else {}), **more.pop("checks", {})}
    members: dict[str, Any] = {
        "prepare": prepare,
        "commands": run,
        "environment": environment,
        "role": roles.chio,
        "cut": roles.not_of_a_launch,
        "after_fault": checks.AFTER_FAULT | more.pop("after_fault", {}),
        **more,
    }
    return Scenario(name=name, about=about, checks=kept, more=own, **members)
