"""What `status` counts of each process: conflicts, recoveries, what workers note of their own resumes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from chio_process import ProcessClient, WorkerError
from chio_process.checkpoints import AgentState, CheckpointError, ProcessStateStore, advance, resume, start
from tests.clients.checkpoints.test_resume import AGENT, ASK, CONSERVATIVE
from tests.clients.drive import Call, drive
from tests.host.commands import accepted
from tests.kernel.external import Gate, ToolState
from tests.kernel.serving import State, Worker

pytestmark = pytest.mark.timeout(120)

NONE = {
    "checkpoint_conflicts": 0, "ambiguous_recoveries": 0, "resumes": 0, "ambiguous_resumes": 0, "schema_refusals": 0,
    "resume_age_ms": 0,
}  # fmt: skip
MakeState = Callable[..., State]


def told(state: State, process: str = "a") -> dict[str, Any]:
    """What `status` says of one process."""
    status = accepted("process", "status", "--state", state.path)
    return dict(next(entry for entry in status["processes"] if entry["process_id"] == process))


def counters(state: State, process: str = "a") -> dict[str, int]:
    return dict(told(state, process)["counters"])


def test_every_counter_begins_at_nothing(make_state: MakeState) -> None:
    state = make_state()
    for process in ("root", "a", "b"):
        assert counters(state, process) == NONE
        assert (told(state, process)["checkpoint_bytes"], told(state, process)["checkpoint_saved_ms"]) == (0, None)


def test_a_conflict_is_counted_of_the_process_that_met_it(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        for _ in range(3):
            assert worker.refused("checkpoint", expected_revision="7", value=1) == "checkpoint_conflict"
        assert worker.refused("checkpoint", expected_revision="07", value=1) == "invalid_request"
        worker.ask("checkpoint", expected_revision="0", value=1)
        assert counters(state) == {**NONE, "checkpoint_conflicts": 3}  # in the commit of the save
        assert worker.refused("checkpoint", expected_revision="0", value=1) == "checkpoint_conflict"
    assert counters(state) == {**NONE, "checkpoint_conflicts": 4}  # at the latest when the kernel stops
    assert counters(state, "b") == NONE


def test_size_and_time_are_those_of_the_newest_save(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.ask("checkpoint", expected_revision="0", value="x" * 1000)
        first = told(state)
        assert (first["checkpoint_revision"], first["checkpoint_bytes"]) == ("1", 1002)
        worker.ask("checkpoint", expected_revision="1", value="é")
        second = told(state)
        assert (second["checkpoint_revision"], second["checkpoint_bytes"]) == ("2", 4)
        assert worker.refused("checkpoint", expected_revision="1", value=[]) == "checkpoint_conflict"
        assert told(state)["checkpoint_saved_ms"] == second["checkpoint_saved_ms"] >= first["checkpoint_saved_ms"]


def test_a_call_found_in_flight_is_counted_once(make: Callable[..., ToolState], tmp_path: Path) -> None:
    state = make()
    serving = state.serve()
    gate = Gate(tmp_path / "bank", "after_effect")
    worker = serving.worker("a")
    with worker.connect() as line:
        line.send(worker.call("key", "pay", {"to": "x"}, "bank"))
        gate.reached()
        gate.disarm()
        serving.kill()
    assert counters(state) == NONE
    for _ in range(2):
        with state.serve():
            pass
        assert counters(state) == {**NONE, "ambiguous_recoveries": 1}


@pytest.mark.parametrize("client", ["python", "node"])
def test_what_either_client_notes_is_counted_before_it_is_answered(make_state: MakeState, client: str) -> None:
    state = make_state()
    serving = state.serve()
    try:
        worker = serving.worker("a")
        size = len(state.log().leaves)
        outcomes = drive(
            client, worker.path,
            Call("note", ("resumed", {"ageMs": 1500})), Call("note", ("resumed", {"ageMs": 20})),
            Call("note", ("resumed",)), Call("note", ("ambiguous_resume",)), Call("note", ("schema_refused",)),
            Call("note", ("something_else",)), Call("note", ("resumed", {"ageMs": -1})),
            credential=worker.credential,
        )  # fmt: skip
        assert [outcome.result for outcome in outcomes[:5]] == [{}] * 5
        assert [outcome.code for outcome in outcomes[5:]] == ["invalid_request"] * 2
        expected = {**NONE, "resumes": 3, "ambiguous_resumes": 1, "schema_refusals": 1, "resume_age_ms": 20}
        assert counters(state) == expected
    finally:
        serving.kill()
    assert counters(state) == expected
    assert len(state.log().leaves) == size


@pytest.mark.parametrize(
    "members",
    [
        {}, {"event": None}, {"event": ["resumed"]}, {"event": {"resumed": 1}}, {"event": "resumes"},
        {"event": "checkpoint_conflicts"}, {"event": "resume_age_ms"}, {"event": ""}, {"event": "resumed", "more": 1},
        {"event": "resumed", "age_ms": None}, {"event": "resumed", "age_ms": True}, {"event": "resumed", "age_ms": 1.5},
        {"event": "resumed", "age_ms": "1"}, {"event": "resumed", "age_ms": -1},
        {"event": "resumed", "age_ms": 2**53}, {"event": "resumed", "process": "b"},
    ],
)  # fmt: skip
def test_a_note_that_is_none_is_refused_and_counts_nothing(worker: Worker, members: dict[str, Any]) -> None:
    """A member `op` stands in each; the frame is one of the protocol."""
    assert worker.refused("note", **members) == "invalid_request"


def test_a_refused_note_changes_no_count(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        assert worker.refused("note", event="resumed", age_ms=-1) == "invalid_request"
        worker.ask("note", event="resumed", age_ms=2**53 - 1)
        assert worker.refused("note", event="resumed", age_ms=2**53) == "invalid_request"
        worker.ask("cancel")
        assert worker.refused("note", event="resumed") == "cancelled"
    assert counters(state) == {**NONE, "resumes": 1, "resume_age_ms": 2**53 - 1}


def test_a_resume_over_the_processs_own_state_shows_in_status(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        with ProcessClient(worker.path, worker.credential) as client:
            store = ProcessStateStore(client)
            with pytest.raises(CheckpointError):
                resume(store, "agent", "run-1", AGENT, CONSERVATIVE)
            assert counters(state) == NONE
            ready = start(store, "agent", "run-1", AgentState(AGENT), now=1_000)
            resume(store, "agent", "run-1", AGENT, CONSERVATIVE, now=3_500)
            assert counters(state) == {**NONE, "resumes": 1, "resume_age_ms": 2_500}
            advance(store, ready, AgentState(AGENT).begin_turn(ASK), now=4_000)
            with pytest.raises(CheckpointError, match="ambiguous_in_flight"):
                resume(store, "agent", "run-1", AGENT, CONSERVATIVE, now=4_100)
            assert counters(state) == {**NONE, "resumes": 1, "ambiguous_resumes": 1, "resume_age_ms": 100}
            with pytest.raises(WorkerError, match="invalid_request"):
                client.note("no such event")


def test_counters_of_a_state_stay_readable_whatever_is_in_its_other_rows(make_state: MakeState) -> None:
    state = make_state()
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        database.execute("INSERT INTO counter VALUES ('a', 'of a later version', 7)")
    assert counters(state) == NONE
