"""Attested calls as a kernel would sign them, made here without any code of the project.

Two steps. `parts(case)` gives every document of one call, consistent and unsigned. `assemble(parts)` signs them all,
builds the log, its proofs and its checkpoint, and returns the artifact. What is changed between the two is signed by
the right keys, as a host that lies would; what is changed afterwards is a forgery.

Keys, salts and times are fixed: `tests.verify.artifacts` writes `fixtures/artifacts` from here.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any

from nacl.signing import SigningKey

from tests.verify.signed import commitment, jcs

KERNEL, LOG, AUTHORITY, STRANGER = (SigningKey(bytes([seed]) * 32) for seed in (11, 12, 13, 14))
RUNTIME_ID = "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe815"
T0 = 1_795_992_584_000
UNKNOWN = "outcome_unknown_after_dispatch"
ORIGINAL = "original_call_commitment_and_signed_store_readback"
READBACK = "signed_store_readback"

CASES = ("completed", "unknown", "compensated", "refused", "reconciled", "built_in", "redispatched", "readback")


def key_of(key: SigningKey) -> str:
    return key.verify_key.encode().hex()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def signed_id(kind: str, body: Any) -> str:
    return sha(f"chio/{kind}/v1".encode() + b"\0" + jcs(body))


def sign(kind: str, body: Any, key: SigningKey) -> str:
    return key.sign(f"chio/{kind}/v1".encode() + b"\0" + jcs(body)).signature.hex()


def signed_text(kind: str, body: Any, key: SigningKey) -> str:
    return jcs({"body": body, "signature": sign(kind, body, key)}).decode()


@dataclass(slots=True)
class Parts:
    """All that is said of one call, before anything is signed."""

    request: dict[str, Any]
    context: dict[str, Any]
    bootstrap: dict[str, Any]
    tokens: list[dict[str, Any]]
    log: list[tuple[str, dict[str, Any]]]
    own: list[int]  # indexes of the leaves that are shown
    response: dict[str, Any] | None
    disclosed: dict[str, Any]  # beside the receipt in the response
    observation: dict[str, Any]
    keys: dict[str, SigningKey] = field(
        default_factory=lambda: {"observation": KERNEL, "bootstrap": KERNEL, "receipt": KERNEL, "log": LOG,
                                 "capability": AUTHORITY}
    )  # fmt: skip

    def leaf(self, kind: str) -> dict[str, Any]:
        """The body of the last leaf of a type."""
        return next(body for found, body in reversed(self.log) if found == kind)


# --- the world -------------------------------------------------------------------------------------------------------


def _grant(tool: str, server: str = "reports", **changes: Any) -> dict[str, Any]:
    return {
        "server": server,
        "tool": tool,
        "operations": ["invoke", "delegate"],
        "expires_ms": T0 + 3_600_000,
        "max_invocations": None,
        "constraints": [],
        "parent_grant": None,
        **changes,
    }


def _token(process: str, parent: dict[str, Any] | None, share: int, grants: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": "chio.capability.v1",
        "runtime_id": RUNTIME_ID,
        "process_id": process,
        "parent_capability_id": signed_id("capability", parent) if parent else None,
        "depth": parent["depth"] + 1 if parent else 0,
        "issued_ms": T0,
        "expires_ms": T0 + 3_600_000,
        "budget_share_bps": share,
        "grants": grants,
    }


def tokens() -> list[dict[str, Any]]:
    """The caller's own first: `producer`, then root."""
    size = {"type": "object", "maxProperties": 8}
    root = _token(
        "root", None, 10_000,
        [_grant("*", max_invocations=100, constraints=[size]), _grant("*", "chio-ipc")],
    )  # fmt: skip
    producer = _token(
        "producer", root, 5_000,
        [
            _grant("publish", max_invocations=5, constraints=[size], parent_grant=0),
            _grant("send_jobs", "chio-ipc", operations=["invoke"], parent_grant=1),
        ],
    )  # fmt: skip
    return [producer, root]


def bootstrap(chain: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": "chio.bootstrap.v1",
        "runtime_id": RUNTIME_ID,
        "created_ms": T0,
        "time_ms": T0,
        "kernel_key": key_of(KERNEL),
        "log_key": key_of(LOG),
        "authority_key": key_of(AUTHORITY),
        "log_origin": f"chio.invalid/{RUNTIME_ID}",
        "config_digest": "1" * 64,
        "policy_digest": "2" * 64,
        "storage": {"filesystem": "ext4", "journal_mode": "wal", "synchronous": "full", "volatile": False},
        "processes": [
            {
                "process_id": token["process_id"],
                "parent_id": above["process_id"] if above else None,
                "capability_id": signed_id("capability", token),
                "ceiling": token["budget_share_bps"] // 100,
            }
            for token, above in reversed(list(zip(chain, [*chain[1:], None], strict=True)))
        ],
        "servers": [{"server_id": "reports", "tools_digest": "3" * 64, "tools": []}],
    }


def request_of(case: str) -> dict[str, Any]:
    server, tool = ("chio-ipc", "send_jobs") if case == "built_in" else ("reports", "publish")
    return {
        "operation_key": f"{case}-report-42",
        "server_id": server,
        "tool_name": "retract" if case == "refused" else tool,
        "arguments": {"message_key": case, "payload": {"items": [2, 3, 5], "note": 'é "quoted"\n'}},
        **({} if case == "redispatched" else {"known_outcome_only": True}),
    }


def call_of(request: dict[str, Any], context: dict[str, Any], parameter_hash: str, dispatch: int) -> dict[str, Any]:
    named = [RUNTIME_ID, context["process_id"], request["operation_key"], *([dispatch] if dispatch > 1 else [])]
    policy = "known_outcome_only" if "known_outcome_only" in request else "default"
    bound = [
        RUNTIME_ID, context["process_id"], request["operation_key"], context["capability_id"], request["server_id"],
        request["tool_name"], parameter_hash, policy,
    ]  # fmt: skip
    return {
        "process_id": context["process_id"],
        "operation_key": request["operation_key"],
        "request_id": "process:" + sha(jcs(named)),
        "binding": sha(jcs(bound)),
        "dispatch": dispatch,
        "recovery_policy": policy,
    }


def receipt_body(
    state: str, request: dict[str, Any], context: dict[str, Any], parameter_hash: str, dispatch: int, index: int
) -> dict[str, Any]:
    decision: dict[str, Any] = {"verdict": "allow"}
    terminal: dict[str, Any] = {"state": "completed"}
    if state == "refused":
        decision = {"verdict": "deny", "reason": "out_of_scope", "guard": "grant"}
    elif state != "completed":
        reason = "not_dispatched" if state == "compensated" else UNKNOWN
        decision, terminal = {"verdict": "incomplete", "reason": reason}, {"state": "incomplete", "reason": reason}
    return {
        "schema": "chio.receipt.v1",
        "runtime_id": RUNTIME_ID,
        "log_index": index,
        "time_ms": T0 + index,
        "capability_id": context["capability_id"],
        "tool_server": request["server_id"],
        "tool_name": request["tool_name"],
        "action": {"parameter_hash": parameter_hash},
        "decision": decision,
        "terminal_state": terminal,
        "output": {"kind": "value", "hash": commitment(salt(request, "output"), jcs(OUTPUT))}
        if state == "completed"
        else None,
        "policy_hash": "2" * 64,
        "call": call_of(request, context, parameter_hash, dispatch),
        "attempt": {"number": dispatch, "launch_id": "b" * 64},
        "evidence": [{"guard": "grant", "passed": state != "refused"}],
        "kernel_key": key_of(KERNEL),
    }


OUTPUT = {"kind": "value", "value": {"content": [{"type": "text", "text": "published"}], "isError": False}}


def salt(request: dict[str, Any], what: str) -> str:
    return sha(f"{request['operation_key']} {what}".encode())[:32]


def _filler(index: int) -> tuple[str, dict[str, Any]]:
    body = {"schema": "chio.attempt.v1", "runtime_id": RUNTIME_ID, "time_ms": T0 + index, "process_id": "producer",
            "attempt": index, "event": "reserved"}  # fmt: skip
    return "attempt", body


def parts(case: str, *, answered: bool = True, chain: list[dict[str, Any]] | None = None) -> Parts:
    """One call of `CASES`; without `answered`, no response is attested. `chain` are other tokens."""
    chain = chain or tokens()
    boot = bootstrap(chain)
    request = request_of(case)
    context = {
        "runtime_id": RUNTIME_ID, "process_id": "producer", "capability_id": signed_id("capability", chain[0]),
    }  # fmt: skip
    state = {"built_in": "completed", "redispatched": "completed", "readback": "completed"}.get(case, case)
    parameter_hash = commitment(salt(request, "parameters"), jcs(request["arguments"]))
    dispatches = 2 if case == "redispatched" else 1
    log: list[tuple[str, dict[str, Any]]] = [("bootstrap", boot), *(_filler(index) for index in range(1, 4))]
    own: list[int] = []
    for dispatch in range(1, dispatches + 1):
        last = dispatch == dispatches
        if case not in ("refused", "built_in", "readback"):
            own.append(len(log))
            log.append(("intent", _intent(request, context, parameter_hash, dispatch)))
            log.append(_filler(len(log)))
        if last:
            own.append(len(log))
        settled = state if last else "unknown"
        log.append(("receipt", receipt_body(settled, request, context, parameter_hash, dispatch, len(log))))
    receipt = log[own[-1]][1]
    if state == "reconciled":
        log.append(_filler(len(log)))
        own.append(len(log))
        log.append(("reconciliation", _reconciliation(receipt["call"], len(log))))
    log += [_filler(len(log) + more) for more in range(3)]
    response = {
        "request_id": receipt["call"]["request_id"],
        "verdict": "allow" if state == "completed" else "deny",
        "output": OUTPUT if state == "completed" else None,
        "reason": receipt["decision"].get("reason"),
        "terminal_state": receipt["terminal_state"],
        "execution_nonce_json": None,
        **({"reconciliation": {"outcome": "applied", "by": "ada", "record": own[-1]}} if state == "reconciled" else {}),
    }
    observation = {
        "schema": "chio.process.call-observation.v2",
        "runtime_id": RUNTIME_ID,
        "time_ms": T0 + 1000,
        "kernel_key": key_of(KERNEL),
        "request_sha256": sha(jcs(request)),
        "context_sha256": sha(jcs(context)),
        "call": receipt["call"],
        "parameter_salt": salt(request, "parameters"),
        "operation": None if state == "refused" else {"state": state},
        "custody_binding": {"refused": "no_custody_claim", "readback": READBACK}.get(case, ORIGINAL),
    }
    shown = {
        "parameters": request["arguments"],
        "parameter_salt": salt(request, "parameters"),
        "output_salt": salt(request, "output") if state == "completed" else None,
    }
    return Parts(request, context, boot, chain, log, own, response if answered else None, shown, observation)


def _intent(request: dict[str, Any], context: dict[str, Any], parameter_hash: str, dispatch: int) -> dict[str, Any]:
    return {
        "call": call_of(request, context, parameter_hash, dispatch),
        "attempt": {"number": dispatch, "launch_id": "b" * 64},
        "capability_id": context["capability_id"],
        "server": request["server_id"],
        "tool": request["tool_name"],
        "parameter_hash": parameter_hash,
    }


def _reconciliation(call: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "schema": "chio.reconciliation.v1",
        "runtime_id": RUNTIME_ID,
        "time_ms": T0 + index,
        "call": call,
        "outcome": "applied",
        "by": "ada",
        "evidence_sha256": "4" * 64,
    }


# --- signing and the log ---------------------------------------------------------------------------------------------


def root_of(hashes: list[bytes]) -> bytes:
    """RFC 9162 section 2.1.1, as it is defined there."""
    if len(hashes) == 1:
        return hashes[0]
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    return hashlib.sha256(b"\x01" + root_of(hashes[:split]) + root_of(hashes[split:])).digest()


def inclusion_of(hashes: list[bytes], index: int) -> list[bytes]:
    """RFC 9162 section 2.1.3.1, as it is defined there."""
    if len(hashes) == 1:
        return []
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    if index < split:
        return [*inclusion_of(hashes[:split], index), root_of(hashes[split:])]
    return [*inclusion_of(hashes[split:], index - split), root_of(hashes[:split])]


def note(origin: str, size: int, root: bytes, key: SigningKey) -> str:
    text = f"{origin}\n{size}\n{base64.b64encode(root).decode()}\n"
    key_id = hashlib.sha256(origin.encode() + b"\n\x01" + key.verify_key.encode()).digest()[:4]
    signature = base64.b64encode(key_id + key.sign(text.encode()).signature).decode()
    return f"{text}\n— {origin} {signature}\n"


def observation_body(made: Parts) -> dict[str, Any]:
    """The observation's body: everything below it is signed and in the log."""
    leaves = []
    for kind, body in made.log:
        signature = sign(kind, body, made.keys[kind]) if kind in ("receipt", "bootstrap") else None
        leaves.append(jcs({"body": body, "signature": signature, "type": kind}))
    hashes = [hashlib.sha256(b"\x00" + leaf).digest() for leaf in leaves]
    response = None
    if made.response is not None:
        receipt = made.leaf("receipt")
        signature = sign("receipt", receipt, made.keys["receipt"])
        line = jcs({"body": receipt, "disclosed": made.disclosed, "signature": signature})
        response = jcs({"receipt_json": line.decode(), **made.response}).decode()
    return {
        "bootstrap_json": signed_text("bootstrap", made.bootstrap, made.keys["bootstrap"]),
        "response_json": response,
        "capabilities_json": [signed_text("capability", token, made.keys["capability"]) for token in made.tokens],
        "leaves": [
            {
                "index": index,
                "leaf_json": leaves[index].decode(),
                "proof": [sibling.hex() for sibling in inclusion_of(hashes, index)],
            }
            for index in made.own
        ],
        "checkpoint": note(f"chio.invalid/{RUNTIME_ID}", len(leaves), root_of(hashes), made.keys["log"]),
        **made.observation,
    }


def assemble(made: Parts) -> bytes:
    """The artifact, signed whatever it says."""
    return signed_text("observation", observation_body(made), made.keys["observation"]).encode()
