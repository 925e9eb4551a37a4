"""The stdio client on a loop of its own; its peer is a process, or the test itself at the raw ends of the pipes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import termios
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import uvloop

from chio.tools.mcp import Ended, Request, StdioClient
from tests.kernel.external import start

PATIENCE_S = 20.0


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """On the loop that the kernel uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, PATIENCE_S))


@dataclass(eq=False)
class Asked:
    """One request and all that the client said of it."""

    request: Request
    ends: list[Ended] = field(default_factory=list)
    late: list[bytes] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def end(self) -> Ended:
        await self.done.wait()
        (ended,) = self.ends
        return ended


class Driven:
    """A client; `lost` collects the reasons that it gave for its own end."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self.lost: list[str] = []
        self.client = StdioClient(asyncio.get_running_loop(), stdin, stdout, self.lost.append)

    def call(self, tool: str, arguments: dict[str, Any], timeout_s: float = PATIENCE_S) -> Asked:
        data = json.dumps(arguments, separators=(",", ":")).encode()
        return self._asked(lambda done, late: self.client.call(tool, data, timeout_s, done, late))

    def ping(self) -> Asked:
        return self._asked(lambda done, _: self.client.ping(done))

    def _asked(self, begin: Callable[[Callable[[Ended], None], Callable[[bytes], None]], Request]) -> Asked:
        early: list[Ended] = []
        asked: list[Asked] = []

        def done(ended: Ended) -> None:
            if not asked:  # it ended before it had begun
                early.append(ended)
                return
            asked[0].ends.append(ended)
            asked[0].done.set()

        def late(result: bytes) -> None:
            asked[0].late.append(result)

        request = begin(done, late)
        asked.append(Asked(request))
        for ended in early:
            done(ended)
        return asked[0]


class RawPeer(Driven):
    """The test is the server: it reads what the client wrote and writes what it likes."""

    def __init__(self, capacity: int | None = None) -> None:
        self.from_client, stdin = os.pipe2(os.O_CLOEXEC)
        stdout, self.to_client = os.pipe2(os.O_CLOEXEC)
        if capacity is not None:
            fcntl.fcntl(stdin, fcntl.F_SETPIPE_SZ, capacity)
        os.set_blocking(self.from_client, False)
        super().__init__(stdin, stdout)
        self._stdout = stdout
        self.received = bytearray()

    async def say(self, data: bytes) -> None:
        """Write, and let the client take all of it."""
        while data:
            data = data[os.write(self.to_client, data) :]
            while not self.client.closed and unread(self._stdout):
                await asyncio.sleep(0)
        await turn()

    def read(self, limit: int = 1 << 20) -> int:
        """Take up to `limit` bytes of what the client wrote; how many came."""
        try:
            data = os.read(self.from_client, limit)
        except BlockingIOError:
            return 0
        self.received += data
        return len(data)

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """The next messages of the client."""
        while self.received.count(b"\n") < count:
            self.read()
            await asyncio.sleep(0)
        found = self.received.split(b"\n", count)
        self.received = bytearray(found.pop())
        return [json.loads(line) for line in found]

    def client_frame(self, tool: str, arguments: dict[str, Any]) -> bytes:
        """What a first call will be on the wire."""
        data = json.dumps(arguments, separators=(",", ":"))
        parameters = f'{{"arguments":{data},"name":"{tool}"}}'
        return f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{parameters}}}\n'.encode()

    def close(self) -> None:
        self.client.close("the test is over")
        for fd in (self.from_client, self.to_client):
            with contextlib.suppress(OSError):
                os.close(fd)


def unread(fd: int) -> int:
    """Bytes that wait in a pipe (ioctl_pipe: FIONREAD)."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4), "little")


async def turn() -> None:
    """Two turns of the loop: what became ready is handled, and what that scheduled."""
    for _ in range(2):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def raw(capacity: int | None = None) -> AsyncIterator[RawPeer]:
    peer = RawPeer(capacity)
    try:
        yield peer
    finally:
        peer.close()


@contextlib.asynccontextmanager
async def served_by(*command: str) -> AsyncIterator[Driven]:
    """A client whose server is a process."""
    process, stdin, stdout = start(list(command))
    driven = Driven(stdin, stdout)
    try:
        yield driven
    finally:
        driven.client.close("the test is over")
        process.kill()
        process.wait()
