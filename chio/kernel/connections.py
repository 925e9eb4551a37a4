"""Workers' connections: one listener for each attempt, one request at a time on each connection.

Identity is the listener a connection came through, the peer's uid where the attempt is confined, and the credential.
Descriptors that a peer passes are never received: the socket refuses them where Linux can (SO_PASSRIGHTS, 6.16), and
otherwise they are closed unseen, since the bytes are read without room for ancillary data.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol, cast

from chio import wire
from chio.errors import WireError
from chio.kernel.invocations import Caller

MAX_CONNECTIONS = 64
_SO_PEERPIDFD = 77
_SO_PASSRIGHTS = 83
_PEERCRED = struct.Struct("3i")
_SWEEP_S = 0.5


class Service(Protocol):
    """What answers requests: `chio.kernel.process.Kernel`."""

    def serve(self, caller: Caller, operation: dict[str, Any], plain: bool, connection: Connection) -> None: ...

    def check_peer(self, caller: Caller, pidfd: int, done: Callable[[bool], None]) -> None:
        """Ask whoever can see into pid namespaces whether the peer is in the attempt's; takes over `pidfd`."""


@dataclass(slots=True, eq=False)
class Listener:
    """A served socket. `identify` names the caller of a credential's digest, or nobody.

    `uid` is the only one that may connect, or None; `most` bounds the connections.
    """

    identify: Callable[[bytes], Caller | None]
    uid: int | None
    most: int = MAX_CONNECTIONS
    attempt: Caller | None = None  # whose socket it is, when it is one attempt's
    server: asyncio.Server | None = None
    connections: set[Connection] = field(default_factory=set)

    @classmethod
    def of_attempt(cls, caller: Caller, credential: bytes, uid: int | None) -> Listener:
        """One attempt's own socket: its credential and no other."""
        return cls(lambda digest: caller if hmac.compare_digest(digest, credential) else None, uid, attempt=caller)

    def admit(self, connection: Connection, caller: Caller) -> bool:
        """Whether this connection may speak for the caller: at most MAX_CONNECTIONS do for one process."""
        if self.attempt is None and connection.process != caller.node.id:
            held = sum(1 for other in self.connections if other.process == caller.node.id)
            if held >= MAX_CONNECTIONS:
                return False
            connection.process = caller.node.id
        return True

    def close(self) -> None:
        """No new connection, and none left: the attempt has ended."""
        if self.server is not None:
            self.server.close()
        for connection in list(self.connections):
            connection.abort()


class Connection(asyncio.Protocol):
    """One stream of request lines. `deadline` is when a frame or an answer must have moved (loop time, s)."""

    __slots__ = (
        "_buffer",
        "_busy",
        "_listener",
        "_loop",
        "_paused",
        "_refused",
        "_scheduled",
        "_service",
        "_transport",
        "_unchecked",
        "_untaken",
        "deadline",
        "on_lost",
        "process",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, listener: Listener, service: Service) -> None:
        self._loop = loop
        self._listener = listener
        self._service = service
        self._buffer = bytearray()
        self._unchecked = False  # the host has not said yet whether the peer is in the attempt's pid namespace
        self._busy = False  # a request is being served
        self._scheduled = False  # the next line that has arrived will be taken in a later turn of the loop
        self._untaken = False  # the client does not take its answers: nothing is served until it does
        self._paused = False  # reading is
        self._refused = False  # what still comes is discarded
        self._transport: asyncio.Transport
        self.deadline: float | None = None
        self.on_lost: Callable[[], None] | None = None
        self.process: str | None = None

    # --- asyncio -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        listener = self._listener
        if len(listener.connections) >= listener.most:
            self._hang_up_at_once("limit_reached")
            return
        peer = transport.get_extra_info("socket")
        if listener.uid is not None and listener.attempt is not None:
            pid, uid, _gid = _PEERCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
            pidfd = _peer_pidfd(peer, pid) if uid == listener.uid else None
            if pidfd is None:
                self._hang_up_at_once("unauthenticated")
                return
            self._unchecked = True
            self._service.check_peer(listener.attempt, pidfd, self._peer_checked)
        listener.connections.add(self)
        self.deadline = self._loop.time() + wire.FRAME_TIMEOUT_S

    def _peer_checked(self, inside: bool) -> None:
        if self._transport.is_closing():
            return
        if inside:
            self._unchecked = False
            self._go_on()
        else:
            self._refuse("unauthenticated")

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        buffer = self._buffer
        buffer += data
        if self._busy or self._scheduled or self._untaken or self._unchecked:
            # A client that writes on while it is owed an answer is held back, not buffered without end.
            if len(buffer) > wire.MAX_REQUEST_BYTES:
                self._transport.pause_reading()
                self._paused = True
            return
        self._next(len(buffer) - len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.connections.discard(self)
        self.deadline = None
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None

    def pause_writing(self) -> None:
        self._untaken = True
        self.deadline = self._loop.time() + wire.FRAME_TIMEOUT_S

    def resume_writing(self) -> None:
        self._untaken = False
        if not self._refused:
            self.deadline = None
            self._go_on()

    # --- frames --------------------------------------------------------------------------------------------------

    def _next(self, searched: int = 0) -> None:
        """Take the next whole line, if there is one, and serve it."""
        end = self._buffer.find(b"\n", searched)
        if end < 0:
            if len(self._buffer) >= wire.MAX_REQUEST_BYTES:
                self._refuse("invalid_frame")
            elif self._buffer and (self.deadline is None or searched == 0):
                self.deadline = self._loop.time() + wire.FRAME_TIMEOUT_S
            return
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if len(line) >= wire.MAX_REQUEST_BYTES:
            self._refuse("invalid_frame")
            return
        self.deadline = None
        self._busy = True
        try:
            credential, operation, plain = wire.request_frame(line)
        except WireError as error:
            if error.code == "invalid_frame":
                self._refuse("invalid_frame")
            else:
                self.reply(wire.error_frame(error.code))
            return
        listener = self._listener
        caller = listener.identify(sha256(credential.encode()).digest())
        if caller is None:
            self._refuse("unauthenticated")
            return
        if not listener.admit(self, caller):
            self._refuse("limit_reached")
            return
        self._service.serve(caller, operation, plain, self)

    def reply(self, frame: bytes) -> None:
        """Answer the request being served and take the next one. Silent when the client has gone."""
        self.on_lost = None
        if self._transport.is_closing():
            return
        self._transport.write(frame)
        self._busy = False
        self._go_on()

    def _go_on(self) -> None:
        """Read on and take the next line, unless the client is still owed an answer or does not take one."""
        if self._busy or self._untaken:
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._buffer and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._scheduled = False
        if not self._refused and not self._transport.is_closing():
            self._next()

    def _refuse(self, code: str) -> None:
        """Answer with an error, read no more requests, and hang up when the client has or the deadline comes.

        What the client still sends is discarded, so that it can finish writing and then read the answer.
        """
        self._refused = True
        self._buffer.clear()
        self.deadline = self._loop.time() + wire.FRAME_TIMEOUT_S
        self._transport.write(wire.error_frame(code))
        self._transport.write_eof()

    def _hang_up_at_once(self, code: str) -> None:
        self._refused = True
        self._transport.write(wire.error_frame(code))
        self._transport.close()

    def expire(self, now: float) -> None:
        """Called now and then: a frame that is not delivered, or an answer that is not taken, in time."""
        if self.deadline is None or now < self.deadline:
            return
        if self._refused or self._untaken:
            self._transport.abort()
        else:
            self._refuse("frame_timeout")

    @property
    def busy(self) -> bool:
        return self._busy

    def abort(self) -> None:
        self._transport.abort()


def _peer_pidfd(peer: socket.socket, pid: int) -> int | None:
    """A pidfd of the peer: Linux's own (SO_PEERPIDFD, 6.5), else opened by number; None when it is gone already.

    A number may have been reused since; whoever has it now must still be in the attempt's pid namespace to pass.
    """
    try:
        return peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


class Connections:
    """All listeners of a kernel."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service) -> None:
        self._loop = loop
        self._service = service
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._sweep()

    async def listen(self, key: tuple[str, int], listener: Listener, sock: socket.socket) -> None:
        """Serve one attempt's listening socket."""
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        except OSError:
            pass  # before Linux 6.16: see the module's docstring
        sock.setblocking(False)
        loop, service = self._loop, self._service
        server = await loop.create_unix_server(
            lambda: Connection(loop, listener, service), sock=sock, backlog=MAX_CONNECTIONS
        )
        listener.server = server
        self._listeners[key] = listener

    def close(self, key: tuple[str, int]) -> None:
        """The attempt ended: its credential and its socket are no longer served."""
        listener = self._listeners.pop(key, None)
        if listener is not None:
            listener.close()

    @property
    def busy(self) -> bool:
        """Whether any request is being served."""
        return any(connection.busy for listener in self._listeners.values() for connection in listener.connections)

    def stop_accepting(self) -> None:
        for listener in self._listeners.values():
            if listener.server is not None:
                listener.server.close()

    def close_all(self) -> None:
        for key in list(self._listeners):
            self.close(key)

    def _sweep(self) -> None:
        now = self._loop.time()
        for listener in self._listeners.values():
            for connection in list(listener.connections):
                connection.expire(now)
        self._loop.call_later(_SWEEP_S, self._sweep)
