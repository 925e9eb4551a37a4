"""What a worker may send, and what the kernel does with the rest: it answers with a code and serves everybody else."""

from __future__ import annotations

import array
import json
import os
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernel.serving import PROTOCOL, Line, Serving, State, Worker, code_of, result_of

pytestmark = pytest.mark.timeout(60)

REQUEST_BYTES = 2 * 1024 * 1024


def served(bystander: Worker) -> bool:
    return bystander.ask("inspect")["state"] == "running"


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


# --- frames ----------------------------------------------------------------------------------------------------------

BROKEN = {
    "garbage": b"\x00\xff\x17 garbage\n",
    "an empty line": b"\n",
    "text that is no JSON": b"{'protocol': 1}\n",
    "two values on a line": b"{} {}\n",
    "a byte order mark": b"\xef\xbb\xbf{}\n",
    "bytes that are no UTF-8": b'{"protocol":"\xff"}\n',
    "a surrogate in raw bytes": b'{"protocol":"\xed\xa0\x80"}\n',
    "a comment": b"{} // really\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_line_that_is_no_json_text_is_an_invalid_frame_and_ends_its_connection(
    worker: Worker, bystander: Worker, text: bytes
) -> None:
    with worker.connect() as line:
        line.send(text)
        assert line.code() == "invalid_frame"
        assert served(bystander)
    assert served(worker)


@pytest.mark.parametrize("text", [BROKEN["garbage"], BROKEN["bytes that are no UTF-8"]], ids=["garbage", "no UTF-8"])
def test_after_an_invalid_frame_nothing_more_is_read_from_its_connection(worker: Worker, text: bytes) -> None:
    with worker.connect() as line:
        line.send(text + worker.frame("inspect"))
        assert line.code() == "invalid_frame"
        assert line.closed()


def changed(worker: Worker, *replacements: tuple[str, str]) -> bytes:
    text = worker.frame("inspect").decode()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text.encode()


def call_with(worker: Worker, arguments: str) -> bytes:
    """A call whose arguments are this text."""
    return worker.call("key", "send_m0", {"at": "HERE"}).replace(b'{"at": "HERE"}', arguments.encode())


OUTSIDE: dict[str, Callable[[Worker], bytes]] = {
    "a number": lambda worker: b"7\n",
    "an array": lambda worker: b"[]\n",
    "an empty object": lambda worker: b"{}\n",
    "another protocol": lambda worker: changed(worker, (PROTOCOL, "chio.process.v2")),
    "no credential": lambda worker: changed(worker, (f'"credential": "{worker.credential}", ', "")),
    "a credential that is no text": lambda worker: changed(worker, (f'"{worker.credential}"', "7")),
    "a field of the frame too many": lambda worker: changed(worker, ('{"protocol"', '{"extra": 1, "protocol"')),
    "an operation that is no object": lambda worker: changed(worker, ('{"op": "inspect"}', '"inspect"')),
    "an operation without op": lambda worker: changed(worker, ('{"op": "inspect"}', "{}")),
    "an op that is no text": lambda worker: changed(worker, ('"inspect"', "1")),
    "an unknown op": lambda worker: changed(worker, ('"inspect"', '"destroy"')),
    "a field of the operation too many": lambda worker: changed(worker, ('"inspect"', '"inspect", "process_id": "a"')),
    "a duplicate field of the frame": lambda worker: changed(worker, ('{"protocol"', '{"credential": "", "protocol"')),
    "a duplicate op": lambda worker: changed(worker, ('"inspect"', '"cancel", "op": "inspect"')),
    "a duplicate argument": lambda worker: call_with(worker, '{"a": 1, "a": 1}'),
    "a duplicate argument in other spelling": lambda worker: call_with(worker, '{"a": 1, "\\u0061": 2}'),
    "65 levels": lambda worker: call_with(worker, f'{{"a": {nested(62)}}}'),
    "260 levels": lambda worker: call_with(worker, f'{{"a": {nested(260)}}}'),
    "100,000 levels": lambda worker: call_with(worker, f'{{"a": {nested(100_000)}}}'),
    "not a number": lambda worker: call_with(worker, '{"a": NaN}'),
    "2^53": lambda worker: call_with(worker, '{"a": 9007199254740992}'),
    "-2^53": lambda worker: call_with(worker, '{"a": -9007199254740992}'),
    "2^64": lambda worker: call_with(worker, '{"a": 18446744073709551616}'),
    "an integer of 5,000 digits": lambda worker: call_with(worker, f'{{"a": 1{"0" * 4999}}}'),
    "an integral float beyond 2^53": lambda worker: call_with(worker, '{"a": 1e16}'),
    "a number beyond every double": lambda worker: call_with(worker, '{"a": 1e400}'),
    "a lone surrogate": lambda worker: call_with(worker, '{"a": "\\ud800"}'),
    "a lone surrogate in a name": lambda worker: call_with(worker, '{"\\udfff": 1}'),
    "arguments that are no object": lambda worker: call_with(worker, "[]"),
}  # fmt: skip


@pytest.mark.parametrize("text", OUTSIDE.values(), ids=OUTSIDE)
def test_json_outside_the_protocol_is_an_invalid_request_and_the_next_line_is_served(
    worker: Worker, bystander: Worker, text: Callable[[Worker], bytes]
) -> None:
    with worker.connect() as line:
        line.send(text(worker))
        assert line.code() == "invalid_request"
        assert served(bystander)
        line.send(worker.frame("inspect"))
        assert result_of(line.read())["tree_calls"] == bystander.ask("inspect")["tree_calls"]


INSIDE = {
    "64 levels": f'{{"a": {nested(61)}}}',
    "2^53 - 1": '{"a": 9007199254740991}',
    "an integral float": '{"a": 1e2}',
    "a surrogate pair": '{"a": "\\ud83d\\ude00"}',
    "names outside ASCII": '{"é": 1, "😀": 2, "\uffff": 3}',
}


@pytest.mark.parametrize("arguments", INSIDE.values(), ids=INSIDE)
def test_the_edges_of_the_profile_are_inside(worker: Worker, arguments: str) -> None:
    """As arguments of a tool outside the grant, so that what answers is the kernel's decision and no tool's."""
    line = worker.line(call_with(worker, arguments).replace(b"send_m0", b"transfer"))
    assert result_of(line)["reason"] == "out_of_scope"


BAD_NAMES = {
    "empty": "", "257 bytes": "k" * 257, "257 bytes in 129 characters": "é" * 128 + "k", "a newline": "a\nb",
    "a NUL": "a\0b", "DEL": "a\x7fb", "a C1 control": "a\x85b", "a leading space": " a", "a trailing space": "a ",
    "a trailing no-break space": "a\xa0", "a line separator": "a\u2028b",
}  # fmt: skip


@pytest.mark.parametrize("field", ["operation_key", "server_id", "tool_name"])
@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_key_or_a_tool_with_an_impossible_name_is_an_invalid_request(worker: Worker, field: str, name: str) -> None:
    named = {"operation_key": "k", "server_id": "s", "tool_name": "t", "arguments": {}, field: name}
    assert worker.refused("invoke", **named) == "invalid_request"


@pytest.mark.parametrize("name", ["k" * 256, "é" * 128, "a b", "schlüssel:1"])
def test_a_key_of_256_bytes_or_with_inner_spaces_is_a_key(worker: Worker, name: str) -> None:
    assert worker.invoke(name, "transfer", {})["reason"] == "out_of_scope"


MISTYPED = {
    "invoke without arguments": ("invoke", {"operation_key": "k", "server_id": "s", "tool_name": "t"}),
    "known_outcome_only false": ("invoke", {
        "operation_key": "k", "server_id": "s", "tool_name": "t", "arguments": {}, "known_outcome_only": False}),
    "known_outcome_only one": ("invoke", {
        "operation_key": "k", "server_id": "s", "tool_name": "t", "arguments": {}, "known_outcome_only": 1}),
    "a key that is a number": ("invoke", {"operation_key": 1, "server_id": "s", "tool_name": "t", "arguments": {}}),
    "a checkpoint without a value": ("checkpoint", {"expected_revision": "0"}),
    "a revision that is a number": ("checkpoint", {"expected_revision": 0, "value": 1}),
    "a blob without data": ("blob_put", {"sha256": "0" * 64}),
    "blob data that is no base64": ("blob_put", {"sha256": "0" * 64, "data_base64": "?"}),
    "a digest in upper case": ("blob_read", {"sha256": "A" * 64}),
    "a digest that is too short": ("blob_read", {"sha256": "a" * 63}),
    "cancel with a field": ("cancel", {"process_id": "root"}),
}  # fmt: skip


@pytest.mark.parametrize(("op", "members"), MISTYPED.values(), ids=MISTYPED)
def test_an_operation_with_missing_or_mistyped_fields_is_an_invalid_request(
    worker: Worker, op: str, members: dict[str, object]
) -> None:
    assert worker.refused(op, **members) == "invalid_request"
    assert worker.ask("inspect")["checkpoint"] == {"revision": "0", "value": None}


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_three_mebibytes_are_an_invalid_frame_which_the_sender_can_still_read(
    worker: Worker, bystander: Worker
) -> None:
    with worker.connect() as line:
        line.send(b"x" * (3 * 1024 * 1024))
        assert served(bystander)
        assert line.code() == "invalid_frame"
        assert line.closed()
    assert served(worker)


def padded(worker: Worker, size: int) -> bytes:
    """A call of exactly this many bytes, its newline included."""
    frame = worker.call("padded", "transfer", {"padding": "HERE"})
    return frame.replace(b"HERE", b"x" * (size - len(frame) + 4))


def test_a_request_of_exactly_two_mebibytes_is_served_and_one_byte_more_is_not(worker: Worker) -> None:
    result = result_of(worker.line(padded(worker, REQUEST_BYTES)))
    assert len(json.loads(result["receipt_json"])["disclosed"]["parameters"]["padding"]) > REQUEST_BYTES - 1024
    assert code_of(worker.line(padded(worker, REQUEST_BYTES + 1))) == "invalid_frame"


def test_a_request_that_arrives_byte_by_byte_is_a_request(worker: Worker) -> None:
    with worker.connect() as line:
        for byte in worker.frame("inspect"):
            line.send(bytes([byte]))
        assert result_of(line.read())["process_id"] == worker.process


# --- time ------------------------------------------------------------------------------------------------------------


def test_half_a_frame_and_no_frame_at_all_are_frame_timeouts_after_five_seconds(
    worker: Worker, bystander: Worker
) -> None:
    """One wait for three: half a first frame, half a frame after a served one, and silence."""
    with worker.connect() as half, worker.connect() as later, worker.connect() as silent:
        half.send(worker.frame("inspect")[:-10])
        later.send(worker.frame("inspect") + b"{")
        result_of(later.read())
        waiting = [line.socket for line in (half, later, silent)]
        assert select.select(waiting, [], [], 4)[0] == []
        assert served(bystander)
        for line in (half, later, silent):
            assert line.code() == "frame_timeout"
            assert line.closed()
    assert served(worker)


def test_a_client_that_takes_no_answer_is_dropped_and_costs_the_kernel_no_memory(
    make_state: Callable[..., State],
) -> None:
    """It saves a checkpoint of a mebibyte, asks for it five hundred times, and never reads."""
    with make_state().serve() as serving:
        worker, other = serving.worker("a"), serving.worker("b")
        worker.ask("checkpoint", expected_revision="0", value="x" * (1024 * 1024 - 2))
        before = peak_resident_bytes(serving.host.kernel.pid)
        with worker.connect() as line:
            line.send(worker.frame("inspect") * 500)
            assert served(other)
            hung_up = select.poll()
            hung_up.register(line.socket, select.POLLHUP)
            assert hung_up.poll(10_000), "the kernel still holds a connection whose client takes nothing"
        assert peak_resident_bytes(serving.host.kernel.pid) - before < 32 * 1024 * 1024
        assert served(worker)


def peak_resident_bytes(pid: int) -> int:
    """VmHWM, so that what was given back since is counted too (proc_pid_status(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024


# --- identity --------------------------------------------------------------------------------------------------------


def test_a_wrong_credential_is_unauthenticated_and_ends_its_connection(worker: Worker, bystander: Worker) -> None:
    for credential in ("", "0" * 64, worker.credential[:-1], worker.credential.upper() + " ", bystander.credential):
        with worker.connect() as line:
            line.send(changed(worker, (worker.credential, credential)))
            assert line.code() == "unauthenticated"
            assert line.closed()
    assert served(bystander)
    assert served(worker)


def test_a_credential_outside_ascii_is_unauthenticated(worker: Worker) -> None:
    assert code_of(worker.line(changed(worker, (worker.credential, "\\u00e9")))) == "unauthenticated"


def test_a_payload_cannot_claim_to_be_somebody_else(worker: Worker, bystander: Worker) -> None:
    frame = changed(worker, ('{"op"', f'{{"process_id": "{bystander.process}", "op"'))
    assert code_of(worker.line(frame)) == "invalid_request"


def test_the_credential_of_an_ended_attempt_is_served_no_more(shared: Serving, worker: Worker) -> None:
    with worker.connect() as line:
        line.send(worker.frame("inspect"))
        result_of(line.read())
        shared.end(worker)
        assert line.closed()
    again = shared.worker(worker.process)
    assert code_of(again.line(changed(again, (again.credential, worker.credential)))) == "unauthenticated"
    assert served(again)


def test_passed_descriptors_reach_nobody(shared: Serving, worker: Worker, bystander: Worker) -> None:
    """They are refused or closed; either way the kernel holds as many descriptors as before."""
    with worker.connect() as line:
        line.send(worker.frame("inspect"))
        line.read()
        before = os.listdir(f"/proc/{shared.host.kernel.pid}/fd")
        read, write = os.pipe()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write] * 3))]
        try:
            line.socket.sendmsg([worker.frame("inspect")], rights)
            result_of(line.read())
        except OSError:
            pass  # SO_PASSRIGHTS: the sender is told that it may not
        os.close(write)
        assert os.read(read, 1) == b"", "somebody else still holds the pipe"
        os.close(read)
        assert len(os.listdir(f"/proc/{shared.host.kernel.pid}/fd")) == len(before)
    assert served(bystander)
    assert served(worker)


# --- connections -----------------------------------------------------------------------------------------------------


def test_the_65th_connection_is_told_and_the_first_64_and_everybody_else_are_served(
    worker: Worker, bystander: Worker
) -> None:
    lines = [worker.connect() for _ in range(64)]
    for line in lines:
        line.send(worker.frame("inspect"))
        result_of(line.read())
    with worker.connect() as late:
        assert late.code() == "limit_reached"
        assert late.closed()
    assert served(bystander)
    lines.pop().close()
    lines.append(connected_again(worker))
    for line in lines:
        line.send(worker.frame("inspect"))
        result_of(line.read())
        line.close()


def connected_again(worker: Worker) -> Line:
    """Where one connection was closed another fits, as soon as the kernel has seen the end of the first."""
    while True:
        line = worker.connect()
        line.send(worker.frame("inspect"))
        reply = json.loads(line.read())
        if reply["ok"]:
            return line
        assert reply["error"]["code"] == "limit_reached"
        line.close()


def test_pipelined_requests_are_answered_in_their_order(worker: Worker) -> None:
    frames = [
        worker.frame("inspect"),
        worker.call("one", "transfer", {}),
        b"[]\n",
        worker.frame("checkpoint", expected_revision="0", value=1),
        worker.frame("checkpoint", expected_revision="0", value=2),
        worker.call("one", "transfer", {}),
        worker.frame("inspect"),
    ]
    with worker.connect() as line:
        line.send(b"".join(frames))
        answers = [line.read() for _ in frames]
    assert result_of(answers[0])["checkpoint"]["revision"] == "0"
    assert answers[1] == answers[5]
    assert code_of(answers[2]) == "invalid_request"
    assert result_of(answers[3]) == {"revision": "1", "value": 1}
    assert code_of(answers[4]) == "checkpoint_conflict"
    assert result_of(answers[6])["checkpoint"] == {"revision": "1", "value": 1}


def test_more_pipelined_bytes_than_one_request_may_have_are_still_all_served(worker: Worker) -> None:
    """The kernel holds back a client that writes on while it is owed answers; it drops nothing."""
    frame = padded(worker, 600_000)
    with worker.connect() as line:
        line.socket.setblocking(False)
        left, answers = memoryview(frame * 10), 0
        buffered = bytearray()
        while answers < 10:
            readable, writable, _ = select.select([line.socket], [line.socket] if left else [], [], 20)
            assert readable or writable
            if writable:
                left = left[line.socket.send(left[: 1 << 16]) :]
            if readable:
                chunk = line.socket.recv(1 << 20)
                assert chunk
                buffered += chunk
                answers += chunk.count(b"\n")
    assert len(set(bytes(buffered).split(b"\n")[:-1])) == 1


def test_requests_that_arrive_in_odd_pieces_are_taken_one_by_one(worker: Worker) -> None:
    """A piece that comes between an answer and the next line's turn belongs behind that line."""
    frame = worker.frame("inspect")
    text = frame * 2000
    pieces = [text[at : at + 997] for at in range(0, len(text), 997)]

    def write() -> None:
        for piece in pieces:
            line.send(piece)

    with worker.connect() as line, ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        answers = {line.read() for _ in range(2000)}
        writing.result()
    assert len(answers) == 1
    assert result_of(answers.pop())["process_id"] == worker.process


def test_a_client_that_leaves_does_not_stop_its_admitted_call(worker: Worker) -> None:
    with worker.connect() as line:
        line.send(worker.call("left", "send_m0", {"message_key": f"left by {worker.process}", "payload": 1}))
    # Its own next request is served after the one that was read before it.
    calls = worker.ask("inspect")["tree_calls"]
    repeated = worker.invoke("left", "send_m0", {"message_key": f"left by {worker.process}", "payload": 1})
    assert repeated["output"]["value"]["status"] == "sent"
    assert worker.ask("inspect")["tree_calls"] == calls
