"""The stdio client of MCP: against raw pipes, against servers that misbehave, and against the MCP library's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chio.tools.mcp import MAX_ANSWER_BYTES, End, ServerFault
from chio.tools.router import tools_digest
from tests.kernel.external import SERVERS
from tests.servers.rogue import GARBAGE
from tests.tools.driving import raw, run, served_by, turn

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]


def answer(number: int, result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode() + b"\n"


# --- the stream ------------------------------------------------------------------------------------------------------

_CALLS = 5
_noise = st.sampled_from(
    [
        *(line for line in GARBAGE if b"\n" not in line and len(line) < 1000),
        b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1}}',
        b'{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"\\u00e9 \\n"}}',
        b'{"jsonrpc":"2.0","id":77,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":"x","method":"roots/list","params":{}}',
    ]
)
_texts = st.text(max_size=30) | st.sampled_from(["\n", "é", "\U0001f600", "\ud800", 'quo"te', "x" * 3000])
_answers = st.tuples(st.integers(1, _CALLS + 1), st.dictionaries(st.sampled_from("ab"), _texts), st.booleans())
_lines = st.lists(_noise | _answers, max_size=25)


def as_line(item: bytes | tuple[int, dict[str, str], bool]) -> bytes:
    if isinstance(item, bytes):
        return item + b"\n"
    number, value, is_error = item
    return json.dumps({"jsonrpc": "2.0", "id": number, "error" if is_error else "result": value}).encode() + b"\n"


def ends_of(chunks: list[bytes]) -> tuple[list[Any], list[dict[str, Any]]]:
    """How the calls of one client ended when it was told this: (end, result) of each, and what it said itself."""

    async def drive() -> Any:
        async with raw() as peer:
            calls = [peer.call("do", {"n": n}) for n in range(_CALLS)]
            await peer.lines(_CALLS)
            for chunk in chunks:
                await peer.say(chunk)
            peer.read()
            said = [json.loads(line) for line in peer.received.splitlines()]
            assert all(len(call.ends) <= 1 for call in calls)
            assert peer.lost == []
            return [call.ends[0] if call.ends else None for call in calls], said

    return run(drive())  # type: ignore[no-any-return]


@given(_lines, st.data())
@settings(max_examples=150, deadline=None)
def test_how_the_bytes_of_a_server_are_cut_up_never_changes_what_was_said(
    lines: list[Any], data: st.DataObject
) -> None:
    stream = b"".join(as_line(item) for item in lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=40).map(sorted))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]
    ends, said = ends_of(chunks)
    # By hand: the first answer to each is its outcome, as it was received; what is asked is answered in order.
    for number, ended in enumerate(ends, 1):
        mine = [item for item in lines if isinstance(item, tuple) and item[0] == number]
        if not mine:
            assert ended is None
            continue
        text = json.dumps(mine[0][1]).encode()
        assert ended.end is End.ANSWERED
        assert ended.result == (b'{"error":' + text + b',"isError":true}' if mine[0][2] else text)
    asked = [json.loads(item) for item in lines if isinstance(item, bytes) and (b"ping" in item or b"roots" in item)]
    assert [reply["id"] for reply in said] == [message["id"] for message in asked]
    assert all(("result" in reply) == (message["method"] == "ping") for reply, message in zip(said, asked, strict=True))


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_however_slowly_a_server_reads_it_gets_whole_messages_in_order(sizes: list[int], data: st.DataObject) -> None:
    async def drive() -> None:
        async with raw(4096) as peer:
            for n, size in enumerate(sizes):
                peer.call("do", {"n": n, "x": "x" * size})
                if data.draw(st.booleans()):
                    await peer.say(b'{"jsonrpc":"2.0","id":%d,"method":"ping"}\n' % (1000 + n))
                peer.read(data.draw(st.integers(1, 5000)))
            while peer.client._outgoing or peer.client._control:
                peer.read(data.draw(st.integers(1, 5000)))
                await turn()
            while peer.read():
                pass
            messages = [json.loads(line) for line in peer.received.splitlines()]
            calls = [message for message in messages if message.get("method") == "tools/call"]
            assert [message["params"]["arguments"]["n"] for message in calls] == list(range(len(sizes)))
            assert [len(message["params"]["arguments"]["x"]) for message in calls] == sizes

    run(drive())


def test_a_request_ends_once_and_with_its_first_answer() -> None:
    async def drive() -> None:
        async with raw() as peer:
            call = peer.call("do", {})
            await peer.say(answer(1, {"n": 1}) + answer(1, {"n": 2}))
            peer.client.close("the end")
            await turn()
            assert [(ended.end, ended.result) for ended in call.ends] == [(End.ANSWERED, b'{"n": 1}')]
            assert (call.late, peer.lost) == ([], ["the end"])

    run(drive())


def test_an_answer_to_what_was_not_yet_asked_is_no_answer() -> None:
    async def drive() -> None:
        async with raw(4096) as peer:
            call = peer.call("do", {"x": "x" * 10_000})
            await peer.say(answer(1, {"too": "early"}))
            assert call.ends == []
            while peer.client._outgoing:
                peer.read()
                await turn()
            await peer.say(answer(1, {"in": "time"}))
            assert (await call.end()).result == b'{"in": "time"}'

    run(drive())


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        (b'{"s":"\\ud800"}', b'{"s":"\\ud800"}'), (b'{"s":"\xff"}', b'{"s":"\xff"}'),
        (b' [ 1 , {"a" : "\xc3\xa9"} ] ', b'[ 1 , {"a" : "\xc3\xa9"} ]'), (b"null", b"null"), (b"1e999", b"1e999"),
    ],
    ids=["surrogate", "not UTF-8", "spaces", "null", "infinite"],
)  # fmt: skip
@pytest.mark.parametrize("order", ["id first", "result first"])
def test_a_result_is_kept_as_it_was_received(result: bytes, kept: bytes, order: str) -> None:
    members = [b'"id" : 1', b'"result":' + result]
    line = b' { "jsonrpc":"2.0", ' + b" , ".join(members if order == "id first" else members[::-1]) + b" } \n"

    async def drive() -> None:
        async with raw() as peer:
            call = peer.call("do", {})
            await peer.say(line)
            assert (await call.end()).result == kept

    run(drive())


@pytest.mark.parametrize("line", [line for line in GARBAGE if line.strip()], ids=range(len(GARBAGE) - 2))
def test_a_line_that_is_no_message_answers_nothing(line: bytes) -> None:
    async def drive() -> None:
        async with raw() as peer:
            call = peer.call("do", {})
            await peer.say(line + b"\n")
            assert (call.ends, peer.lost) == ([], [])
            await peer.say(answer(1, {}))
            assert (await call.end()).end is End.ANSWERED

    run(drive())


def test_a_line_may_be_as_long_as_the_limit_and_not_longer() -> None:
    head, tail = b'{"jsonrpc":"2.0","id":1,"result":"', b'"}'
    most = MAX_ANSWER_BYTES - len(head) - len(tail)

    async def drive(size: int) -> End:
        async with raw() as peer:
            call = peer.call("do", {})
            os.set_blocking(peer.to_client, False)
            text = head + b"x" * size + tail + b"\n"
            while text and not peer.client.closed:
                try:
                    text = text[os.write(peer.to_client, text[: 1 << 16]) :]
                except BlockingIOError:
                    await turn()
                except BrokenPipeError:
                    break
            return (await call.end()).end

    assert run(drive(most)) is End.ANSWERED
    assert run(drive(most + 1)) is End.LOST


# --- what was written ------------------------------------------------------------------------------------------------


def test_a_request_of_which_the_pipe_took_nothing_is_taken_back_at_its_deadline() -> None:
    async def drive() -> None:
        async with raw(4096) as peer:
            head = len(peer.client_frame("do", {"x": ""}))
            first = peer.call("do", {"x": "x" * (4096 - head)})
            second = peer.call("do", {"n": 2}, timeout_s=0.05)
            third = peer.call("do", {"n": 3})
            assert (first.request.written, second.request.written) == (4096, 0)
            ended = await second.end()
            assert (ended.end, ended.detail) == (End.NOT_SENT, "the server took no byte within 0.05 s")
            told = await peer.lines(2)
            assert [message["params"]["arguments"].get("n") for message in told] == [None, 3]
            await peer.say(answer(1, {}) + answer(3, {}))
            assert [(await call.end()).end for call in (first, third)] == [End.ANSWERED] * 2

    run(drive())


def test_a_request_that_was_half_taken_at_its_deadline_is_lost_and_the_stream_with_it() -> None:
    async def drive() -> None:
        async with raw(4096) as peer:
            half = peer.call("do", {"x": "x" * 10_000}, timeout_s=0.05)
            after = peer.call("do", {"n": 2})
            assert 0 < half.request.written < len(half.request.frame)
            assert [(await call.end()).end for call in (half, after)] == [End.LOST, End.NOT_SENT]
            assert peer.lost == ["it did not take a whole request within 0.05 s"]
            later = peer.call("do", {"n": 3})
            ended = await later.end()
            assert (ended.end, ended.detail) == (End.NOT_SENT, "the server is gone")
            while peer.read():
                pass
            assert b"\n" not in peer.received  # not one whole message

    run(drive())


def test_a_request_to_a_server_that_closed_its_stdin_was_not_sent() -> None:
    async def drive() -> None:
        async with raw() as peer:
            before = peer.call("do", {})
            os.close(peer.from_client)
            call = peer.call("do", {})
            assert [(await asked.end()).end for asked in (before, call)] == [End.LOST, End.NOT_SENT]
            assert peer.lost == ["its stdin is closed (EPIPE)"]

    run(drive())


def test_what_is_open_when_a_server_closes_its_stdout_is_lost() -> None:
    async def drive() -> None:
        async with raw() as peer:
            calls = [peer.call("do", {}), peer.ping()]
            os.close(peer.to_client)
            assert [(await call.end()).end for call in calls] == [End.LOST] * 2
            assert peer.lost == ["it closed its stdout"]

    run(drive())


def test_a_server_is_told_of_a_deadline_and_its_late_answer_is_told_once() -> None:
    async def drive() -> None:
        async with raw() as peer:
            call = peer.call("do", {}, timeout_s=0.05)
            ended = await call.end()
            assert (ended.end, ended.detail) == (End.LOST, "no answer within 0.05 s")
            _, told = await peer.lines(2)
            assert (told["method"], told["params"]) == (
                "notifications/cancelled", {"requestId": 1, "reason": "deadline"},
            )  # fmt: skip
            assert "id" not in told
            await peer.say(answer(1, {"n": 1}) + answer(1, {"n": 2}))
            assert (call.late, len(call.ends)) == ([b'{"n": 1}'], 1)

    run(drive())


def test_a_cancelled_request_ends_as_it_would_have_and_one_that_ended_is_not_cancelled() -> None:
    async def drive() -> None:
        async with raw() as peer:
            call = peer.call("do", {})
            peer.client.cancel(call.request, "nobody waits")
            await peer.say(answer(1, {"n": 1}))
            assert (await call.end()).end is End.ANSWERED
            peer.client.cancel(call.request, "too late")
            peer.ping()
            assert [message["method"] for message in await peer.lines(3)] == [
                "tools/call", "notifications/cancelled", "ping",
            ]  # fmt: skip

    run(drive())


# --- the start -------------------------------------------------------------------------------------------------------


def rogue(folder: Path, how: str = "") -> list[str]:
    if how:
        (folder / "next_start").write_text(how)
    return [sys.executable, "-I", str(SERVERS / "rogue.py"), str(folder)]


@pytest.mark.parametrize("how", ["", "garbage", "pages"])
def test_the_tools_of_a_server_are_those_that_it_lists_on_whatever_pages(tmp_path: Path, how: str) -> None:
    async def drive() -> None:
        async with served_by(*rogue(tmp_path, how)) as driven:
            tools = await driven.client.start()
            assert [(tool.name, tool.read_only) for tool in tools] == [("do", False), ("look", True)]
            assert len(tools_digest(tools)) == 64

    run(drive())


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("exit", "initialize: .*closed"), ("no_version", "names no protocol version"),
        ("refuses", "initialize: .*not for you"), ("list_as_answer", "initialize: "), ("no_list", "is no list"),
        ("list_of_text", "an entry without a name"), ("annotations_are_text", "annotations that are no object"),
        ("name_twice", "a name twice"), ("endless", "64 pages"), ("odd_cursor", "cursor that is no text"),
    ],
)  # fmt: skip
def test_a_server_that_starts_wrongly_is_a_fault_that_says_why(tmp_path: Path, how: str, why: str) -> None:
    async def drive() -> None:
        async with served_by(*rogue(tmp_path, how)) as driven:
            with pytest.raises(ServerFault, match=why):
                await driven.client.start()

    run(drive())


def test_a_changed_definition_is_another_digest_and_one_outside_the_profile_is_a_fault(tmp_path: Path) -> None:
    async def tools(how: str) -> Any:
        async with served_by(*rogue(tmp_path, how)) as driven:
            return await driven.client.start()

    pinned = tools_digest(run(tools("")))
    (tmp_path / "next_start").unlink(missing_ok=True)
    assert tools_digest(run(tools(""))) == pinned
    assert tools_digest(run(tools("pages"))) == pinned
    for how in ("other_tools", "other_hint"):
        assert tools_digest(run(tools(how))) != pinned
    with pytest.raises(ServerFault, match="outside the canonical profile"):
        tools_digest(run(tools("large_integer")))


# --- the MCP project's own library -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["python", "sqlite"], ids=["library 2", "library 1"])
def library(request: pytest.FixtureRequest) -> str:
    """An interpreter that has the library, out of the environments of the servers that others wrote."""
    subprocess.run([ROOT / ".ci/servers"], check=True, timeout=280)
    return str(ROOT / "build/servers" / request.param / "bin/python")


@pytest.fixture
def drive_library(library: str) -> Callable[..., Any]:
    def drive(work: Callable[..., Any]) -> Any:
        async def start_and_work() -> Any:
            async with served_by(library, "-I", str(ROOT / "tests/tools/peer.py")) as driven:
                tools = await driven.client.start()
                return await work(driven, tools)

        return run(start_and_work())

    return drive


def test_the_library_lists_its_tools_and_their_hints(drive_library: Callable[..., Any]) -> None:
    async def work(_: Any, tools: Any) -> None:
        assert [(tool.name, tool.read_only) for tool in tools] == [
            ("add", True), ("echo", False), ("fail", False), ("report", False),
        ]  # fmt: skip
        assert set(tools[0].definition["inputSchema"]["properties"]) == {"a", "b"}

    drive_library(work)


def test_the_library_answers_calls_pings_and_many_calls_at_once(drive_library: Callable[..., Any]) -> None:
    async def work(driven: Any, _: Any) -> None:
        calls = [driven.call("add", {"a": n, "b": 1}) for n in range(50)]
        ping = driven.ping()
        results = [json.loads((await call.end()).result) for call in calls]
        assert [result["content"][0]["text"] for result in results] == [str(n + 1) for n in range(50)]
        assert (await ping.end()).end is End.ANSWERED
        long = "é\n\u2028" * 100_000
        echoed = json.loads((await driven.call("echo", {"text": long}).end()).result)
        assert echoed["content"][0]["text"] == long

    drive_library(work)


def test_what_fails_in_the_library_is_an_answer_that_says_so(drive_library: Callable[..., Any]) -> None:
    async def work(driven: Any, _: Any) -> None:
        for tool, arguments in (("fail", {"text": "no"}), ("nothing of the kind", {}), ("add", {"a": "x"})):
            ended = await driven.call(tool, arguments).end()
            assert ended.end is End.ANSWERED
            assert json.loads(ended.result)["isError"] is True

    drive_library(work)


def test_what_the_library_says_on_the_way_is_no_answer(drive_library: Callable[..., Any]) -> None:
    async def work(driven: Any, _: Any) -> None:
        call = driven.call("report", {"steps": 20})
        assert json.loads((await call.end()).result)["content"][0]["text"] == "reported"
        assert len(call.ends) == 1

    drive_library(work)
