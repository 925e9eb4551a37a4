"""Calls of tool servers: what a start finds, servers that are down, rows that cannot be recovered."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.external.looking import leaves_of, receipt_of, repeats_byte_for_byte, seen, unknown
from tests.kernel.external import (
    Gate,
    ToolServing,
    ToolState,
    child,
    effects,
)
from tests.kernel.serving import Worker, result_of

pytestmark = pytest.mark.timeout(120)

MakeState = Callable[..., ToolState]


# --- found at start --------------------------------------------------------------------------------------------------


def test_a_call_found_dispatched_at_start_is_unknown_and_a_second_start_finds_nothing(
    make: MakeState, tmp_path: Path
) -> None:
    """[dispatched -> unknown]: found at start"""
    state = make()
    serving = state.serve()
    gate = Gate(tmp_path / "bank", "after_effect")
    worker = serving.worker("a")
    with worker.connect() as line:
        line.send(worker.call("key", "pay", {"to": "x"}, "bank"))
        gate.reached()
        gate.disarm()
        serving.kill()
    assert state.call("key") == "dispatched"
    with state.serve() as again:
        size = len(state.log().leaves)
        worker = again.worker("a")
        frame = worker.call("key", "pay", {"to": "x"}, "bank")
        first = worker.line(frame)
        unknown(state, result_of(first))
        repeats_byte_for_byte(worker, frame, first)
        assert leaves_of(state, "key") == ["intent", "receipt", "incident"]
    with state.serve() as third:
        leaves = [kind for kind, _ in state.log().leaves[size:]]
        assert set(leaves) <= {"attempt", "launch", "incident"}
        assert leaves_of(state, "key") == ["intent", "receipt", "incident"]
        worker = third.worker("a")
        assert worker.line(worker.call("key", "pay", {"to": "x"}, "bank")) == first
    assert len(effects(tmp_path / "bank")) == 1


def test_a_kernel_that_is_told_to_stop_records_what_is_in_flight_as_unknown(make: MakeState, tmp_path: Path) -> None:
    """[dispatched -> unknown]: the host stops"""
    state = make()
    gate = Gate(tmp_path / "bank", "before_effect")
    with state.serve() as serving:
        worker = serving.worker("a")
        line = worker.connect()
        line.send(worker.call("key", "pay", {"to": "x"}, "bank"))
        gate.reached()
        gate.disarm()
    line.close()
    assert state.call("key") == "unknown"
    assert leaves_of(state, "key") == ["intent", "receipt", "incident"]
    state.log()


def test_a_call_whose_intent_cannot_be_written_is_never_sent(make: MakeState, tmp_path: Path) -> None:
    """RLIMIT_FSIZE lets the write-ahead log grow no more: EFBIG for the kernel as ENOSPC would be (setrlimit(2))."""
    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.invoke("before", "do", {"mine": "before"}, "rogue")
        size = (state.path / "authority.db-wal").stat().st_size
        resource.prlimit(serving.kernel.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        serving.servers.patient = True
        with worker.connect() as line:
            line.send(worker.call("lost", "do", {"mine": "lost"}, "rogue"))
            assert line.read() == b""
    assert (seen(tmp_path / "rogue", "before"), seen(tmp_path / "rogue", "lost")) == (1, 0)
    with state.serve() as serving:
        result = serving.worker("a").invoke("lost", "do", {"mine": "lost"}, "rogue")
        assert (result["verdict"], receipt_of(state, result)["call"]["dispatch"]) == ("allow", 1)
    assert seen(tmp_path / "rogue", "lost") == 1


# --- servers that are down -------------------------------------------------------------------------------------------


def test_a_call_of_a_server_that_is_down_starts_it(shared: ToolServing, worker: Worker, key: str) -> None:
    shared.kill_server("rogue")
    assert worker.invoke(key, "do", {"n": 3}, "rogue")["output"]["value"]["structuredContent"] == {"got": 3}


def test_a_server_that_cannot_be_started_is_a_transient_fault_that_leaves_nothing(make: MakeState) -> None:
    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        calls = worker.ask("inspect")["tree_calls"]
        serving.servers.unavailable = True
        serving.kill_server("rogue")
        for _ in range(2):
            with worker.connect() as line:
                line.send(worker.call("key", "do", {"n": 1}, "rogue"))
                assert line.code() == "runtime_error"
        assert worker.ask("inspect")["tree_calls"] == calls
        assert state.rows("SELECT state FROM call WHERE operation_key = 'key'") == []
        serving.servers.unavailable = False
        assert worker.invoke("key", "do", {"n": 1}, "rogue")["verdict"] == "allow"


STARTS = [
    ("exit", "closed"), ("other_tools", "not those that were pinned"),
    ("other_hint", "not those that were pinned"), ("no_version", "no protocol version"),
    ("refuses", "not for you"), ("list_as_answer", "initialize"), ("no_list", "tool list"),
    ("list_of_text", "tool list"), ("annotations_are_text", "tool list"), ("name_twice", "tool list"),
    ("large_integer", "canonical"), ("endless", "pages"), ("odd_cursor", "cursor"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "why"), STARTS, ids=[how for how, _ in STARTS])
def test_a_server_that_starts_wrongly_serves_no_call_and_the_host_lives(
    make: MakeState, tmp_path: Path, how: str, why: str
) -> None:
    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        serving.kill_server("rogue")
        (tmp_path / "rogue" / "next_start").write_text(how)
        with worker.connect() as line:
            line.send(worker.call("key", "do", {}, "rogue"))
            assert line.code() == "runtime_error"
        assert why in serving.servers.refusal()["why"]
        assert state.rows("SELECT state FROM call") == []
        assert worker.invoke("other", "balance", {}, "bank")["verdict"] == "allow"
        refusals = [body for body in state.log().bodies("incident") if why in body["detail"]]
        assert [body["server"] for body in refusals] == ["rogue"]
        (tmp_path / "rogue" / "next_start").unlink()
        assert worker.invoke("key", "do", {}, "rogue")["verdict"] == "allow"
    assert [entry["tool"] for entry in effects(tmp_path / "rogue", "seen.ndjson")] == ["do"]


@pytest.mark.parametrize("how", ["garbage", "pages"])
def test_a_server_that_starts_oddly_but_with_the_pinned_tools_is_used(
    make: MakeState, tmp_path: Path, how: str
) -> None:
    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        serving.kill_server("rogue")
        (tmp_path / "rogue" / "next_start").write_text(how)
        assert worker.invoke("key", "do", {}, "rogue")["verdict"] == "allow"


def test_a_server_that_never_stays_up_is_not_started_without_end(make: MakeState, tmp_path: Path) -> None:
    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        serving.kill_server("rogue")
        (tmp_path / "rogue" / "next_start").write_text("exit_after_list")
        reply = json.loads(worker.line(worker.call("key", "look", {}, "rogue")))
        # Whatever could be proved of each try, nothing was said to have happened.
        assert not reply["ok"] or reply["result"]["verdict"] == "deny"
        (newest,) = state.rows("SELECT max(number) FROM server_start WHERE server = 'rogue'")
        assert newest[0] <= 6
        assert worker.invoke("other", "balance", {}, "bank")["verdict"] == "allow"


# --- a row that cannot be recovered ----------------------------------------------------------------------------------


CORRUPTIONS = {
    "the parameters are others": "UPDATE call SET parameters = CAST('{\"to\":\"y\"}' AS BLOB) WHERE operation_key = 'cut'",
    "the parameters are no JSON": "UPDATE call SET parameters = x'7b' WHERE operation_key = 'cut'",
    "the process is nobody": "UPDATE call SET process = 'nobody' WHERE operation_key = 'cut'",
    "the debits are no list": "UPDATE call SET debited = '7' WHERE operation_key = 'cut'",
    "the binding is another": "UPDATE call SET binding = 'x' WHERE operation_key = 'cut'",
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_dispatched_row_that_cannot_be_recovered_is_quarantined_and_blocks_no_other(
    make: MakeState, tmp_path: Path, corruption: str
) -> None:
    """Second table, `row cannot be recovered`: error `runtime_error`; reported, blocks no other"""
    from tests.kernel.test_state import plant

    state = make(child("a", "bank/pay"), child("b", "bank/pay"))
    serving = state.serve()
    gate = Gate(tmp_path / "bank", "after_effect")
    a, b = serving.worker("a"), serving.worker("b")
    with a.connect() as one, b.connect() as two:
        one.send(a.call("cut", "pay", {"to": "x"}, "bank"))
        gate.reached()
        two.send(b.call("beside", "pay", {"to": "x"}, "bank"))
        while len(state.rows("SELECT id FROM call")) < 2:
            b.ask("inspect")
        gate.disarm()
        serving.kill()
    plant(state, CORRUPTIONS[corruption])
    for _ in range(2):
        with state.serve() as again:
            a, b = again.worker("a"), again.worker("b")
            unknown(state, b.invoke("beside", "pay", {"to": "x"}, "bank"))
            if corruption != "the process is nobody":
                with a.connect() as line:
                    line.send(a.call("cut", "pay", {"to": "x"}, "bank"))
                    assert line.code() in ("runtime_error", "conflict")
            assert a.ask("inspect")["state"] == "running"
            quarantined = [body for body in state.log().bodies("incident") if "quarantined" in body["detail"]]
            assert len(quarantined) == 1
    assert state.rows("SELECT operation_key FROM call WHERE state = 'dispatched'") == [("cut",)]
    assert len(effects(tmp_path / "bank")) == 1


UNREADABLE = {
    "no output": "UPDATE call SET output = x'7b' WHERE operation_key = 'key'",
    "no receipt": "DELETE FROM leaf WHERE idx = (SELECT receipt FROM call WHERE operation_key = 'key')",
    "another's receipt": "UPDATE call SET receipt = 0 WHERE operation_key = 'key'",
}


@pytest.mark.parametrize("statement", UNREADABLE.values(), ids=UNREADABLE)
def test_a_settled_row_that_cannot_be_read_back_is_a_runtime_error_of_its_own(make: MakeState, statement: str) -> None:
    from tests.kernel.test_state import plant

    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.invoke("key", "do", {"n": 1}, "rogue")
        worker.invoke("good", "do", {"n": 1}, "rogue")
    plant(state, statement)
    with state.serve() as serving:
        worker = serving.worker("a")
        with worker.connect() as line:
            line.send(worker.call("key", "do", {"n": 1}, "rogue"))
            assert line.code() == "runtime_error"
        assert worker.invoke("good", "do", {"n": 1}, "rogue")["verdict"] == "allow"
