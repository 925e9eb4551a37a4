"""Which server is up: the kernel's view of the tool servers that the host runs.

The host starts a server and hands its two pipes over; the kernel does the handshake and holds its tools against those
that were pinned at init. A server that ends is asked for again when the next call needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from chio import canonical
from chio.tools.mcp import Ended, Request, ServerFault, StdioClient, Tool


def tools_digest(tools: list[Tool]) -> str:
    """What is pinned of a server: the digest of its tool definitions, sorted by name."""
    try:
        return sha256(canonical.encode([tool.definition for tool in tools])).hexdigest()
    except canonical.NotCanonical as error:
        raise ServerFault(f"a tool definition is outside the canonical profile: {error}") from error


@dataclass(slots=True, eq=False)
class _Server:
    timeout_s: float
    pinned: str
    read_only: frozenset[str]
    tools: frozenset[str]
    client: StdioClient | None = None
    asked: bool = False
    waiting: list[Callable[[bool], None]] = field(default_factory=list)


class Router:
    """All servers of a host. `want(id)` is how it asks the host to start one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, want: Callable[[str], None]) -> None:
        self._loop = loop
        self._want = want
        self._servers: dict[str, _Server] = {}

    def declare(self, server: str, timeout_s: float, pinned: str, tools: dict[str, bool]) -> None:
        """A server of the host: the digest of its pinned tools, and for each whether it is free of side effects."""
        read_only = frozenset(name for name, hint in tools.items() if hint)
        self._servers[server] = _Server(timeout_s, pinned, read_only, frozenset(tools))

    def has(self, server: str, tool: str) -> bool:
        found = self._servers.get(server)
        return found is not None and tool in found.tools

    def is_read(self, server: str, tool: str) -> bool:
        """Whether the tool is free of side effects, as pinned at init (`readOnlyHint`)."""
        found = self._servers.get(server)
        return found is not None and tool in found.read_only

    def is_up(self, server: str) -> bool:
        return self._servers[server].client is not None

    def timeout_s(self, server: str) -> float:
        return self._servers[server].timeout_s

    def when_up(self, server: str, then: Callable[[bool], None]) -> None:
        """Call `then(True)` when the server can be asked, `then(False)` when it could not be started."""
        found = self._servers[server]
        if found.client is not None:
            self._loop.call_soon(then, True)
            return
        found.waiting.append(then)
        if not found.asked:
            found.asked = True
            self._want(server)

    async def attach(self, server: str, stdin: int, stdout: int) -> None:
        """The pipes of a started server: handshake, then it is up. Raises `ServerFault`; then say `failed`."""
        found = self._servers[server]
        client = StdioClient(self._loop, stdin, stdout, lambda _reason: self._lost(found, client))
        try:
            tools = await client.start()
            if tools_digest(tools) != found.pinned:
                raise ServerFault("its tools are not those that were pinned at init")
            if client.closed:
                raise ServerFault("it ended as soon as it had started")
        except ServerFault:
            client.close("its start failed")
            raise
        found.client = client
        self._release(found, True)

    def failed(self, server: str) -> None:
        """It could not be started, or not be used: whoever waits for it learns that."""
        self._release(self._servers[server], False)

    def call(
        self, server: str, tool: str, arguments: bytes, done: Callable[[Ended], None], late: Callable[[bytes], None]
    ) -> Request | None:
        """Send one call to a server that is up; None when it is not, and then nothing was sent."""
        found = self._servers[server]
        if found.client is None:
            return None
        return found.client.call(tool, arguments, found.timeout_s, done, late)

    def cancel(self, request: Request) -> None:
        """Tell whichever server has it that nobody waits any more."""
        for server in self._servers.values():
            if server.client is not None:
                server.client.cancel(request, "cancelled")

    def ended(self, server: str, reason: str) -> None:
        """The host saw the server's process end."""
        client = self._servers[server].client
        if client is not None:
            client.close(reason)

    def close(self) -> None:
        for server in self._servers.values():
            if server.client is not None:
                server.client.close("the host stops")

    def _lost(self, server: _Server, client: StdioClient) -> None:
        if server.client is client:
            server.client = None

    def _release(self, server: _Server, up: bool) -> None:
        server.asked = False
        waiting, server.waiting = server.waiting, []
        for then in waiting:
            then(up)
