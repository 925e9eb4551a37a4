"""Sealed rows that were moved, exchanged or changed are damage: an error for who needs them, and for nobody else."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from tests.host.commands import accepted, refused
from tests.kernel.external import Gate, ToolState
from tests.kernel.serving import State, Worker, code_of, result_of

pytestmark = pytest.mark.timeout(120)

SMALL, OTHER = b"a blob", b"another blob"


def put(worker: Worker, data: bytes) -> str:
    digest = sha256(data).hexdigest()
    worker.ask("blob_put", sha256=digest, data_base64=base64.b64encode(data).decode())
    return digest


def read(worker: Worker, data: bytes) -> bytes:
    return base64.b64decode(worker.ask("blob_read", sha256=sha256(data).hexdigest())["data_base64"])


def change(state: State, *statements: str) -> None:
    """Somebody writes in the database of a stopped state."""
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        for statement in statements:
            assert database.execute(statement).rowcount >= 1, statement


def exchange(state: State, table: str, column: str, key: str, one: object, other: object) -> None:
    """Two rows give each other what a column has."""
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        held = [
            database.execute(f"SELECT {column} FROM {table} WHERE {key} = ?", (row,)).fetchone() for row in (one, other)
        ]
        for row, (value,) in zip((other, one), held, strict=True):
            assert database.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (value, row)).rowcount == 1


SEND = {"message_key": "m", "payload": {"n": 1}}
NAMED = {"message_key": "n", "payload": {"n": 2}}


@pytest.fixture
def state(make_state: Callable[..., State], keyed: Path) -> State:
    """Checkpoints of `a` and `b`, two blobs and two calls of `a`."""
    state = make_state()
    with state.serve() as serving:
        a, b = serving.worker("a"), serving.worker("b")
        a.ask("checkpoint", expected_revision="0", value={"of": "a", "n": 1})
        b.ask("checkpoint", expected_revision="0", value={"of": "b", "n": 1})
        assert [put(a, data) for data in (SMALL, OTHER)]
        for key, arguments in (("one", SEND), ("two", NAMED)):
            a.invoke(key, "send_jobs", arguments)
        b.send("three", "jobs", "o", {"n": 3})
    return state


def test_the_checkpoint_of_another_process_is_never_shown_as_its_own(state: State) -> None:
    exchange(state, "worker_checkpoint", "value", "process", "a", "b")
    with state.serve() as serving:
        for name in ("a", "b"):
            worker = serving.worker(name)
            assert worker.refused("inspect") == "runtime_error"
            assert worker.refused("checkpoint", expected_revision="0", value=1) == "checkpoint_conflict"
        worker = serving.worker("a")
        assert read(worker, SMALL) == SMALL
        assert worker.invoke("one", "send_jobs", SEND)["verdict"] == "allow"
        # A worker that knows its revision may go on from it with a new value.
        assert worker.ask("checkpoint", expected_revision="1", value=2)["revision"] == "2"
        assert worker.ask("inspect")["checkpoint"] == {"revision": "2", "value": 2}
    shown = refused("process", "state", "--state", state.path, "--process", "b")
    assert shown.startswith("chio: the state cannot be read (")
    assert accepted("process", "state", "--state", state.path, "--process", "a")["data"]["checkpoint"]["value"] == 2


def test_an_earlier_value_of_the_same_process_is_no_value_of_this_revision(state: State) -> None:
    ((old,),) = state.rows("SELECT hex(value) FROM worker_checkpoint WHERE process = 'a'")
    with state.serve() as serving:
        serving.worker("a").ask("checkpoint", expected_revision="1", value={"of": "a", "n": 2})
    change(state, f"UPDATE worker_checkpoint SET value = X'{old}' WHERE process = 'a'")
    with state.serve() as serving:
        assert serving.worker("a").refused("inspect") == "runtime_error"
        assert serving.worker("b").ask("inspect")["checkpoint"]["value"] == {"of": "b", "n": 1}
    refused("process", "state", "--state", state.path, "--process", "a")


def test_the_data_of_another_blob_is_never_handed_out(state: State) -> None:
    one, other = (name for (name,) in state.rows("SELECT sha256 FROM blob ORDER BY bytes"))
    assert {one, other}.isdisjoint(sha256(data).hexdigest() for data in (SMALL, OTHER))
    exchange(state, "blob", "data", "sha256", one, other)
    with state.serve() as serving:
        worker = serving.worker("a")
        for data in (SMALL, OTHER):
            assert worker.refused("blob_read", sha256=sha256(data).hexdigest()) == "runtime_error"
        assert worker.ask("inspect")["checkpoint"]["value"] == {"of": "a", "n": 1}
    for data in (SMALL, OTHER):
        named = sha256(data).hexdigest()
        refused("process", "state", "--state", state.path, "--process", "a", "--blob", named)


def test_large_blobs_that_change_places_are_never_handed_out(state: State) -> None:
    large, larger = b"1" * 100_000, b"2" * 100_000
    with state.serve() as serving:
        worker = serving.worker("a")
        for data in (large, larger):
            put(worker, data)
    one, other = sorted((state.path / ".chio-blobs").iterdir())
    texts = one.read_bytes(), other.read_bytes()
    one.write_bytes(texts[1])
    other.write_bytes(texts[0])
    with state.serve() as serving:
        worker = serving.worker("a")
        for data in (large, larger):
            assert worker.refused("blob_read", sha256=sha256(data).hexdigest()) == "runtime_error"
        assert read(worker, SMALL) == SMALL
    named = sha256(large).hexdigest()
    refused("process", "state", "--state", state.path, "--process", "a", "--blob", named)
    other.unlink()
    with state.serve() as serving:
        worker = serving.worker("a")
        assert {worker.refused("blob_read", sha256=sha256(data).hexdigest()) for data in (large, larger)} == {
            "runtime_error"
        }


@pytest.mark.parametrize("column", ["output", "parameter_salt"])
def test_what_is_sealed_of_another_call_is_never_answered(state: State, column: str) -> None:
    exchange(state, "call", column, "operation_key", "one", "two")
    with state.serve() as serving:
        worker = serving.worker("a")
        for key, arguments in (("one", SEND), ("two", NAMED)):
            assert code_of(worker.line(worker.call(key, "send_jobs", arguments))) == "runtime_error"
        assert serving.worker("b").send("three", "jobs", "o", {"n": 3})["sequence"] == "3"
        assert worker.send("four", "jobs", "p", 4)["sequence"] == "4"


def test_what_another_receipt_discloses_is_never_answered(state: State) -> None:
    (one,), (two,) = state.rows("SELECT receipt FROM call WHERE process = 'a' ORDER BY id")
    exchange(state, "leaf", "disclosed", "idx", one, two)
    with state.serve() as serving:
        worker = serving.worker("a")
        assert code_of(worker.line(worker.call("one", "send_jobs", SEND))) == "runtime_error"
        assert serving.worker("b").send("three", "jobs", "o", {"n": 3})["sequence"] == "3"
    out = state.folder / "receipts"
    assert "the state cannot be read" in refused("receipt", "export", "--state", state.path, "--out", out)
    assert not out.exists()


def test_a_damaged_message_stops_nobody_who_does_not_ask_for_it(state: State) -> None:
    change(state, "UPDATE message SET payload = X'00' WHERE sequence = 2")
    with state.serve() as serving:
        worker = serving.worker("b")
        frame = worker.call("receive", "receive_jobs", {"after_sequence": "0", "limit": 16})
        assert code_of(worker.line(frame)) == "runtime_error"
        assert worker.receive("first", "jobs", "0", limit=1)["messages"][0]["payload"] == {"n": 1}
        assert worker.receive("last", "jobs", "2")["messages"][0]["payload"] == {"n": 3}
        assert worker.tool("ack", "ack_jobs", through_sequence="2")["status"] == "acknowledged"


def test_a_payload_is_only_its_senders(state: State) -> None:
    change(state, "UPDATE message SET sender = 'b' WHERE sequence = 1")
    with state.serve() as serving:
        worker = serving.worker("b")
        frame = worker.call("receive", "receive_jobs", {"after_sequence": "0", "limit": 1})
        assert code_of(worker.line(frame)) == "runtime_error"


def test_a_call_in_flight_whose_arguments_do_not_open_is_quarantined_alone(
    make: Callable[..., ToolState], tmp_path: Path
) -> None:
    state = make()
    serving = state.serve()
    gate = Gate(tmp_path / "bank", "after_effect")
    worker = serving.worker("a")
    with worker.connect() as line:
        line.send(worker.call("key", "pay", {"to": "x"}, "bank"))
        gate.reached()
        gate.disarm()
        serving.kill()
    change(state, "UPDATE call SET parameters = X'00'")
    with state.serve() as again:
        worker = again.worker("a")
        assert code_of(worker.line(worker.call("key", "pay", {"to": "x"}, "bank"))) == "runtime_error"
        assert result_of(worker.line(worker.call("next", "pay", {"to": "y"}, "bank")))["verdict"] == "allow"
    assert [body["detail"] for body in state.log().bodies("incident") if "quarantined" in body["detail"]]


def test_a_swapped_data_key_refuses_the_state(state: State) -> None:
    exchange(state, "data_key", "wrapped", "process", "a", "b")
    line = refused("process", "cancel", "--state", state.path, "--process", "a")
    assert "it does not open the data keys of" in line
