"""The write-ahead phases of agents and workflows: which state follows which, and what a payload must be."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chio_process.checkpoints import (
    AgentIdentity,
    AgentPhase,
    AgentState,
    Branch,
    CheckpointError,
    CheckpointStore,
    Effect,
    InFlight,
    SqliteStore,
    Usage,
    Work,
    WorkflowIdentity,
    WorkflowState,
    advance,
    start,
)

AGENT = AgentIdentity("researcher", "model-1", 3)
WORKFLOW = WorkflowIdentity("publish", 7)
ASK = Effect("turn-0", Work.MODEL, "model-1", {"prompt": "p"})
READ = Effect("read-0", Work.TOOL, "read", {"path": "notes.txt"})
FETCH = Effect("fetch", Work.STEP, "fetch", {})
USED = Usage(1, 10, 5, 2)
FIXTURES = Path(__file__).parents[3] / "fixtures/checkpoints"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with SqliteStore(tmp_path / "checkpoints.db") as made:
        yield made


def invalid(why: str) -> Any:
    return pytest.raises(CheckpointError, match=f"invalid: .*{why}")


def agent_states() -> dict[str, AgentState]:
    ready = AgentState(AGENT)
    asked = ready.begin_turn(ASK)
    reading = asked.continue_turn(["say"], USED, READ)
    second = reading.finish_turn(["text"], Usage())
    done = second.begin_turn(ASK).complete(["end"], USED, {"answer": 1})
    return {"ready": ready, "asked": asked, "reading": reading, "second": second, "done": done}


def test_an_agent_goes_through_its_phases(store: CheckpointStore) -> None:
    states = agent_states()
    checkpoint = start(store, "a", "run-1", states["ready"])
    for name in ("asked", "reading", "second"):
        checkpoint = advance(store, checkpoint, states[name])
        assert store.load("a") == checkpoint
        assert AGENT.decode(checkpoint.payload) == states[name]
    checkpoint = advance(store, checkpoint, states["second"].begin_turn(ASK))
    checkpoint = advance(store, checkpoint, states["done"])
    assert checkpoint.payload["phase"] == "completed"
    assert checkpoint.payload["usage"] == (USED + USED).to_document()
    assert (checkpoint.revision, checkpoint.payload["turn"]) == (5, 2)


FORBIDDEN = [
    ("ready", "ready"), ("ready", "second"), ("ready", "done"), ("reading", "asked"), ("second", "ready"),
    ("second", "second"), ("done", "done"), ("done", "ready"), ("done", "asked"), ("reading", "ready"),
]  # fmt: skip


@pytest.mark.parametrize(("earlier", "later"), FORBIDDEN)
def test_no_other_phase_follows(store: CheckpointStore, earlier: str, later: str) -> None:
    states = agent_states()
    order = ["ready", "asked", "reading", "second", "done"]
    checkpoint = start(store, "a", "run-1", states["ready"])
    for name in order[1 : order.index(earlier) + 1]:
        if name == "done":
            checkpoint = advance(store, checkpoint, states["second"].begin_turn(ASK))
        checkpoint = advance(store, checkpoint, states[name])
    with invalid(""):
        advance(store, checkpoint, states[later])
    assert store.load("a") == checkpoint


def test_a_step_that_the_phase_does_not_allow_is_refused_at_once() -> None:
    states = agent_states()
    with invalid("phase turn_in_flight, not ready_for_turn"):
        states["asked"].begin_turn(ASK)
    for name in ("ready", "done"):
        with invalid("not turn_in_flight"):
            states[name].finish_turn([], Usage())
        with invalid("not turn_in_flight"):
            states[name].continue_turn([], Usage(), READ)
        with invalid("not turn_in_flight"):
            states[name].complete([], Usage(), {})


def test_external_work_is_named_before_it_runs() -> None:
    with invalid("nothing is in flight"):
        AgentState(AGENT).begin_turn()
    with invalid("two effects in flight have one key"):
        AgentState(AGENT).begin_turn(ASK, ASK)
    with invalid("two effects in flight have one key"):
        WorkflowState.begin(WORKFLOW, {}, {"a": "x", "b": "x"}).begin_step(FETCH, branch="a").begin_step(
            FETCH, branch="b"
        )


def test_usage_in_a_new_payload_is_never_less_than_in_the_stored_one(store: CheckpointStore) -> None:
    states = agent_states()
    checkpoint = advance(store, start(store, "a", "run-1", states["ready"]), states["asked"])
    checkpoint = advance(store, checkpoint, states["reading"])
    for less in (Usage(), Usage(1, 10, 5, 1), Usage(0, 99, 99, 99)):
        with pytest.raises(CheckpointError) as error:
            advance(store, checkpoint, states["second"].with_usage(less))
        assert error.value.kind == "usage_decreased"
    assert store.load("a") == checkpoint


def test_a_transcript_only_grows(store: CheckpointStore) -> None:
    states = agent_states()
    checkpoint = advance(store, start(store, "a", "run-1", states["ready"]), states["asked"])
    checkpoint = advance(store, checkpoint, states["reading"])
    with invalid("does not begin with"):
        advance(store, checkpoint, replace(states["second"], transcript=("another",)))


@pytest.mark.parametrize(
    "identity",
    [
        AgentIdentity("writer", "model-1", 3),
        AgentIdentity("researcher", "model-2", 3),
        AgentIdentity("researcher", "model-1", 4),
    ],
)
def test_another_agent_model_or_version_does_not_go_on(store: CheckpointStore, identity: AgentIdentity) -> None:
    checkpoint = start(store, "a", "run-1", AgentState(AGENT))
    with pytest.raises(CheckpointError) as error:
        advance(store, checkpoint, AgentState(identity).begin_turn(ASK))
    assert error.value.kind == "identity_mismatch"
    assert store.load("a") == checkpoint


def test_a_record_starts_in_a_stable_state_and_once(store: CheckpointStore) -> None:
    for state in (AgentState(AGENT).begin_turn(ASK), agent_states()["done"]):
        with invalid("starts in a stable state"):
            start(store, "a", "run-1", state)
    start(store, "a", "run-1", AgentState(AGENT))
    with pytest.raises(CheckpointError) as error:
        start(store, "a", "run-1", AgentState(AGENT))
    assert error.value.kind == "conflict"


# --- workflows ---


def test_a_workflow_goes_through_its_steps_in_branches_of_their_own(store: CheckpointStore) -> None:
    state = WorkflowState.begin(WORKFLOW, {"n": 1}, {"left": "fetch", "right": "notify"})
    checkpoint = start(store, "w", "run-1", state)
    notify = Effect("notify", Work.STEP, "notify", {})
    for step in (
        lambda state: state.begin_step(FETCH, branch="left"),
        lambda state: state.begin_step(notify, branch="right"),
        lambda state: state.finish_step({"items": 3}, USED, then="store", branch="left"),
        lambda state: state.finish_step(None, USED, then=None, branch="right"),
        lambda state: state.fork("third", "close"),
        lambda state: state.begin_step(FETCH, branch="left").begin_step(notify, branch="third"),
        lambda state: state.finish_step(1, USED, then=None, branch="left"),
        lambda state: state.finish_step(2, USED, then=None, branch="third"),
        lambda state: state.complete({"ok": True}),
    ):
        state = step(state)
        checkpoint = advance(store, checkpoint, state)
        assert WORKFLOW.decode(store.load("w").payload) == state
    assert {name: branch.results for name, branch in state.branches.items()} == {
        "left": {"fetch": {"items": 3}, "store": 1}, "right": {"notify": None}, "third": {"close": 2},
    }  # fmt: skip
    assert state.usage == USED + USED + USED + USED
    with invalid("completed"):
        state.fork("fourth", "x")
    with invalid("nothing follows"):
        advance(store, checkpoint, state)


BEFORE = WorkflowState.begin(WORKFLOW, {"n": 1}, "fetch")
DURING = BEFORE.begin_step(FETCH)
AFTER = DURING.finish_step(3, USED, then="store")


@pytest.mark.parametrize(
    ("earlier", "later", "why"),
    [
        (BEFORE, AFTER, "not in flight"),
        (BEFORE, WorkflowState.begin(WORKFLOW, {"n": 1}, "store"), "without its result"),
        (BEFORE, WorkflowState.begin(WORKFLOW, {"n": 2}, "fetch"), "input"),
        (BEFORE, replace(BEFORE, branches={"other": Branch("fetch")}), "gone"),
        (BEFORE, replace(BEFORE, branches={**BEFORE.branches, "new": Branch(None)}), "begin before a step"),
        (DURING, BEFORE, "takes back"),
        (DURING, replace(DURING, branches={"main": Branch(None)}), "without its result"),
        (AFTER, replace(AFTER, branches={"main": Branch("store", {})}), "forgets"),
        (AFTER, replace(AFTER, branches={"main": Branch("store", {"fetch": 4})}), "changes or forgets"),
        (AFTER, replace(AFTER, branches={"main": Branch(None, {"fetch": 3, "store": 1})}), "not in flight"),
    ],
)
def test_no_other_state_of_a_workflow_follows(earlier: WorkflowState, later: WorkflowState, why: str) -> None:
    with invalid(why):
        later.check_follows(earlier)


def test_a_null_result_is_a_result() -> None:
    """A step that returns null is finished, and forgetting that is noticed."""
    kept = DURING.finish_step(None, USED, then="store")
    with invalid("forgets"):
        replace(kept, branches={"main": Branch("store", {})}).check_follows(kept)


@pytest.mark.parametrize(
    "act",
    [
        lambda: BEFORE.finish_step(1, USED, then=None),
        lambda: DURING.begin_step(FETCH),
        lambda: BEFORE.begin_step(FETCH, branch="absent"),
        lambda: BEFORE.complete({}),
        lambda: BEFORE.fork("main", "x"),
        lambda: DURING.finish_step(1, USED, then="fetch"),
        lambda: WorkflowState(WORKFLOW, {}, {}),
        lambda: WorkflowState.begin(WORKFLOW, {}, " fetch"),
    ],
)
def test_a_step_that_a_branch_does_not_allow_is_refused_at_once(act: Any) -> None:
    with invalid(""):
        act()


# --- payloads ---


# Members that hold JSON of the application's own.
FREE = {"transcript", "result", "input", "results", "request"}


def members(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every member that the schema knows."""
    if isinstance(node, dict):
        for name in node:
            yield (*path, name)
            if name not in FREE:
                yield from members(node[name], (*path, name))
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from members(item, (*path, index))


def with_change(payload: dict[str, Any], path: tuple[Any, ...], change: Any) -> dict[str, Any]:
    """The payload with one member of another value, or without it."""
    copy: dict[str, Any] = json.loads(json.dumps(payload))
    at: Any = copy
    for step in path[:-1]:
        at = at[step]
    if change == "drop":
        del at[path[-1]]
    else:
        at[path[-1]] = change
    return copy


@pytest.mark.parametrize("name", ["chio.agent/v2-in-flight", "chio.workflow/v2-in-flight", "chio.agent/v2-completed"])
def test_a_damaged_payload_is_refused_and_never_mended(name: str) -> None:
    payload = json.loads((FIXTURES / f"{name}.json").read_text())["payload"]
    decode: Any = (AgentState if "agent" in name else WorkflowState).from_payload
    for path in members(payload):
        if path != ("branches", "main"):  # a workflow's branches have the application's names
            with invalid(""):
                decode(with_change(payload, path, "drop"))
        for change in ([], 7.5, "damaged", None, {}, True, -1):
            damaged = with_change(payload, path, change)
            try:
                state = decode(damaged)
            except CheckpointError as error:
                if error.kind != "invalid":
                    raise
            else:
                assert state.to_payload() == damaged, (path, change)
                assert type(change) is type(functools.reduce(lambda at, step: at[step], path, payload)), (path, change)


COUNTS = st.integers(0, 2**40)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS)


@given(USAGES, USAGES)
def test_merged_usage_covers_both_and_is_the_least_that_does(one: Usage, other: Usage) -> None:
    merged = one.merged(other)
    assert merged.covers(one)
    assert merged.covers(other)
    assert merged == other.merged(one)
    assert (one + other).covers(merged)
    assert one.covers(other) == (merged == one)


@pytest.mark.parametrize("counts", [(-1,), (True,), (1.0,), ("1",), (2**53,)])
def test_a_count_that_is_none_is_refused(counts: Any) -> None:
    with invalid("model_calls"):
        Usage(*counts)


def test_a_sum_that_no_counter_can_hold_is_refused() -> None:
    with invalid("would pass"):
        Usage(2**53 - 1) + Usage(1)


def test_each_claim_is_another(store: CheckpointStore) -> None:
    state = AgentState(AGENT).begin_turn(ASK)
    assert state.in_flight is not None
    again = state.reclaimed()
    assert again.in_flight is not None
    assert (again.in_flight.attempt, again.in_flight.effects) == (2, state.in_flight.effects)
    assert len({state.in_flight.claim, again.in_flight.claim, InFlight.begin(ASK).claim}) == 3
    assert again.phase is AgentPhase.TURN_IN_FLIGHT
