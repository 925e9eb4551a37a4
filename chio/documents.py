"""The documents that are written, as types: what is signed, what commands print, what a worker is given.

`docs/formats.md` says what each member means. The types are published as JSON Schemas by `chio schema`; a document of
a type of `chio.schema` is one that is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from chio.schema import Document, Id

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Salt = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Signature = Annotated[str, Meta(pattern="^[0-9a-f]{128}$")]
RuntimeId = Annotated[str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
RequestId = Annotated[str, Meta(pattern="^process:[0-9a-f]{64}$")]
Revision = Annotated[str, Meta(pattern="^[0-9]+$")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0)]
Number = Annotated[int, Meta(ge=1)]
Dispatch = Annotated[int, Meta(ge=1, le=3)]
Outcome = Literal["applied", "not_applied"]


# --- keys and who may do what ------------------------------------------------------------------------------------


class Pins(Document, frozen=True):
    schema: Literal["chio.pins.v1"]
    runtime_id: RuntimeId
    kernel_key: Digest
    log_key: Digest
    authority_key: Digest
    config_digest: Digest
    policy_digest: Digest


class Storage(Document, frozen=True):
    filesystem: str
    journal_mode: Literal["wal"]
    synchronous: Literal["full"]
    volatile: bool


class BootstrapProcess(Document, frozen=True):
    process_id: Id
    parent_id: Id | None
    capability_id: Digest
    ceiling: Number


class BootstrapTool(Document, frozen=True):
    name: str
    read_only: bool


class BootstrapServer(Document, frozen=True):
    server_id: Id
    tools_digest: Digest
    tools: list[BootstrapTool]


class BootstrapBody(Document, frozen=True):
    schema: Literal["chio.bootstrap.v1"]
    runtime_id: RuntimeId
    created_ms: Count
    time_ms: Count
    kernel_key: Digest
    log_key: Digest
    authority_key: Digest
    log_origin: Text
    config_digest: Digest
    policy_digest: Digest
    storage: Storage
    processes: list[BootstrapProcess]
    servers: list[BootstrapServer]


class Bootstrap(Document, frozen=True):
    body: BootstrapBody
    signature: Signature


class Grant(Document, frozen=True):
    server: Name
    tool: Name
    operations: list[Literal["invoke", "delegate"]]
    expires_ms: Count
    max_invocations: Number | None
    constraints: list[dict[str, Any]]
    parent_grant: Count | None


class CapabilityBody(Document, frozen=True):
    schema: Literal["chio.capability.v1"]
    runtime_id: RuntimeId
    process_id: Id
    parent_capability_id: Digest | None
    depth: Count
    issued_ms: Count
    expires_ms: Count
    budget_share_bps: Annotated[int, Meta(ge=1, le=10_000)]
    grants: list[Grant]


class Capability(Document, frozen=True):
    body: CapabilityBody
    signature: Signature


# --- a call ------------------------------------------------------------------------------------------------------


class Call(Document, frozen=True):
    process_id: Id
    operation_key: Name
    request_id: RequestId
    binding: Digest
    dispatch: Dispatch
    recovery_policy: Literal["default", "known_outcome_only"]


class Attempt(Document, frozen=True):
    number: Number
    launch_id: Digest | None


class Action(Document, frozen=True):
    parameter_hash: Digest


class Decision(Document, frozen=True):
    verdict: Literal["allow", "deny", "incomplete"]
    reason: Text | UnsetType = UNSET
    guard: Text | UnsetType = UNSET


class TerminalState(Document, frozen=True):
    state: Literal["completed", "incomplete"]
    reason: Text | UnsetType = UNSET


class OutputCommitment(Document, frozen=True):
    kind: Literal["value", "text", "withheld"]
    hash: Digest


class Evidence(Document, frozen=True):
    guard: Text
    passed: bool
    detail: Text | UnsetType = UNSET


class ReceiptBody(Document, frozen=True):
    schema: Literal["chio.receipt.v1"]
    runtime_id: RuntimeId
    log_index: Count
    time_ms: Count
    capability_id: Digest
    tool_server: Name
    tool_name: Name
    action: Action
    decision: Decision
    terminal_state: TerminalState
    output: OutputCommitment | None
    policy_hash: Digest
    call: Call
    attempt: Attempt | None
    evidence: list[Evidence]
    kernel_key: Digest


class Disclosed(Document, frozen=True):
    parameters: Any = UNSET
    parameter_salt: Salt | UnsetType = UNSET
    output_salt: Salt | UnsetType | None = UNSET


class Receipt(Document, frozen=True):
    body: ReceiptBody
    disclosed: Disclosed
    signature: Signature


class Reconciled(Document, frozen=True):
    outcome: Outcome
    by: Text
    record: Count


class Response(Document, frozen=True):
    """The result of an `invoke`."""

    request_id: RequestId
    verdict: Literal["allow", "deny"]
    output: dict[str, Any] | None
    reason: Text | None
    terminal_state: TerminalState
    receipt_json: Text
    execution_nonce_json: None
    reconciliation: Reconciled | UnsetType = UNSET


class ObservedOperation(Document, frozen=True):
    state: Literal["completed", "unknown", "compensated", "reconciled"]


class ObservedLeaf(Document, frozen=True):
    index: Count
    leaf_json: Text
    proof: list[Digest]


CustodyBinding = Literal[
    "original_call_commitment_and_signed_store_readback", "signed_store_readback", "no_custody_claim"
]


class ObservationBody(Document, frozen=True):
    schema: Literal["chio.process.call-observation.v2"]
    runtime_id: RuntimeId
    time_ms: Count
    kernel_key: Digest
    bootstrap_json: Text
    request_sha256: Digest
    context_sha256: Digest
    call: Call
    parameter_salt: Salt
    response_json: Text | None
    capabilities_json: list[Text]
    operation: ObservedOperation | None
    custody_binding: CustodyBinding
    leaves: list[ObservedLeaf]
    checkpoint: Text


class Observation(Document, frozen=True):
    body: ObservationBody
    signature: Signature


# --- what commands print, and what a worker is given --------------------------------------------------------------


class RunReportWorker(Document, frozen=True):
    process: Id
    state: Literal["pending", "running", "completed", "failed"]
    attempts: Count
    suspensions: Literal[0]
    outcome: Text | None
    peak_resident_bytes: Count | None
    cpu_ms: Count | None
    confined: bool
    launch_id: Digest | None


class RunReport(Document, frozen=True):
    schema: Literal["chio.process.run-report.v1"]
    complete: bool
    pending_container_records: Count
    abandoned_socket_intents: Count
    workers: list[RunReportWorker]


class AttemptLog(Document, frozen=True):
    schema: Literal["chio.process.logs.v1"]
    process: Id
    attempt: Number
    state: Literal["reserved", "running", "ended"]
    outcome: Text | None
    stdout: str | None
    stderr: str | None
    stdout_bytes: Count | None
    stderr_bytes: Count | None


class ServerLog(Document, frozen=True):
    schema: Literal["chio.process.server-log.v1"]
    server: Id
    start: Number
    outcome: Text | None
    stderr: str | None
    stderr_bytes: Count | None


class StatusAttempt(Document, frozen=True):
    number: Number
    state: Literal["reserved", "running", "ended"]
    confined: bool
    launch_id: Digest | None
    outcome: Text | None
    peak_resident_bytes: Count | None
    cpu_ms: Count | None


class StatusProcess(Document, frozen=True):
    process_id: Id
    parent_id: Id | None
    depth: Count
    state: Literal["running", "cancelled"]
    ceiling: Number
    calls: Count
    capability_id: Digest
    checkpoint_revision: Revision
    checkpoint_bytes: Count
    checkpoint_saved_ms: Count | None
    tombstone: Count | None
    counters: dict[str, Count]
    attempts: list[StatusAttempt]


class StatusMailbox(Document, frozen=True):
    id: Id
    last_sequence: Count
    acknowledged_through: Count
    pending_messages: Count
    pending_bytes: Count


class StatusServer(Document, frozen=True):
    server: Id
    number: Number
    outcome: Text
    stderr_bytes: Count | None


class StatusLog(Document, frozen=True):
    size: Number
    checkpoint: Text


class Status(Document, frozen=True):
    schema: Literal["chio.process.status.v1"]
    runtime_id: RuntimeId
    created_ms: Count
    initialized: bool
    live: bool
    planned: bool
    encrypted: bool
    epoch: Count
    replay_only: bool
    processes: list[StatusProcess]
    mailboxes: list[StatusMailbox]
    servers: list[StatusServer]
    calls: dict[str, Count]
    log: StatusLog


class LogExport(Document, frozen=True):
    schema: Literal["chio.log.export.v1"]
    file: str
    leaves: Count
    checkpoint: Text


class CheckpointState(Document, frozen=True):
    revision: Revision
    value: Any


class BlobState(Document, frozen=True):
    sha256: Digest
    bytes: Count
    data_base64: str


class ApplicationData(Document, frozen=True):
    checkpoint: CheckpointState | UnsetType = UNSET
    blob: BlobState | UnsetType = UNSET


class ApplicationState(Document, frozen=True):
    schema: Literal["chio.process.application-state.v1"]
    process: Id
    data: ApplicationData


class CallAttestation(Document, frozen=True):
    schema: Literal["chio.process.call-attestation.v1"]
    file: str
    runtime_id: RuntimeId
    request_id: RequestId
    observed_operation_state: str | None
    custody_binding: CustodyBinding


class ReceiptSignatures(Document, frozen=True):
    schema: Literal["chio.receipt.signatures.v1"]
    receipts_verified: Number
    trusted_kernel_key: Digest
    checks: list[Literal["signature", "signer_pin", "action_parameter_hash"]]


class ReceiptExport(Document, frozen=True):
    schema: Literal["chio.receipt.export.v1"]
    receipts: Count
    file: str


class FailedCheck(Document, frozen=True):
    check: Text
    why: Text


class CallVerification(Document, frozen=True):
    schema: Literal["chio.process.call-verification.v1"]
    runtime_id: RuntimeId
    process_id: Id
    request_id: RequestId
    observed_operation_state: str | None
    custody_binding: CustodyBinding
    artifact_schema: Literal["chio.process.call-observation.v2"]
    checks: list[Text]
    unchecked: list[Text]
    failed: list[FailedCheck] | UnsetType = UNSET


class ResponseVerification(Document, frozen=True):
    schema: Literal["chio.process.response-verification.v1"]
    response_bound: bool
    runtime_id: RuntimeId
    process_id: Id
    request_id: RequestId
    receipt_id: Digest | None
    checks: list[Text]
    unchecked: list[Text]
    failed: list[FailedCheck] | UnsetType = UNSET


class VerdictCheck(Document, frozen=True):
    name: Text
    state: Literal["passed", "failed", "unchecked"]
    reason: Text | UnsetType = UNSET
    file: Text | UnsetType = UNSET
    place: Text | UnsetType = UNSET
    required: bool | UnsetType = UNSET


class VerdictCondition(Document, frozen=True):
    name: Text
    holds: bool
    reason: str


class Verdict(Document, frozen=True):
    schema: Literal["chio.verdict.v1"]
    subject: Text
    result: Literal["verified", "refused", "incomplete"]
    proved: list[Text]
    checks: list[VerdictCheck]
    observed: list[VerdictCondition]
    figures: dict[str, Any]


class Tool(Document, frozen=True):
    server_id: Name
    tool_name: Name


class Connection(Document, frozen=True):
    protocol: Literal["chio.process.v1"]
    process_id: Id
    socket_path: Text
    credential: Digest
    kernel_key: Digest
    runtime_id: RuntimeId
    capability_id: Digest
    tools: list[Tool]


class WorkerBootstrap(Document, frozen=True):
    schema: Literal["chio.process.worker-bootstrap.v1"]
    connection: Connection
    attempt: Number
    input: Any


# --- what is kept ------------------------------------------------------------------------------------------------


class SnapshotIndex(Document, frozen=True):
    bytes: Annotated[int, Meta(ge=1, le=256 * 1024)]
    sha256: Digest
    blobs: Annotated[list[Digest], Meta(min_length=1, max_length=64)]


class JsonSnapshot(Document, frozen=True):
    """The reference of a document in blobs. `bytes` and `sha256` are of its canonical text."""

    schema: Literal["chio.process.json-snapshot.v1"]
    bytes: Annotated[int, Meta(ge=1, le=8 * 1024 * 1024)]
    sha256: Digest
    index: SnapshotIndex


class CheckpointEnvelope(Document, frozen=True):
    """`docs/checkpoints.md`: one revision of one record of progress."""

    id: Name
    run_id: Name
    revision: Count
    kind: Annotated[str, Meta(max_length=128, pattern=r"\A[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+\Z")]
    schema_version: Number
    payload: dict[str, Any]
    updated_at: Count


class ResolvedTmpfs(Document, frozen=True):
    tmp_bytes: Count
    shm_bytes: Count
    inodes: Count


class ResolvedLimits(Document, frozen=True):
    open_files: Count
    file_bytes: Count
    scratch_bytes: Count
    output_bytes: Count
    memory_bytes: Count
    pids: Count
    cpu_seconds: Count
    cpu_quota_percent: Count


class ResolvedSeccomp(Document, frozen=True):
    list: Text
    text_sha256: Digest


class ResolvedProfile(Document, frozen=True):
    """What holds of a confinement profile after `extends`. `profile_sha256` is of its text, as it was written."""

    schema: Literal["chio.resolved-profile.v1"]
    name: Text
    profile_sha256: Digest
    hostname: Text
    environment: dict[str, str]
    tmpfs: ResolvedTmpfs
    limits: ResolvedLimits
    network: Literal["none", "loopback"]
    seccomp: ResolvedSeccomp
    landlock: Literal["required", "best-effort"]
    cgroup: Literal["required", "best-effort"]
