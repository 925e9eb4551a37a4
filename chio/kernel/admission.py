"""The admission of one call: a flat, ordered list of refusals over plain values. No I/O, no exceptions.

The order is contract section 4: process running, known key, ceilings, capability chain with revocation and expiry,
grant, constraints, `max_invocations`. A wrong frame or credential never comes this far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from chio.kernel import budgets
from chio.kernel.grants import Capability, covering


class Verdict(Enum):
    ADMITTED = "admitted"
    CANCELLED = "cancelled"  # error, no receipt
    CONFLICT = "conflict"  # error, no receipt; the original stays
    REPLAY = "replay"
    LIMIT_REACHED = "limit_reached"  # error, no receipt
    REVOKED = "revoked"
    EXPIRED = "expired"
    OUT_OF_SCOPE = "out_of_scope"
    CONSTRAINT_VIOLATED = "constraint_violated"
    INVOCATIONS_EXHAUSTED = "invocations_exhausted"


# Which check a refusal comes from: the `guard` of its receipt.
GUARD_OF: dict[Verdict, str] = {
    Verdict.REVOKED: "revocation",
    Verdict.EXPIRED: "expiry",
    Verdict.OUT_OF_SCOPE: "grant",
    Verdict.CONSTRAINT_VIOLATED: "constraints",
    Verdict.INVOCATIONS_EXHAUSTED: "invocations",
}
GUARDS = ("budget", "revocation", "expiry", "grant", "constraints", "invocations")


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the decision looks at.

    `chain` runs from the caller's capability up to root's; `budget` is (calls, ceiling) for the same processes.
    `known_binding` is the binding already kept under the key, `binding` this request's.
    `tool_exists` keeps a grant of `*` to the tools that there are. `invocations_left` answers, for the position of
    one of the caller's grants, whether its whole chain can be debited; `constraints_hold` whether the arguments
    satisfy every constraint of that grant.
    """

    running: bool
    known_binding: str | None
    binding: str
    budget: list[tuple[int, int]]
    chain: list[Capability]
    revoked: frozenset[str]
    now_ms: int
    server: str
    tool: str
    tool_exists: bool
    constraints_hold: Callable[[int], bool]
    invocations_left: Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """`grant` is the position of the grant that admits the call."""

    verdict: Verdict
    grant: int | None = None


def decide(facts: Facts) -> Decision:
    if not facts.running:
        return Decision(Verdict.CANCELLED)
    if facts.known_binding is not None:
        return Decision(Verdict.REPLAY if facts.known_binding == facts.binding else Verdict.CONFLICT)
    if budgets.exhausted(facts.budget):
        return Decision(Verdict.LIMIT_REACHED)
    if facts.revoked and any(capability.id in facts.revoked for capability in facts.chain):
        return Decision(Verdict.REVOKED)
    if any(facts.now_ms >= capability.body.expires_ms for capability in facts.chain):
        return Decision(Verdict.EXPIRED)
    caller = facts.chain[0]
    matching = covering(caller, facts.server, facts.tool) if facts.tool_exists else []
    if not matching:
        return Decision(Verdict.OUT_OF_SCOPE)
    live = [position for position in matching if facts.now_ms < caller.body.grants[position].expires_ms]
    if not live:
        return Decision(Verdict.EXPIRED)
    allowed = [position for position in live if facts.constraints_hold(position)]
    if not allowed:
        return Decision(Verdict.CONSTRAINT_VIOLATED)
    for position in allowed:
        if facts.invocations_left(position):
            return Decision(Verdict.ADMITTED, position)
    return Decision(Verdict.INVOCATIONS_EXHAUSTED)


def _checks(failed: str | None) -> tuple[dict[str, object], ...]:
    upto = GUARDS[: GUARDS.index(failed) + 1] if failed else GUARDS
    return tuple({"guard": guard, "passed": guard != failed} for guard in upto)


# The checks in order: each that passed, up to the one that refused. The `evidence` of a receipt.
EVIDENCE: dict[Verdict, tuple[dict[str, object], ...]] = {
    verdict: _checks(GUARD_OF.get(verdict)) for verdict in (Verdict.ADMITTED, *GUARD_OF)
}
