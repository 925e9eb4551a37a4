"""An agent's progress, turn by turn. Kind `chio.agent`, schema version 2.

    ready_for_turn  --begin_turn-->   turn_in_flight
    turn_in_flight  --continue_turn-> turn_in_flight   (an answer is kept before the tools that it asks for run)
    turn_in_flight  --finish_turn-->  ready_for_turn
    turn_in_flight  --complete-->     completed

Each step returns a new state; `advance` stores it. The external work of a phase runs after it is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from chio_process.checkpoints.document import (
    JsonObject,
    JsonValue,
    checked_fields,
    checked_integer,
    checked_name,
    checked_object,
    checked_value,
    encode,
    invalid,
)
from chio_process.checkpoints.effects import Effect
from chio_process.checkpoints.progress import InFlight
from chio_process.checkpoints.usage import NONE_USED, Usage


class AgentPhase(StrEnum):
    READY_FOR_TURN = "ready_for_turn"
    TURN_IN_FLIGHT = "turn_in_flight"
    COMPLETED = "completed"


_FOLLOWS = {
    AgentPhase.READY_FOR_TURN: {AgentPhase.TURN_IN_FLIGHT},
    AgentPhase.TURN_IN_FLIGHT: {AgentPhase.TURN_IN_FLIGHT, AgentPhase.READY_FOR_TURN, AgentPhase.COMPLETED},
    AgentPhase.COMPLETED: set(),
}
_MEMBERS = (
    "agent", "model", "definition_version", "phase", "turn", "transcript", "in_flight", "result", "usage",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """An agent, the model that it thinks with, and the version of its definition (from 0)."""

    KIND: ClassVar[str] = "chio.agent"
    SCHEMA_VERSION: ClassVar[int] = 2

    agent: str
    model: str
    definition_version: int

    def __post_init__(self) -> None:
        checked_name(self.agent, "agent")
        checked_name(self.model, "model")
        checked_integer(self.definition_version, "definition_version")

    def decode(self, payload: JsonObject) -> "AgentState":
        return AgentState.from_payload(payload)


@dataclass(frozen=True, slots=True)
class AgentState:
    """`turn`: how many turns are finished. `transcript`: JSON values in the application's own shape, only ever
    longer."""

    identity: AgentIdentity
    phase: AgentPhase = AgentPhase.READY_FOR_TURN
    turn: int = 0
    transcript: tuple[JsonValue, ...] = ()
    in_flight: InFlight | None = None
    result: JsonObject | None = None
    usage: Usage = NONE_USED

    def __post_init__(self) -> None:
        if type(self.phase) is not AgentPhase:
            invalid("phase is none of an agent's")
        checked_integer(self.turn, "turn")
        object.__setattr__(self, "transcript", tuple(checked_value(list(self.transcript), "transcript")))
        if self.result is not None:
            object.__setattr__(self, "result", checked_object(self.result, "result"))
        if (self.in_flight is not None) != (self.phase is AgentPhase.TURN_IN_FLIGHT):
            invalid("in_flight belongs to the phase turn_in_flight, and to no other")
        if (self.result is not None) != (self.phase is AgentPhase.COMPLETED):
            invalid("result belongs to the phase completed, and to no other")

    # --- steps ---

    def begin_turn(self, *effects: Effect) -> "AgentState":
        """Announces a turn's first external work, the model call as a rule."""
        self._must_be(AgentPhase.READY_FOR_TURN)
        return replace(self, phase=AgentPhase.TURN_IN_FLIGHT, in_flight=InFlight.begin(*effects))

    def continue_turn(self, said: Sequence[Any], used: Usage, *effects: Effect) -> "AgentState":
        """Keeps what came of the work in flight and announces what this turn does next."""
        self._must_be(AgentPhase.TURN_IN_FLIGHT)
        return replace(self._with(said, used), in_flight=InFlight.begin(*effects))

    def finish_turn(self, said: Sequence[Any], used: Usage) -> "AgentState":
        self._must_be(AgentPhase.TURN_IN_FLIGHT)
        kept = self._with(said, used)
        return replace(kept, phase=AgentPhase.READY_FOR_TURN, in_flight=None, turn=self.turn + 1)

    def complete(self, said: Sequence[Any], used: Usage, result: JsonObject) -> "AgentState":
        self._must_be(AgentPhase.TURN_IN_FLIGHT)
        kept = self._with(said, used)
        return replace(kept, phase=AgentPhase.COMPLETED, in_flight=None, turn=self.turn + 1, result=result)

    # --- what `advance` and `resume` ask ---

    @property
    def effects_in_flight(self) -> tuple[Effect, ...]:
        return self.in_flight.effects if self.in_flight else ()

    def with_usage(self, usage: Usage) -> "AgentState":
        return replace(self, usage=usage)

    def reclaimed(self) -> "AgentState":
        return replace(self, in_flight=self.in_flight.reclaimed() if self.in_flight else None)

    def check_follows(self, earlier: "AgentState") -> None:
        if self.phase not in _FOLLOWS[earlier.phase]:
            invalid(f"{self.phase} does not follow {earlier.phase}")
        finished = earlier.phase is AgentPhase.TURN_IN_FLIGHT and self.phase is not AgentPhase.TURN_IN_FLIGHT
        if self.turn != earlier.turn + finished:
            invalid(f"turn {self.turn} of {self.phase} does not follow turn {earlier.turn} of {earlier.phase}")
        if encode(self.transcript[: len(earlier.transcript)]) != encode(earlier.transcript):
            invalid("the transcript does not begin with the one that is stored")

    # --- payload ---

    def to_payload(self) -> JsonObject:
        return {
            "agent": self.identity.agent,
            "model": self.identity.model,
            "definition_version": self.identity.definition_version,
            "phase": str(self.phase),
            "turn": self.turn,
            "transcript": list(self.transcript),
            "in_flight": self.in_flight.to_document() if self.in_flight else None,
            "result": self.result,
            "usage": self.usage.to_document(),
        }

    @classmethod
    def from_payload(cls, payload: JsonObject) -> Self:
        """CheckpointError `invalid` for anything but a payload of schema version 2."""
        members = checked_fields(payload, _MEMBERS, "payload")
        if members["phase"] not in [str(phase) for phase in AgentPhase]:
            invalid("payload.phase is none of an agent's")
        if type(members["transcript"]) is not list:
            invalid("payload.transcript is not a list")
        in_flight = members["in_flight"]
        return cls(
            AgentIdentity(members["agent"], members["model"], members["definition_version"]),
            AgentPhase(members["phase"]),
            members["turn"],
            tuple(members["transcript"]),
            None if in_flight is None else InFlight.from_document(in_flight),
            members["result"],
            Usage.from_document(members["usage"]),
        )

    def _with(self, said: Sequence[Any], used: Usage) -> "AgentState":
        return replace(self, transcript=(*self.transcript, *said), usage=self.usage + used)

    def _must_be(self, phase: AgentPhase) -> None:
        if self.phase is not phase:
            invalid(f"the agent is in the phase {self.phase}, not {phase}")
