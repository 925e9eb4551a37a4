"""Durable mailboxes: every row of the contract's table, and receives that wait."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernel.serving import Line, Serving, State, Worker, all_of, child, code_of, config, mailbox, result_of

pytestmark = pytest.mark.timeout(60)

MakeState = Callable[..., State]


@pytest.fixture(scope="module")
def box(_boxes: Iterator[int]) -> Callable[[], str]:
    return lambda: f"m{next(_boxes)}"


@pytest.fixture(scope="module")
def _boxes() -> Iterator[int]:
    return iter(range(29))  # m29 takes malformed calls


@pytest.fixture
def small(make_state: MakeState) -> Iterator[tuple[Worker, Worker, State]]:
    """Two workers on a mailbox of three messages, two of them pending at most, and one with room for 40 bytes."""
    host = config(
        child("a", *all_of("few", "tight")), child("b", *all_of("few", "tight")),
        mailboxes=[
            mailbox("few", max_pending_messages=2, max_messages=3),
            mailbox("tight", max_pending_bytes=40, max_message_bytes=30),
        ],
    )  # fmt: skip
    state = make_state(host)
    with state.serve() as serving:
        yield serving.worker("a"), serving.worker("b"), state


# --- send ------------------------------------------------------------------------------------------------------------


def test_messages_are_numbered_from_one_and_name_their_sender(
    worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name = box()
    payloads = [{"items": [2, 3, 5]}, "text", None, 1.5, ["é", "😀"]]
    for n, payload in enumerate(payloads):
        sent = worker.send(f"send {n}", name, f"message {n}", payload)
        assert sent == {"status": "sent", "sequence": str(n + 1)}
    assert bystander.receive("receive", name, "0") == {
        "status": "received",
        "messages": [
            {"sequence": str(n + 1), "payload": payload, "sender": worker.process} for n, payload in enumerate(payloads)
        ],
        "next_sequence": "5",
    }


def test_the_same_message_under_another_operation_key_is_the_original(worker: Worker, box: Callable[[], str]) -> None:
    name = box()
    assert worker.send("one", name, "message", {"a": 1, "b": 2}) == {"status": "sent", "sequence": "1"}
    assert worker.send("two", name, "message", {"b": 2, "a": 1}) == {"status": "sent", "sequence": "1"}
    assert worker.send("other", name, "other", 1) == {"status": "sent", "sequence": "2"}
    assert len(worker.receive("all", name, "0")["messages"]) == 2


def refused(result: dict[str, Any]) -> tuple[str, str, str]:
    """(reason, guard, detail) of a call that the mailbox refused, whose receipt is a refusal's."""
    assert (result["verdict"], result["output"], result["terminal_state"]) == ("deny", None, {"state": "completed"})
    body = json.loads(result["receipt_json"])["body"]
    last = body["evidence"][-1]
    assert body["decision"] == {"verdict": "deny", "reason": result["reason"], "guard": last["guard"]}
    return result["reason"], last["guard"], last["detail"]


def test_a_message_key_with_another_payload_or_sender_is_a_message_conflict(
    worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name = box()
    worker.send("one", name, "message", {"total": 10})
    for who, payload in ((worker, {"total": 18}), (bystander, {"total": 10})):
        result = who.invoke("conflict", f"send_{name}", {"message_key": "message", "payload": payload})
        assert refused(result)[:2] == ("message_conflict", "mailbox")
        assert who.invoke("conflict", f"send_{name}", {"message_key": "message", "payload": payload}) == result
    assert [message["payload"] for message in worker.receive("all", name, "0")["messages"]] == [{"total": 10}]


def test_a_message_that_was_acknowledged_says_so_when_it_is_sent_again(worker: Worker, box: Callable[[], str]) -> None:
    name = box()
    worker.send("one", name, "message", 1)
    worker.tool("ack", f"ack_{name}", through_sequence="1")
    assert worker.send("two", name, "message", 1) == {"status": "acknowledged", "sequence": "1"}
    conflict = worker.invoke("three", f"send_{name}", {"message_key": "message", "payload": 2})
    assert refused(conflict)[0] == "message_conflict"
    # The first call under its own key is what it was.
    assert worker.send("one", name, "message", 1) == {"status": "sent", "sequence": "1"}


def test_a_full_mailbox_takes_no_key_and_has_room_again_after_an_acknowledgement(
    small: tuple[Worker, Worker, State],
) -> None:
    a, b, state = small
    for n in range(2):
        assert a.send(f"key {n}", "few", f"m{n}", n)["status"] == "sent"
    assert a.send("key 2", "few", "m2", 2) == {"status": "full"}
    assert a.send("again", "few", "m1", 1) == {"status": "sent", "sequence": "2"}
    assert b.send("not taken", "few", "m2", "of another sender") == {"status": "full"}
    b.tool("ack", "ack_few", through_sequence="1")
    assert b.send("now", "few", "m2", "of another sender") == {"status": "sent", "sequence": "3"}
    assert a.send("key 2", "few", "m2", 2) == {"status": "full"}  # what the key was answered stays its answer
    assert state.rows("SELECT pending_messages FROM mailbox WHERE id = 'few'") == [(2,)]


def test_a_mailbox_that_had_its_last_message_is_exhausted_for_ever(small: tuple[Worker, Worker, State]) -> None:
    a, b, _ = small
    for n in range(3):
        assert a.send(f"key {n}", "few", f"m{n}", n)["status"] == "sent"
        b.tool(f"ack {n}", "ack_few", through_sequence=str(n + 1))
    assert a.send("key 3", "few", "m3", 3) == {"status": "exhausted"}
    assert a.send("known", "few", "m0", 0) == {"status": "acknowledged", "sequence": "1"}


def test_pending_bytes_count_as_canonical_text_and_come_back_with_the_acknowledgement(
    small: tuple[Worker, Worker, State],
) -> None:
    a, b, state = small
    assert a.send("30", "tight", "m0", "x" * 28)["status"] == "sent"
    over = a.invoke("31", "send_tight", {"message_key": "m1", "payload": "x" * 29})
    assert refused(over) == ("invalid_arguments", "mailbox", "payload: 31 bytes, at most 30")
    assert a.send("11", "tight", "m2", "é" * 4 + "x") == {"status": "full"}
    assert a.send("10", "tight", "m3", "é" * 4)["status"] == "sent"
    assert a.send("1", "tight", "m4", 0) == {"status": "full"}
    b.tool("ack", "ack_tight", through_sequence="2")
    assert state.rows("SELECT pending_messages, pending_bytes FROM mailbox WHERE id = 'tight'") == [(0, 0)]
    assert a.send("again", "tight", "m5", "x" * 28)["status"] == "sent"


def test_the_largest_message_that_the_defaults_allow_passes_through(worker: Worker, box: Callable[[], str]) -> None:
    name, payload = box(), "x" * (64 * 1024 - 2)
    assert worker.send("most", name, "most", payload)["status"] == "sent"
    over = worker.invoke("over", f"send_{name}", {"message_key": "over", "payload": payload + "x"})
    assert refused(over)[0] == "invalid_arguments"
    assert worker.receive("all", name, "0")["messages"][0]["payload"] == payload


# --- receive ---------------------------------------------------------------------------------------------------------


def test_receiving_consumes_nothing_and_pages_by_its_cursor(
    worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name = box()
    for n in range(20):
        worker.send(f"send {n}", name, f"m{n}", n)
    for who in (worker, bystander):
        cursor, seen = "0", []
        for n, size in enumerate((16, 4, 0)):
            page = who.receive(f"page {n}", name, cursor)
            assert len(page["messages"]) == size
            seen += [message["payload"] for message in page["messages"]]
            cursor = page["next_sequence"]
        assert seen == list(range(20))
        assert cursor == "20"
    assert [message["sequence"] for message in worker.receive("three", name, "7", 3)["messages"]] == ["8", "9", "10"]


def test_a_key_replays_an_empty_result_although_there_is_a_message_now(worker: Worker, box: Callable[[], str]) -> None:
    name = box()
    empty = {"status": "received", "messages": [], "next_sequence": "0"}
    assert worker.receive("early", name, "0") == empty
    worker.send("send", name, "m", 1)
    assert worker.receive("early", name, "0") == empty
    assert len(worker.receive("late", name, "0")["messages"]) == 1


def test_a_cursor_behind_the_acknowledgement_has_expired(worker: Worker, box: Callable[[], str]) -> None:
    name = box()
    for n in range(3):
        worker.send(f"send {n}", name, f"m{n}", n)
    worker.tool("ack", f"ack_{name}", through_sequence="2")
    for cursor in ("0", "1"):
        expired = worker.receive(f"at {cursor}", name, cursor)
        assert expired == {"status": "cursor_expired", "acknowledged_through": "2"}
    assert [message["payload"] for message in worker.receive("at 2", name, "2")["messages"]] == [2]


def test_a_cursor_beyond_the_newest_message_waits_for_what_comes_behind_it(
    worker: Worker, box: Callable[[], str]
) -> None:
    name = box()
    assert worker.receive("far", name, "9" * 19) == {"status": "received", "messages": [], "next_sequence": "9" * 19}


# --- acknowledge -----------------------------------------------------------------------------------------------------


def test_an_acknowledgement_never_goes_back_and_drops_payloads_but_not_keys(
    shared: Serving, worker: Worker, box: Callable[[], str]
) -> None:
    name = box()
    for n in range(3):
        worker.send(f"send {n}", name, f"m{n}", f"payload {n}")
    for key, through, answer in (("a", "2", "2"), ("b", "1", "2"), ("c", "0", "2"), ("d", "2", "2"), ("e", "3", "3")):
        acknowledged = worker.tool(key, f"ack_{name}", through_sequence=through)
        assert acknowledged == {"status": "acknowledged", "through_sequence": answer}
    rows = shared.state.rows("SELECT message_key, payload FROM message WHERE mailbox = ? ORDER BY sequence", name)
    assert rows == [("m0", None), ("m1", None), ("m2", None)]


def test_what_was_not_sent_cannot_be_acknowledged(worker: Worker, box: Callable[[], str]) -> None:
    name = box()
    worker.send("send", name, "m", 1)
    for n, through in enumerate(("2", "9" * 19)):
        result = worker.invoke(f"ack {n}", f"ack_{name}", {"through_sequence": through})
        assert refused(result)[:2] == ("invalid_arguments", "mailbox")
    assert len(worker.receive("all", name, "0")["messages"]) == 1


# --- arguments -------------------------------------------------------------------------------------------------------

MALFORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "send without payload": ("send", {"message_key": "m"}),
    "send with more": ("send", {"message_key": "m", "payload": 1, "sender": "root"}),
    "an empty message key": ("send", {"message_key": "", "payload": 1}),
    "a message key of 257 bytes": ("send", {"message_key": "m" * 257, "payload": 1}),
    "a message key with a newline": ("send", {"message_key": "a\nb", "payload": 1}),
    "a message key that is a number": ("send", {"message_key": 1, "payload": 1}),
    "receive without limit": ("receive", {"after_sequence": "0"}),
    "receive with more": ("receive", {"after_sequence": "0", "limit": 1, "wait": 1}),
    "a limit of 0": ("receive", {"after_sequence": "0", "limit": 0}),
    "a limit of 17": ("receive", {"after_sequence": "0", "limit": 17}),
    "a limit that is true": ("receive", {"after_sequence": "0", "limit": True}),
    "a limit that is a float": ("receive", {"after_sequence": "0", "limit": 1.5}),
    "a cursor that is a number": ("receive", {"after_sequence": 0, "limit": 1}),
    "a cursor with a sign": ("receive", {"after_sequence": "+1", "limit": 1}),
    "a cursor with a leading zero": ("receive", {"after_sequence": "01", "limit": 1}),
    "a cursor of other digits": ("receive", {"after_sequence": "\u0661", "limit": 1}),
    "a cursor with a newline": ("receive", {"after_sequence": "1\n", "limit": 1}),
    "an empty cursor": ("receive", {"after_sequence": "", "limit": 1}),
    "a cursor of 20 digits": ("receive", {"after_sequence": "1" * 20, "limit": 1}),
    "a negative wait": ("receive", {"after_sequence": "0", "limit": 1, "wait_ms": -1}),
    "a wait of 30,001 ms": ("receive", {"after_sequence": "0", "limit": 1, "wait_ms": 30_001}),
    "a wait that is text": ("receive", {"after_sequence": "0", "limit": 1, "wait_ms": "1"}),
    "ack without a sequence": ("ack", {}),
    "ack with a number": ("ack", {"through_sequence": 1}),
    "ack with a negative number": ("ack", {"through_sequence": "-1"}),
}


@pytest.mark.parametrize(("verb", "arguments"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_arguments_are_a_signed_refusal_and_change_nothing(
    shared: Serving, worker: Worker, verb: str, arguments: dict[str, Any]
) -> None:
    before = shared.state.rows("SELECT * FROM mailbox WHERE id = 'm29'")
    key = f"malformed {verb} {json.dumps(arguments)}"[:200]
    result = worker.invoke(key, f"{verb}_m29", arguments)
    assert refused(result)[:2] == ("invalid_arguments", "mailbox")
    assert worker.invoke(key, f"{verb}_m29", arguments) == result
    assert shared.state.rows("SELECT * FROM mailbox WHERE id = 'm29'") == before


# --- waiting ---------------------------------------------------------------------------------------------------------


def waiting(worker: Worker, name: str, key: str = "wait", after: str = "0", wait_ms: int = 30_000) -> Line:
    """A receive that waits: when this returns, the kernel has parked it."""
    line = worker.connect()
    line.send(worker.call(key, f"receive_{name}", {"after_sequence": after, "limit": 16, "wait_ms": wait_ms}))
    # Requests of the other connections are taken in turn: two of them later, this one has been decided.
    for _ in range(2):
        worker.ask("inspect")
    assert select.select([line.socket], [], [], 0)[0] == []
    return line


def value(line: Line) -> dict[str, Any]:
    return dict(result_of(line.read())["output"]["value"])


def test_a_waiting_receive_is_woken_by_a_send_and_everybody_else_is_served_meanwhile(
    worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name, other = box(), box()
    calls = worker.ask("inspect")["tree_calls"]
    with waiting(worker, name) as line, waiting(bystander, name) as second:
        assert worker.ask("inspect")["tree_calls"] == calls  # what waits is no call yet
        bystander.send(f"send to {other}", other, "m", 1)
        assert select.select([line.socket, second.socket], [], [], 0)[0] == []
        bystander.send(f"send to {name}", name, "m", "here")
        expected = {
            "status": "received",
            "messages": [{"sequence": "1", "payload": "here", "sender": bystander.process}],
            "next_sequence": "1",
        }
        assert value(line) == value(second) == expected
    repeated = worker.tool("wait", f"receive_{name}", after_sequence="0", limit=16, wait_ms=30_000)
    assert repeated == expected


def test_a_wait_that_ends_without_a_message_is_an_empty_result_that_is_retained(
    worker: Worker, box: Callable[[], str]
) -> None:
    name = box()
    started = time.monotonic()
    with waiting(worker, name, wait_ms=300) as line:
        empty = value(line)
    assert 0.25 < time.monotonic() - started < 10
    assert empty == {"status": "received", "messages": [], "next_sequence": "0"}
    worker.send("send", name, "m", 1)
    assert worker.tool("wait", f"receive_{name}", after_sequence="0", limit=16, wait_ms=300) == empty


def test_a_receive_does_not_wait_when_there_is_a_message_or_its_cursor_has_expired(
    worker: Worker, box: Callable[[], str]
) -> None:
    name = box()
    worker.send("send", name, "m", 1)
    now = worker.tool("now", f"receive_{name}", after_sequence="0", limit=1, wait_ms=30_000)
    assert len(now["messages"]) == 1
    worker.tool("ack", f"ack_{name}", through_sequence="1")
    expired = worker.tool("expired", f"receive_{name}", after_sequence="0", limit=1, wait_ms=30_000)
    assert expired["status"] == "cursor_expired"


def test_a_waiting_receive_whose_cursor_is_ahead_goes_on_waiting_after_an_earlier_message(
    worker: Worker, box: Callable[[], str]
) -> None:
    name = box()
    with waiting(worker, name, after="1") as line:
        worker.send("first", name, "m1", 1)
        worker.ask("inspect")
        assert select.select([line.socket], [], [], 0)[0] == []
        worker.send("second", name, "m2", 2)
        assert [message["payload"] for message in value(line)["messages"]] == [2]


def test_a_client_that_leaves_while_it_waits_leaves_no_record(
    shared: Serving, worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name = box()
    calls = worker.ask("inspect")["tree_calls"]
    waiting(worker, name, "left").close()
    bystander.send(f"send to {name}", name, "m", 1)
    assert worker.ask("inspect")["tree_calls"] == calls + 1
    assert shared.state.rows("SELECT * FROM call WHERE operation_key = 'left'") == []
    # Its key is free: for the same request, or for another one.
    assert worker.invoke("left", "transfer", {})["reason"] == "out_of_scope"


def test_an_attempt_that_ends_while_it_waits_leaves_no_record(
    shared: Serving, worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name = box()
    with waiting(worker, name, "ended") as line:
        shared.end(worker)
        assert line.closed()
    bystander.send(f"send to {name}", name, "m", 1)
    assert shared.state.rows("SELECT * FROM call WHERE operation_key = 'ended'") == []
    again = shared.worker(worker.process)
    assert again.receive("ended", name, "0")["messages"][0]["payload"] == 1


def test_a_key_that_waits_is_taken_by_whoever_commits_first(worker: Worker, box: Callable[[], str]) -> None:
    """Authority and key are looked at again when the receive commits, not when it began."""
    name = box()
    with waiting(worker, name, "key") as line:
        assert worker.invoke("key", "transfer", {})["reason"] == "out_of_scope"
        worker.send("send", name, "m", 1)
        assert line.code() == "conflict"


def test_the_same_receive_that_waits_twice_is_one_call_with_one_answer(worker: Worker, box: Callable[[], str]) -> None:
    name = box()
    calls = worker.ask("inspect")["tree_calls"]
    with waiting(worker, name) as line, waiting(worker, name) as second:
        worker.send("send", name, "m", 1)
        assert line.read() == second.read()
    assert worker.ask("inspect")["tree_calls"] == calls + 2


def test_a_receive_that_waits_when_its_process_is_cancelled_is_cancelled(make_state: MakeState) -> None:
    with make_state().serve() as serving:
        a, b = serving.worker("a"), serving.worker("b")
        with waiting(a, "jobs") as line:
            assert a.ask("cancel") == {"cancelled_processes": 1}
            b.send("send", "jobs", "m", 1)
            assert line.code() == "cancelled"
        assert serving.state.rows("SELECT count(*) FROM call WHERE process = 'a'") == [(0,)]


def test_a_receive_that_reaches_the_ceiling_while_it_waits_is_limit_reached(make_state: MakeState) -> None:
    with make_state(config(child("a", *all_of("jobs"), share=10_000), max_calls=1)).serve() as serving:
        a = serving.worker("a")
        with waiting(a, "jobs") as line:
            a.send("send", "jobs", "m", 1)
            assert line.code() == "limit_reached"


def test_sixty_four_receives_wait_at_once_and_one_send_wakes_them_all(
    worker: Worker, bystander: Worker, box: Callable[[], str]
) -> None:
    name = box()
    lines = [worker.connect() for _ in range(64)]
    for n, line in enumerate(lines):
        arguments = {"after_sequence": "0", "limit": 1, "wait_ms": 30_000}
        line.send(worker.call(f"wait {n}", f"receive_{name}", arguments))
    for line in lines:  # a request behind a receive that waits has its turn after it
        line.send(worker.frame("inspect"))
    bystander.send(f"send to {name}", name, "m", 1)
    for line in lines:
        assert len(value(line)["messages"]) == 1
        assert result_of(line.read())["process_id"] == worker.process
        line.close()


# --- one commit ------------------------------------------------------------------------------------------------------


def test_a_send_is_one_commit_of_its_message_call_receipt_leaf_and_counters(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        before = (state.path / "authority.db-wal").read_bytes()
        worker.send("send", "jobs", "m", 1)
        commits = commit_frames((state.path / "authority.db-wal").read_bytes()) - commit_frames(before)
    assert commits == 1


def commit_frames(wal: bytes) -> int:
    """Frames that end a commit: the second word of their header is not zero (sqlite.org/fileformat2, section 4)."""
    page = int.from_bytes(wal[8:12], "big")
    frames = range(32, len(wal), 24 + page)
    return sum(wal[at + 4 : at + 8] != bytes(4) for at in frames)


def test_a_message_that_conflicts_with_one_sent_in_the_same_group_is_refused(make_state: MakeState) -> None:
    """Sixteen senders of one message key, read in one turn of the kernel: one message, fifteen conflicts."""
    with make_state().serve() as serving:
        worker = serving.worker("a")
        lines = [worker.connect() for _ in range(16)]
        for n, line in enumerate(lines):
            line.send(worker.call(f"key {n}", "send_jobs", {"message_key": "m", "payload": n}))
        answers = [result_of(line.read()) for line in lines]
        for line in lines:
            line.close()
        assert sorted(answer["verdict"] for answer in answers) == ["allow"] + ["deny"] * 15
        assert {answer["reason"] for answer in answers} == {None, "message_conflict"}
        assert code_of(worker.line(worker.call("key 0", "send_jobs", {}))) == "conflict"
