"""The leaves of the log as types, one for each type of leaf (`docs/formats.md`, "The log: leaves")."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from chio.documents import (
    Attempt,
    BootstrapBody,
    Call,
    Count,
    Digest,
    Name,
    Number,
    Outcome,
    ReceiptBody,
    RuntimeId,
    Text,
)
from chio.schema import Document, Id


class Statement(Document, frozen=True):
    """What every body but an intent's begins with."""

    runtime_id: RuntimeId
    time_ms: Count


class IntentBody(Document, frozen=True):
    call: Call
    attempt: Attempt | None
    capability_id: Digest
    server: Name
    tool: Name
    parameter_hash: Digest


class AttemptBody(Statement, frozen=True):
    schema: Literal["chio.attempt.v1"]
    process_id: Id
    attempt: Number
    event: Literal["reserved", "ended"]
    outcome: Text | UnsetType = UNSET


class LaunchField(Document, frozen=True):
    name: Text
    asked: Any
    value: Any
    source: Literal["observed", "installed", "unobservable", "absent"]
    detail: str | UnsetType = UNSET


class LaunchBody(Statement, frozen=True):
    schema: Literal["chio.launch.v1"]
    process_id: Id | None
    attempt: Number
    observer: Literal["host"]
    confined: bool
    asked: dict[str, Any]
    executable_sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    fields: list[LaunchField]
    server: Id | UnsetType = UNSET


class ExitUsage(Document, frozen=True):
    peak_resident_bytes: Count | None
    peak_resident_source: Text | None
    cpu_ms: Count | None
    cpu_source: Text | None
    wall_ms: Count | None
    memory_peak_bytes: Count | None
    process_peak: Count | None
    oom_kills: Count | None


class ExitStatus(Document, frozen=True):
    exit: Count | UnsetType = UNSET
    signal: Number | UnsetType = UNSET


class ExitOutput(Document, frozen=True):
    stdout_bytes: Count
    stderr_bytes: Count


class ExportedFile(Document, frozen=True):
    file: Text
    bytes: Count
    sha256: Digest


class ExitBody(Statement, frozen=True):
    schema: Literal["chio.exit.v1"]
    process_id: Id
    attempt: Number
    launch_id: Digest
    observer: Literal["host"]
    outcome: Text
    status: ExitStatus
    usage: ExitUsage
    output: ExitOutput
    limits_hit: list[Text]
    exports: list[ExportedFile]


class IncidentBody(Statement, frozen=True):
    schema: Literal["chio.incident.v1"]
    detail: Text
    call: Call | UnsetType = UNSET
    answer_bytes: Count | UnsetType = UNSET
    answer_sha256: Digest | UnsetType = UNSET
    server: Id | UnsetType = UNSET
    start: Number | UnsetType = UNSET


class RevocationBody(Statement, frozen=True):
    schema: Literal["chio.revocation.v1"]
    process_id: Id
    what: Literal["credentials", "capability"]
    count: Count | UnsetType = UNSET
    capability_id: Digest | UnsetType = UNSET


class CancellationBody(Statement, frozen=True):
    schema: Literal["chio.cancellation.v1"]
    process_id: Id
    by: Literal["worker", "operator"]
    processes: list[Id]


class ReconciliationBody(Statement, frozen=True):
    schema: Literal["chio.reconciliation.v1"]
    call: Call
    outcome: Outcome
    by: Text
    evidence_sha256: Digest


class TombstoneBody(Statement, frozen=True):
    schema: Literal["chio.tombstone.v1"]
    process_id: Id
    by: Text


class EpochBody(Statement, frozen=True):
    schema: Literal["chio.epoch.v1"]
    epoch: Number
    event: Literal["restored", "accepted"]
    by: Text
    size: Count
    root: Digest


BODIES: dict[str, type[Document]] = {
    "bootstrap": BootstrapBody,
    "attempt": AttemptBody,
    "launch": LaunchBody,
    "intent": IntentBody,
    "receipt": ReceiptBody,
    "exit": ExitBody,
    "incident": IncidentBody,
    "revocation": RevocationBody,
    "cancellation": CancellationBody,
    "reconciliation": ReconciliationBody,
    "tombstone": TombstoneBody,
    "epoch": EpochBody,
}
SIGNED = ("bootstrap", "launch", "receipt", "exit", "epoch")
