"""The stdio client of the Model Context Protocol (2025-06-18): initialize, tools/list, tools/call, cancel, ping.

One JSON-RPC 2.0 message per line on the server's stdin and stdout. The client never guesses: a request ends with the
server's own answer to it, with the proof that no byte of it was written, or as lost. What a server says by itself is
ignored, except a ping; what it asks of us is declined.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec
import orjson

from chio import __version__

PROTOCOL_VERSION = "2025-06-18"
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_TOOLS = 1024
MAX_PAGES = 64
START_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 18
_MAX_GARBAGE_LINES = 1000
_MAX_GIVEN_UP = 1024


class End(Enum):
    """How a request ended."""

    ANSWERED = "answered"
    NOT_SENT = "not_sent"  # provably: no byte of it was taken by the pipe
    LOST = "lost"  # part or all of it was written, and no answer that can be read came


@dataclass(frozen=True, slots=True)
class Ended:
    """`result` is the raw JSON text of the answer's result (or of an error made into one); `detail` says why not."""

    end: End
    detail: str
    result: bytes | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. `written` counts the bytes of its frame that the pipe took."""

    id: int
    frame: bytes
    done: Callable[[Ended], None]
    written: int = 0
    timer: asyncio.TimerHandle | None = None
    late: Callable[[bytes], None] | None = None


class _Message(msgspec.Struct):
    """A line from the server: an answer, a request or a notification."""

    id: int | str | None = None
    method: str | None = None
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Tool(msgspec.Struct, frozen=True):
    """A tool as its server declares it. `definition` is all of it, which is what gets pinned."""

    name: str
    read_only: bool
    definition: dict[str, Any]


class ServerFault(Exception):
    """A server that cannot be used: its handshake failed. The message says why."""


@dataclass(slots=True, eq=False)
class StdioClient:
    """One live server. `lost` is called once, with the reason, when it can answer nothing more."""

    loop: asyncio.AbstractEventLoop
    stdin: int
    stdout: int
    lost: Callable[[str], None]
    _next: int = 0
    _open: dict[int, Request] = field(default_factory=dict)
    _given_up: dict[int, Callable[[bytes], None]] = field(default_factory=dict)
    _outgoing: deque[Request] = field(default_factory=deque)
    _control: deque[bytearray] = field(default_factory=deque)
    _buffer: bytearray = field(default_factory=bytearray)
    _searched: int = 0
    _garbage: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        for fd in (self.stdin, self.stdout):
            os.set_blocking(fd, False)
        self.loop.add_reader(self.stdout, self._readable)

    # --- operations ----------------------------------------------------------------------------------------------

    async def start(self) -> list[Tool]:
        """The handshake and the whole tool list, sorted by name. Raises `ServerFault`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await self._ask(
                    "initialize",
                    {
                        "protocolVersion": PROTOCOL_VERSION,
                        "capabilities": {},
                        "clientInfo": {"name": "chio", "version": __version__},
                    },
                )
                if type(answer.get("protocolVersion")) is not str:
                    raise ServerFault("its answer to initialize names no protocol version")
                self._say({"jsonrpc": "2.0", "method": "notifications/initialized"})
                return await self._list_tools()
        except TimeoutError as error:
            raise ServerFault(f"it did not answer within {START_TIMEOUT_S:.0f} s of its start") from error

    async def _list_tools(self) -> list[Tool]:
        found: dict[str, Tool] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self._ask("tools/list", {"cursor": cursor} if cursor is not None else {})
            tools, cursor = page.get("tools"), page.get("nextCursor")
            if type(tools) is not list:
                raise ServerFault("its tool list is no list")
            for entry in tools:
                if type(entry) is not dict or type(entry.get("name")) is not str or entry["name"] in found:
                    raise ServerFault("its tool list has an entry without a name, or a name twice")
                hints = entry.get("annotations") or {}
                if type(hints) is not dict:
                    raise ServerFault("its tool list has annotations that are no object")
                found[entry["name"]] = Tool(entry["name"], hints.get("readOnlyHint") is True, entry)
            if cursor is not None and type(cursor) is not str:
                raise ServerFault("its tool list goes on at a cursor that is no text")
            if cursor is None:
                return sorted(found.values(), key=lambda tool: tool.name)
            if len(found) > MAX_TOOLS:
                break
        raise ServerFault(f"its tool list has more than {MAX_TOOLS} tools or {MAX_PAGES} pages")

    async def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        future: asyncio.Future[Ended] = self.loop.create_future()

        def arrived(ended: Ended) -> None:
            if not future.done():
                future.set_result(ended)

        self.request(method, orjson.dumps(parameters), arrived)
        ended = await future
        if ended.result is None:
            raise ServerFault(f"{method}: {ended.detail}")
        try:
            answer = orjson.loads(ended.result)
        except orjson.JSONDecodeError as error:
            raise ServerFault(f"{method}: its answer cannot be read") from error
        if type(answer) is not dict or answer.get("isError"):
            raise ServerFault(f"{method}: {ended.result[:200].decode(errors='replace')}")
        return answer

    def call(
        self,
        tool: str,
        arguments: bytes,
        timeout_s: float,
        done: Callable[[Ended], None],
        late: Callable[[bytes], None],
    ) -> Request:
        """`tools/call`. `done` is called exactly once; `late` if an answer comes after it was given up."""
        parameters = b'{"arguments":' + arguments + b',"name":' + orjson.dumps(tool) + b"}"
        request = self.request("tools/call", parameters, done)
        request.late = late
        if request.id in self._open:
            request.timer = self.loop.call_later(timeout_s, self._deadline, request, timeout_s)
        return request

    def request(self, method: str, parameters: bytes, done: Callable[[Ended], None]) -> Request:
        self._next += 1
        head = f'{{"jsonrpc":"2.0","id":{self._next},"method":"{method}","params":'
        request = Request(self._next, head.encode() + parameters + b"}\n", done)
        if self._closed:
            self.loop.call_soon(done, Ended(End.NOT_SENT, "the server is gone"))
            return request
        self._open[request.id] = request
        self._outgoing.append(request)
        self._writable()
        return request

    @property
    def closed(self) -> bool:
        return self._closed

    def ping(self, done: Callable[[Ended], None]) -> Request:
        return self.request("ping", b"{}", done)

    def cancel(self, request: Request, reason: str) -> None:
        """Tell the server that nobody waits any more. The request itself ends as it would have."""
        if self._open.get(request.id) is request and request.written:
            self._say(
                {
                    "jsonrpc": "2.0",
                    "method": "notifications/cancelled",
                    "params": {"requestId": request.id, "reason": reason},
                }
            )

    def close(self, reason: str) -> None:
        """End it: every request that is open is lost, or provably not sent."""
        if self._closed:
            return
        self._closed = True
        self.loop.remove_reader(self.stdout)
        self.loop.remove_writer(self.stdin)
        os.close(self.stdin)
        os.close(self.stdout)
        requests, self._open = list(self._open.values()), {}
        self._outgoing.clear()
        for request in requests:
            if request.timer is not None:
                request.timer.cancel()
            request.done(Ended(End.LOST if request.written else End.NOT_SENT, reason))
        self.lost(reason)

    # --- writing -------------------------------------------------------------------------------------------------

    def _say(self, message: dict[str, Any]) -> None:
        if not self._closed:
            self._control.append(bytearray(orjson.dumps(message) + b"\n"))
            self._writable()

    def _writable(self) -> None:
        """Write what the pipe takes: a started frame first, then what we say by the way, then the next request."""
        while not self._closed and (self._control or self._outgoing):
            started = bool(self._outgoing) and self._outgoing[0].written > 0
            note = None if started or not self._control else self._control[0]
            try:
                if note is not None:
                    del note[: os.write(self.stdin, note)]
                    if not note:
                        self._control.popleft()
                    continue
                request = self._outgoing[0]
                request.written += os.write(self.stdin, request.frame[request.written :])
                if request.written == len(request.frame):
                    self._outgoing.popleft()
            except BlockingIOError:
                self.loop.add_writer(self.stdin, self._writable)
                return
            except OSError as error:
                self.close(f"its stdin is closed ({errno.errorcode.get(error.errno or 0, error.errno)})")
                return
        if not self._closed:
            self.loop.remove_writer(self.stdin)

    def _deadline(self, request: Request, timeout_s: float) -> None:
        """Its time is up. A frame of which nothing was written is taken back; a half-written one breaks the stream."""
        if request.written == 0:
            self._outgoing.remove(request)
            self._end(request, Ended(End.NOT_SENT, f"the server took no byte within {timeout_s:g} s"))
            return
        self.cancel(request, "deadline")
        if self._outgoing and self._outgoing[0] is request:
            self.close(f"it did not take a whole request within {timeout_s:g} s")
            return
        if request.late is not None:
            self._given_up[request.id] = request.late
            while len(self._given_up) > _MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        self._end(request, Ended(End.LOST, f"no answer within {timeout_s:g} s"))

    def _end(self, request: Request, ended: Ended) -> None:
        self._open.pop(request.id, None)
        if request.timer is not None:
            request.timer.cancel()
        request.done(ended)

    # --- reading -------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data = os.read(self.stdout, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"its stdout cannot be read ({errno.errorcode.get(error.errno or 0, error.errno)})")
            return
        if not data:
            self.close("it closed its stdout")
            return
        self._buffer += data
        while not self._closed and (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            if len(line) > MAX_ANSWER_BYTES:
                self.close(f"it wrote a line of over {MAX_ANSWER_BYTES} bytes")
                return
            self._line(line)
        self._searched = len(self._buffer)
        if len(self._buffer) > MAX_ANSWER_BYTES:
            self.close(f"it wrote a line of over {MAX_ANSWER_BYTES} bytes")

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        message: _Message | None
        try:
            message = msgspec.json.decode(line, type=_Message)
        except (msgspec.DecodeError, RecursionError):
            message = _read_leniently(line)
        if message is None:
            # Not a message of the protocol. It answers nothing, so nothing is concluded from it.
            self._garbage += 1
            if self._garbage > _MAX_GARBAGE_LINES:
                self.close("it writes lines that are no messages")
            return
        if message.method is not None:
            self._asked(message)
        elif type(message.id) is int:
            self._answered(message.id, message)

    def _asked(self, message: _Message) -> None:
        """A request of the server's: a ping is answered, anything else declined. Notifications are ignored."""
        if message.id is None:
            return
        if message.method == "ping":
            self._say({"jsonrpc": "2.0", "id": message.id, "result": {}})
        else:
            error = {"code": -32601, "message": "this client offers nothing to its servers"}
            self._say({"jsonrpc": "2.0", "id": message.id, "error": error})

    def _answered(self, number: int, message: _Message) -> None:
        if message.result is not msgspec.UNSET and message.error is msgspec.UNSET:
            result = bytes(message.result)
        elif message.error is not msgspec.UNSET and message.result is msgspec.UNSET:
            result = b'{"error":' + bytes(message.error) + b',"isError":true}'
        else:
            result = None
        request = self._open.get(number)
        if request is None:
            late = self._given_up.pop(number, None)
            if late is not None and result is not None:
                late(result)
            return  # an answer given twice, or to nothing that was asked
        if request.written < len(request.frame):
            return  # it cannot be an answer to what was not yet asked
        if result is None:
            self._end(request, Ended(End.LOST, "its answer holds neither one result nor one error"))
        else:
            self._end(request, Ended(End.ANSWERED, "answered", result))


_DECODER = json.JSONDecoder()


def _read_leniently(line: bytes) -> _Message | None:
    """An answer whose result the strict reader takes for no JSON: a lone surrogate, or bytes that are not UTF-8.

    It is an answer all the same, and what becomes of such a result is not decided here. As Latin-1 every byte is one
    character, so that the members can be cut out as they were received (JSON's own characters are ASCII).
    """
    text = line.decode("latin-1")
    members: dict[str, tuple[Any, bytes]] = {}
    try:
        at = _after("{", text, 0)
        while True:
            name, at = _DECODER.raw_decode(text, _skip(text, at))
            start = _skip(text, _after(":", text, at))
            value, at = _DECODER.raw_decode(text, start)
            members[name] = value, line[start:at]
            at = _skip(text, at)
            if not text.startswith(",", at):
                break
            at += 1
        at = _skip(text, _after("}", text, at))
    except (ValueError, TypeError, RecursionError):
        return None
    number, _ = members.get("id", (None, b""))
    if at != len(text) or type(number) is not int or "method" in members:
        return None
    message = _Message(id=number)
    if "result" in members:
        message.result = msgspec.Raw(members["result"][1])
    if "error" in members:
        message.error = msgspec.Raw(members["error"][1])
    return message


def _skip(text: str, at: int) -> int:
    """The position of what follows the white space."""
    while text.startswith((" ", "\t", "\r", "\n"), at):
        at += 1
    return at


def _after(token: str, text: str, at: int) -> int:
    """The position after `token`, which must come next. Raises `ValueError`."""
    at = _skip(text, at)
    if not text.startswith(token, at):
        raise ValueError(token)
    return at + len(token)
