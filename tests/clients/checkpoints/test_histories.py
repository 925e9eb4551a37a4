"""Random histories of several programs on one record: always equal to one serial history of what was acknowledged."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chio_process.checkpoints import (
    AgentIdentity,
    AgentState,
    Checkpoint,
    CheckpointError,
    Completed,
    Effect,
    ResumePolicy,
    Retried,
    SqliteEffects,
    SqliteStore,
    Usage,
    Work,
    WorkflowIdentity,
    WorkflowState,
    advance,
    resume,
    start,
)
from chio_process.checkpoints.migrations import agent_1_to_2, agent_2_to_1, workflow_1_to_2, workflow_2_to_1

AGENT = AgentIdentity("researcher", "model-1", 3)
REFUSALS = {"conflict", "ambiguous_in_flight", "repeat_refused", "effect_unknown", "not_found"}
PROGRAMS = 3
STEPS = st.tuples(
    st.integers(0, PROGRAMS - 1),
    st.sampled_from(["conservative", "replay", "begin", "perform", "fail", "finish", "complete", "crash"]),
)


class History:
    """What several programs do, one step at a time, and what each of them was told."""

    def __init__(self, folder: Path) -> None:
        self.happened: Counter[str] = Counter()
        self.failing = False
        self.store = SqliteStore(folder / "checkpoints.db")
        self.effects = SqliteEffects(str(folder / "effects.db"), self.happen)
        self.views: dict[int, tuple[Checkpoint, AgentState]] = {}
        self.acknowledged: list[Checkpoint] = [start(self.store, "a", "run-1", AgentState(AGENT), now=1)]

    def close(self) -> None:
        self.store.close()
        self.effects.close()

    def happen(self, effect: Effect) -> str:
        self.happened[effect.key] += 1
        if self.failing:
            raise ConnectionError("went away")
        return effect.key

    def saved(self, program: int, checkpoint: Checkpoint, state: AgentState) -> None:
        if checkpoint != self.acknowledged[-1]:
            self.acknowledged.append(checkpoint)
        self.views[program] = (checkpoint, state)

    def step(self, program: int, act: str) -> None:
        if act in ("conservative", "replay"):
            policy = ResumePolicy.retry() if act == "replay" else ResumePolicy.conservative()
            resumed = resume(self.store, "a", "run-1", AGENT, policy, self.effects)
            self.saved(program, resumed.checkpoint, resumed.state)
            if isinstance(resumed, Retried):
                assert [planned.outcome() for planned in resumed.effects] == [
                    planned.effect.key for planned in resumed.effects
                ]
            assert isinstance(resumed, Completed) == (resumed.state.result is not None)
            return
        if program not in self.views:
            return
        checkpoint, state = self.views[program]
        match act:
            case "crash":
                del self.views[program]
            case "begin" if not state.effects_in_flight and state.result is None:
                effect = Effect(f"turn-{state.turn}", Work.MODEL, "model-1", {"turn": state.turn})
                state = state.begin_turn(effect)
                self.saved(program, advance(self.store, checkpoint, state), state)
            case "perform" | "fail" if state.effects_in_flight:
                self.failing = act == "fail"
                self.effects.perform(state.effects_in_flight[0])
            case "finish" | "complete" if state.effects_in_flight:
                said, used = [self.effects.perform(state.effects_in_flight[0])], Usage(1, 2, 3, 4)
                state = state.finish_turn(said, used) if act == "finish" else state.complete(said, used, {"said": said})
                self.saved(program, advance(self.store, checkpoint, state), state)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_what_was_acknowledged_is_one_serial_history_and_no_effect_happened_twice(steps: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        for program, act in steps:
            try:
                history.step(program, act)
            except CheckpointError as error:
                if error.kind not in REFUSALS:
                    raise
            except ConnectionError:
                pass
            assert history.store.load("a") == history.acknowledged[-1]
        told = history.acknowledged
        assert [checkpoint.revision for checkpoint in told] == list(range(len(told)))
        states = [AGENT.decode(checkpoint.payload) for checkpoint in told]
        for (earlier, state), (later, following) in zip(
            zip(told, states, strict=True), list(zip(told, states, strict=True))[1:], strict=False
        ):
            assert later.updated_at >= earlier.updated_at
            assert following.usage.covers(state.usage)
        assert max(history.happened.values(), default=0) <= 1
        history.close()


TEXTS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=6)
EFFECTS = st.builds(Effect, TEXTS, st.sampled_from(Work), TEXTS, st.dictionaries(TEXTS, st.integers(0, 9), max_size=2))
COUNTS = st.integers(0, 1_000)
USED = st.builds(Usage, COUNTS, COUNTS, COUNTS)
WALK = st.lists(st.tuples(st.booleans(), USED, EFFECTS, TEXTS), max_size=6)


@given(WALK)
def test_every_state_that_an_agent_can_reach_survives_its_payload_and_both_migrations(walk: list[Any]) -> None:
    state = AgentState(AGENT)
    for stays, used, effect, text in walk:
        earlier = state
        if not state.effects_in_flight:
            state = state.begin_turn(effect)
        elif stays:
            state = state.continue_turn([text], used, effect)
        else:
            state = state.finish_turn([text], used)
        state.check_follows(earlier)
        payload = state.to_payload()
        assert AGENT.decode(payload) == state
        old = agent_2_to_1(payload)
        assert agent_2_to_1(agent_1_to_2(old)) == old
        assert AgentState.from_payload(agent_1_to_2(old)).usage == state.usage


@given(WALK)
def test_every_state_that_a_workflow_can_reach_survives_its_payload_and_both_migrations(walk: list[Any]) -> None:
    workflow = WorkflowIdentity("publish", 7)
    state = WorkflowState.begin(workflow, {"n": 1}, "step-0")
    for number, (ends, used, effect, text) in enumerate(walk):
        earlier, branch = state, state.branches["main"]
        if branch.status == "pending":
            state = state.begin_step(effect)
        elif branch.status == "in_flight":
            state = state.finish_step(text, used, then=None if ends else f"step-{number + 1}")
        elif state.result is None:
            state = state.complete({"text": text})
        else:
            return
        state.check_follows(earlier)
        payload = state.to_payload()
        assert workflow.decode(payload) == state
        old = workflow_2_to_1(payload)
        assert workflow_2_to_1(workflow_1_to_2(old)) == old
        assert WorkflowState.from_payload(workflow_1_to_2(old)).usage == state.usage
