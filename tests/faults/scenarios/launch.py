"""A launch and an end, of two workers at once."""

from __future__ import annotations

from tests.faults.scenarios.project import Project, Worker, scenario

SCENARIO = scenario(
    "launch",
    "two workers launched at once that do nothing",
    Project((Worker("one", "nothing.mjs"), Worker("two", "nothing.mjs")), parallel=2),
    cut=lambda _: True,
)
