"""The recipe project as its tests see it: plans, what each recipe came to, what was kept."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.report.walkthrough import Project

confined = pytest.mark.skipif(os.geteuid() != 0, reason="confining a worker needs root in this version")

# How each language's worker is started, in a copy of the project.
LANGUAGES = {"python": [".venv/bin/python", "python/worker.py"], "node": ["node", "node/worker.mjs"]}

RESULT = {"item_count": 3, "total": 10}


def came_to(project: Project, state: str, process: str, attempt: int) -> dict[str, Any]:
    """What each recipe of one attempt came to, by its name: the lines of that attempt's log."""
    kept = project.json(f"chio process logs --state {state} --process {process} --attempt {attempt}")
    assert kept["stderr"] == "", kept["stderr"]
    lines = [json.loads(line) for line in kept["stdout"].splitlines()]
    return {line["recipe"]: line["came_to"] for line in lines}


def checkpoint(project: Project, state: str, process: str = "consumer") -> dict[str, Any]:
    kept = project.json(f"chio process state --state {state} --process {process}")
    assert (kept["schema"], kept["process"]) == ("chio.process.application-state.v1", process)
    return dict(kept["data"]["checkpoint"])


def mailboxes(project: Project, state: str) -> dict[str, dict[str, Any]]:
    return {box["id"]: box for box in project.json(f"chio process status --state {state}")["mailboxes"]}


def plan_that_stops(project: Project, language: str, recipe: str, point: str) -> str:
    """A plan whose consumer does one recipe and, at its first attempt, stops at that point; its file's name."""
    plan = json.loads((project.folder / f"process-{language}.json").read_text())
    plan["workers"] = [worker for worker in plan["workers"] if worker["process"] != "sibling"]
    (consumer,) = [worker for worker in plan["workers"] if worker["process"] == "consumer"]
    consumer |= {"input": {"recipes": [recipe], "stop_after": point}, "max_attempts": 2}
    name = f"stops-{language}-{point}.json"
    (project.folder / name).write_text(json.dumps(plan))
    return name
