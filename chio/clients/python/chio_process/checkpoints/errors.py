"""The one exception of the package. `kind` is for programs, the message for people.

CheckpointError.kind says what happened. Unless it says otherwise, nothing was stored and nothing was run:

    the caller's   invalid              a value, a document or a step between two checkpoints that is none
                   too_large            the checkpoint is over the store's limit
                   not_found            no checkpoint has this id
    the record's   conflict             another writer's revision is the current one: load, decide again
                   foreign_run          the checkpoint belongs to another run
                   kind_mismatch        the checkpoint is of another kind
                   schema_unsupported   the payload has a schema version that this code does not read: migrate it
                   identity_mismatch    another agent, model, workflow or definition version wrote it
                   usage_decreased      the new payload counts less usage than the stored one
                   corrupt              what is stored is not a checkpoint
    recovery's     ambiguous            the reply to a save was lost and rereading does not tell: it may be stored
                   ambiguous_in_flight  external work was in flight and the policy is conservative
                   repeat_refused       external work was in flight and the policy does not name it
                   effect_conflict      the effect's key is recorded with another request
                   effect_unknown       the effect may have happened; it is not run again
                   effect_not_done      the effect provably did not happen
    migrations'    migration_missing    no registered migration leads from this version to that one
                   migration_lossy      going back would lose what the older shape cannot hold
    the store's    unavailable          the store or the kernel did not answer, or refused for its own reasons
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class CheckpointErrorKind(StrEnum):
    INVALID = "invalid"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    FOREIGN_RUN = "foreign_run"
    KIND_MISMATCH = "kind_mismatch"
    SCHEMA_UNSUPPORTED = "schema_unsupported"
    IDENTITY_MISMATCH = "identity_mismatch"
    USAGE_DECREASED = "usage_decreased"
    CORRUPT = "corrupt"
    AMBIGUOUS = "ambiguous"
    AMBIGUOUS_IN_FLIGHT = "ambiguous_in_flight"
    REPEAT_REFUSED = "repeat_refused"
    EFFECT_CONFLICT = "effect_conflict"
    EFFECT_UNKNOWN = "effect_unknown"
    EFFECT_NOT_DONE = "effect_not_done"
    MIGRATION_MISSING = "migration_missing"
    MIGRATION_LOSSY = "migration_lossy"
    UNAVAILABLE = "unavailable"


class CheckpointError(Exception):
    """`response` is the kernel's whole answer where an effect's outcome is what the error is about, else None."""

    def __init__(self, kind: CheckpointErrorKind, message: str, response: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.response = response

    def __reduce__(self) -> tuple[type["CheckpointError"], tuple[Any, ...]]:
        # Exception would hand the one joined string to __init__, so a pool's child could not raise it in its parent.
        return type(self), (self.kind, self.message, self.response)
