"""One row of `call`, as the ledger moves it and the store keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from chio.kernel.calls import State


@dataclass(slots=True)
class CallRow:
    """One row of `call`, as it is stored."""

    process: str
    operation_key: str
    state: State
    server: str
    tool: str
    recovery_policy: str
    binding: str
    parameter_salt: bytes
    parameter_hash: str
    parameters: bytes | None
    dispatch: int
    request_id: str
    attempt: int | None
    launch_id: str | None
    debited: str | None
    reason: str | None
    output: bytes | None
    receipt: int | None
    reconciliation: str | None = None


CALL_COLUMNS = (
    "process, operation_key, state, server, tool, recovery_policy, binding, parameter_salt, parameter_hash, parameters,"
    " dispatch, request_id, attempt, launch_id, debited, reason, output, receipt, reconciliation"
)


def place(call: CallRow, column: str) -> str:
    """What a sealed column of this call is authenticated as."""
    return f"call/{call.operation_key}/{column}"
