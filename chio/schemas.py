"""`chio schema`: the JSON Schema (draft 2020-12) of each document, made from its type.

A schema says what members and types a document has. It does not say what makes it true: signatures, digests and the
rules between documents are in `docs/formats.md`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from chio import documents, leaf_types, printed, schema
from chio.errors import InputError

DRAFT = "https://json-schema.org/draft/2020-12/schema"

DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "chio.process.host.v1": schema.HostConfig,
    "chio.process.run.v2": schema.Plan,
    "policy": schema.Policy,
    "request": schema.KeptRequest,
    "context": schema.KeptContext,
    "response": documents.Response,
    "connection": documents.Connection,
    "chio.process.worker-bootstrap.v1": documents.WorkerBootstrap,
    "chio.pins.v1": documents.Pins,
    "chio.bootstrap.v1": documents.Bootstrap,
    "chio.capability.v1": documents.Capability,
    "chio.receipt.v1": documents.Receipt,
    "chio.process.call-observation.v2": documents.Observation,
    "chio.process.run-report.v1": documents.RunReport,
    "chio.process.status.v1": documents.Status,
    "chio.process.logs.v1": documents.AttemptLog,
    "chio.process.server-log.v1": documents.ServerLog,
    "chio.log.export.v1": documents.LogExport,
    "chio.process.application-state.v1": documents.ApplicationState,
    "chio.process.call-attestation.v1": documents.CallAttestation,
    "chio.process.call-verification.v1": documents.CallVerification,
    "chio.process.response-verification.v1": documents.ResponseVerification,
    "chio.receipt.signatures.v1": documents.ReceiptSignatures,
    "chio.receipt.export.v1": documents.ReceiptExport,
    "chio.verdict.v1": documents.Verdict,
    "chio.backup.v1": schema.Backup,
    "chio.process.evidence.v1": printed.EvidenceWritten,
    "chio.process.json-snapshot.v1": documents.JsonSnapshot,
    "chio.resolved-profile.v1": documents.ResolvedProfile,
    "checkpoint-envelope": documents.CheckpointEnvelope,
    "init": printed.Initialized,
    "serve": printed.Ready,
    "key": printed.KeyFile,
    "credential": printed.Credential,
    "revoke": printed.Revoked,
    "revoke-capability": printed.CapabilityRevoked,
    "cancel": printed.Cancelled,
    "delete": printed.Deleted,
    "backup": printed.BackedUp,
    "restore": printed.Restored,
    "accept": printed.Accepted,
    "reconcile": printed.ReconciledCall,
}


def names() -> list[str]:
    """Everything that has a schema. `leaf` is any leaf of the log, `leaf.TYPE` one of a type, a verb what it prints."""
    return sorted([*DOCUMENTS, "leaf", *(f"leaf.{kind}" for kind in leaf_types.BODIES)])


def published(name: str) -> dict[str, Any]:
    """One schema, self-contained. Raises `InputError` for a name that there is not."""
    if name in DOCUMENTS:
        found = msgspec.json.schema(DOCUMENTS[name])
    elif name == "leaf":
        found = _leaves(*leaf_types.BODIES)
    elif name.startswith("leaf.") and name.removeprefix("leaf.") in leaf_types.BODIES:
        found = _leaves(name.removeprefix("leaf."))
    else:
        raise InputError(
            "there is no such schema", file="chio schema", field="NAME", why=f"`{name}`", fix="see `chio schema`"
        )
    made: dict[str, Any] = _ecma({"$schema": DRAFT, **found, "title": name})
    return made


def _ecma(value: Any) -> Any:
    """Patterns in the syntax of JSON Schema (ECMA-262), where `^` and `$` are the ends of the whole text."""
    if isinstance(value, dict):
        ends = {"pattern": value["pattern"].replace("\\A", "^").replace("\\Z", "$")} if _is_pattern(value) else {}
        return {name: _ecma(item) for name, item in value.items()} | ends
    return [_ecma(item) for item in value] if isinstance(value, list) else value


def _is_pattern(value: dict[str, Any]) -> bool:
    return isinstance(value.get("pattern"), str)


def _leaves(*kinds: str) -> dict[str, Any]:
    bodies, definitions = msgspec.json.schema_components(
        [leaf_types.BODIES[kind] for kind in kinds], ref_template="#/$defs/{name}"
    )
    leaves = [_leaf(kind, body) for kind, body in zip(kinds, bodies, strict=True)]
    return {**(leaves[0] if len(leaves) == 1 else {"anyOf": leaves}), "$defs": definitions}


def _leaf(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    signature = {"type": "string", "pattern": "^[0-9a-f]{128}$"} if kind in leaf_types.SIGNED else {"type": "null"}
    return {
        "type": "object",
        "properties": {"body": body, "signature": signature, "type": {"const": kind}},
        "required": ["body", "signature", "type"],
        "additionalProperties": False,
    }
