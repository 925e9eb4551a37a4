"""The life of a call: one enum of states and one transition table, used by the normal path and by recovery alike.

The table is contract section 4. A transition names the leaves that its commit appends and what it counts; the code
that performs one (`chio.kernel.process`) looks it up here, so that no path can invent a move of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, Flag

MAX_DISPATCHES = 3


class State(Enum):
    REFUSED = "refused"
    COMPLETED = "completed"
    DISPATCHED = "dispatched"
    COMPENSATED = "compensated"
    UNKNOWN = "unknown"
    RECONCILED = "reconciled"


class Event(Enum):
    REFUSED = "a check or a built-in tool refused it"
    BUILT_IN_RAN = "a built-in tool ran"
    ADMITTED = "an external tool's call was admitted"
    ANSWERED = "the server's answer was read"
    NOT_SENT = "provably no byte reached the server"
    LOST = "deadline, server death, or an answer that cannot be read"
    FOUND_AT_START = "found dispatched at start"
    REPEATED = "repeated with the same binding"
    REPEATED_READ = "an eligible read was repeated with the same binding"
    REPEAT_REFUSED = "a repeat was refused by a check"
    RECONCILED = "the operator stated the outcome"
    LATE_ANSWER = "an answer came after the outcome was given up"


class Counts(Flag):
    NOTHING = 0
    CALL = 1  # one of max_calls and of every share on the way to root
    GRANTS = 2  # one of max_invocations along the capability chain
    REFUND = 4  # gives GRANTS back


@dataclass(frozen=True, slots=True)
class Transition:
    """Where an event leads. `leaves` are appended in this order, in the commit that moves the row."""

    to: State
    leaves: tuple[str, ...]
    counts: Counts = Counts.NOTHING


TRANSITIONS: dict[tuple[State | None, Event], Transition] = {
    (None, Event.REFUSED): Transition(State.REFUSED, ("receipt",), Counts.CALL),
    (None, Event.BUILT_IN_RAN): Transition(State.COMPLETED, ("receipt",), Counts.CALL | Counts.GRANTS),
    (None, Event.ADMITTED): Transition(State.DISPATCHED, ("intent",), Counts.CALL | Counts.GRANTS),
    (State.DISPATCHED, Event.ANSWERED): Transition(State.COMPLETED, ("receipt",)),
    (State.DISPATCHED, Event.NOT_SENT): Transition(State.COMPENSATED, ("receipt",), Counts.REFUND),
    (State.DISPATCHED, Event.LOST): Transition(State.UNKNOWN, ("receipt", "incident")),
    (State.DISPATCHED, Event.FOUND_AT_START): Transition(State.UNKNOWN, ("receipt", "incident")),
    (State.COMPENSATED, Event.REPEATED): Transition(State.DISPATCHED, ("intent",), Counts.GRANTS),
    (State.UNKNOWN, Event.REPEATED_READ): Transition(State.DISPATCHED, ("intent",)),
    (State.COMPENSATED, Event.REPEAT_REFUSED): Transition(State.COMPENSATED, ()),
    (State.UNKNOWN, Event.REPEAT_REFUSED): Transition(State.UNKNOWN, ()),
    (State.UNKNOWN, Event.RECONCILED): Transition(State.RECONCILED, ("reconciliation",)),
    (State.UNKNOWN, Event.LATE_ANSWER): Transition(State.UNKNOWN, ("incident",)),
    (State.RECONCILED, Event.LATE_ANSWER): Transition(State.RECONCILED, ("incident",)),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a state is told to the worker and signed: contract section 4, the second table."""

    verdict: str
    terminal_state: str
    terminal_reason: str | None
    decision: str


OUTCOMES: dict[State, Outcome] = {
    State.COMPLETED: Outcome("allow", "completed", None, "allow"),
    State.REFUSED: Outcome("deny", "completed", None, "deny"),
    State.UNKNOWN: Outcome("deny", "incomplete", "outcome_unknown_after_dispatch", "incomplete"),
    State.COMPENSATED: Outcome("deny", "incomplete", "not_dispatched", "incomplete"),
    State.RECONCILED: Outcome("deny", "incomplete", "outcome_unknown_after_dispatch", "incomplete"),
}


class IllegalTransition(AssertionError):
    """An event that the table has no row for: a defect of ours, never a state to repair silently."""


def transition(state: State | None, event: Event) -> Transition:
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise IllegalTransition(f"{event.name} in state {state.name if state else 'new'}")
    return found
