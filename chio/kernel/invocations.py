"""What goes into one `invoke` and what comes out of it: requests, answers, and the texts about a call.

The decision itself is `chio.kernel.ledger`; everything here is a value or a pure function of one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from chio import canonical
from chio.kernel.call_row import CallRow
from chio.kernel.calls import OUTCOMES
from chio.kernel.mailboxes import is_name
from chio.kernel.tree import Node

_INVOKE_FIELDS = frozenset({"op", "operation_key", "server_id", "tool_name", "arguments"})


class CallError(Exception):
    """An answer without a receipt: `code` is the contract's server code. Nothing was written."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by socket and credential. `attempt` is null under serve, `launch_id` for an unconfined worker."""

    node: Node
    attempt: int | None
    launch_id: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """A well-formed `invoke`. `parameters` is the JCS of `arguments`."""

    key: str
    server: str
    tool: str
    arguments: dict[str, Any]
    parameters: bytes
    recovery_policy: str
    plain: bool


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An intent that this commit writes: to be sent when it is on disk, never before."""

    call: CallRow


@dataclass(frozen=True, slots=True)
class Live:
    """The same call is on its way: its repeats wait for the one outcome."""

    call: CallRow


@dataclass(frozen=True, slots=True)
class Down:
    """The call would be admitted, but its server is not up: nothing was written."""

    server: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply that carries a receipt. `wakes` is a mailbox that got a message in this commit."""

    result: bytes
    receipt: bytes
    wakes: str | None = None


def read_request(operation: dict[str, Any], plain: bool) -> Request:
    """The fields of an `invoke`. Raises `CallError("invalid_request")`."""
    keys = operation.keys()
    if not (
        keys == _INVOKE_FIELDS
        or (keys == _INVOKE_FIELDS | {"known_outcome_only"} and operation["known_outcome_only"] is True)
    ):
        raise CallError("invalid_request")
    key, server, tool = operation["operation_key"], operation["server_id"], operation["tool_name"]
    arguments = operation["arguments"]
    if not (is_name(key) and is_name(server) and is_name(tool)) or type(arguments) is not dict:
        raise CallError("invalid_request")
    policy = "known_outcome_only" if "known_outcome_only" in keys else "default"
    return Request(key, server, tool, arguments, canonical.encode_scanned(arguments, plain), policy, plain)


def terminal_state(call: CallRow) -> dict[str, str]:
    outcome = OUTCOMES[call.state]
    if outcome.terminal_reason is None:
        return {"state": outcome.terminal_state}
    return {"state": outcome.terminal_state, "reason": outcome.terminal_reason}


def debited(debits: list[tuple[Node, int, int]]) -> str | None:
    """What a refund has to give back: JCS of [[process, grant], …]."""
    return canonical.encode_plain([[at.id, position] for at, position, _ in debits]).decode() if debits else None


def intent_body(call: CallRow, node: Node) -> dict[str, Any]:
    return {
        "call": call_members(call),
        "attempt": attempt_members(call),
        "capability_id": node.capability.id,
        "server": call.server,
        "tool": call.tool,
        "parameter_hash": call.parameter_hash,
    }


def attempt_members(call: CallRow) -> dict[str, Any] | None:
    return {"number": call.attempt, "launch_id": call.launch_id} if call.attempt is not None else None


def call_members(call: CallRow) -> dict[str, Any]:
    """The `call` object of receipts, intents and incidents."""
    return {
        "process_id": call.process,
        "operation_key": call.operation_key,
        "request_id": call.request_id,
        "binding": call.binding,
        "dispatch": call.dispatch,
        "recovery_policy": call.recovery_policy,
    }


def result_text(call: CallRow, receipt: bytes) -> bytes:
    """The `result` of an invoke's reply, from what is stored: a replay is byte for byte the first answer."""
    beside = {"reconciliation": orjson.Fragment(call.reconciliation)} if call.reconciliation is not None else {}
    return orjson.dumps(
        {
            "request_id": call.request_id,
            "verdict": OUTCOMES[call.state].verdict,
            "output": orjson.Fragment(call.output) if call.output is not None else None,
            "reason": call.reason,
            "terminal_state": terminal_state(call),
            "receipt_json": receipt.decode(),
            **beside,
            "execution_nonce_json": None,
        }
    )
