"""Calls of tool servers, row by row: what ends well, what does not, what is refused, who waits (contract section 4)."""

from __future__ import annotations

import json
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
    tool,
)
from tests.kernel.serving import Worker, result_of

pytestmark = pytest.mark.timeout(120)

MakeState = Callable[..., ToolState]


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
