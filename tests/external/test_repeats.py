"""Calls of tool servers, row by row: another dispatch, compensation, debits, cancelling, reconciling."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.external.looking import incidents_of, leaves_of, receipt_of, repeats_byte_for_byte, seen, unknown
from tests.kernel.external import (
    Gate,
    ToolServing,
    ToolState,
    child,
    effects,
    mailbox_routes,
    tool,
)
from tests.kernel.serving import Line, Worker, grant, result_of

pytestmark = pytest.mark.timeout(120)

NOT_DISPATCHED = {"state": "incomplete", "reason": "not_dispatched"}
MakeState = Callable[..., ToolState]


# --- another dispatch ------------------------------------------------------------------------------------------------


def test_a_read_of_unknown_outcome_is_dispatched_again_on_a_repeat_and_three_times_at_most(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    """[unknown -> dispatched n+1], and the third outcome stays"""
    frame = worker.call(key, "look", {"how": "exit", "mine": key}, "rogue")
    results = []
    for n in (1, 2, 3):
        before = shared.state.rows("SELECT calls FROM usage WHERE process = ?", worker.process)
        results.append(result_of(worker.line(frame)))
        assert seen(folder / "rogue", key) == n
        unknown(shared.state, results[-1])
        assert receipt_of(shared.state, results[-1])["call"]["dispatch"] == n
        after = shared.state.rows("SELECT calls FROM usage WHERE process = ?", worker.process)
        assert after == (before if n > 1 else [(1,)])
    assert len({result["request_id"] for result in results}) == 3
    last = worker.line(frame)
    assert result_of(last) == results[-1]
    repeats_byte_for_byte(worker, frame, last)
    assert seen(folder / "rogue", key) == 3
    assert leaves_of(shared.state, key) == ["intent", "receipt", "incident"] * 3


def test_a_redispatched_read_that_is_answered_is_completed(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    """[unknown -> dispatched 2 -> completed]"""
    gate = Gate(folder / "bank", "before_reading")
    frame = worker.call(key, "balance", {"to": key}, "bank")
    with worker.connect() as line:
        line.send(frame)
        gate.reached()
        gate.disarm()
        shared.kill_server("bank")
        unknown(shared.state, result_of(line.read()))
    first = worker.line(frame)
    result = result_of(first)
    assert (result["verdict"], receipt_of(shared.state, result)["call"]["dispatch"]) == ("allow", 2)
    repeats_byte_for_byte(worker, frame, first)
    reads = [entry for entry in effects(folder / "bank", "reads.ndjson") if entry["arguments"]["to"] == key]
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("name", "more"), [("do", {}), ("look", {"known_outcome_only": True})], ids=["an effect", "known_outcome_only"]
)
def test_what_is_no_eligible_read_is_never_dispatched_again(
    shared: ToolServing, worker: Worker, folder: Path, key: str, name: str, more: dict[str, Any]
) -> None:
    frame = worker.call(key, name, {"how": "exit", "mine": key}, "rogue", **more)
    first = worker.line(frame)
    unknown(shared.state, result_of(first))
    repeats_byte_for_byte(worker, frame, first)
    assert seen(folder / "rogue", key) == 1


@pytest.mark.parametrize("changes", [{"max_invocations": 9}, {"constraints": {}}], ids=["counted", "constrained"])
def test_a_read_under_a_stateful_grant_is_never_dispatched_again(
    make: MakeState, tmp_path: Path, changes: dict[str, Any]
) -> None:
    state = make(child("a", "rogue/look"), rules=[tool("rogue", "look", **changes)])
    with state.serve() as serving:
        worker = serving.worker("a")
        frame = worker.call("key", "look", {"how": "exit", "mine": "key"}, "rogue")
        first = worker.line(frame)
        unknown(state, result_of(first))
        repeats_byte_for_byte(worker, frame, first)
    assert seen(tmp_path / "rogue", "key") == 1


@pytest.mark.parametrize("op", ["revoke_capability"])
def test_a_repeat_that_a_check_refuses_replays_what_is_retained(make: MakeState, tmp_path: Path, op: str) -> None:
    """[unknown -> unknown] and [compensated -> compensated]: a repeat that any check refuses"""
    state = make(child("a", "rogue/look", "rogue/do"))
    with state.serve() as serving:
        worker = serving.worker("a")
        read = worker.call("read", "look", {"how": "exit", "mine": "read"}, "rogue")
        lost = worker.line(read)
        unknown(state, result_of(lost))
        unsent = worker.call("unsent", "do", {"mine": "unsent"}, "rogue")
        not_sent = shut_and(worker, unsent, tmp_path / "rogue")
        serving.kernel.call(op, process="a")
        repeats_byte_for_byte(worker, read, lost)
        repeats_byte_for_byte(worker, unsent, not_sent)
    assert (seen(tmp_path / "rogue", "read"), seen(tmp_path / "rogue", "unsent")) == (1, 0)
    assert (state.call("read"), state.call("unsent")) == ("unknown", "compensated")


# --- provably not sent -----------------------------------------------------------------------------------------------


def shut_and(worker: Worker, frame: bytes, folder: Path, server_id: str = "rogue") -> bytes:
    """Have the server close its stdin while it lives, then call: no byte of the call can reach it."""
    if not (folder / "shut.go").exists():
        os.mkfifo(folder / "shut.go")
    shut = worker.invoke(f"shut for {sha256(frame).hexdigest()}", "do", {"how": "shut_stdin"}, server_id)
    assert shut["output"]["value"]["structuredContent"] == {"shut": True}
    return worker.line(frame)


def test_a_call_of_which_no_byte_was_taken_is_compensated_and_may_be_sent_again(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    """[dispatched -> compensated] and [compensated -> dispatched 2]"""
    frame = worker.call(key, "do", {"mine": key}, "rogue")
    first = result_of(shut_and(worker, frame, folder / "rogue"))
    assert (first["verdict"], first["output"], first["reason"]) == ("deny", None, "not_dispatched")
    assert first["terminal_state"] == NOT_DISPATCHED
    assert receipt_of(shared.state, first)["decision"] == {"verdict": "incomplete", "reason": "not_dispatched"}
    assert leaves_of(shared.state, key) == ["intent", "receipt"]
    again = worker.line(frame)
    assert result_of(again)["verdict"] == "allow"
    assert receipt_of(shared.state, result_of(again))["call"]["dispatch"] == 2
    repeats_byte_for_byte(worker, frame, again)
    assert seen(folder / "rogue", key) == 1


def test_a_call_is_compensated_three_times_at_most(shared: ToolServing, worker: Worker, folder: Path, key: str) -> None:
    frame = worker.call(key, "do", {"mine": key}, "rogue", known_outcome_only=True)
    for n in (1, 2, 3):
        last = shut_and_repeat(worker, frame, folder / "rogue", n)
        assert receipt_of(shared.state, result_of(last))["call"]["dispatch"] == n
    repeats_byte_for_byte(worker, frame, last)
    assert seen(folder / "rogue", key) == 0


def shut_and_repeat(worker: Worker, frame: bytes, folder: Path, n: int) -> bytes:
    shut = worker.invoke(f"shut {n} {worker.process}", "do", {"how": "shut_stdin"}, "rogue")
    assert shut["verdict"] == "allow"
    return worker.line(frame)


def test_a_server_that_reads_nothing_gets_half_a_call_whose_outcome_is_unknown_and_none_of_the_next(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    """[dispatched -> unknown] for the one, [dispatched -> compensated] for the other, by what the pipe took"""
    os.mkfifo(folder / "deaf" / "deaf.go")
    assert worker.invoke(f"{key}, deaf", "do", {"how": "deaf"}, "deaf")["verdict"] == "allow"
    with worker.connect() as half, worker.connect() as none:
        half.send(worker.call(key, "do", {"mine": key, "padding": "x" * 200_000}, "deaf"))
        while shared.state.rows("SELECT state FROM call WHERE operation_key = ?", key) == []:
            worker.ask("inspect")
        none.send(worker.call(f"{key}, next", "do", {"mine": key}, "deaf"))
        unknown(shared.state, result_of(half.read()))
        assert result_of(none.read())["terminal_state"] == NOT_DISPATCHED
    assert seen(folder / "deaf", key) == 0
    # The stream is broken off; the next call gets a server of its own.
    assert worker.line(worker.call(f"{key}, next", "do", {"mine": key}, "deaf"))
    assert shared.state.call(f"{key}, next") == "completed"
    assert seen(folder / "deaf", key) == 1


# --- max_invocations -------------------------------------------------------------------------------------------------


def test_a_compensated_call_gives_its_invocation_back_along_the_whole_chain(make: MakeState, tmp_path: Path) -> None:
    """[dispatched -> compensated]: grants refunded; [compensated -> dispatched]: grants counted again"""
    state = make(
        child("a", "quick/do", "rogue/do"),
        child("below", "quick/do", "rogue/do", parent="a", share=500),
        rules=[tool("quick"), tool("rogue", "do", max_invocations=2)],
    )
    with state.serve() as serving:
        below = serving.worker("below")
        position = 1
        chain = [("below", position), ("a", position), ("root", position)]
        frame = below.call("key", "do", {"mine": "key"}, "rogue")
        first = result_of(shut_and(below, frame, tmp_path / "rogue"))  # the shutting call is the first of two
        assert first["terminal_state"] == NOT_DISPATCHED
        assert [state.used()[at] for at in chain] == [1, 1, 1]
        assert result_of(below.line(frame))["verdict"] == "allow"
        assert [state.used()[at] for at in chain] == [2, 2, 2]
        for name in ("below", "a", "root"):
            result = serving.worker(name).invoke(f"one too many for {name}", "do", {}, "rogue")
            assert (result["verdict"], result["reason"]) == ("deny", "invocations_exhausted")
        assert [state.used()[at] for at in chain] == [2, 2, 2]
    assert debits_by_the_log(state) == state.used()


def debits_by_the_log(state: ToolState) -> dict[tuple[str, int], int]:
    """What the log says stands debited of every grant that counts: intents less compensated, and built-in calls.

    Each tool is covered by one grant of each process here, so that the log names the grant.
    """
    capabilities = {name: json.loads(text)["body"] for name, text in state.rows("SELECT id, capability FROM process")}
    parents = dict(state.rows("SELECT id, parent FROM process"))
    found: dict[tuple[str, int], int] = {}

    def debit(name: str | None, server_id: str, tool_name: str, by: int) -> None:
        position = None
        while name is not None:
            grants = capabilities[name]["grants"]
            if position is None:
                (position,) = (
                    n for n, entry in enumerate(grants)
                    if entry["server"] == server_id and entry["tool"] in ("*", tool_name)
                )  # fmt: skip
            if grants[position]["max_invocations"] is not None:
                found[name, position] = found.get((name, position), 0) + by
            position, name = grants[position]["parent_grant"], parents[name]

    for kind, body in state.log().leaves:
        if kind == "intent":
            debit(body["call"]["process_id"], body["server"], body["tool"], 1)
        elif kind == "receipt":
            at = body["call"]["process_id"], body["tool_server"], body["tool_name"]
            if body["decision"].get("reason") == "not_dispatched":
                debit(*at, -1)
            elif body["tool_server"] == "chio-ipc" and body["decision"]["verdict"] == "allow":
                debit(*at, 1)
    return found


def test_what_is_debited_of_every_grant_adds_up_in_the_log_across_crashes(make: MakeState, tmp_path: Path) -> None:
    state = make(
        child("a", "rogue/do", "bank/pay", *mailbox_routes("jobs")),
        child("below", "rogue/do", "bank/pay", "chio-ipc/send_jobs", parent="a", share=500),
        rules=[
            tool("rogue", "do", max_invocations=60), tool("bank", "pay", max_invocations=60),
            grant("send_jobs", max_invocations=30), grant("receive_jobs"), grant("ack_jobs"),
        ],
    )  # fmt: skip
    for round_ in range(4):
        serving = state.serve()
        lines: list[Line] = []
        try:
            workers = [serving.worker(name) for name in ("a", "below")]
            for worker in workers:
                me = f"{worker.process} {round_}"
                for n in range(3):
                    worker.invoke(f"{me} pay {n}", "pay", {"to": me, "cents": n}, "bank")
                    worker.send(f"{me} send {n}", "jobs", f"{me} {n}", n)
                frame = worker.call(f"{me} unsent", "do", {"mine": me}, "rogue")
                assert result_of(shut_and(worker, frame, tmp_path / "rogue"))["terminal_state"] == NOT_DISPATCHED
                if round_ % 2:
                    assert result_of(worker.line(frame))["verdict"] == "allow"
                worker.invoke(f"{me} exit", "do", {"how": "exit"}, "rogue")
            assert debits_by_the_log(state) == state.used()
            # At most 14 of these are debited in a round, so that one always reaches the bank.
            gate = Gate(tmp_path / "bank", "before_effect")
            for worker in workers:
                for n in range(4):
                    lines.append(worker.connect())
                    lines[-1].send(worker.call(f"{worker.process} {round_} cut {n}", "pay", {}, "bank"))
            gate.reached()
            gate.disarm()
        finally:
            serving.kill()
            for line in lines:
                line.close()
        assert debits_by_the_log(state) == state.used()
    with state.serve() as serving:
        assert debits_by_the_log(state) == state.used()
        worker = serving.worker("below")
        results = [worker.invoke(f"drain {n}", "pay", {}, "bank") for n in range(61)]
    assert results[-1]["reason"] == "invocations_exhausted"
    assert debits_by_the_log(state) == state.used()
    assert max(state.used().values()) <= 60
    assert state.used()["root", 1] == 60


# --- cancelling, reconciling -----------------------------------------------------------------------------------------


def test_cancelling_withholds_what_is_in_flight_and_its_own_receipt_stays_retained(
    make: MakeState, tmp_path: Path
) -> None:
    """Second table, `cancelled in flight`: error `cancelled`, the call's own receipt retained"""
    state = make(child("a", "bank/pay"), child("below", "bank/pay", parent="a", share=500))
    with state.serve() as serving:
        above, below = serving.worker("a"), serving.worker("below")
        gate = Gate(tmp_path / "bank", "after_effect")
        frame = below.call("key", "pay", {"to": "x"}, "bank")
        with below.connect() as line:
            line.send(frame)
            gate.reached()
            assert above.ask("cancel") == {"cancelled_processes": 2}
            assert line.code() == "cancelled"
        gate.go()
        root = serving.worker("root")
        assert root.invoke("after", "balance", {"to": "x"}, "bank")["verdict"] == "allow"  # on the same pipe
        with below.connect() as line:
            line.send(frame)
            assert line.code() == "cancelled"
        assert state.call("key") == "completed"
    assert leaves_of(state, "key") == ["intent", "receipt"]
    assert len(effects(tmp_path / "bank")) == 1


def test_a_reconciled_call_keeps_its_receipt_and_shows_the_statement_beside_it(make: MakeState) -> None:
    """[unknown -> reconciled]"""
    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        frame = worker.call("key", "do", {"how": "exit"}, "rogue")
        before = result_of(worker.line(frame))
        statement: dict[str, Any] = {"outcome": "applied", "by": "somebody", "evidence_sha256": "0" * 64}
        serving.kernel.call("reconcile", process="a", key="key", **statement)
        after = worker.line(frame)
        result = result_of(after)
        record = state.log().leaves[result["reconciliation"]["record"]]
        assert record[0] == "reconciliation"
        assert {name: record[1][name] for name in statement} == statement
        shown = result.pop("reconciliation")
        assert (shown.keys(), shown["outcome"], shown["by"]) == ({"outcome", "by", "record"}, "applied", "somebody")
        assert result == before
        repeats_byte_for_byte(worker, frame, after)
    assert state.call("key") == "reconciled"


def test_only_an_unknown_outcome_can_be_reconciled(make: MakeState) -> None:
    from chio.errors import StateError

    state = make()
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.invoke("known", "do", {}, "rogue")
        worker.invoke("refused", "balance", {}, "no such server")
        for key in ("known", "refused", "never made"):
            with pytest.raises(StateError, match="only a call whose outcome is unknown"):
                serving.kernel.call(
                    "reconcile", process="a", key=key, outcome="applied", by="x", evidence_sha256="0" * 64
                )
        assert state.log().bodies("reconciliation") == []


def test_an_answer_after_the_reconciliation_is_an_incident_too(make: MakeState, tmp_path: Path) -> None:
    """[reconciled -> reconciled]: late answer"""
    state = make(child("a", "quick/do"))
    os.mkfifo(tmp_path / "quick" / "late.go")
    with state.serve() as serving:
        worker = serving.worker("a")
        frame = worker.call("key", "do", {"how": "late_when_told"}, "quick")
        unknown(state, result_of(worker.line(frame)))
        serving.kernel.call("reconcile", process="a", key="key", outcome="applied", by="x", evidence_sha256="0" * 64)
        with open(tmp_path / "quick" / "late.go", "w"):
            pass
        worker.invoke("after", "do", {}, "quick")
        reconciled = result_of(worker.line(frame))
    _lost, late = incidents_of(state, reconciled["request_id"])
    assert late["detail"] == "an answer came late"
    assert state.call("key") == "reconciled"
