"""The checkpoint envelope: whose progress it is, at which revision, in which shape."""

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from chio_process.checkpoints.document import (
    JsonObject,
    checked_fields,
    checked_integer,
    checked_name,
    checked_object,
    encode,
    invalid,
)
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind

MAX_CHECKPOINT_BYTES = 1024 * 1024  # as encoded; the kernel's limit for a process's whole value
_KIND = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+\Z")
_MAX_KIND_BYTES = 128


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One revision of one record of progress.

    `id`, `run_id`: names of 1-256 bytes; the same for the life of the record. `revision`: from 0, by one. `kind`:
    namespaced (`acme.order`). `schema_version`: of the payload's shape, from 1. `payload`: a JSON object, copied and
    checked. `updated_at`: Unix milliseconds, never earlier than the revision before.

    Every member is checked on construction: CheckpointError `invalid`, or `too_large` over 1 MiB as encoded.
    """

    id: str
    run_id: str
    revision: int
    kind: str
    schema_version: int
    payload: JsonObject
    updated_at: int

    def __post_init__(self) -> None:
        checked_name(self.id, "id")
        checked_name(self.run_id, "run_id")
        checked_integer(self.revision, "revision")
        if type(self.kind) is not str or len(self.kind) > _MAX_KIND_BYTES or _KIND.match(self.kind) is None:
            invalid("kind is not a namespaced name such as acme.order")
        checked_integer(self.schema_version, "schema_version", least=1)
        checked_integer(self.updated_at, "updated_at")
        object.__setattr__(self, "payload", checked_object(self.payload, "payload"))
        self.encoded()

    @classmethod
    def initial(
        cls, id: str, run_id: str, kind: str, schema_version: int, payload: Mapping[str, Any], now: int | None = None
    ) -> Self:
        """Revision 0. `now` is in Unix milliseconds; the wall clock without it."""
        return cls(id, run_id, 0, kind, schema_version, dict(payload), now_ms() if now is None else now)

    def next(
        self, payload: Mapping[str, Any], now: int | None = None, *, schema_version: int | None = None
    ) -> "Checkpoint":
        """The revision after this one. A clock that went back does not take `updated_at` with it."""
        return Checkpoint(
            self.id,
            self.run_id,
            self.revision + 1,
            self.kind,
            self.schema_version if schema_version is None else schema_version,
            dict(payload),
            max(self.updated_at, now_ms() if now is None else now),
        )

    def to_document(self) -> JsonObject:
        """The wire form, and its own copy: members as the fields are named."""
        return {
            "id": self.id,
            "run_id": self.run_id,
            "revision": self.revision,
            "kind": self.kind,
            "schema_version": self.schema_version,
            "payload": checked_object(self.payload, "payload"),
            "updated_at": self.updated_at,
        }

    @classmethod
    def from_document(cls, document: object) -> Self:
        """Every member, no other, each of its type; else CheckpointError `invalid` or `too_large`."""
        return cls(**checked_fields(document, tuple(field.name for field in fields(cls)), "checkpoint"))

    def encoded(self) -> str:
        """The one text of this revision: equal texts are equal checkpoints. CheckpointError `too_large`."""
        text = encode(self.to_document())
        size = len(text.encode("utf-8"))
        if size > MAX_CHECKPOINT_BYTES:
            raise CheckpointError(
                CheckpointErrorKind.TOO_LARGE,
                f"the checkpoint has {size} bytes, at most {MAX_CHECKPOINT_BYTES}; keep large values in blobs",
            )
        return text


def new_checkpoint_id() -> str:
    """A random id, to be kept where a restart finds it. An id taken from the task itself needs no keeping."""
    return str(uuid.uuid4())


def now_ms() -> int:
    return time.time_ns() // 1_000_000
