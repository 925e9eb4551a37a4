"""What commands print of what they did, as types: one for each command, most without a `schema` member of their own.

`docs/formats.md`, "Documents that commands print", says what each member means. Files are named as they were given.
"""

from __future__ import annotations

from typing import Literal

from chio.documents import Call, Count, Digest, Number, Outcome, RuntimeId, Text
from chio.schema import Document, Id


class Initialized(Document, frozen=True):
    initialized: Literal[True]
    processes: Number
    kernel_key: Digest
    runtime_id: RuntimeId


class Ready(Document, frozen=True):
    """The one line of `chio process serve`."""

    ready: Literal[True]
    protocol: Literal["chio.process.v1"]
    socket_path: Text
    kernel_key: Digest


class KeyFile(Document, frozen=True):
    key_file: str


class Credential(Document, frozen=True):
    process: Id
    connection: str
    socket_path: Text


class Revoked(Document, frozen=True):
    process: Id
    revoked_credentials: Count


class CapabilityRevoked(Document, frozen=True):
    process: Id
    capability_id: Digest


class Cancelled(Document, frozen=True):
    process: Id
    cancelled_processes: Count


class Deleted(Document, frozen=True):
    process: Id
    tombstone: Count


class BackedUp(Document, frozen=True):
    backup: str
    runtime_id: RuntimeId
    size: Number
    root: Digest
    signing_key: bool


class Restored(Document, frozen=True):
    restored: Literal[True]
    runtime_id: RuntimeId
    epoch: Number
    size: Number
    replay_only: Literal[True]


class Accepted(Document, frozen=True):
    accepted: Literal[True]
    epoch: Number


class ReconciledCall(Document, frozen=True):
    process: Id
    operation_key: Text
    log_index: Count
    call: Call
    outcome: Outcome
    by: Text
    evidence_sha256: Digest


class EvidenceWritten(Document, frozen=True):
    schema: Literal["chio.process.evidence.v1"]
    file: str
    runtime_id: RuntimeId
    leaves: Number
    bytes: Number
    withheld: list[str]
    sections: dict[str, Count]
