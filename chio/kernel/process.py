"""The kernel process: receive, decide, commit, reply.

One thread, one writer. Workers' requests come from `connections`, the host's from the control socket (`control`);
both become items of the writer's next commit. Reads are answered at once, since between commits nothing is half done.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import orjson

from chio import canonical, schema, statedir, wire
from chio.errors import StateError
from chio.kernel import grants, recovery
from chio.kernel.clock import Clock
from chio.kernel.connections import Connection, Connections
from chio.kernel.ledger import Answer, Caller, CallError, Ledger, Request, read_request
from chio.kernel.log import Log, origin
from chio.kernel.mailboxes import Mailboxes, Waiting
from chio.kernel.state import MAX_BLOB_BYTES, StateRefused, WorkerState
from chio.kernel.store import Store, half_initialised
from chio.kernel.tree import Node, Tree
from chio.kernel.writer import PARKED, Item, Writer
from chio.signing import Keyring, SigningKey


class HostLink(Protocol):
    """What the kernel asks of the host: `chio.kernel.control.Control`."""

    def cancelled(self, processes: list[str]) -> None:
        """These processes were cancelled: end their workers."""

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
    ) -> None:
        self.path = path
        self._loop = loop
        self.store = store
        self.host = self.store.host()
        if not self.host.get("ready"):
            raise half_initialised(path)
        keys, self.config, bootstrap = _pinned(directory, self.host, path)
        if not bootstrap["storage"]["volatile"]:
            statedir.require_durable(directory, Path(path), allow_volatile)
        self.runtime_id: str = self.host["runtime_id"]
        self.kernel_key = keys.kernel.public
        self.log = Log(origin(self.runtime_id), keys.log)
        recovery.restore_log(self.store, self.log, path)
        self.clock = Clock(recovery.newest_time_ms(self.store))
        self.tree = Tree(self.store, path)
        self.state = WorkerState(self.store, self.config.limits.state)
        self.writer = Writer(loop, self.store, self.log, self._rolled_back, recovery.open_receipts(directory))
        self.ledger = Ledger(
            self.store,
            self.log,
            self.tree,
            Mailboxes(self.store, {box.id: box.limits for box in self.config.mailboxes}),
            self.clock,
            keys.kernel,
            runtime_id=self.runtime_id,
            policy_hash=bootstrap["policy_digest"],
            open_commit=self.writer.open_commit,
        )
        self.recovered = self.writer.now(lambda: recovery.recover(self.store, self.ledger))
        self.connections = Connections(loop, self)
        self.live: set[tuple[str, int]] = set()
        self._waiting: dict[str, list[_Receive]] = {}
        self._link = link

    def _rolled_back(self) -> None:
        self.tree.reload()
        self.state.reload()

    def grants_live(self) -> bool:
        now_ms = self.clock.now_ms()
        return any(grants.lives(node.capability, now_ms) for node in self.tree.nodes.values())

    def check_peer(self, caller: Caller, pidfd: int, done: Callable[[bool], None]) -> None:
        assert caller.attempt is not None
        self._link.check_peer(caller.node.id, caller.attempt, pidfd, done)

    # --- requests ------------------------------------------------------------------------------------------------

    def serve(self, caller: Caller, operation: dict[str, Any], plain: bool, connection: Connection) -> None:
        """One authenticated request; the connection is answered exactly once, now or after the commit."""
        try:
            match operation["op"]:
                case "invoke":
                    self._submit(_Receive(caller, read_request(operation, plain), connection))
                case "inspect":
                    _only(operation, "op")
                    connection.reply(wire.ok_frame(self._inspect(caller.node)))
                case "blob_read":
                    self._require_running(caller.node)
                    digest, data = self.state.read_blob(caller.node.id, operation)
                    members = {"sha256": digest, "bytes": len(data), "data_base64": base64.b64encode(data).decode()}
                    connection.reply(wire.ok_frame(orjson.dumps(members)))
                case "checkpoint":
                    self._submit_work(caller, connection, lambda: self._checkpoint(caller.node, operation, plain))
                case "blob_put":
                    self._submit_work(caller, connection, lambda: self._put_blob(caller.node, operation))
                case "cancel":
                    _only(operation, "op")
                    self._submit_work(caller, connection, lambda: self._cancel(caller.node))
                case _:
                    raise CallError("invalid_request")
        except (CallError, StateRefused) as error:
            connection.reply(wire.error_frame(error.code))
        except canonical.NotCanonical:
            connection.reply(wire.error_frame("invalid_request"))

    def _submit(self, receive: _Receive) -> None:
        self.writer.submit(
            Item(
                lambda: self._invoke(receive),
                lambda result: self._answer(receive, result),
                lambda: receive.connection.reply(wire.error_frame("runtime_error")),
            )
        )

    def _invoke(self, receive: _Receive) -> Any:
        """In the commit: an `Answer`, an error code, or PARKED."""
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
        self.writer.show_receipt(result.receipt)
        return result

    def _answer(self, receive: _Receive, result: Answer | str) -> None:
        if receive.timer is not None:
            receive.timer.cancel()
        if isinstance(result, str):
            receive.connection.reply(wire.error_frame(result))
            return
        receive.connection.reply(wire.ok_frame(result.result))
        if result.wakes is not None:
            for waiting in self._waiting.pop(result.wakes, []):
                self._wake(waiting)

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

    # --- a worker's own records ----------------------------------------------------------------------------------

    def _submit_work(self, caller: Caller, connection: Connection, work: Callable[[], bytes]) -> None:
        def run() -> bytes:
            try:
                self._require_running(caller.node)
                return wire.ok_frame(work())
            except (CallError, StateRefused) as error:
                return wire.error_frame(error.code)

        self.writer.submit(Item(run, connection.reply, lambda: connection.reply(wire.error_frame("runtime_error"))))

    def _require_running(self, node: Node) -> None:
        if not all(above.running for above in node.path):
            raise CallError("cancelled")

    def _checkpoint(self, node: Node, operation: dict[str, Any], plain: bool) -> bytes:
        revision, value = self.state.next_checkpoint(node.id, operation, plain)
        self.writer.open_commit()
        self.store.put_worker_checkpoint(node.id, revision, value)
        return b'{"revision":"' + revision.encode() + b'","value":' + value + b"}"

    def _put_blob(self, node: Node, operation: dict[str, Any]) -> bytes:
        digest, data, new = self.state.new_blob(node.id, operation)
        if new:
            self.writer.open_commit()
            self.state.put_blob(node.id, digest, data)
        return orjson.dumps({"sha256": digest, "bytes": len(data)})

    def _cancel(self, node: Node) -> bytes:
        names = [below.id for below in node.subtree() if below.running]
        self.writer.open_commit()
        self.store.cancel(names)
        self.ledger.record("cancellation", {"process_id": node.id, "by": "worker", "processes": names})
        for below in node.subtree():
            below.running = False
        self._loop.call_soon(self._link.cancelled, names)
        return orjson.dumps({"cancelled_processes": len(names)})

    def _inspect(self, node: Node) -> bytes:
        revision, value = self.store.checkpoint(node.id)
        own, total, limits = self.state.usage.get(node.id), self.state.total(), self.config.limits
        return orjson.dumps(
            {
                "process_id": node.id,
                "parent_id": node.parent.id if node.parent else None,
                "root_id": schema.ROOT,
                "state": "running" if all(above.running for above in node.path) else "cancelled",
                "depth": node.depth,
                "limits": {
                    "max_processes": limits.max_processes,
                    "max_depth": limits.max_depth,
                    "max_calls": limits.max_calls,
                },
                "tree_calls": self.tree[schema.ROOT].calls,
                "checkpoint": {"revision": revision, "value": orjson.Fragment(value)},
                "storage": {
                    "max_blob_bytes": MAX_BLOB_BYTES,
                    "limits": {"max_bytes": limits.state.max_bytes, "max_blobs": limits.state.max_blobs},
                    "process_bytes": own.bytes if own else 0,
                    "process_blobs": own.blobs if own else 0,
                    "tree_bytes": total.bytes,
                    "tree_blobs": total.blobs,
                },
            }
        )

    def close(self) -> None:
        """Stop serving and leave the log checkpointed."""
        self.connections.close_all()
        self.writer.now(lambda: None)
        self.store.close()


def _only(operation: dict[str, Any], *fields: str) -> None:
    if operation.keys() != set(fields):
        raise CallError("invalid_request")


def _pinned(directory: int, host: dict[str, Any], path: str) -> tuple[Keyring, schema.HostConfig, dict[str, Any]]:
    """Keys, config and bootstrap of the state, each held against the signed bootstrap before anything starts."""
    bootstrap = orjson.loads(host["bootstrap"])["body"]
    try:
        seeds = orjson.loads(statedir.read(directory, statedir.KEYS))
        keys = Keyring(*(SigningKey(bytes.fromhex(seeds[name])) for name in ("kernel", "log", "authority")))
        config_text = statedir.read(directory, statedir.CONFIG)
        policy_text = statedir.read(directory, statedir.POLICY)
    except (OSError, KeyError, ValueError) as error:
        raise StateError(
            "the state cannot be served",
            file=path,
            why=f"a pinned file cannot be read: {error}",
            fix="restore the state from a backup",
        ) from error
    if (keys.kernel.public, keys.log.public, keys.authority.public) != (
        bootstrap["kernel_key"],
        bootstrap["log_key"],
        bootstrap["authority_key"],
    ):
        raise StateError(
            "the state cannot be served",
            file=f"{path}/{statedir.KEYS}",
            why="its keys are not the bootstrap's",
            fix="restore the state from a backup",
        )
    for name, text, digest, source in (
        (statedir.CONFIG, config_text, bootstrap["config_digest"], host["config_path"]),
        (statedir.POLICY, policy_text, bootstrap["policy_digest"], host["policy_path"]),
    ):
        if sha256(text).hexdigest() != digest:
            raise StateError(
                "a pinned document was changed", file=f"{path}/{name}", fix="restore it; the state pins its digest"
            )
        _refuse_changed_source(source, digest)
    return keys, schema.host_config(config_text, f"{path}/{statedir.CONFIG}"), bootstrap


def _refuse_changed_source(source: str, digest: str) -> None:
    """The operator's own file, if it is still there, says what was pinned; a silent difference would mislead."""
    try:
        with open(source, "rb") as file:
            now = sha256(file.read(schema.MAX_DOCUMENT_BYTES + 1)).hexdigest()
    except OSError:
        return
    if now != digest:
        raise StateError(
            "a document was changed since init",
            file=source,
            why="the state pins its bytes",
            fix="restore it, or start a new state for the changed one",
        )
