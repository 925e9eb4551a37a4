"""The kernel process: receive, decide, commit, reply.

One thread, one writer. Workers' requests come from `connections`, the host's from the control socket (`control`);
both become items of the writer's next commit. Reads are answered at once, since between commits nothing is half done.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import orjson

from chio import canonical, schema, statedir, wire
from chio.kernel import blobs, counters, grants, receipts, recovery
from chio.kernel.call_row import CallRow
from chio.kernel.calls import Event
from chio.kernel.clock import Clock
from chio.kernel.connections import Connection, Connections
from chio.kernel.database import half_initialised
from chio.kernel.invocations import Answer, Caller, CallError, Dispatch, Down, Live, Request, read_request
from chio.kernel.ledger import Ledger
from chio.kernel.log import Log, origin
from chio.kernel.mailboxes import Mailboxes, Waiting
from chio.kernel.pinned import read_pinned
from chio.kernel.state import StateRefused
from chio.kernel.store import Store
from chio.kernel.tree import Node, Tree
from chio.kernel.vault import OpenVault, Unsealable, vault_of
from chio.kernel.worker_records import WorkerRecords, only
from chio.kernel.writer import PARKED, Item, Writer
from chio.tools import mcp
from chio.tools.router import Router

MAX_OUTPUT_BYTES = 2 * 1024 * 1024  # of a result, so that a reply holds it beside its receipt
_ROOM_BYTES = 64 * 1024 * 1024
_MAX_SERVER_STARTS = 3


class HostLink(Protocol):
    """What the kernel asks of the host: `chio.kernel.control.Control`."""

    def cancelled(self, processes: list[str]) -> None:
        """These processes were cancelled: end their workers."""

    def server_needed(self, server: str) -> None:
        """Start this tool server (again): a call waits for it."""

    def checkpointed(self, note: str) -> None:
        """This checkpoint of the log is on disk: it may be handed out."""

    def check_peer(self, process: str, number: int, pidfd: int, done: Callable[[bool], None]) -> None:
        """Is the process behind `pidfd` in this attempt's pid namespace? Takes the descriptor over."""


@dataclass(slots=True, eq=False)
class _Receive:
    """A request on its way to a commit; a receive may be parked until a message or its time comes."""

    caller: Caller
    request: Request
    connection: Connection
    may_wait: bool = True
    timer: asyncio.TimerHandle | None = None
    mailbox: str | None = None
    awaits_server: bool = False
    server_starts: int = 0
    answered: bool = False


@dataclass(slots=True, eq=False)
class _Flight:
    """A dispatched call: who waits for its one outcome. `sent` is its request to the server."""

    waiters: list[_Receive] = field(default_factory=list)
    sent: mcp.Request | None = None


class Kernel:
    """The opened state and everything that serves it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        directory: int,
        path: str,
        allow_volatile: bool,
        link: HostLink,
        key: bytes | None = None,
        key_file: str | None = None,
    ) -> None:
        self.path = path
        self._loop = loop
        self.store = store
        self.host = self.store.host()
        if not self.host.get("ready"):
            raise half_initialised(path)
        keys, self.config_text, bootstrap = read_pinned(directory, self.host, path)
        self.config = schema.host_config(self.config_text.encode(), f"{path}/{statedir.CONFIG}")
        if not bootstrap["storage"]["volatile"]:
            statedir.require_durable(directory, Path(path), allow_volatile)
        self.runtime_id: str = self.host["runtime_id"]
        self.store.vault = vault_of(key, self.runtime_id, self.store.data_keys(), path, key_file)
        if self.store.tombstones():
            self.store.erase_log()  # a kill may have come between a deletion's commit and this
        self.kernel_key = keys.kernel.public
        self.log = Log(origin(self.runtime_id), keys.log)
        recovery.restore_log(self.store, self.log, path)
        self.clock = Clock(recovery.newest_time_ms(self.store))
        self.tree = Tree(self.store, path)
        self.records = WorkerRecords(self, blobs.BlobFiles(directory))
        self.counters = counters.Counters(self.store)
        receipts_fd = recovery.open_receipts(directory)
        self.writer = Writer(
            loop, self.store, self.log, self.counters, self._rolled_back, receipts_fd, link.checkpointed
        )
        self.router = _router(loop, self.config, bootstrap, link.server_needed)
        self.ledger = Ledger(
            self.store,
            self.log,
            self.tree,
            Mailboxes(self.store, {box.id: box.limits for box in self.config.mailboxes}),
            self.clock,
            keys.kernel,
            runtime_id=self.runtime_id,
            policy_hash=bootstrap["policy_digest"],
            servers=self.router,
            counters=self.counters,
            replay_only=bool(self.host["replay_only"]),
            has_room=self._has_room,
            open_commit=self.writer.open_commit,
        )
        self.recovered = self.writer.now(lambda: recovery.recover(self.store, self.ledger))
        self.connections = Connections(loop, self)
        self.live: set[tuple[str, int]] = set()
        self._waiting: dict[str, list[_Receive]] = {}
        self._flights: dict[tuple[str, str], _Flight] = {}
        self._link = link

    def _rolled_back(self) -> None:
        self.tree.reload()
        self.records.state.reload()

    @property
    def replay_only(self) -> bool:
        return self.ledger.replay_only

    def grants_live(self) -> bool:
        now_ms = self.clock.now_ms()
        return any(self.lives(node, now_ms) for node in self.tree.nodes.values())

    def lives(self, node: Node, now_ms: int) -> bool:
        """Whether a process can still be admitted to anything: no attempt of one that cannot is started."""
        revoked = any(capability.id in self.tree.revoked for capability in node.chain)
        return not revoked and grants.lives(node.capability, now_ms)

    def check_peer(self, caller: Caller, pidfd: int, done: Callable[[bool], None]) -> None:
        assert caller.attempt is not None
        self._link.check_peer(caller.node.id, caller.attempt, pidfd, done)

    def connection(self, node: Node, credential: str) -> dict[str, Any]:
        """What a worker needs to speak for a process, but for the socket's path."""
        return {
            "protocol": wire.PROTOCOL,
            "process_id": node.id,
            "credential": credential,
            "kernel_key": self.kernel_key,
            "runtime_id": self.runtime_id,
            "capability_id": node.capability.id,
            "tools": [{"server_id": grant.server, "tool_name": grant.tool} for grant in node.capability.body.grants],
        }

    def end_waiting(self) -> None:
        """The host stops: receives that wait are told so, and nothing is recorded of them."""
        for queue in self._waiting.values():
            for receive in list(queue):
                self._unpark(receive)
                self._reply(receive, wire.error_frame("runtime_error"))

    # --- requests ------------------------------------------------------------------------------------------------

    def serve(self, caller: Caller, operation: dict[str, Any], plain: bool, connection: Connection) -> None:
        """One authenticated request; the connection is answered exactly once, now or after the commit."""
        try:
            match operation["op"]:
                case "invoke":
                    self._submit(_Receive(caller, read_request(operation, plain), connection))
                case "cancel":
                    only(operation, "op")
                    self.records.submit(caller, connection, lambda: self._cancel(caller.node))
                case _:
                    self.records.serve(caller, operation, plain, connection)
        except (CallError, StateRefused) as error:
            connection.reply(wire.error_frame(error.code))
        except canonical.NotCanonical:
            connection.reply(wire.error_frame("invalid_request"))
        except Unsealable:
            connection.reply(wire.error_frame("runtime_error"))

    def _submit(self, receive: _Receive) -> None:
        if receive.answered:
            return
        self.writer.submit(
            Item(
                lambda: self._invoke(receive),
                lambda result: self._answer(receive, result),
                lambda: self._reply(receive, wire.error_frame("runtime_error")),
            )
        )

    def _reply(self, receive: _Receive, frame: bytes) -> None:
        """Answer once. A group that was rolled back leaves its requests in the queues that they entered in it, and
        the disk may then refuse each: who was told so is told nothing more by what it waited for."""
        if receive.answered:
            return
        receive.answered = True
        if receive.timer is not None:
            receive.timer.cancel()
        key = (receive.caller.node.id, receive.request.key)
        flight = self._flights.get(key)
        if flight is not None and receive in flight.waiters:
            flight.waiters.remove(receive)
            if not flight.waiters and flight.sent is None:
                del self._flights[key]
        receive.connection.reply(frame)

    def _invoke(self, receive: _Receive) -> Any:
        """In the commit: an `Answer` or a `Dispatch`, an error code, or PARKED."""
        caller = receive.caller
        if caller.attempt is not None and (caller.node.id, caller.attempt) not in self.live:
            return "unauthenticated"
        try:
            result = self.ledger.invoke(caller, receive.request, may_wait=receive.may_wait)
        except CallError as error:
            return error.code
        if isinstance(result, Waiting):
            self._park(receive, result)
            return PARKED
        if isinstance(result, Live):
            self._join(receive)
            return PARKED
        if isinstance(result, Down):
            self._await_server(receive, result.server)
            return PARKED
        if isinstance(result, Answer):
            self._show_receipt(result.receipt)
        return result

    def _show_receipt(self, receipt: bytes) -> None:
        """A line of `receipts.ndjson`; of an encrypted state, without what only its key file may show."""
        self.writer.show_receipt(receipt if isinstance(self.store.vault, OpenVault) else receipts.withheld(receipt))

    def _answer(self, receive: _Receive, result: Answer | Dispatch | str) -> None:
        """After the commit."""
        if isinstance(result, str):
            self._reply(receive, wire.error_frame(result))
        elif isinstance(result, Dispatch):
            if receive.timer is not None:  # it was a repeat in a group that was rolled back
                receive.timer.cancel()
            self._send(receive, result.call)
        else:
            self._reply(receive, wire.ok_frame(result.result))
            if result.wakes is not None:
                for waiting in self._waiting.pop(result.wakes, []):
                    self._wake(waiting)

    # --- external calls ------------------------------------------------------------------------------------------

    def _send(self, receive: _Receive, call: CallRow) -> None:
        """The intent is on disk: now the first byte may leave. Nothing that happens from here is forgotten."""
        key = (call.process, call.operation_key)
        flight = self._flights.setdefault(key, _Flight())
        self._add_waiter(flight, receive)
        parameters = call.parameters or b"{}"

        def late(result: bytes) -> None:
            self._late(key, call.dispatch, result)

        flight.sent = self.router.call(
            call.server, call.tool, parameters, lambda ended: self._ended(key, call, ended), late
        )
        if flight.sent is None:
            self._ended(key, call, mcp.Ended(mcp.End.NOT_SENT, "the server ended before it was asked"))

    def _join(self, receive: _Receive) -> None:
        """A repeat of a call in flight waits for the one outcome, at most as long as the server may take."""
        request = receive.request
        flight = self._flights.setdefault((receive.caller.node.id, request.key), _Flight())
        if receive not in flight.waiters:
            self._add_waiter(flight, receive)
            receive.timer = self._loop.call_later(
                self.router.timeout_s(request.server), self._give_up, flight, receive, "runtime_error"
            )

    def _add_waiter(self, flight: _Flight, receive: _Receive) -> None:
        if receive not in flight.waiters:  # a group that was rolled back runs its items again
            flight.waiters.append(receive)
        receive.connection.on_lost = lambda: self._leave(flight, receive)

    def _leave(self, flight: _Flight, receive: _Receive) -> None:
        """Its client went away. The call goes on: what was admitted is not undone by that."""
        if receive.timer is not None:
            receive.timer.cancel()
        if receive in flight.waiters:
            flight.waiters.remove(receive)

    def _give_up(self, flight: _Flight, receive: _Receive, code: str) -> None:
        if receive in flight.waiters:
            self._reply(receive, wire.error_frame(code))

    def _ended(self, key: tuple[str, str], call: CallRow, ended: mcp.Ended) -> None:
        """The server answered, or provably was not asked, or the outcome is not known: commit that, then answer."""
        event, detail, output = _EVENTS[ended.end], ended.detail, None
        if ended.result is not None:
            output = output_of(ended.result)
            if output is None:
                event, detail = Event.LOST, "its answer is not text"

        def work() -> Answer:
            answer = self.ledger.settle(replace(call), event, detail, output)
            if self._flights[key].waiters:
                self._show_receipt(answer.receipt)
            return answer

        def answer(result: Answer) -> None:
            for receive in self._flights.pop(key).waiters:
                self._reply(receive, wire.ok_frame(result.result))

        def failed() -> None:
            # The row stays dispatched; the next start makes it unknown. Nobody is told more than is on disk.
            flight = self._flights.pop(key)
            for receive in list(flight.waiters):
                self._give_up(flight, receive, "runtime_error")

        self.writer.submit(Item(work, answer, failed))

    def _late(self, key: tuple[str, str], dispatch: int, result: bytes) -> None:
        work = lambda: self.ledger.late_answer(*key, dispatch, result)  # noqa: E731
        self.writer.submit(Item(work, lambda _: None, lambda: None))

    def _await_server(self, receive: _Receive, server: str) -> None:
        """Nothing was written; the call is decided anew when its server is up, a few times at most."""
        if receive.awaits_server:  # a group that was rolled back runs its items again
            return
        if receive.server_starts >= _MAX_SERVER_STARTS:  # it comes up and is gone again before it can be asked
            self._loop.call_soon(self._reply, receive, wire.error_frame("runtime_error"))
            return
        receive.awaits_server = True
        receive.server_starts += 1
        gone = False

        def lost() -> None:
            nonlocal gone
            gone = True

        def then(up: bool) -> None:
            receive.awaits_server = False
            if gone:
                return
            receive.connection.on_lost = None
            if up:
                self._submit(receive)
            else:
                self._reply(receive, wire.error_frame("runtime_error"))

        receive.connection.on_lost = lost
        self.router.when_up(server, then)

    def _has_room(self) -> bool:
        """Whether the state's disk has room for an intent and, after it, for every outcome in flight."""
        free = os.statvfs(".")
        needed = _ROOM_BYTES + len(self._flights) * mcp.MAX_ANSWER_BYTES // 8
        return free.f_bavail * free.f_frsize >= needed

    # --- waiting receives ----------------------------------------------------------------------------------------

    def _park(self, receive: _Receive, waiting: Waiting) -> None:
        """Hold nothing but this entry: no commit, no lock, no thread. If the client goes, nothing is recorded."""
        receive.mailbox = waiting.mailbox
        queue = self._waiting.setdefault(waiting.mailbox, [])
        if receive not in queue:  # a group that was rolled back runs its items again
            queue.append(receive)
        receive.connection.on_lost = lambda: self._unpark(receive)
        if receive.timer is None:
            receive.timer = self._loop.call_later(waiting.wait_ms / 1000, self._time_is_up, receive)

    def _unpark(self, receive: _Receive) -> None:
        if receive.timer is not None:
            receive.timer.cancel()
        queue = self._waiting.get(receive.mailbox or "", [])
        if receive in queue:
            queue.remove(receive)

    def _time_is_up(self, receive: _Receive) -> None:
        receive.may_wait = False
        queue = self._waiting.get(receive.mailbox or "", [])
        if receive in queue:
            queue.remove(receive)
            self._wake(receive)

    def _wake(self, receive: _Receive) -> None:
        """Back to the writer: authority is checked again in the commit that answers."""
        receive.connection.on_lost = None
        self._submit(receive)

    # --- cancelling ---------------------------------------------------------------------------------------------

    def _cancel(self, node: Node) -> bytes:
        return orjson.dumps({"cancelled_processes": self.cancel(node.id, "worker")})

    def cancel(self, process: str, by: str) -> int:
        """Cancel a process and all below it, for good; how many were running."""
        node = self.tree[process]
        names = [below.id for below in node.subtree() if below.running]
        self.writer.open_commit()
        self.store.cancel(names)
        self.ledger.record("cancellation", {"process_id": node.id, "by": by, "processes": names})
        for below in node.subtree():
            below.running = False
        self._loop.call_soon(self._cancelled, names)
        return len(names)

    def _cancelled(self, names: list[str]) -> None:
        """After the commit: what is in flight goes on and is retained, but its output is withheld from now on."""
        for (process, _), flight in list(self._flights.items()):
            if process in names:
                if flight.sent is not None:
                    self.router.cancel(flight.sent)
                for receive in list(flight.waiters):
                    self._give_up(flight, receive, "cancelled")
        self._link.cancelled(names)

    def close(self) -> None:
        """Stop serving and leave the log checkpointed. What is in flight is recorded as what is provable of it."""
        self.connections.close_all()
        self.router.close()
        self.writer.flush()
        self.writer.now(lambda: None)
        self.records.close()
        self.store.close()


_EVENTS = {mcp.End.ANSWERED: Event.ANSWERED, mcp.End.NOT_SENT: Event.NOT_SENT, mcp.End.LOST: Event.LOST}


def output_of(result: bytes) -> bytes | None:
    """The output object (JCS) of a server's result: its value, else its text as received, else that it is too large.

    None when the bytes are not even text.
    """
    if len(result) > MAX_OUTPUT_BYTES:
        output: dict[str, Any] = {
            "kind": "withheld", "reason": "too_large", "bytes": len(result), "sha256": sha256(result).hexdigest(),
        }  # fmt: skip
        return canonical.encode(output)
    try:
        value, plain = canonical.parse_scanned(result)
        return b'{"kind":"value","value":' + canonical.encode_scanned(value, plain) + b"}"
    except canonical.NotCanonical:
        pass
    try:
        return canonical.encode({"kind": "text", "text": result.decode()})
    except UnicodeDecodeError:
        return None


def _router(
    loop: asyncio.AbstractEventLoop, config: schema.HostConfig, bootstrap: dict[str, Any], needed: Callable[[str], None]
) -> Router:
    """The router with every server as it was pinned at init."""
    router = Router(loop, needed)
    pinned = {entry["server_id"]: entry for entry in bootstrap["servers"]}
    for server in config.servers:
        entry = pinned[server.id]
        tools = {tool["name"]: tool["read_only"] for tool in entry["tools"]}
        router.declare(server.id, server.request_timeout_seconds, entry["tools_digest"], tools)
    return router
