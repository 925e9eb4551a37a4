"""What the log and the server say of one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kernel.external import ToolState, effects
from tests.kernel.serving import Worker
from verify.receipts import verify_receipt

UNKNOWN = {"state": "incomplete", "reason": "outcome_unknown_after_dispatch"}


def receipt_of(state: ToolState, result: dict[str, Any]) -> dict[str, Any]:
    return verify_receipt(result["receipt_json"].encode(), state.kernel_key).body


def incidents_of(state: ToolState, request_id: str) -> list[dict[str, Any]]:
    found = state.log().bodies("incident")
    return [body for body in found if "call" in body and body["call"]["request_id"] == request_id]


def leaves_of(state: ToolState, key: str) -> list[str]:
    """The types of the leaves about one call, in order."""
    return [kind for kind, body in state.log().leaves if body.get("call", {}).get("operation_key") == key]


def unknown(state: ToolState, result: dict[str, Any]) -> None:
    """What the second table says of an unknown outcome."""
    assert (result["verdict"], result["output"], result["terminal_state"]) == ("deny", None, UNKNOWN)
    assert result["reason"] == "outcome_unknown_after_dispatch"
    body = receipt_of(state, result)
    assert body["decision"] == {"verdict": "incomplete", "reason": "outcome_unknown_after_dispatch"}
    assert (body["output"], body["terminal_state"]) == (None, UNKNOWN)


def repeats_byte_for_byte(worker: Worker, frame: bytes, first: bytes) -> None:
    for _ in range(2):
        assert worker.line(frame) == first


def seen(folder: Path, key: str) -> int:
    return sum(1 for entry in effects(folder, "seen.ndjson") if entry["arguments"].get("mine") == key)
