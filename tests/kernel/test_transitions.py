"""The life of a call: the contract's table row by row, and what a start does with a call that it finds dispatched."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from chio import canonical
from chio.kernel import database, receipts
from chio.kernel.calls import (
    MAX_DISPATCHES,
    OUTCOMES,
    TRANSITIONS,
    Counts,
    Event,
    IllegalTransition,
    Outcome,
    State,
    Transition,
    transition,
)
from chio.kernel.clock import Clock
from chio.kernel.counters import Counters
from chio.kernel.ledger import Ledger
from chio.kernel.log import Log, leaf_hash, origin
from chio.kernel.mailboxes import Mailboxes
from chio.kernel.recovery import restore_log
from chio.kernel.store import CallRow, Store
from chio.kernel.tree import Tree
from chio.signing import SigningKey
from chio.tools.router import Router
from tests.kernel import serving
from tests.kernel.serving import Serving, Worker, child, config, grant, policy, result_of
from verify.receipts import verify_receipt

pytestmark = pytest.mark.timeout(60)

MakeState = Callable[..., serving.State]

CALL_AND_GRANTS = Counts.CALL | Counts.GRANTS

# Contract section 4, the first table: (from, event, to, leaves of the one commit, what it counts).
CONTRACT = [
    (None, Event.REFUSED, State.REFUSED, ["receipt"], Counts.CALL),
    (None, Event.BUILT_IN_RAN, State.COMPLETED, ["receipt"], CALL_AND_GRANTS),
    (None, Event.ADMITTED, State.DISPATCHED, ["intent"], CALL_AND_GRANTS),
    (State.DISPATCHED, Event.ANSWERED, State.COMPLETED, ["receipt"], Counts.NOTHING),
    (State.DISPATCHED, Event.NOT_SENT, State.COMPENSATED, ["receipt"], Counts.REFUND),
    (State.DISPATCHED, Event.LOST, State.UNKNOWN, ["receipt", "incident"], Counts.NOTHING),
    (State.DISPATCHED, Event.FOUND_AT_START, State.UNKNOWN, ["receipt", "incident"], Counts.NOTHING),
    (State.COMPENSATED, Event.REPEATED, State.DISPATCHED, ["intent"], Counts.GRANTS),
    (State.UNKNOWN, Event.REPEATED_READ, State.DISPATCHED, ["intent"], Counts.NOTHING),
    (State.COMPENSATED, Event.REPEAT_REFUSED, State.COMPENSATED, [], Counts.NOTHING),
    (State.UNKNOWN, Event.REPEAT_REFUSED, State.UNKNOWN, [], Counts.NOTHING),
    (State.UNKNOWN, Event.RECONCILED, State.RECONCILED, ["reconciliation"], Counts.NOTHING),
    (State.UNKNOWN, Event.LATE_ANSWER, State.UNKNOWN, ["incident"], Counts.NOTHING),
    (State.RECONCILED, Event.LATE_ANSWER, State.RECONCILED, ["incident"], Counts.NOTHING),
]

# The second: how a state is told and signed: (verdict, terminal state, its reason, the receipt's decision).
UNKNOWN = "outcome_unknown_after_dispatch"
TOLD = {
    State.COMPLETED: ("allow", "completed", None, "allow"),
    State.REFUSED: ("deny", "completed", None, "deny"),
    State.UNKNOWN: ("deny", "incomplete", UNKNOWN, "incomplete"),
    State.COMPENSATED: ("deny", "incomplete", "not_dispatched", "incomplete"),
    State.RECONCILED: ("deny", "incomplete", UNKNOWN, "incomplete"),
}


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "event", "to", "leaves", "counts"), CONTRACT)
def test_a_row_of_the_contract_is_a_row_of_the_table(
    before: State | None, event: Event, to: State, leaves: list[str], counts: Counts
) -> None:
    assert transition(before, event) == Transition(to, tuple(leaves), counts)


def test_the_table_has_no_row_that_the_contract_does_not_have() -> None:
    assert set(TRANSITIONS) == {(before, event) for before, event, *_ in CONTRACT}
    assert len(CONTRACT) == len(TRANSITIONS)


LEGAL = {(before, event) for before, event, *_ in CONTRACT}


@pytest.mark.parametrize("before", [None, *State], ids=lambda state: state.value if state else "new")
@pytest.mark.parametrize("event", Event, ids=lambda event: event.name.lower())
def test_every_other_move_is_illegal(before: State | None, event: Event) -> None:
    if (before, event) in LEGAL:
        transition(before, event)
        return
    with pytest.raises(IllegalTransition, match=event.name):
        transition(before, event)


def test_every_state_but_a_dispatched_call_has_an_answer() -> None:
    assert {state: Outcome(*told) for state, told in TOLD.items()} == OUTCOMES
    assert set(State) - set(OUTCOMES) == {State.DISPATCHED}


def test_a_call_is_dispatched_three_times_at_most() -> None:
    assert MAX_DISPATCHES == 3


# --- a dispatched call in the store ----------------------------------------------------------------------------------


@pytest.fixture
def external(make_state: MakeState) -> serving.State:
    """A stopped state whose `a` may send with `max_invocations`, so that a refund would show."""
    rules = policy(grant("send_jobs", max_invocations=5), grant("receive_jobs"))
    return make_state(config(child("a", "send_jobs"), child("b", "receive_jobs")), rules)


class Planter:
    """Writes what a kernel with tool servers would have written when it died, with its own store and functions."""

    def __init__(self, state: serving.State, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = state
        monkeypatch.chdir(state.path)
        self._directory = -1

    def __enter__(self) -> Planter:
        self._directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        self.store = Store(database.open_existing(self._directory, str(self.state.path)))
        seeds = json.loads((self.state.path / "keys.json").read_text())
        self.runtime_id = self.state.pins.runtime_id
        self.log = Log(origin(self.runtime_id), SigningKey(bytes.fromhex(seeds["log"])))
        restore_log(self.store, self.log, str(self.state.path))
        self.store.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.store.commit()
        self.store.close()
        os.close(self._directory)

    def capability(self, process: str) -> str:
        return next(str(row[5]) for row in self.store.processes() if row[0] == process)

    def dispatched(self, key: str, tool: str = "charge", *, dispatch: int = 1, debited: bool = False) -> CallRow:
        """An admitted call of `a` to the server `billing`: its row, its intent leaf, its debits."""
        parameters, salt = canonical.encode({"amount": 7, "note": "é"}), b"0123456789abcdef"
        parameter_hash = receipts.commitment(salt, parameters)
        row = CallRow(
            process="a",
            operation_key=key,
            state=State.DISPATCHED,
            server="billing",
            tool=tool,
            recovery_policy="default",
            binding=receipts.binding(
                self.runtime_id, "a", key, self.capability("a"), "billing", tool, parameter_hash, "default"
            ),
            parameter_salt=salt,
            parameter_hash=parameter_hash,
            parameters=parameters,
            dispatch=dispatch,
            request_id=receipts.request_id(self.runtime_id, "a", key, dispatch),
            attempt=1,
            launch_id=None,
            debited='[["a",0],["root",0]]' if debited else None,
            reason=None,
            output=None,
            receipt=None,
        )
        body = canonical.encode(
            {
                "schema": "chio.intent.v1", "runtime_id": self.runtime_id, "time_ms": self.created_ms,
                "call": {"process_id": "a", "operation_key": key, "request_id": row.request_id}, "attempt": None,
                "capability_id": self.capability("a"), "server": "billing", "tool": tool,
                "parameter_hash": parameter_hash,
            }
        )  # fmt: skip
        hashed = leaf_hash("intent", body, None)
        self.store.put_leaf(self.log.append(hashed), "intent", body, None, hashed)
        self.store.put_call(row)
        self.store.debit_calls(["a", "root"])
        if debited:
            self.store.debit_grant("a", 0, 1)
            self.store.debit_grant("root", 0, 1)
        return row

    @property
    def created_ms(self) -> int:
        return int(self.store.host()["created_ms"])


def repeat(worker: Worker, key: str, tool: str = "charge") -> bytes:
    return worker.line(worker.call(key, tool, {"note": "é", "amount": 7}, "billing"))


def check_unknown(serving_: Serving, line: bytes, planted: CallRow) -> dict[str, Any]:
    """The answer to a call whose outcome nobody knows, as the contract's second table tells it; its receipt's body."""
    result = result_of(line)
    told = {"state": "incomplete", "reason": UNKNOWN}
    assert (result["verdict"], result["output"], result["terminal_state"]) == ("deny", None, told)
    assert (result["reason"], result["request_id"]) == (UNKNOWN, planted.request_id)
    pins = serving_.state.pins
    body = verify_receipt(result["receipt_json"].encode(), pins.kernel_key, pins.runtime_id).body
    assert body["decision"] == {"verdict": "incomplete", "reason": UNKNOWN}
    assert (body["terminal_state"], body["output"]) == (told, None)
    assert body["call"] == {
        "process_id": "a", "operation_key": planted.operation_key, "request_id": planted.request_id,
        "binding": planted.binding, "dispatch": planted.dispatch, "recovery_policy": "default",
    }  # fmt: skip
    assert body["attempt"] == {"number": 1, "launch_id": None}
    return dict(body)


def test_a_call_found_dispatched_at_start_becomes_unknown_with_a_receipt_and_an_incident(
    external: serving.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Planter(external, monkeypatch) as planter:
        first = planter.dispatched("first", debited=True)
        second = planter.dispatched("second", dispatch=3)
    assert external.rows("SELECT count(*) FROM call WHERE state = 'dispatched'") == [(2,)]
    with external.serve() as running:
        worker = running.worker("a")
        answers = [repeat(worker, "first"), repeat(worker, "second")]
        for line, planted in zip(answers, (first, second), strict=True):
            check_unknown(running, line, planted)
        # Nothing is dispatched again by a repeat, and nothing is counted: not the call, no grant comes back.
        assert [repeat(worker, "first"), repeat(worker, "second")] == answers
        assert worker.ask("inspect")["tree_calls"] == 2
        assert dict(external.rows("SELECT process, used FROM grant_usage")) == {"root": 1, "a": 1}
    log = external.log()
    kinds = [kind for kind, _ in log.leaves if kind != "attempt"]
    assert kinds == ["bootstrap", "intent", "intent", "receipt", "incident", "receipt", "incident"]
    for incident, receipt in zip(log.bodies("incident"), log.receipts, strict=True):
        assert incident["call"] == receipt.body["call"]
    assert external.rows("SELECT state, parameters FROM call") == [("unknown", None)] * 2
    assert log.receipts[0].disclosed["parameters"] == {"amount": 7, "note": "é"}


def test_a_second_recovery_finds_nothing_to_do(external: serving.State, monkeypatch: pytest.MonkeyPatch) -> None:
    with Planter(external, monkeypatch) as planter:
        planted = planter.dispatched("key")
    with external.serve():
        pass
    tables = ("call", "leaf", "log_checkpoint", "usage", "grant_usage", "attempt")
    before = [external.rows(f"SELECT * FROM {table}") for table in tables]
    with external.serve():
        pass
    assert [external.rows(f"SELECT * FROM {table}") for table in tables] == before
    with external.serve() as running:
        check_unknown(running, repeat(running.worker("a"), "key"), planted)


def test_the_key_of_an_unknown_call_stays_taken_by_what_was_asked(
    external: serving.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Planter(external, monkeypatch) as planter:
        planter.dispatched("key")
    with external.serve() as running:
        worker = running.worker("a")
        for change in ({"server": "other"}, {"tool": "refund"}, {"arguments": {"amount": 8, "note": "é"}}):
            named = {"key": "key", "tool": "charge", "arguments": {"amount": 7, "note": "é"}, "server": "billing"}
            frame = worker.call(**{**named, **change})
            assert serving.code_of(worker.line(frame)) == "conflict"
        result_of(repeat(worker, "key"))


def test_attempts_that_the_dead_host_left_open_are_ended_once_with_a_leaf_each(make_state: MakeState) -> None:
    state = make_state()
    running = state.serve()
    for name in ("a", "b", "a"):
        running.worker(name)
    running.kill()
    with state.serve() as again:
        attempts = again.host.kernel.call("progress")["attempts"]
        assert [(entry["process"], entry["number"], entry["state"], entry["outcome"]) for entry in attempts] == [
            ("a", 1, "ended", "host_interrupted"), ("a", 2, "ended", "host_interrupted"),
            ("b", 1, "ended", "host_interrupted"),
        ]  # fmt: skip
    events = [(body["event"], body["process_id"], body["attempt"]) for body in state.log().bodies("attempt")]
    assert events[3:] == [("ended", "a", 1), ("ended", "a", 2), ("ended", "b", 1)]


# --- moves through the ledger ----------------------------------------------------------------------------------------


def test_a_move_from_another_state_than_the_rows_changes_nothing(
    external: serving.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old state stands in the statement's WHERE, so that no path can settle a call twice."""
    with Planter(external, monkeypatch) as planter:
        planter.dispatched("key")
        row = planter.store.find_call("a", "key")
        assert row is not None
        row.state, row.parameters, row.receipt = State.UNKNOWN, None, 0
        with pytest.raises(sqlite3.DatabaseError, match="not in state unknown"):
            planter.store.move_call(row, State.UNKNOWN)
        planter.store.move_call(row, State.DISPATCHED)
        with pytest.raises(sqlite3.DatabaseError, match="not in state dispatched"):
            planter.store.move_call(row, State.DISPATCHED)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE call SET receipt = 0",
        "UPDATE call SET parameters = NULL",
        "UPDATE call SET dispatch = 4",
        "UPDATE call SET dispatch = 0",
        "UPDATE call SET state = 'lost'",
        "UPDATE call SET state = 'completed'",
        "INSERT INTO call SELECT id + 1, process, operation_key, state, server, tool, recovery_policy, binding,"
        " parameter_salt, parameter_hash, parameters, dispatch, request_id, attempt, launch_id, debited, reason,"
        " output, receipt, reconciliation FROM call",
    ],
)
def test_the_schema_itself_refuses_a_call_that_the_table_cannot_reach(
    external: serving.State, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    with Planter(external, monkeypatch) as planter:
        planter.dispatched("key")
    with external.copy() as database, pytest.raises(sqlite3.IntegrityError):
        database.execute(change)


SETTLED = [
    pytest.param(Event.ANSWERED, b'{"kind":"value","value":{"paid":true}}', id="answered"),
    pytest.param(Event.ANSWERED, b'{"bytes":9,"kind":"withheld","reason":"too_large","sha256":"00"}', id="withheld"),
    pytest.param(Event.NOT_SENT, None, id="not sent"),
    pytest.param(Event.LOST, None, id="lost"),
    pytest.param(Event.FOUND_AT_START, None, id="found at start"),
]


@pytest.mark.parametrize(("event", "output"), SETTLED)
def test_settling_a_dispatched_call_writes_what_its_row_of_the_table_names(
    external: serving.State, monkeypatch: pytest.MonkeyPatch, event: Event, output: bytes | None
) -> None:
    """The one function for every way out of `dispatched`, recovery's among them."""
    move = transition(State.DISPATCHED, event)
    with Planter(external, monkeypatch) as planter:
        planter.dispatched("key", debited=True)
        key = SigningKey(bytes.fromhex(json.loads((external.path / "keys.json").read_text())["kernel"]))
        ledger = Ledger(
            planter.store, planter.log, Tree(planter.store, ""), Mailboxes(planter.store, {}), Clock(0), key,
            runtime_id=planter.runtime_id, policy_hash=external.pins.policy_digest, open_commit=planter.store.begin,
            servers=Router(asyncio.new_event_loop(), lambda _: None), has_room=lambda: True,
            counters=Counters(planter.store), replay_only=False,
        )  # fmt: skip
        row = planter.store.find_call("a", "key")
        assert row is not None
        size = planter.log.size
        text = ledger.settle(row, event, "told by the test", output).receipt
        leaves = [planter.store.leaf(index)[0] for index in range(size, planter.log.size)]
        kept = planter.store.find_call("a", "key")
        used = planter.store.grant_used("a", 0), planter.store.grant_used("root", 0)
        with pytest.raises(IllegalTransition):
            ledger.settle(row, event, "twice")
    assert kept is not None
    assert (kept.state, kept.output, kept.parameters, kept.dispatch) == (move.to, output, None, 1)
    assert tuple(leaves) == move.leaves
    assert used == ((0, 0) if Counts.REFUND in move.counts else (1, 1))
    verdict, state, reason, decision = TOLD[move.to]
    body = verify_receipt(text, external.kernel_key).body
    assert body["decision"] == {"verdict": decision} | ({"reason": reason} if reason else {})
    assert body["terminal_state"] == {"state": state} | ({"reason": reason} if reason else {})
    assert (body["output"] or {}).get("kind") == (orjson.loads(output)["kind"] if output else None)
    external.log()
    with external.serve() as running:
        result = result_of(repeat(running.worker("a"), "key"))
    assert result["receipt_json"].encode() == text
    assert (result["verdict"], result["output"]) == (verdict, orjson.loads(output) if output else None)


def test_a_mailbox_call_never_stands_dispatched(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as running:
        worker = running.worker("a")
        worker.send("key", "jobs", "m", 1)
        assert state.rows("SELECT state, dispatch, parameters FROM call") == [("completed", 1, None)]
    assert [kind for kind, _ in state.log().leaves if kind != "attempt"] == ["bootstrap", "receipt"]
