"""What a restart does with the record that it finds.

stored state   conservative          retry(...)
completed      the recorded result   the recorded result; nothing runs
stable         continues             continues
in flight      ambiguous_in_flight   each announced effect: a recorded result is replayed; one that cannot happen
                                     twice is performed; another is performed if the policy names it; else
                                     repeat_refused, and nothing of the record changes
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeAlias, runtime_checkable

from chio_process.checkpoints.document import JsonObject, JsonValue, invalid
from chio_process.checkpoints.effects import Effect, EffectStore, Standing, Work
from chio_process.checkpoints.envelope import Checkpoint, now_ms
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.progress import Identity, ProgressT, read
from chio_process.checkpoints.store import CheckpointStore
from chio_process.checkpoints.usage import Usage

Repeatable: TypeAlias = bool | Collection[str]
Observe: TypeAlias = Callable[..., object]


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """What may be done again when it is not known whether it was done. Make one with the two class methods."""

    explicit: bool
    repeat: frozenset[tuple[Work, str | None]]  # work and name; None stands for every name

    @classmethod
    def conservative(cls) -> Self:
        """In flight is refused, and somebody has to decide."""
        return cls(False, frozenset())

    @classmethod
    def retry(
        cls,
        *,
        model: Repeatable = False,
        tools: Repeatable = False,
        delegation: Repeatable = False,
        steps: Repeatable = False,
    ) -> Self:
        """In flight is resolved. Each argument says what of its kind may happen twice: all of it, or what is named."""
        allowed: set[tuple[Work, str | None]] = set()
        for work, names in zip(Work, (model, tools, delegation, steps), strict=True):
            if isinstance(names, str):
                invalid(f"what may be repeated of {work} work is a collection of names, not one string")
            if isinstance(names, bool):
                allowed.update({(work, None)} if names else ())
            else:
                allowed.update((work, name) for name in names)
        return cls(True, frozenset(allowed))

    def repeats(self, effect: Effect) -> bool:
        return (effect.work, None) in self.repeat or (effect.work, effect.name) in self.repeat


@dataclass(frozen=True, slots=True)
class PlannedEffect:
    """One effect that was in flight. `replays`: its result is recorded. `may_repeat`: the policy names it."""

    effect: Effect
    replays: bool
    may_repeat: bool
    effects: EffectStore

    def outcome(self) -> JsonValue:
        """Its recorded result, or that of performing it now. CheckpointError as `EffectStore.perform`."""
        return self.effects.perform(self.effect, repeat=self.may_repeat)


@dataclass(frozen=True, slots=True)
class Completed(Generic[ProgressT]):
    checkpoint: Checkpoint
    state: ProgressT
    result: JsonObject


@dataclass(frozen=True, slots=True)
class Continued(Generic[ProgressT]):
    """Stable: begin the next step from here."""

    checkpoint: Checkpoint
    state: ProgressT


@dataclass(frozen=True, slots=True)
class Retried(Generic[ProgressT]):
    """In flight, and claimed by this resume: `checkpoint` is a revision that it stored. Take each effect's outcome,
    then go on as after the first time."""

    checkpoint: Checkpoint
    state: ProgressT
    effects: tuple[PlannedEffect, ...]


Resumed: TypeAlias = Completed[ProgressT] | Continued[ProgressT] | Retried[ProgressT]


@runtime_checkable
class NotingStore(Protocol):
    """A store that counts events of recovery."""

    def note(self, event: str, **fields: int) -> None: ...


def resume(
    store: CheckpointStore,
    id: str,
    run_id: str,
    identity: Identity[ProgressT],
    policy: ResumePolicy,
    effects: EffectStore | None = None,
    *,
    usage: Usage | None = None,
    observe: Observe | None = None,
    now: int | None = None,
) -> Resumed[ProgressT]:
    """Loads the record and says where to go on, running nothing.

    An explicit policy needs `effects`, the store that the work was performed through. `usage` is what the caller knows
    to have been used; of it and the stored usage the larger counts. `observe(event, age_ms=...)` is told `resumed`,
    `ambiguous_resume` and `schema_refused`; without it a store that has `note` is.

    CheckpointError, beside the store's: foreign_run, kind_mismatch, schema_unsupported, corrupt, identity_mismatch,
    ambiguous_in_flight, repeat_refused, effect_conflict: the stored bytes are what they were. conflict if somebody
    else resumed the record at the same time.
    """
    told = observe or (store.note if isinstance(store, NotingStore) else _unobserved)
    now = now_ms() if now is None else now
    checkpoint = store.load(id)
    age_ms = max(0, now - checkpoint.updated_at)
    if checkpoint.run_id != run_id:
        raise CheckpointError(CheckpointErrorKind.FOREIGN_RUN, f"{id!r} belongs to run {checkpoint.run_id!r}")
    try:
        state = read(checkpoint, identity)
    except CheckpointError as error:
        if error.kind is CheckpointErrorKind.SCHEMA_UNSUPPORTED:
            told("schema_refused", age_ms=age_ms)
        raise
    if usage is not None:
        state = state.with_usage(state.usage.merged(usage))
    if state.result is not None:
        told("resumed", age_ms=age_ms)
        return Completed(checkpoint, state, state.result)
    if not state.effects_in_flight:
        told("resumed", age_ms=age_ms)
        return Continued(checkpoint, state)
    told("ambiguous_resume", age_ms=age_ms)
    planned = _plan(checkpoint, state.effects_in_flight, policy, effects)
    # The claim: of two that resume the same revision, one goes on.
    state = state.reclaimed()
    claimed = checkpoint.next(state.to_payload(), now)
    store.compare_and_swap(claimed, checkpoint.revision)
    told("resumed", age_ms=age_ms)
    return Retried(claimed, state, planned)


def _plan(
    checkpoint: Checkpoint, in_flight: tuple[Effect, ...], policy: ResumePolicy, effects: EffectStore | None
) -> tuple[PlannedEffect, ...]:
    if not policy.explicit:
        raise CheckpointError(
            CheckpointErrorKind.AMBIGUOUS_IN_FLIGHT,
            f"{checkpoint.id!r} has {len(in_flight)} effect(s) in flight at revision {checkpoint.revision}; "
            "find out what happened, or resume with a policy that says what may be repeated",
        )
    if effects is None:
        invalid("an explicit retry needs the effect store that the work was performed through")
    planned = []
    for effect in in_flight:
        standing = effects.standing(effect)
        if standing not in (Standing.COMPLETED, Standing.FENCED) and not policy.repeats(effect):
            raise CheckpointError(
                CheckpointErrorKind.REPEAT_REFUSED,
                f"{effect.key!r} has no recorded result, and the policy does not name {effect.work} {effect.name!r}",
            )
        planned.append(PlannedEffect(effect, standing is Standing.COMPLETED, policy.repeats(effect), effects))
    return tuple(planned)


def _unobserved(event: str, **fields: int) -> None:
    """Nobody wants to know."""
