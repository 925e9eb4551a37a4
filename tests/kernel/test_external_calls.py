"""Calls of tool servers, driven through a real kernel and real servers: the contract's two tables, row by row.

`[from -> to]` in a test's docstring names the row of the first table that it reaches. What servers do wrong is in
`tests/servers/rogue.py`; the effects that count are those that the server itself has written down.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.external import (
    Gate,
    ToolServing,
    ToolState,
    child,
    effects,
    host_config,
    mailbox_routes,
    server,
    tool,
)
from tests.kernel.serving import Line, Worker, grant, policy, result_of
from verify.receipts import verify_receipt

pytestmark = pytest.mark.timeout(120)

_PROCESSES = 90
UNKNOWN = {"state": "incomplete", "reason": "outcome_unknown_after_dispatch"}
NOT_DISPATCHED = {"state": "incomplete", "reason": "not_dispatched"}
MakeState = Callable[..., ToolState]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("external")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[ToolServing]:
    """One kernel for the module. `quick` is the rogue with a deadline of a second; `deaf` too, for who stops it."""
    servers = [
        server("bank", "resource.py", folder / "bank"),
        server("rogue", "rogue.py", folder / "rogue"),
        server("quick", "rogue.py", folder / "quick", timeout_s=1),
        server("deaf", "rogue.py", folder / "deaf", timeout_s=1),
    ]
    routes = [f"bank/{name}" for name in ("pay", "balance")]
    routes += [f"{name}/{verb}" for name in ("rogue", "quick", "deaf") for verb in ("do", "look")]
    children = [child(f"p{n}", *routes, share=100) for n in range(_PROCESSES)]
    host = host_config(servers, *children, max_calls=1_000_000, max_processes=_PROCESSES + 1)
    rules = policy(tool("bank"), tool("rogue"), tool("quick"), tool("deaf"))
    with ToolState.make(folder / "state", host, rules).serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def _processes() -> Iterator[int]:
    return iter(range(_PROCESSES))


@pytest.fixture
def worker(shared: ToolServing, _processes: Iterator[int]) -> Worker:
    return shared.worker(f"p{next(_processes)}")


@pytest.fixture
def key(worker: Worker) -> str:
    """An operation key that names its call in the whole state."""
    return f"key of {worker.process}"


@pytest.fixture
def make(tmp_path: Path) -> MakeState:
    """Makes a state of its own with the servers `bank` and `rogue`, and with `quick` where it is named."""
    numbers = itertools.count()

    def make_state(*children: dict[str, Any], rules: list[dict[str, Any]] | None = None, **limits: Any) -> ToolState:
        servers = [
            server("bank", "resource.py", tmp_path / "bank"),
            server("rogue", "rogue.py", tmp_path / "rogue"),
            server("quick", "rogue.py", tmp_path / "quick", timeout_s=1),
        ]
        allowed = rules or [tool("bank"), tool("rogue"), tool("quick"), grant()]
        kin = list(children) or [child("a", "bank/pay", "bank/balance", "rogue/do", "rogue/look", "quick/do")]
        return ToolState.make(tmp_path / str(next(numbers)), host_config(servers, *kin, **limits), policy(*allowed))

    return make_state


def receipt_of(state: ToolState, result: dict[str, Any]) -> dict[str, Any]:
    return verify_receipt(result["receipt_json"].encode(), state.kernel_key).body


def incidents_of(state: ToolState, request_id: str) -> list[dict[str, Any]]:
    found = state.log().bodies("incident")
    return [body for body in found if "call" in body and body["call"]["request_id"] == request_id]


def leaves_of(state: ToolState, key: str) -> list[str]:
    """The types of the leaves about one call, in order."""
    return [kind for kind, body in state.log().leaves if body.get("call", {}).get("operation_key") == key]


def unknown(state: ToolState, result: dict[str, Any]) -> None:
    """What the second table says of an unknown outcome."""
    assert (result["verdict"], result["output"], result["terminal_state"]) == ("deny", None, UNKNOWN)
    assert result["reason"] == "outcome_unknown_after_dispatch"
    body = receipt_of(state, result)
    assert body["decision"] == {"verdict": "incomplete", "reason": "outcome_unknown_after_dispatch"}
    assert (body["output"], body["terminal_state"]) == (None, UNKNOWN)


def repeats_byte_for_byte(worker: Worker, frame: bytes, first: bytes) -> None:
    for _ in range(2):
        assert worker.line(frame) == first


# --- rows that end well ----------------------------------------------------------------------------------------------


def test_an_answered_call_is_completed_with_what_the_server_said(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    """[new -> dispatched] and [dispatched -> completed]"""
    frame = worker.call(key, "pay", {"to": key, "cents": 7}, "bank")
    first = worker.line(frame)
    result = result_of(first)
    assert (result["verdict"], result["reason"], result["terminal_state"]) == ("allow", None, {"state": "completed"})
    assert result["output"]["kind"] == "value"
    body = receipt_of(shared.state, result)
    assert (body["decision"], body["output"]["kind"]) == ({"verdict": "allow"}, "value")
    assert (body["tool_server"], body["tool_name"], body["call"]["dispatch"]) == ("bank", "pay", 1)
    assert leaves_of(shared.state, key) == ["intent", "receipt"]
    assert shared.state.call(key) == "completed"
    repeats_byte_for_byte(worker, frame, first)
    assert [e["effect"] for e in effects(folder / "bank") if e["arguments"]["to"] == key] == [
        result["output"]["value"]["structuredContent"]["effect"]
    ]


def test_the_intent_is_on_disk_before_the_server_hears_of_the_call(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    gate = Gate(folder / "bank", "before_effect")
    with worker.connect() as line:
        line.send(worker.call(key, "pay", {"to": key}, "bank"))
        gate.reached()
        assert shared.state.call(key) == "dispatched"
        intent = next(b for b in shared.state.log().bodies("intent") if b["call"]["operation_key"] == key)
        assert intent.keys() == {"call", "attempt", "capability_id", "server", "tool", "parameter_hash"}
        gate.go()
        assert result_of(line.read())["verdict"] == "allow"


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("rpc_error", {"error": {"code": -32602, "message": "no such account"}, "isError": True}),
        ("is_error", {"content": [{"text": "declined", "type": "text"}], "isError": True}),
    ],
)
def test_an_error_of_the_protocol_is_an_answer(worker: Worker, key: str, how: str, value: Any) -> None:
    """[dispatched -> completed]"""
    result = worker.invoke(key, "do", {"how": how}, "rogue")
    assert (result["verdict"], result["terminal_state"]) == ("allow", {"state": "completed"})
    assert result["output"] == {"kind": "value", "value": value}


@pytest.mark.parametrize(
    "text",
    [
        '{"n":9007199254740993}', '{"a":1,"a":2}', '{"s":"\\ud800"}', '{"n":1e999}', '{"n":18446744073709551616}',
        "[" * 65 + "]" * 65, '{"n":1e16}',
    ],
    ids=["2^53+1", "twice", "surrogate", "infinite", "2^64", "deep", "1e16"],
)  # fmt: skip
def test_an_answer_outside_the_canonical_profile_is_delivered_as_it_was_received(
    shared: ToolServing, worker: Worker, key: str, text: str
) -> None:
    frame = worker.call(key, "do", {"how": "raw", "result": text}, "rogue")
    first = worker.line(frame)
    result = result_of(first)
    assert result["output"] == {"kind": "text", "text": text}
    assert receipt_of(shared.state, result)["output"]["kind"] == "text"
    repeats_byte_for_byte(worker, frame, first)


@pytest.mark.parametrize("text", ["null", "7", '"é"', "[]", '{"b":1.50,"a":"\\u0041"}'])
def test_an_answer_of_any_shape_inside_the_profile_is_a_value(worker: Worker, key: str, text: str) -> None:
    result = worker.invoke(key, "do", {"how": "raw", "result": text}, "rogue")
    assert result["output"] == {"kind": "value", "value": json.loads(text)}


def test_an_answer_that_is_too_large_is_withheld_and_its_digest_kept(
    shared: ToolServing, worker: Worker, key: str
) -> None:
    """[dispatched -> completed]"""
    frame = worker.call(key, "do", {"how": "large"}, "rogue")
    first = worker.line(frame)
    text = b'{"text":"' + b"x" * (3 << 20) + b'"}'
    withheld = {"kind": "withheld", "reason": "too_large", "bytes": len(text), "sha256": sha256(text).hexdigest()}
    result = result_of(first)
    assert (result["verdict"], result["output"]) == ("allow", withheld)
    assert receipt_of(shared.state, result)["output"]["kind"] == "withheld"
    repeats_byte_for_byte(worker, frame, first)


@pytest.mark.parametrize(("how", "value"), [("garbage", {"after": "garbage"}), ("chatters", {"chattered": True})])
def test_what_is_no_answer_is_ignored(worker: Worker, key: str, how: str, value: Any) -> None:
    result = worker.invoke(key, "do", {"how": how}, "rogue")
    assert result["output"]["value"]["structuredContent"] == value


def test_a_server_that_asks_is_answered_a_ping_and_declined_the_rest(worker: Worker, key: str) -> None:
    asked = worker.invoke(key, "do", {"how": "asks"}, "rogue")["output"]["value"]["structuredContent"]
    assert asked["p"] == {"jsonrpc": "2.0", "id": "p", "result": {}}
    for name in ("s", "r"):
        assert asked[name]["error"]["code"] == -32601


def test_of_two_answers_the_first_is_the_outcome(shared: ToolServing, worker: Worker, key: str) -> None:
    frame = worker.call(key, "do", {"how": "twice"}, "rogue")
    first = worker.line(frame)
    assert result_of(first)["output"]["value"]["structuredContent"] == {"answer": 1}
    assert worker.invoke(f"{key}, next", "do", {"n": 5}, "rogue")["output"]["value"]["structuredContent"] == {"got": 5}
    repeats_byte_for_byte(worker, frame, first)
    assert leaves_of(shared.state, key) == ["intent", "receipt"]


def test_answers_out_of_order_reach_the_calls_they_answer(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    with worker.connect() as one, worker.connect() as two:
        one.send(worker.call(key, "do", {"how": "swapped", "mine": key}, "rogue"))
        while not seen(folder / "rogue", key):
            worker.ask("inspect")
        two.send(worker.call(f"{key}, second", "do", {}, "rogue"))
        answers = [result_of(line.read())["output"]["value"]["structuredContent"] for line in (one, two)]
    assert answers == [{"answer": 1}, {"answer": 2}]


# --- rows that do not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("exit", "closed"),
        ("garbage_and_exit", "it closed its stdout"),
        ("huge", "a line of over"),
        ("both", "neither one result nor one error"),
        ("neither", "neither one result nor one error"),
        ("no_text", "not text"),
        ("garbage_without_end", "no messages"),
    ],
)
def test_a_call_whose_answer_cannot_be_read_is_unknown_and_the_next_is_served(
    shared: ToolServing, worker: Worker, folder: Path, key: str, how: str, detail: str
) -> None:
    """[dispatched -> unknown]: server died, answer unreadable or over the limit"""
    frame = worker.call(key, "do", {"how": how, "mine": key}, "rogue")
    first = worker.line(frame)
    result = result_of(first)
    unknown(shared.state, result)
    (incident,) = incidents_of(shared.state, result["request_id"])
    assert detail in incident["detail"]
    assert detail in receipt_of(shared.state, result)["evidence"][-1]["detail"]
    assert leaves_of(shared.state, key) == ["intent", "receipt", "incident"]
    repeats_byte_for_byte(worker, frame, first)
    # An effect that may have happened is never asked for again; the server is there for others.
    assert [e for e in effects(folder / "rogue", "seen.ndjson") if e["arguments"].get("mine") == key] == [
        {"tool": "do", "arguments": {"how": how, "mine": key}}
    ]
    after = worker.invoke(f"{key}, after", "do", {"n": 1}, "rogue")
    assert after["output"]["value"]["structuredContent"] == {"got": 1}


@pytest.mark.parametrize("how", ["never", "text_id"])
def test_a_deadline_makes_the_outcome_unknown_and_the_server_stays(
    shared: ToolServing, worker: Worker, key: str, how: str
) -> None:
    """[dispatched -> unknown]: deadline"""
    frame = worker.call(key, "do", {"how": how}, "quick")
    first = worker.line(frame)
    unknown(shared.state, result_of(first))
    (incident,) = incidents_of(shared.state, result_of(first)["request_id"])
    assert incident["detail"] == "no answer within 1 s"
    starts = shared.state.rows("SELECT number, outcome FROM server_start WHERE server = 'quick'")
    assert worker.invoke(f"{key}, after", "do", {"n": 1}, "quick")["verdict"] == "allow"
    assert shared.state.rows("SELECT number, outcome FROM server_start WHERE server = 'quick'") == starts
    repeats_byte_for_byte(worker, frame, first)


def test_an_answer_after_the_deadline_is_an_incident_and_changes_nothing(
    shared: ToolServing, worker: Worker, key: str
) -> None:
    """[unknown -> unknown]: late answer"""
    frame = worker.call(key, "do", {"how": "late"}, "quick")
    first = worker.line(frame)
    result = result_of(first)
    unknown(shared.state, result)
    worker.invoke(f"{key}, after", "do", {}, "quick")  # answered after the late one, on the same pipe
    lost, late = incidents_of(shared.state, result["request_id"])
    text = json.dumps({"content": [], "structuredContent": {"late": True}}).encode()
    assert (lost["detail"], late["detail"]) == ("no answer within 1 s", "an answer came late")
    assert (late["answer_bytes"], late["answer_sha256"]) == (len(text), sha256(text).hexdigest())
    assert shared.state.call(key) == "unknown"
    repeats_byte_for_byte(worker, frame, first)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_tool_that_is_not_granted_is_refused_for_good_and_never_asked_for(make: MakeState, tmp_path: Path) -> None:
    """[new -> refused]"""
    state = make(child("a", "rogue/look"))
    with state.serve() as serving:
        worker = serving.worker("a")
        for name in ("do", "nothing of the kind"):
            frame = worker.call(name, name, {}, "rogue")
            first = worker.line(frame)
            result = result_of(first)
            assert (result["verdict"], result["reason"]) == ("deny", "out_of_scope")
            assert receipt_of(state, result)["decision"] == {
                "verdict": "deny", "reason": "out_of_scope", "guard": "grant",
            }  # fmt: skip
            repeats_byte_for_byte(worker, frame, first)
        assert worker.invoke("elsewhere", "do", {}, "no such server")["reason"] == "out_of_scope"
        assert worker.ask("inspect")["tree_calls"] == 3
        assert leaves_of(state, "do") == ["receipt"]
    assert effects(tmp_path / "rogue", "seen.ndjson") == []


BROKEN: list[dict[str, Any]] = [{"cents": 101}, {"cents": "1"}, {}, {"cents": 1.5}]
SCHEMA = {"type": "object", "properties": {"cents": {"type": "integer", "maximum": 100}}, "required": ["cents"]}


def test_arguments_that_break_a_constraint_are_refused_and_a_child_keeps_its_parents(
    make: MakeState, tmp_path: Path
) -> None:
    """[new -> refused]"""
    state = make(
        child("a", "bank/pay"), child("below", "bank/pay", parent="a", share=500),
        rules=[tool("bank", "pay", constraints=SCHEMA)],
    )  # fmt: skip
    with state.serve() as serving:
        for name in ("a", "below"):
            worker = serving.worker(name)
            for n, arguments in enumerate(BROKEN):
                frame = worker.call(f"{name} {n}", "pay", arguments, "bank")
                first = worker.line(frame)
                result = result_of(first)
                assert (result["verdict"], result["reason"]) == ("deny", "constraint_violated")
                assert receipt_of(state, result)["decision"]["guard"] == "constraints"
                repeats_byte_for_byte(worker, frame, first)
            assert worker.invoke(f"{name} good", "pay", {"cents": 100}, "bank")["verdict"] == "allow"
    assert [entry["arguments"]["cents"] for entry in effects(tmp_path / "bank")] == [100, 100]
    state.log()


@pytest.mark.parametrize(
    "arguments", ['{"n":9007199254740993}', '{"n":1e16}', '{"a":1,"a":2}', "[]", '"text"', "[" * 70 + "]" * 70]
)
def test_arguments_outside_the_profile_never_become_a_call(
    shared: ToolServing, worker: Worker, key: str, arguments: str
) -> None:
    frame = worker.call(key, "do", {"here": True}, "rogue").replace(b'{"here": true}', arguments.encode())
    assert b"here" not in frame
    with worker.connect() as line:
        line.send(frame)
        assert line.code() == "invalid_request"
    assert shared.state.rows("SELECT state FROM call WHERE operation_key = ?", key) == []


@pytest.mark.parametrize("bad", ["", " a", "a ", "a\nb", "a\x00b", "a\x7fb", "a\x85b", "x" * 257, "é" * 129])
@pytest.mark.parametrize("field", ["operation_key", "server_id", "tool_name"])
def test_a_name_with_control_characters_or_of_a_wrong_length_is_refused(
    shared: ToolServing, bad: str, field: str, bystander: Worker
) -> None:
    named = {"operation_key": "k", "server_id": "rogue", "tool_name": "do", "arguments": {}, field: bad}
    assert bystander.refused("invoke", **named) == "invalid_request"


@pytest.fixture(scope="module")
def bystander(shared: ToolServing) -> Worker:
    return shared.worker("root")


def test_another_request_under_a_known_key_is_a_conflict_and_the_original_stays(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    arguments = {"to": key, "cents": 1}
    frame = worker.call(key, "pay", arguments, "bank")
    first = worker.line(frame)
    others: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("pay", {**arguments, "cents": 2}, "bank", {}),
        ("balance", arguments, "bank", {}),
        ("do", arguments, "rogue", {}),
        ("pay", arguments, "bank", {"known_outcome_only": True}),
    ]
    for name, given, at, more in others:
        with worker.connect() as line:
            line.send(worker.call(key, name, given, at, **more))
            assert line.code() == "conflict"
    assert worker.line(worker.call(key, "pay", dict(reversed(arguments.items())), "bank")) == first
    repeats_byte_for_byte(worker, frame, first)
    assert len([e for e in effects(folder / "bank") if e["arguments"]["to"] == key]) == 1


# --- duplicates of a live call ---------------------------------------------------------------------------------------


def test_duplicates_of_a_live_call_wait_for_its_one_outcome(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    gate = Gate(folder / "bank", "after_effect")
    frame = worker.call(key, "pay", {"to": key}, "bank")
    lines = [worker.connect() for _ in range(8)]
    for line in lines:
        line.send(frame)
    gate.reached()
    other = shared.worker(worker.process)  # a later attempt of the same process
    lines.append(other.connect())
    lines[-1].send(other.call(key, "pay", {"to": key}, "bank"))
    assert worker.ask("inspect")["state"] == "running"  # and nobody else is held up
    gate.go()
    assert len({line.read() for line in lines}) == 1
    for line in lines:
        line.close()
    assert len([e for e in effects(folder / "bank") if e["arguments"]["to"] == key]) == 1
    assert leaves_of(shared.state, key) == ["intent", "receipt"]


def test_a_client_that_goes_away_does_not_stop_its_call(
    shared: ToolServing, worker: Worker, folder: Path, key: str
) -> None:
    gate = Gate(folder / "bank", "before_effect")
    frame = worker.call(key, "pay", {"to": key}, "bank")
    with worker.connect() as line:
        line.send(frame)
        gate.reached()
    with worker.connect() as again:
        again.send(frame)
        gate.go()
        assert result_of(again.read())["verdict"] == "allow"
    assert len([e for e in effects(folder / "bank") if e["arguments"]["to"] == key]) == 1


# --- another dispatch ------------------------------------------------------------------------------------------------


def seen(folder: Path, key: str) -> int:
    return sum(1 for entry in effects(folder, "seen.ndjson") if entry["arguments"].get("mine") == key)


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
            tool("rogue", "do", max_invocations=60), tool("bank", "pay", max_invocations=40),
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
        results = [worker.invoke(f"drain {n}", "pay", {}, "bank") for n in range(41)]
    assert results[-1]["reason"] == "invocations_exhausted"
    assert debits_by_the_log(state) == state.used()
    assert max(state.used().values()) <= 60
    assert state.used()["root", 1] == 40


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
    "the parameters are others": "UPDATE call SET parameters = '{\"to\":\"y\"}' WHERE operation_key = 'cut'",
    "the parameters are no JSON": "UPDATE call SET parameters = '{' WHERE operation_key = 'cut'",
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
    "no output": "UPDATE call SET output = '{' WHERE operation_key = 'key'",
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
