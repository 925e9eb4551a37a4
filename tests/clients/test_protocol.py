"""Both clients on one real socket: what they send, what they accept, and the code of every failure."""

import base64
import hashlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.clients.drive import Call, Together, Wait, bytes_argument, drive
from tests.clients.peer import (
    CREDENTIAL,
    PROTOCOL,
    RESULTS,
    Peer,
    Stream,
    answering,
    closing_after,
    error,
    kernel_like,
    ok,
)

MIB = 1024 * 1024
INSPECT = Call("inspect")
SERVER_CODES = [
    "unauthenticated", "invalid_request", "cancelled", "conflict", "checkpoint_conflict", "limit_reached",
    "runtime_error", "response_too_large", "invalid_frame", "frame_timeout", "blob_missing", "a_code_of_tomorrow",
]  # fmt: skip
BLOB = b"Some bytes to keep\x00\xff"
DIGEST = hashlib.sha256(BLOB).hexdigest()


def frame(operation: str) -> bytes:
    return f'{{"protocol":"{PROTOCOL}","credential":"{CREDENTIAL}","operation":{operation}}}\n'.encode()


# --- requests ---


@pytest.mark.parametrize(
    ("call", "operation"),
    [
        (INSPECT, '{"op":"inspect"}'),
        (Call("cancel"), '{"op":"cancel"}'),
        (Call("note", ("resumed",)), '{"op":"note","event":"resumed"}'),
        (Call("note", ("resumed", {"ageMs": 0})), '{"op":"note","event":"resumed","age_ms":0}'),
        (
            Call("invoke", ("send-order", "chio-ipc", "send_jobs", {"b": [1, None, "é\u2028\n"], "a": {}})),
            '{"op":"invoke","operation_key":"send-order","server_id":"chio-ipc","tool_name":"send_jobs",'
            '"arguments":{"b":[1,null,"é\u2028\\n"],"a":{}}}',
        ),
        (
            Call("invoke", ("k", "s", "t", {}, {"knownOutcomeOnly": True})),
            '{"op":"invoke","operation_key":"k","server_id":"s","tool_name":"t","arguments":{},'
            '"known_outcome_only":true}',
        ),
        (
            Call("invoke", ("k", "s", "t", {}, {"knownOutcomeOnly": False})),
            '{"op":"invoke","operation_key":"k","server_id":"s","tool_name":"t","arguments":{}}',
        ),
        (
            Call("checkpoint", ("0", {"n": 1})),
            '{"op":"checkpoint","expected_revision":"0","value":{"n":1}}',
        ),
    ],
    ids=lambda value: value.method if isinstance(value, Call) else "",
)
def test_each_operation_is_one_compact_line(client: str, peer: Peer, call: Call, operation: str) -> None:
    peer.play(kernel_like)
    [outcome] = drive(client, peer.path, call)
    assert outcome.result == RESULTS[call.method]
    assert peer.frames == [frame(operation)]


def test_receipt_text_comes_back_as_it_was_sent(client: str, peer: Peer) -> None:
    peer.play(kernel_like)
    [outcome] = drive(client, peer.path, Call("invoke", ("k", "s", "t", {})))
    assert outcome.result["receipt_json"] == RESULTS["invoke"]["receipt_json"]


def test_a_request_of_exactly_two_mebibytes_is_sent_and_one_byte_more_is_not(client: str, peer: Peer) -> None:
    room = 2 * MIB - len(frame('{"op":"checkpoint","expected_revision":"0","value":""}'))
    peer.play(kernel_like)
    fits, too_large = drive(
        client, peer.path, Call("checkpoint", ("0", "x" * room)), Call("checkpoint", ("0", "x" * (room + 1)))
    )
    assert (fits.code, too_large.code) == (None, "request_too_large")
    assert [len(sent) for sent in peer.frames] == [2 * MIB]


def test_the_limit_of_a_request_is_in_bytes_and_not_in_characters(client: str, peer: Peer) -> None:
    [outcome] = drive(client, peer.path, Call("checkpoint", ("0", "é" * MIB)))
    assert outcome.code == "request_too_large"


@pytest.mark.parametrize("value", ["$nan", "$infinity", "$undefined", "$bigint", "$map"])
def test_what_has_no_json_form_is_refused_before_anything_is_sent(client: str, peer: Peer, value: str) -> None:
    outcomes = drive(client, peer.path, Call("checkpoint", ("0", value)), Call("checkpoint", ("0", {"a": [value]})))
    assert [outcome.code for outcome in outcomes] == ["invalid_request"] * 2
    assert peer.connections == 0


# --- refusals and failures ---


@pytest.mark.parametrize("code", SERVER_CODES)
def test_a_code_of_the_kernel_is_the_errors_code_and_nothing_is_sent_again(client: str, peer: Peer, code: str) -> None:
    peer.play(answering(error(code)))
    [outcome] = drive(client, peer.path, INSPECT)
    assert outcome.code == code
    assert len(peer.frames) == 1


def test_after_a_refusal_the_next_call_takes_a_new_connection(client: str, peer: Peer) -> None:
    peer.play(closing_after(error("invalid_request")), kernel_like)
    refused, served = drive(client, peer.path, INSPECT, INSPECT)
    assert (refused.code, served.result) == ("invalid_request", RESULTS["inspect"])


@pytest.mark.parametrize("reply", [error("conflict"), b"garbage\n"])
def test_a_connection_whose_call_failed_is_closed_at_once(client: str, peer: Peer, reply: bytes) -> None:
    closed: list[bool] = []
    peer.play(answering(reply))  # ends only when the client closes
    drive(client, peer.path, INSPECT, Wait(lambda: closed.append(peer.closed.acquire(timeout=10))))
    assert closed == [True]


def test_a_kernel_without_room_is_heard_although_it_answers_unasked(client: str, peer: Peer) -> None:
    peer.play(lambda stream: stream.send(error("limit_reached")))
    [outcome] = drive(client, peer.path, INSPECT)
    assert outcome.code == "limit_reached"


def test_a_refusal_sent_before_the_request_was_read_is_heard(client: str, peer: Peer) -> None:
    def refuse_unread(stream: Stream) -> None:
        stream.send(error("invalid_frame"))

    peer.play(refuse_unread)
    [outcome] = drive(client, peer.path, Call("checkpoint", ("0", "x" * MIB)))
    # Node destroys a socket whose write fails, and with it what it had not read yet.
    assert outcome.code in ({"invalid_frame"} if client == "python" else {"invalid_frame", "transport_error"})


@pytest.mark.parametrize("kind", ["absent", "a file", "nobody listens", "too long a path"])
def test_a_socket_that_nobody_serves_is_a_transport_error(client: str, tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 200 if kind == "too long a path" else "dead")
    if kind == "a file":
        path.write_text("")
    elif kind == "nobody listens":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(str(path))
    [outcome] = drive(client, path, INSPECT)
    assert outcome.code == "transport_error"


def test_a_connection_closed_without_a_reply_is_a_transport_error_and_sent_once(client: str, peer: Peer) -> None:
    peer.play(closing_after(b""), kernel_like)
    lost, served = drive(client, peer.path, INSPECT, INSPECT)
    assert (lost.code, served.result) == ("transport_error", RESULTS["inspect"])
    assert len(peer.frames) == 2


def test_a_kept_connection_that_breaks_is_a_transport_error_and_only_the_next_call_connects(
    client: str, peer: Peer
) -> None:
    peer.play(closing_after(ok(RESULTS["inspect"]), b""), kernel_like)
    first, broken, next_one = drive(client, peer.path, INSPECT, Call("cancel"), INSPECT)
    assert (first.code, broken.code, next_one.code) == (None, "transport_error", None)
    assert [json.loads(sent)["operation"]["op"] for sent in peer.frames] == ["inspect", "cancel", "inspect"]


def test_silence_is_a_transport_error_when_the_time_is_up(client: str, peer: Peer) -> None:
    peer.play(answering(b""))
    [outcome] = drive(client, peer.path, INSPECT, timeout=0.2)
    assert outcome.code == "transport_error"
    assert "timed out" in outcome.text


def test_a_reply_that_never_ends_is_given_up_when_the_time_is_up(client: str, peer: Peer) -> None:
    """A deadline that began again with each byte would never come."""
    stopped = threading.Event()

    def trickle(stream: Stream) -> None:
        stream.read()
        while not stopped.wait(0.02):
            stream.send(b" ")

    peer.play(trickle)
    try:
        [outcome] = drive(client, peer.path, INSPECT, timeout=0.3)
    finally:
        stopped.set()
    assert outcome.code == "transport_error"


@pytest.mark.parametrize("part", [b"{", ok(RESULTS["inspect"])[:-1]])
def test_a_reply_that_breaks_off_is_truncated(client: str, peer: Peer, part: bytes) -> None:
    peer.play(closing_after(part))
    [outcome] = drive(client, peer.path, INSPECT)
    assert outcome.code == "truncated_response"
    assert len(peer.frames) == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"\n",
        b"garbage\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b"1" * 5000 + b"\n",
        b'{"protocol":"chio.process.v1","ok":true,"result":{}} trailing\n',
        b'{"protocol":"chio.process.v1","ok":true,"result":{"process_id":NaN}}\n',
        b'{"protocol":"chio.process.v2","ok":true,"result":{}}\n',
        b'{"ok":true,"result":{}}\n',
        b'{"protocol":"chio.process.v1","ok":1,"result":{}}\n',
        b'{"protocol":"chio.process.v1","ok":true,"result":[]}\n',
        b'{"protocol":"chio.process.v1","ok":true,"error":{"code":"conflict"}}\n',
        b'{"protocol":"chio.process.v1","ok":false,"error":{"code":7}}\n',
        b'{"protocol":"chio.process.v1","ok":false,"error":"conflict"}\n',
        b'{"protocol":"chio.process.v1","ok":false,"error":{"code":""}}\n',
        b'{"protocol":"chio.process.v1","ok":false,"error":{"code":"conflict"},"result":{}}\n',
        ok({}),
        ok({**RESULTS["inspect"], "process_id": 7}),
        ok({**RESULTS["inspect"], "checkpoint": None}),
        ok(RESULTS["inspect"])[:-3] + b',"more":NaN}}\n',
        ok(RESULTS["inspect"])[:-3] + b',"more":"\xff"}}\n',
        ok(RESULTS["inspect"]) + b"x",
        ok(RESULTS["inspect"]) + ok(RESULTS["inspect"]),
        b"[" * 200_000 + b"\n",
    ],
    ids=lambda reply: repr(reply[:60]),
)
def test_a_reply_outside_the_protocol_is_invalid(client: str, peer: Peer, reply: bytes) -> None:
    peer.play(answering(reply))
    [outcome] = drive(client, peer.path, INSPECT)
    assert outcome.code == "invalid_response"
    assert len(peer.frames) == 1


@pytest.mark.parametrize("call", [Call("invoke", ("k", "s", "t", {})), Call("checkpoint", ("0", 1))])
def test_a_result_of_another_operation_is_invalid(client: str, peer: Peer, call: Call) -> None:
    peer.play(answering(ok(RESULTS["cancel"])))
    assert drive(client, peer.path, call)[0].code == "invalid_response"


def test_a_response_of_exactly_eight_mebibytes_is_read_and_one_byte_more_is_not(client: str, peer: Peer) -> None:
    room = 8 * MIB - len(ok({**RESULTS["inspect"], "fill": ""}))
    fits, too_large = ({**RESULTS["inspect"], "fill": "x" * size} for size in (room, room + 1))
    peer.play(answering(ok(fits), ok(too_large)))
    read, refused = drive(client, peer.path, INSPECT, INSPECT)
    assert (read.result, refused.code) == (fits, "response_too_large")


def test_an_endless_reply_is_given_up_at_the_limit(client: str, peer: Peer) -> None:
    peer.play(answering(b"x" * (9 * MIB)))
    assert drive(client, peer.path, INSPECT)[0].code == "response_too_large"


# --- connections ---


def test_calls_one_after_another_share_a_connection(client: str, peer: Peer) -> None:
    peer.play(kernel_like)
    outcomes = drive(client, peer.path, INSPECT, Call("cancel"), INSPECT)
    assert [outcome.code for outcome in outcomes] == [None] * 3
    assert peer.connections == 1


def test_a_connection_that_was_closed_while_idle_is_replaced_before_the_next_call(client: str, peer: Peer) -> None:
    peer.play(closing_after(ok(RESULTS["inspect"])), kernel_like)
    outcomes = drive(client, peer.path, INSPECT, Wait(peer.closed.acquire), INSPECT)
    assert [outcome.code for outcome in outcomes] == [None, None]
    assert len(peer.frames) == 2


def test_words_that_arrive_unasked_are_never_taken_for_a_reply(client: str, peer: Peer) -> None:
    spoken = threading.Event()
    resting = threading.Event()

    def speak_unasked(stream: Stream) -> None:
        stream.read()
        stream.send(ok(RESULTS["inspect"]))
        resting.wait()
        stream.send(error("frame_timeout"))
        spoken.set()
        stream.wait_for_close()

    def rest() -> None:
        resting.set()
        assert spoken.wait(10)

    peer.play(speak_unasked, kernel_like)
    outcomes = drive(client, peer.path, INSPECT, Wait(rest), INSPECT)
    assert [outcome.code for outcome in outcomes] == [None, None]


def test_calls_at_the_same_time_take_connections_of_their_own_and_get_their_own_replies(
    client: str, peer: Peer
) -> None:
    everyone = threading.Barrier(4)

    def together(stream: Stream) -> None:
        request = stream.read()
        assert request is not None
        everyone.wait(10)  # no reply leaves before all four requests are here
        key = request["operation"]["operation_key"]
        stream.send(ok({**RESULTS["invoke"], "request_id": key}))
        stream.wait_for_close()

    peer.play(*[together] * 4)
    keys = [f"key-{number}" for number in range(4)]
    outcomes = drive(client, peer.path, Together(tuple(Call("invoke", (key, "s", "t", {})) for key in keys)))
    assert [outcome.result["request_id"] for outcome in outcomes] == keys


# --- blobs ---


def _blob(data: bytes = BLOB, **changes: Any) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "data_base64": encoded, **changes}


@pytest.mark.parametrize("data", [b"", BLOB, bytes(range(256)) * 4096])
def test_a_blob_goes_out_with_its_digest_and_comes_back_as_the_same_bytes(
    client: str, peer: Peer, data: bytes
) -> None:
    stored = {name: value for name, value in _blob(data).items() if name != "data_base64"}
    peer.play(answering(ok(stored), ok(_blob(data))))
    calls = Call("putBlob", (bytes_argument(data),)), Call("readBlob", (stored["sha256"],))
    put, read = drive(client, peer.path, *calls)
    assert (put.result, read.result) == (stored, data)
    sent = json.loads(peer.frames[0])["operation"]
    assert sent == {"op": "blob_put", "sha256": stored["sha256"], "data_base64": _blob(data)["data_base64"]}
    assert json.loads(peer.frames[1])["operation"] == {"op": "blob_read", "sha256": stored["sha256"]}


@pytest.mark.parametrize("changes", [{"sha256": "0" * 64}, {"bytes": 3}, {"bytes": "20"}])
def test_a_blob_that_was_stored_as_something_else_is_an_invalid_response(
    client: str, peer: Peer, changes: dict[str, Any]
) -> None:
    peer.play(answering(ok({"sha256": DIGEST, "bytes": len(BLOB), **changes})))
    assert drive(client, peer.path, Call("putBlob", (bytes_argument(BLOB),)))[0].code == "invalid_response"


@pytest.mark.parametrize(
    "reply",
    [
        _blob(data=b"other bytes"),
        _blob(bytes=3),
        _blob(data_base64="not base64!"),
        _blob(data_base64=_blob()["data_base64"] + "\n"),
        _blob(data_base64=_blob()["data_base64"].rstrip("=") + "*"),
        _blob(data_base64=None),
    ],
)
def test_a_blob_that_is_not_the_one_asked_for_is_an_invalid_response(
    client: str, peer: Peer, reply: dict[str, Any]
) -> None:
    peer.play(answering(ok(reply)))
    assert drive(client, peer.path, Call("readBlob", (DIGEST,)))[0].code == "invalid_response"
