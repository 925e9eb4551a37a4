"""What the signed log holds of one call: its leaves, each proved to be under one checkpoint.

An intent is committed before the first byte of an external call is sent; a built-in tool's receipt is committed with
its effect. Where that is there, the call was kept from its start: `original_call_commitment_and_signed_store_readback`.
Without it the outcome is still read back from the signed store: `signed_store_readback`. A refusal ran nothing, so
there is nothing to have had custody of: `no_custody_claim`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from verify import canonical, shape
from verify.keys import PublicKey
from verify.leaves import INTENT, RECONCILIATION
from verify.log import Checkpoint, leaf_hash, verify_inclusion
from verify.receipts import BODY as RECEIPT
from verify.requests import Context, Request
from verify.responses import NOT_DISPATCHED, OUTCOME_UNKNOWN, require_state
from verify.verdict import VerifyError

ORIGINAL = "original_call_commitment_and_signed_store_readback"
READBACK = "signed_store_readback"
NO_CLAIM = "no_custody_claim"

_BUILT_IN_SERVERS = ("chio-ipc", "chio-process")
MAX_DISPATCHES = 3

_BODIES = {"intent": INTENT, "receipt": RECEIPT, "reconciliation": RECONCILIATION}
LEAF = shape.record({"index": shape.at_least(0), "leaf_json": shape.text, "proof": shape.array(shape.digest)})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the log as received. Nothing is proved until `prove`."""

    index: int
    kind: str
    body: dict[str, Any]
    body_text: bytes
    signature: str | None
    text: bytes
    proof: list[bytes]

    def prove(self, checkpoint: Checkpoint) -> None:
        verify_inclusion(leaf_hash(self.text), self.index, checkpoint.size, self.proof, checkpoint.root)


@dataclass(frozen=True, slots=True)
class Custody:
    """The leaves of one call, by what they are."""

    intents: list[Leaf]
    receipt: Leaf
    reconciliation: Leaf | None

    @property
    def leaves(self) -> list[Leaf]:
        return [*self.intents, self.receipt, *([self.reconciliation] if self.reconciliation else [])]


def read_leaf(entry: dict[str, Any]) -> Leaf:
    text = entry["leaf_json"].encode()
    members = canonical.split(text, ("body", "signature", "type"))
    kind, signature = members["type"].value, members["signature"].value
    shape.one_of(*_BODIES)(kind, "type")
    _BODIES[kind](members["body"].value, "body")
    (shape.signature if kind == "receipt" else shape.null)(signature, "signature")
    proof = [bytes.fromhex(sibling) for sibling in entry["proof"]]
    return Leaf(entry["index"], kind, members["body"].value, members["body"].received, signature, text, proof)


def read_custody(entries: Sequence[dict[str, Any]]) -> Custody:
    """The leaves of an observation: intents, then the receipt, then a reconciliation."""
    leaves = [read_leaf(entry) for entry in entries]
    kinds = [leaf.kind for leaf in leaves]
    intents = kinds.count("intent")
    if intents > MAX_DISPATCHES or kinds[intents:] not in (["receipt"], ["receipt", "reconciliation"]):
        raise VerifyError("the leaves are not intents, a receipt and at most one reconciliation", check="fields")
    return Custody(leaves[:intents], leaves[intents], leaves[intents + 1] if len(leaves) > intents + 1 else None)


def require_retained(
    custody: Custody, checkpoint: Checkpoint, state: str | None, call: dict[str, Any], bootstrap: dict[str, Any]
) -> None:
    """The retained operation: its receipt and reconciliation are in the log, and say what is claimed of the call.

    `state` is null for a refusal, which has a decision and no operation.
    """
    receipt = custody.receipt
    receipt.prove(checkpoint)
    kernel_key = PublicKey.from_hex(bootstrap["kernel_key"])
    if receipt.body["kernel_key"] != kernel_key.hex or receipt.body["runtime_id"] != bootstrap["runtime_id"]:
        _refuse("the receipt is of another kernel or run", "retained_operation")
    kernel_key.verify_record("receipt", receipt.body_text, str(receipt.signature))
    if receipt.body["log_index"] != receipt.index:
        _refuse("the receipt names another leaf", "retained_operation")
    if receipt.body["policy_hash"] != bootstrap["policy_digest"]:
        _refuse("the receipt names another policy", "retained_operation")
    if receipt.body["call"] != call:
        _refuse("the receipt is of another call", "retained_operation")
    require_state(receipt.body)
    if _state_of(custody) != state:
        _refuse(f"the log says {_state_of(custody) or 'refused'}, not {state or 'refused'}", "retained_operation")
    if custody.reconciliation is not None:
        _require_reconciliation(custody.reconciliation, receipt, checkpoint)


def _state_of(custody: Custody) -> str | None:
    decision = custody.receipt.body["decision"]
    settled = {"allow": "completed", "deny": None}.get(decision["verdict"], "")
    if settled == "":
        settled = {OUTCOME_UNKNOWN: "unknown", NOT_DISPATCHED: "compensated"}[decision["reason"]]
    if custody.reconciliation is None:
        return settled
    if settled != "unknown":
        _refuse("a reconciliation of an outcome that is known", "retained_operation")
    return "reconciled"


def _require_reconciliation(leaf: Leaf, receipt: Leaf, checkpoint: Checkpoint) -> None:
    leaf.prove(checkpoint)
    if leaf.body["call"] != receipt.body["call"] or leaf.body["runtime_id"] != receipt.body["runtime_id"]:
        _refuse("the reconciliation is of another call", "retained_operation")
    if leaf.index <= receipt.index or leaf.body["time_ms"] < receipt.body["time_ms"]:
        _refuse("the reconciliation stands before its receipt", "retained_operation")


def require_custody(custody: Custody, checkpoint: Checkpoint, claimed: str, request: Request, context: Context) -> None:
    """The custody binding: what the leaves show of the call's start, and that no more is claimed."""
    receipt = custody.receipt.body
    before = -1
    for position, intent in enumerate(custody.intents):
        intent.prove(checkpoint)
        dispatch = intent.body["call"]["dispatch"]
        expected = {**receipt["call"], "dispatch": dispatch, "request_id": context.request_id(request, dispatch)}
        if intent.body["call"] != expected:
            _refuse(f"intent {position} is of another call", "continuation_custody")
        signed = {
            "server": receipt["tool_server"],
            "tool": receipt["tool_name"],
            "capability_id": receipt["capability_id"],
            "parameter_hash": receipt["action"]["parameter_hash"],
        }
        if signed != {name: intent.body[name] for name in signed}:
            _refuse(f"intent {position} is of another route, caller or arguments", "continuation_custody")
        if not before < intent.index < custody.receipt.index:
            _refuse(f"intent {position} is out of order", "continuation_custody")
        before = intent.index
    if custody.intents and custody.intents[-1].body["attempt"] != receipt["attempt"]:
        _refuse("the last intent is of another attempt", "continuation_custody")
    if claimed != custody_of(custody):
        _refuse(f"the leaves show {custody_of(custody)}, not {claimed}", "continuation_custody")


def custody_of(custody: Custody) -> str:
    receipt = custody.receipt.body
    dispatches = [intent.body["call"]["dispatch"] for intent in custody.intents]
    if receipt["tool_server"] in _BUILT_IN_SERVERS and (dispatches or receipt["decision"]["verdict"] == "incomplete"):
        _refuse("a built-in tool has no intent and no unknown outcome", "continuation_custody")
    if receipt["decision"]["verdict"] == "deny":
        if dispatches:
            _refuse("a refusal has no intent", "continuation_custody")
        return NO_CLAIM
    if receipt["tool_server"] in _BUILT_IN_SERVERS:
        return ORIGINAL
    return ORIGINAL if dispatches == list(range(1, receipt["call"]["dispatch"] + 1)) else READBACK


def admitted_at_ms(custody: Custody) -> int | None:
    """When the call was admitted, as near as the log says: a built-in tool's receipt has a time, an intent has none."""
    receipt = custody.receipt.body
    return receipt["time_ms"] if receipt["tool_server"] in _BUILT_IN_SERVERS else None


def _refuse(why: str, check: str) -> NoReturn:
    raise VerifyError(why, check=check)
