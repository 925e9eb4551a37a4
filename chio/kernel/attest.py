"""One signed observation of one call, for a reviewer who will not open the state (contract section 9).

What is signed is what the log and the store hold, never what the operator claims: a request, a context or a response
that is not the retained one is refused. The observation carries leaves with their inclusion proofs, the tokens that
allowed the call, and the signed bootstrap that certifies every key, so that a kernel key and a run id are enough to
judge it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from chio import canonical
from chio.errors import InputError, StateError
from chio.kernel import receipts
from chio.kernel.calls import State
from chio.kernel.grants import MAILBOX_SERVER
from chio.kernel.invocations import CallError
from chio.kernel.log import leaf_bytes, proof_ranges, root_of
from chio.kernel.store import CallRow
from chio.signing import signed_text

if TYPE_CHECKING:
    from chio.kernel.process import Kernel

SCHEMA = "chio.process.call-observation.v2"
ORIGINAL = "original_call_commitment_and_signed_store_readback"
READBACK = "signed_store_readback"
NO_CLAIM = "no_custody_claim"


@dataclass(frozen=True, slots=True)
class Attested:
    """The artifact's text, and what it says of the call. `state` is null for a refusal."""

    text: bytes
    request_id: str
    state: str | None
    custody_binding: str

    def as_reply(self) -> dict[str, Any]:
        return {
            "artifact": base64.b64encode(self.text).decode(),
            "request_id": self.request_id,
            "observed_operation_state": self.state,
            "custody_binding": self.custody_binding,
        }


def attest(kernel: Kernel, message: dict[str, Any]) -> Attested:
    """Observe and sign. `message` has `request` and `context` (values), `response` (text or null), `files` (names).

    Raises `InputError` for what is not retained as given, `StateError` for a call that cannot be read back.
    """
    request, context, response, files = (message[name] for name in ("request", "context", "response", "files"))
    call = _retained_call(kernel, request, context, files)
    try:
        told = kernel.ledger.retained(call)
    except CallError as error:
        raise StateError(
            "the call cannot be read back",
            file=kernel.path,
            field=call.operation_key,
            why="its row or its receipt is damaged, and it is quarantined",
            fix="restore the state from a backup",
        ) from error
    if response is not None:
        _require_retained_response(response, told.result, files["response"])
    kernel.writer.open_commit()
    kernel.writer.checkpoint_log()
    newest = kernel.store.last_checkpoint()
    assert newest is not None
    assert call.receipt is not None
    size, _, note = newest
    intents = kernel.store.intents(call.process, call.operation_key)
    indexes = [*intents, call.receipt]
    if call.reconciliation is not None:
        indexes.append(orjson.loads(call.reconciliation)["record"])
    state = None if call.state is State.REFUSED else call.state.value
    custody = _custody(call, intents)
    body = canonical.encode(
        {
            "schema": SCHEMA,
            "runtime_id": kernel.runtime_id,
            "time_ms": kernel.clock.now_ms(),
            "kernel_key": kernel.kernel_key,
            "bootstrap_json": kernel.host["bootstrap"],
            "request_sha256": sha256(canonical.encode(request)).hexdigest(),
            "context_sha256": sha256(canonical.encode(context)).hexdigest(),
            "call": {
                "process_id": call.process,
                "operation_key": call.operation_key,
                "request_id": call.request_id,
                "binding": call.binding,
                "dispatch": call.dispatch,
                "recovery_policy": call.recovery_policy,
            },
            "parameter_salt": call.parameter_salt.hex(),
            "response_json": response,
            "capabilities_json": [token.text.decode() for token in kernel.tree[call.process].chain],
            "operation": {"state": state} if state is not None else None,
            "custody_binding": custody,
            "leaves": [_leaf(kernel, index, size) for index in indexes],
            "checkpoint": note,
        }
    )
    signature = kernel.ledger.sign_observation(body)
    return Attested(signed_text(body, signature), call.request_id, state, custody)


def _retained_call(kernel: Kernel, request: dict[str, Any], context: dict[str, Any], files: dict[str, str]) -> CallRow:
    """The call that this request made in this context: known key, same binding."""
    node = kernel.tree.nodes.get(context["process_id"])
    for field, known in (
        ("runtime_id", kernel.runtime_id),
        ("process_id", node.id if node else None),
        ("capability_id", node.capability.id if node else None),
    ):
        if context[field] != known:
            raise InputError(
                "the context is not one of this state",
                file=files["context"],
                field=field,
                why=f"it is {known} here" if known else f"there is no process `{context[field]}`",
                fix="name the state that the call was made on, and the context that was kept with it",
            )
    assert node is not None
    call = kernel.store.find_call(node.id, request["operation_key"])
    if call is None:
        raise InputError(
            "no call is retained under this key",
            file=files["request"],
            field="operation_key",
            why=f"{node.id} made no call `{request['operation_key']}` that was admitted or refused",
            fix="name the key of a call that had a receipt",
        )
    policy = "known_outcome_only" if request.get("known_outcome_only") else "default"
    parameter_hash = receipts.commitment(call.parameter_salt, canonical.encode(request["arguments"]))
    for field, asked, retained in (
        ("server_id", request["server_id"], call.server),
        ("tool_name", request["tool_name"], call.tool),
        ("known_outcome_only", policy, call.recovery_policy),
        ("arguments", parameter_hash, call.parameter_hash),
    ):
        if asked != retained:
            raise InputError(
                "the request is not the one that is retained under its key",
                file=files["request"],
                field=field,
                why="another one was made under this key",
                fix="name the request as it was kept before it was sent",
            )
    return call


def _require_retained_response(text: str, retained: bytes, file: str) -> None:
    """The response given is what the worker got: the retained one, or what it was before it was reconciled."""
    kept = orjson.loads(retained)
    answers = [kept, {name: value for name, value in kept.items() if name != "reconciliation"}]
    given = canonical.encode(canonical.parse(text.encode()))
    if given not in [canonical.encode(answer) for answer in answers]:
        raise InputError(
            "the response is not the one that is retained",
            file=file,
            why="the worker was not answered this, or was answered something newer since",
            fix="repeat the call for what is retained now, or attest without --response",
        )


def _custody(call: CallRow, intents: list[int]) -> str:
    """What the log shows of the call's start."""
    if call.state is State.REFUSED:
        return NO_CLAIM
    if call.server == MAILBOX_SERVER or len(intents) == call.dispatch:
        return ORIGINAL
    return READBACK


def _leaf(kernel: Kernel, index: int, size: int) -> dict[str, Any]:
    """One leaf as the log hashes it, with its proof under the checkpoint of `size` leaves."""
    kind, body, signature = kernel.store.leaf(index)
    proof = [
        root_of(hashed for _, hashed in islice(kernel.store.leaf_hashes(start), end - start))
        for start, end in proof_ranges(index, size)
    ]
    text = leaf_bytes(kind, body.encode(), signature)
    return {"index": index, "leaf_json": text.decode(), "proof": [sibling.hex() for sibling in proof]}
