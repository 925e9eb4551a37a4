"""The frozen plan as it is stored: without its workers' inputs, which are sealed as their processes' data."""

from __future__ import annotations

import orjson

from chio import canonical


def without_inputs(plan: str) -> tuple[str, dict[str, bytes]]:
    """(the frozen text with every input null, each worker's input as JCS)."""
    frozen = canonical.parse(plan.encode())
    inputs: dict[str, bytes] = {}
    for worker in frozen["plan"]["workers"]:
        inputs[worker["process"]] = canonical.encode(worker["input"])
        worker["input"] = None
    return canonical.encode(frozen).decode(), inputs


def with_inputs(plan: str, inputs: dict[str, bytes]) -> str:
    """The frozen text again; an input that was deleted stays null."""
    frozen = canonical.parse(plan.encode())
    for worker in frozen["plan"]["workers"]:
        worker["input"] = orjson.loads(inputs.get(worker["process"], b"null"))
    return canonical.encode(frozen).decode()
