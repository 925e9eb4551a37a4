"""What agents and workflows have in common: progress that is announced before external work and kept after it."""

import uuid
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, TypeVar

from chio_process.checkpoints.document import JsonObject, checked_fields, checked_integer, checked_name, invalid
from chio_process.checkpoints.effects import Effect
from chio_process.checkpoints.envelope import Checkpoint
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.store import CheckpointStore
from chio_process.checkpoints.usage import Usage


@dataclass(frozen=True, slots=True)
class InFlight:
    """External work that was announced and whose results are not kept yet.

    `attempt`: from 1, one more for every explicit retry. `claim`: drawn by whoever announced or retried it, so that
    two who do so at once write two different checkpoints, of which the store takes one.
    """

    effects: tuple[Effect, ...]
    attempt: int
    claim: str

    def __post_init__(self) -> None:
        checked_integer(self.attempt, "attempt", least=1)
        checked_name(self.claim, "claim")
        if not self.effects:
            invalid("nothing is in flight: name at least one effect")
        if len({effect.key for effect in self.effects}) != len(self.effects):
            invalid("two effects in flight have one key")

    @classmethod
    def begin(cls, *effects: Effect) -> Self:
        return cls(effects, 1, uuid.uuid4().hex)

    def reclaimed(self) -> "InFlight":
        return InFlight(self.effects, self.attempt + 1, uuid.uuid4().hex)

    def to_document(self) -> JsonObject:
        effects = [effect.to_document() for effect in self.effects]
        return {"effects": effects, "attempt": self.attempt, "claim": self.claim}

    @classmethod
    def from_document(cls, document: object) -> Self:
        members = checked_fields(document, ("effects", "attempt", "claim"), "in_flight")
        if type(members["effects"]) is not list:
            invalid("in_flight.effects is not a list")
        effects = tuple(Effect.from_document(effect) for effect in members["effects"])
        return cls(effects, members["attempt"], members["claim"])


class Progress(Protocol):
    """One state of an agent, a workflow, or an application's own kind. Immutable, and with its identity in it."""

    @property
    def identity(self) -> "Identity[Self]": ...

    @property
    def usage(self) -> Usage: ...

    @property
    def effects_in_flight(self) -> tuple[Effect, ...]:
        """The external work that is announced; none in a stable or a completed state."""
        ...

    @property
    def result(self) -> JsonObject | None:
        """What it came to; None until it is completed."""
        ...

    def to_payload(self) -> JsonObject: ...

    def with_usage(self, usage: Usage) -> Self: ...

    def reclaimed(self) -> Self:
        """The same work in flight, as its next attempt."""
        ...

    def check_follows(self, earlier: Self) -> None:
        """CheckpointError `invalid` if this state does not come right after `earlier`."""
        ...


ProgressT = TypeVar("ProgressT", bound=Progress)
ProgressT_co = TypeVar("ProgressT_co", bound=Progress, covariant=True)


class Identity(Protocol[ProgressT_co]):
    """Whose progress a record is. Only an equal identity may continue it."""

    KIND: ClassVar[str]
    SCHEMA_VERSION: ClassVar[int]

    def decode(self, payload: JsonObject) -> ProgressT_co:
        """The state in a payload of SCHEMA_VERSION, whoever wrote it; CheckpointError `invalid` if there is none."""
        ...


def start(store: CheckpointStore, id: str, run_id: str, state: Progress, now: int | None = None) -> Checkpoint:
    """Creates the record of `state` at revision 0. CheckpointError `conflict` if there is one already: resume it."""
    if state.effects_in_flight or state.result is not None:
        invalid("a record starts in a stable state")
    identity = state.identity
    created = Checkpoint.initial(id, run_id, identity.KIND, identity.SCHEMA_VERSION, state.to_payload(), now)
    store.compare_and_swap(created, None)
    return created


def advance(store: CheckpointStore, checkpoint: Checkpoint, state: Progress, now: int | None = None) -> Checkpoint:
    """Stores `state` as the revision after `checkpoint`, and returns that.

    CheckpointError, beside the store's: invalid if the state does not follow the one in `checkpoint`; usage_decreased;
    and those of `read`.
    """
    earlier = read(checkpoint, state.identity)
    state.check_follows(earlier)
    if not state.usage.covers(earlier.usage):
        raise CheckpointError(
            CheckpointErrorKind.USAGE_DECREASED, f"{checkpoint.id!r} has used more than the new payload counts"
        )
    following = checkpoint.next(state.to_payload(), now)
    store.compare_and_swap(following, checkpoint.revision)
    return following


def read(checkpoint: Checkpoint, identity: Identity[ProgressT]) -> ProgressT:
    """The state in a checkpoint, if this identity wrote it. CheckpointError: kind_mismatch, schema_unsupported,
    corrupt, identity_mismatch."""
    if checkpoint.kind != identity.KIND:
        raise CheckpointError(
            CheckpointErrorKind.KIND_MISMATCH, f"{checkpoint.id!r} is of kind {checkpoint.kind}, not {identity.KIND}"
        )
    if checkpoint.schema_version != identity.SCHEMA_VERSION:
        raise CheckpointError(
            CheckpointErrorKind.SCHEMA_UNSUPPORTED,
            f"{checkpoint.id!r} has schema version {checkpoint.schema_version} of {identity.KIND}, and this code reads "
            f"version {identity.SCHEMA_VERSION}; migrate it",
        )
    try:
        state = identity.decode(checkpoint.payload)
    except CheckpointError as error:
        raise CheckpointError(CheckpointErrorKind.CORRUPT, f"the payload of {checkpoint.id!r}: {error}") from error
    if state.identity != identity:
        raise CheckpointError(
            CheckpointErrorKind.IDENTITY_MISMATCH, f"{checkpoint.id!r} is of {state.identity}, not of {identity}"
        )
    return state
