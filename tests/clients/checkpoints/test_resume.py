"""What a restart does with what it finds: the table of docs/checkpoints.md, row by row, over both stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chio_process.checkpoints import (
    AgentIdentity,
    AgentState,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Completed,
    Continued,
    Effect,
    EffectsByWork,
    ResumePolicy,
    Retried,
    SqliteEffects,
    Usage,
    Work,
    WorkflowIdentity,
    WorkflowState,
    advance,
    resume,
    start,
)
from chio_process.checkpoints.resume import NotingStore

AGENT = AgentIdentity("researcher", "model-1", 3)
WORKFLOW = WorkflowIdentity("publish", 7)
ASK = Effect("turn-0", Work.MODEL, "model-1", {"prompt": "p"})
READ = Effect("read-0", Work.TOOL, "read", {"path": "a"})
SEARCH = Effect("search-0", Work.TOOL, "search", {"for": "b"})
USED = Usage(1, 10, 5, 2)
CONSERVATIVE = ResumePolicy.conservative()
EVERYTHING = ResumePolicy.retry(model=True, tools=True, delegation=True, steps=True)


class Outside:
    """The world that effects happen in."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fails = False

    def __call__(self, effect: Effect) -> Any:
        self.happened.append(effect.key)
        if self.fails:
            raise ConnectionError("the other end went away")
        return {"of": effect.key, "time": len(self.happened)}


@pytest.fixture
def outside() -> Outside:
    return Outside()


@pytest.fixture
def effects(tmp_path: Path, outside: Outside) -> Iterator[SqliteEffects]:
    with SqliteEffects(str(tmp_path / "effects.db"), outside) as made:
        yield made


@pytest.fixture
def ready(store: CheckpointStore) -> Checkpoint:
    return start(store, "a", "run-1", AgentState(AGENT), now=1_000)


@pytest.fixture
def in_flight(store: CheckpointStore, ready: Checkpoint) -> Checkpoint:
    """A turn whose two tools are announced."""
    state = AgentState(AGENT).begin_turn(ASK)
    asked = advance(store, ready, state, now=1_000)
    return advance(store, asked, state.continue_turn(["say"], USED, READ, SEARCH), now=1_000)


def refused(kind: str, store: CheckpointStore, *arguments: Any, **options: Any) -> CheckpointError:
    """The resume ends with this kind of error, and the stored bytes are what they were."""
    before = store.load("a").encoded()
    with pytest.raises(CheckpointError) as error:
        resume(store, "a", *arguments, **options)
    assert error.value.kind == kind
    assert store.load("a").encoded() == before
    return error.value


@pytest.mark.parametrize("policy", [CONSERVATIVE, EVERYTHING])
def test_completed_is_replayed_and_nothing_runs(
    store: CheckpointStore, in_flight: Checkpoint, outside: Outside, effects: SqliteEffects, policy: ResumePolicy
) -> None:
    done = advance(store, in_flight, AGENT.decode(in_flight.payload).complete([], Usage(), {"answer": 42}))
    for _ in range(2):
        resumed = resume(store, "a", "run-1", AGENT, policy, effects)
        assert isinstance(resumed, Completed)
        assert (resumed.result, resumed.checkpoint) == ({"answer": 42}, done)
    assert outside.happened == []
    assert store.load("a") == done


@pytest.mark.parametrize("policy", [CONSERVATIVE, EVERYTHING])
def test_stable_continues_from_where_it_is(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects, outside: Outside, policy: ResumePolicy
) -> None:
    stable = advance(store, in_flight, AGENT.decode(in_flight.payload).finish_turn([], Usage()))
    resumed = resume(store, "a", "run-1", AGENT, policy, effects)
    assert isinstance(resumed, Continued)
    assert resumed.checkpoint == store.load("a") == stable
    assert (resumed.state.turn, resumed.state.transcript) == (1, ("say",))
    assert outside.happened == []
    assert advance(store, resumed.checkpoint, resumed.state.begin_turn(ASK)).revision == stable.revision + 1


def test_in_flight_is_refused_under_the_conservative_policy(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects, outside: Outside
) -> None:
    for with_effects in (None, effects):
        refused("ambiguous_in_flight", store, "run-1", AGENT, CONSERVATIVE, with_effects)
    assert outside.happened == []


def test_what_has_a_recorded_result_is_replayed_and_the_rest_runs_if_it_is_named(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects, outside: Outside
) -> None:
    first = effects.perform(READ)
    refused("repeat_refused", store, "run-1", AGENT, ResumePolicy.retry(), effects)
    refused("repeat_refused", store, "run-1", AGENT, ResumePolicy.retry(model=True, steps=True), effects)
    refused("repeat_refused", store, "run-1", AGENT, ResumePolicy.retry(tools={"read"}), effects)
    assert outside.happened == ["read-0"]
    resumed = resume(store, "a", "run-1", AGENT, ResumePolicy.retry(tools={"search"}), effects)
    assert isinstance(resumed, Retried)
    assert [planned.replays for planned in resumed.effects] == [True, False]
    assert outside.happened == ["read-0"]
    assert [planned.outcome() for planned in resumed.effects] == [first, {"of": "search-0", "time": 2}]
    assert outside.happened == ["read-0", "search-0"]
    assert advance(store, resumed.checkpoint, resumed.state.finish_turn(["text"], Usage())).payload["turn"] == 1


def test_everything_recorded_needs_no_permission_to_repeat(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects, outside: Outside
) -> None:
    results = [effects.perform(READ), effects.perform(SEARCH)]
    resumed = resume(store, "a", "run-1", AGENT, ResumePolicy.retry(), effects)
    assert isinstance(resumed, Retried)
    assert [planned.outcome() for planned in resumed.effects] == results
    assert outside.happened == ["read-0", "search-0"]


def test_a_retry_is_announced_as_the_next_attempt_before_anything_runs(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects
) -> None:
    first = resume(store, "a", "run-1", AGENT, EVERYTHING, effects, now=5_000)
    assert first.checkpoint == store.load("a")
    assert (first.checkpoint.revision, first.checkpoint.updated_at) == (in_flight.revision + 1, 5_000)
    assert first.checkpoint.payload["in_flight"]["attempt"] == 2
    again = resume(store, "a", "run-1", AGENT, EVERYTHING, effects)
    assert again.checkpoint.payload["in_flight"]["attempt"] == 3
    with pytest.raises(CheckpointError, match="conflict"):  # the first of them comes too late
        advance(store, first.checkpoint, first.state.finish_turn([], Usage()))


class Interrupted:
    """A store in which, between a resume's reading and its claim, another resume goes first."""

    def __init__(self, store: CheckpointStore, effects: SqliteEffects) -> None:
        self._store = store
        self._effects = effects

    def load(self, id: str) -> Checkpoint:
        found = self._store.load(id)
        resume(self._store, id, "run-1", AGENT, EVERYTHING, self._effects, now=found.updated_at)
        return found

    def compare_and_swap(self, checkpoint: Checkpoint, expected: int | None) -> None:
        self._store.compare_and_swap(checkpoint, expected)


def test_of_two_that_retry_at_once_one_goes_on(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects, outside: Outside
) -> None:
    with pytest.raises(CheckpointError) as error:
        resume(Interrupted(store, effects), "a", "run-1", AGENT, EVERYTHING, effects, now=in_flight.updated_at)
    assert error.value.kind == "conflict"
    assert store.load("a").revision == in_flight.revision + 1
    assert outside.happened == []


def test_a_key_that_is_recorded_with_another_request_is_refused(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects, outside: Outside
) -> None:
    effects.perform(Effect("read-0", Work.TOOL, "read", {"path": "another"}))
    refused("effect_conflict", store, "run-1", AGENT, EVERYTHING, effects)
    assert outside.happened == ["read-0"]


def test_an_explicit_retry_needs_its_effect_store(store: CheckpointStore, in_flight: Checkpoint) -> None:
    refused("invalid", store, "run-1", AGENT, EVERYTHING)
    refused("invalid", store, "run-1", AGENT, EVERYTHING, EffectsByWork({}))


@pytest.mark.parametrize(
    ("run_id", "identity", "kind"),
    [
        ("run-2", AGENT, "foreign_run"),
        ("run-1", WORKFLOW, "kind_mismatch"),
        ("run-1", AgentIdentity("writer", "model-1", 3), "identity_mismatch"),
        ("run-1", AgentIdentity("researcher", "model-2", 3), "identity_mismatch"),
        ("run-1", AgentIdentity("researcher", "model-1", 4), "identity_mismatch"),
    ],
)
def test_somebody_elses_record_is_not_resumed(
    store: CheckpointStore, ready: Checkpoint, effects: SqliteEffects, run_id: str, identity: Any, kind: str
) -> None:
    for policy in (CONSERVATIVE, EVERYTHING):
        refused(kind, store, run_id, identity, policy, effects)


@pytest.mark.parametrize("identity", [WorkflowIdentity("publish", 8), WorkflowIdentity("collect", 7), AGENT])
def test_another_workflow_or_version_of_it_is_not_resumed(store: CheckpointStore, identity: Any) -> None:
    start(store, "a", "run-1", WorkflowState.begin(WORKFLOW, {}, "fetch"))
    kind = "kind_mismatch" if identity is AGENT else "identity_mismatch"
    refused(kind, store, "run-1", identity, CONSERVATIVE)


@pytest.mark.parametrize("version", [1, 3])
def test_another_schema_version_is_refused_and_not_guessed_at(store: CheckpointStore, version: int) -> None:
    store.compare_and_swap(
        Checkpoint.initial("a", "run-1", "chio.agent", version, AgentState(AGENT).to_payload(), 1_000), None
    )
    seen: list[Any] = []
    refused(
        "schema_unsupported", store, "run-1", AGENT, CONSERVATIVE, now=1_400,
        observe=lambda event, **fields: seen.append((event, fields)),
    )  # fmt: skip
    assert seen == [("schema_refused", {"age_ms": 400})]


def test_a_payload_that_is_none_is_corrupt_and_stays(store: CheckpointStore) -> None:
    store.compare_and_swap(Checkpoint.initial("a", "run-1", "chio.agent", 2, {"phase": "ready_for_turn"}), None)
    refused("corrupt", store, "run-1", AGENT, EVERYTHING)


def test_a_record_that_is_not_there_is_not_found(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="not_found"):
        resume(store, "a", "run-1", AGENT, CONSERVATIVE)


def test_restored_usage_is_the_larger_of_what_is_stored_and_what_is_known(
    store: CheckpointStore, in_flight: Checkpoint, effects: SqliteEffects
) -> None:
    known = Usage(model_calls=3, input_tokens=1, output_tokens=9)
    merged = Usage(3, 10, 9, 2)
    resumed = resume(store, "a", "run-1", AGENT, EVERYTHING, effects, usage=known)
    assert resumed.state.usage == merged
    assert store.load("a").payload["usage"] == merged.to_document()
    stable = advance(store, resumed.checkpoint, resumed.state.finish_turn([], USED))
    assert stable.payload["usage"] == (merged + USED).to_document()
    continued = resume(store, "a", "run-1", AGENT, CONSERVATIVE, usage=Usage(model_calls=9))
    assert continued.state.usage == Usage(9, 20, 14, 4)
    assert resume(store, "a", "run-1", AGENT, CONSERVATIVE).state.usage == merged + USED


def test_what_is_observed_says_how_old_the_record_was(
    store: CheckpointStore, ready: Checkpoint, effects: SqliteEffects
) -> None:
    seen: list[Any] = []

    def observe(event: str, **fields: int) -> None:
        seen.append((event, fields))

    resume(store, "a", "run-1", AGENT, CONSERVATIVE, observe=observe, now=3_500)
    resume(store, "a", "run-1", AGENT, CONSERVATIVE, observe=observe, now=500)  # a clock that went back
    advance(store, ready, AgentState(AGENT).begin_turn(ASK), now=4_000)
    refused("ambiguous_in_flight", store, "run-1", AGENT, CONSERVATIVE, observe=observe, now=4_100)
    resume(store, "a", "run-1", AGENT, EVERYTHING, effects, observe=observe, now=4_200)
    assert seen == [
        ("resumed", {"age_ms": 2_500}), ("resumed", {"age_ms": 0}), ("ambiguous_resume", {"age_ms": 100}),
        ("ambiguous_resume", {"age_ms": 200}), ("resumed", {"age_ms": 200}),
    ]  # fmt: skip


def test_a_workflow_with_one_branch_in_flight_is_in_flight(
    store: CheckpointStore, effects: SqliteEffects, outside: Outside
) -> None:
    state = WorkflowState.begin(WORKFLOW, {"n": 1}, {"left": "fetch", "right": "notify"})
    fetch = Effect("fetch", Work.STEP, "fetch", {"n": 1})
    advance(store, start(store, "a", "run-1", state), state.begin_step(fetch, branch="left"))
    refused("ambiguous_in_flight", store, "run-1", WORKFLOW, CONSERVATIVE)
    refused("repeat_refused", store, "run-1", WORKFLOW, ResumePolicy.retry(tools=True), effects)
    resumed = resume(store, "a", "run-1", WORKFLOW, ResumePolicy.retry(steps={"fetch"}), effects)
    assert isinstance(resumed, Retried)
    result = resumed.effects[0].outcome()
    done = advance(store, resumed.checkpoint, resumed.state.finish_step(result, USED, then=None, branch="left"))
    assert done.payload["branches"]["left"]["results"] == {"fetch": result}
    assert isinstance(resume(store, "a", "run-1", WORKFLOW, CONSERVATIVE), Continued)


def test_a_policy_names_work_and_not_letters() -> None:
    with pytest.raises(CheckpointError, match="collection of names"):
        ResumePolicy.retry(tools="read")
    named = ResumePolicy.retry(tools=["read"], model=True)
    assert [named.repeats(effect) for effect in (READ, SEARCH, ASK)] == [True, False, True]
    assert not CONSERVATIVE.repeats(ASK)


def test_only_the_stores_that_count_are_told() -> None:
    """The process state reaches the host's counters; a file has none."""
    from chio_process.checkpoints import ProcessStateStore, SqliteStore

    assert issubclass(ProcessStateStore, NotingStore)
    assert not issubclass(SqliteStore, NotingStore)


def test_a_record_is_what_another_program_finds(store: CheckpointStore, in_flight: Checkpoint) -> None:
    """The documented wire form, so that an operator can read it."""
    document = json.loads(store.load("a").encoded())
    assert document["kind"] == "chio.agent"
    assert document["payload"]["phase"] == "turn_in_flight"
    assert [effect["key"] for effect in document["payload"]["in_flight"]["effects"]] == ["read-0", "search-0"]
