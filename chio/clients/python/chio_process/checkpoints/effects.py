"""External work: what is announced before it is done, and the records that keep it from being done twice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Protocol, Self

from chio_process.checkpoints.document import (
    JsonObject,
    JsonValue,
    checked_fields,
    checked_name,
    checked_object,
    checked_value,
    decode,
    digest,
    encode,
    invalid,
)
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.sqlite import SqliteFile
from chio_process.errors import WorkerError


class Work(StrEnum):
    """What kind of external work an effect is; a retry policy names these."""

    MODEL = "model"
    TOOL = "tool"
    DELEGATION = "delegation"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Effect:
    """One piece of external work.

    `key`: stable, from the task itself, never from a time or an attempt; the same whenever this same work is tried
    again. `name`: of the model, tool, agent or step. `request`: all that the work depends on; with the key it decides
    whether a recorded result is this work's.
    """

    key: str
    work: Work
    name: str
    request: JsonObject

    def __post_init__(self) -> None:
        checked_name(self.key, "effect key")
        if type(self.work) is not Work:
            invalid("effect work is not one of model, tool, delegation, step")
        checked_name(self.name, "effect name")
        object.__setattr__(self, "request", checked_object(self.request, "effect request"))

    @property
    def digest(self) -> str:
        """SHA-256, lower-case hex, of work, name and request."""
        return digest([self.work, self.name, self.request])

    def to_document(self) -> JsonObject:
        return {"key": self.key, "work": str(self.work), "name": self.name, "request": self.request}

    @classmethod
    def from_document(cls, document: object) -> Self:
        members = checked_fields(document, ("key", "work", "name", "request"), "effect")
        if members["work"] not in [str(work) for work in Work]:
            invalid("effect work is not one of model, tool, delegation, step")
        return cls(members["key"], Work(members["work"]), members["name"], members["request"])


class Standing(Enum):
    """What an effect store can say of an effect without doing anything."""

    ABSENT = "absent"  # nothing is recorded: it did not start, or it was not started through this store
    STARTED = "started"  # it may have happened
    COMPLETED = "completed"  # its result is recorded; performing it replays that
    FENCED = "fenced"  # whatever became of it, performing it cannot do it twice


class EffectStore(Protocol):
    def standing(self, effect: Effect) -> Standing:
        """CheckpointError: effect_conflict if the key is recorded with another request; unavailable."""
        ...

    def perform(self, effect: Effect, *, repeat: bool = False) -> JsonValue:
        """The recorded result, or that of doing it now. `repeat` allows to do again what was started before.

        CheckpointError: effect_conflict; effect_unknown if it was started, has no result and may not be repeated;
        effect_not_done; unavailable. An error of the work itself passes through and leaves the effect started.
        """
        ...


Perform = Callable[[Effect], Any]


class SqliteEffects(SqliteFile):
    """An `EffectStore` in a SQLite file; it may be the file of a `SqliteStore`.

    `perform` commits the start of an effect before `run` is called, and its result after. Two programs that perform
    one effect at the same time are not told apart from one that crashed: the second is refused, or repeats if it may.
    """

    def __init__(self, path: str, run: Perform, *, create: bool = True) -> None:
        """`run` does the work and returns a JSON value."""
        super().__init__(path, create=create)
        self._run = run

    def standing(self, effect: Effect) -> Standing:
        rows = self.rows("SELECT digest, state, result FROM effect WHERE key = ?", effect.key)
        return _standing(effect, rows)

    def perform(self, effect: Effect, *, repeat: bool = False) -> JsonValue:
        with self.transaction() as database:
            rows = database.execute("SELECT digest, state, result FROM effect WHERE key = ?", (effect.key,)).fetchall()
            match _standing(effect, rows):
                case Standing.COMPLETED:
                    return decode(rows[0][2])
                case Standing.STARTED if not repeat:
                    raise CheckpointError(
                        CheckpointErrorKind.EFFECT_UNKNOWN, f"{effect.key!r} was started and has no recorded result"
                    )
            database.execute(
                "INSERT INTO effect VALUES (?, ?, 'started', 1, NULL)"
                " ON CONFLICT (key) DO UPDATE SET attempt = attempt + 1",
                (effect.key, effect.digest),
            )
        result = checked_value(self._run(effect), "effect result")
        with self.transaction() as database:
            # Of two that repeated it at once, the first result stands, for whoever asks from now on.
            database.execute(
                "UPDATE effect SET state = 'completed', result = ? WHERE key = ? AND state = 'started'",
                (encode(result), effect.key),
            )
            ((kept,),) = database.execute("SELECT result FROM effect WHERE key = ?", (effect.key,)).fetchall()
        return decode(kept)


def _standing(effect: Effect, rows: list[tuple[Any, ...]]) -> Standing:
    if not rows:
        return Standing.ABSENT
    ((recorded, state, _),) = rows
    if recorded != effect.digest:
        raise CheckpointError(CheckpointErrorKind.EFFECT_CONFLICT, f"{effect.key!r} is recorded with another request")
    return Standing(state)


class InvokeClient(Protocol):
    """What is needed of a `chio_process.ProcessClient`."""

    def invoke(
        self, key: str, server: str, tool: str, arguments: Mapping[str, Any], *, known_outcome_only: bool = False
    ) -> dict[str, Any]: ...


class KernelEffects:
    """An `EffectStore` for tools that the Chio kernel calls: it keeps each operation key's first outcome.

    An effect's key is its operation key, its request {"server", "tool", "arguments"}. Calls are sent as
    `known_outcome_only`, so that the kernel never does one twice, whatever a policy allows.
    """

    def __init__(self, client: InvokeClient) -> None:
        self._client = client

    def standing(self, effect: Effect) -> Standing:
        checked_fields(effect.request, ("server", "tool", "arguments"), "effect request")
        return Standing.FENCED

    def perform(self, effect: Effect, *, repeat: bool = False) -> JsonValue:
        """The result of `ProcessClient.invoke`, a refusal included, original or replayed.

        CheckpointError: effect_unknown with the kernel's answer as `response` (its `reconciliation` is the operator's
        statement, if there is one); effect_not_done if the kernel proves that it was not dispatched, after which
        performing it again is a first time; effect_conflict; ambiguous if no reply came: perform it again.
        """
        request = checked_fields(effect.request, ("server", "tool", "arguments"), "effect request")
        try:
            response = self._client.invoke(
                effect.key, request["server"], request["tool"], request["arguments"], known_outcome_only=True
            )
        except WorkerError as error:
            raise CheckpointError(_INVOKE_KINDS.get(error.code, CheckpointErrorKind.UNAVAILABLE), str(error)) from error
        terminal = response["terminal_state"]
        if terminal["state"] == "completed":
            return response
        if terminal.get("reason") == "not_dispatched":
            raise CheckpointError(CheckpointErrorKind.EFFECT_NOT_DONE, f"{effect.key!r} was not dispatched", response)
        raise CheckpointError(
            CheckpointErrorKind.EFFECT_UNKNOWN, f"the kernel does not know the outcome of {effect.key!r}", response
        )


_INVOKE_KINDS = {
    "conflict": CheckpointErrorKind.EFFECT_CONFLICT,
    "invalid_request": CheckpointErrorKind.INVALID,
    "request_too_large": CheckpointErrorKind.TOO_LARGE,
    "transport_error": CheckpointErrorKind.AMBIGUOUS,
    "truncated_response": CheckpointErrorKind.AMBIGUOUS,
    "invalid_response": CheckpointErrorKind.AMBIGUOUS,
    "response_too_large": CheckpointErrorKind.AMBIGUOUS,
    "runtime_error": CheckpointErrorKind.AMBIGUOUS,
}


class EffectsByWork:
    """An `EffectStore` of several, one for each kind of work: tools by the kernel, say, the rest in a file."""

    def __init__(self, stores: Mapping[Work, EffectStore]) -> None:
        self._stores = dict(stores)

    def standing(self, effect: Effect) -> Standing:
        return self._store(effect).standing(effect)

    def perform(self, effect: Effect, *, repeat: bool = False) -> JsonValue:
        return self._store(effect).perform(effect, repeat=repeat)

    def _store(self, effect: Effect) -> EffectStore:
        if effect.work not in self._stores:
            invalid(f"no effect store is given for {effect.work} work")
        return self._stores[effect.work]
