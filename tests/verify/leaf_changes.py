"""Changes of one leaf of a run that lies, and other tests, are made of: outcomes, further dispatches, launch fields."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.verify.bundled import Leaf, Run, call_ids
from tests.verify.signed import commitment, jcs

SALT = bytes(range(16))
ANSWER = jcs({"kind": "value", "value": {"content": []}})


def allowed(receipt: Leaf) -> Leaf:
    """The receipt as one of a call that ran and was answered."""
    body = receipt.body
    body["decision"], body["terminal_state"] = {"verdict": "allow"}, {"state": "completed"}
    body["output"] = {"kind": "value", "hash": commitment(SALT.hex(), ANSWER)}
    guards = ("budget", "revocation", "expiry", "grant", "constraints", "invocations")
    body["evidence"] = [{"guard": guard, "passed": True} for guard in guards]
    if body["tool_server"] != "chio-ipc":
        body["evidence"].append({"guard": "dispatch", "passed": True, "detail": "answered"})
    receipt.output = (SALT, ANSWER)
    return receipt


def denied(receipt: Leaf, reason: str, guard: str) -> Leaf:
    body = receipt.body
    body["decision"], body["terminal_state"] = (
        {"verdict": "deny", "reason": reason, "guard": guard},
        {"state": "completed"},
    )
    guards = ["budget", "revocation", "expiry", "grant", "constraints", "invocations"]
    passed = guards[: guards.index(guard)]
    body["evidence"] = [*({"guard": name, "passed": True} for name in passed), {"guard": guard, "passed": False}]
    body["output"] = receipt.output = None
    return receipt


def not_sent(receipt: Leaf) -> Leaf:
    allowed(receipt)
    body = receipt.body
    body["decision"] = {"verdict": "incomplete", "reason": "not_dispatched"}
    body["terminal_state"] = {"state": "incomplete", "reason": "not_dispatched"}
    body["evidence"][-1]["passed"] = False
    body["output"] = receipt.output = None
    return receipt


def intent_of(receipt: Leaf) -> Leaf:
    """The intent that goes before a receipt."""
    body = receipt.body
    return Leaf(
        "intent",
        {
            "call": dict(receipt.call),
            "attempt": body["attempt"],
            "capability_id": body["capability_id"],
            "server": body["tool_server"],
            "tool": body["tool_name"],
            "parameter_hash": body["action"]["parameter_hash"],
        },
    )


def renamed(run: Run, leaf: Leaf, key: str = "", dispatch: int = 1) -> Leaf:
    """A copy, as a leaf of the call of another key or of another dispatch."""
    copy = deepcopy(leaf)
    copy.call.update(operation_key=key or leaf.call["operation_key"], dispatch=dispatch)
    copy.call.update(call_ids(run.runtime_id, copy))
    return copy


def launch(run: Run, process: str = "clerk") -> Leaf:
    return run.one("launch", process_id=process)


def at(leaf: Leaf, name: str) -> dict[str, Any]:
    """One field of a launch record."""
    found: dict[str, Any] = next(field for field in leaf.body["fields"] if field["name"] == name)
    return found


def both(leaf: Leaf, name: str, value: Any) -> None:
    """A field that was asked for and seen to be this."""
    at(leaf, name).update(asked=value, value=value)


def drop_field(leaf: Leaf, name: str) -> None:
    leaf.body["fields"] = [field for field in leaf.body["fields"] if field["name"] != name]
