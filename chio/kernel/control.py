"""The host's operations over the control socket (design: host and kernel meet only here).

Each request is `{"id","op",...}` and is answered `{"re","ok":true,...}` or `{"re","ok":false,"error":{...}}`, in commit
order. The kernel speaks first only to say which processes were cancelled (`{"event":"cancelled","processes":[...]}`),
which server a call waits for (`server_needed`) and how its handshake went (`server`), which checkpoint of the log was
committed (`{"event":"checkpoint","note"}`), and to ask about a peer (`{"event":"peer","process","number","ticket"}`,
with its pidfd): the operation `peer` answers.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from hashlib import sha256
from typing import Any

from chio import canonical
from chio.errors import ChioError, HostFault, InputError, StateError
from chio.kernel import attest, epoch, evidence, plans, recovery
from chio.kernel.connections import MAX_CONNECTIONS, Listener
from chio.kernel.database import unreadable
from chio.kernel.invocations import Caller
from chio.kernel.process import Kernel
from chio.kernel.tree import Node
from chio.kernel.vault import OpenVault, Unsealable
from chio.kernel.writer import Item
from chio.tools.mcp import ServerFault
from chio.wire import Channel

MAX_LOG_BYTES = 64 * 1024
DRAIN_S = 30.0


class Control:
    """Serves one host until it says `quit` or its end of the socket closes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        self._loop = loop
        self._channel = channel
        self._kernel: Kernel
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets = itertools.count(1)
        self._asked: dict[int, Callable[[bool], None]] = {}
        self.stopped = loop.create_future()

    def cancelled(self, processes: list[str]) -> None:
        self._send({"event": "cancelled", "processes": processes})

    def server_needed(self, server: str) -> None:
        self._send({"event": "server_needed", "server": server})

    def checkpointed(self, note: str) -> None:
        self._send({"event": "checkpoint", "note": note})

    def check_peer(self, process: str, number: int, pidfd: int, done: Callable[[bool], None]) -> None:
        """Only the host may look into an attempt's namespaces; it answers with the operation `peer`."""
        ticket = next(self._tickets)
        self._asked[ticket] = done
        self._send({"event": "peer", "process": process, "number": number, "ticket": ticket}, (pidfd,))
        os.close(pidfd)

    def attach(self, kernel: Kernel) -> None:
        """Begin to read requests, once the state is open and recovered."""
        self._kernel = kernel
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            while (received := self._channel.receive(wait=False)) is not None:
                message, fds = received
                self._handle(message, fds)
        except HostFault:
            self._stop()

    def _stop(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        if not self.stopped.done():
            self.stopped.set_result(None)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            self._channel.send(message, fds)
        except HostFault:
            if not self.stopped.done():
                self.stopped.set_result(None)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        request, op = message["id"], message["op"]
        if op == "quit":
            self._send({"re": request, "ok": True})
            self._stop()
            return
        if op == "peer":
            self._asked.pop(message["ticket"])(message["inside"])
            self._send({"re": request, "ok": True})
            return
        if op in ("serve", "drain"):
            self._spawn(self._serve(request, fds[0]) if op == "serve" else self._drain(request))
            return
        if op == "listen":
            self._spawn(self._listen(request, message, fds[0]))
            return
        if op == "server_failed":
            self._kernel.router.failed(message["server"])
            self._send({"re": request, "ok": True})
            return
        work: Callable[[dict[str, Any]], dict[str, Any]] = {
            "freeze": self._freeze,
            "progress": self._progress,
            "reserve": self._reserve,
            "launched": self._launched,
            "ended": self._ended,
            "settled": self._settled,
            "finish": self._finish,
            "server_started": self._server_started,
            "server_ended": self._server_ended,
            "reconcile": self._reconcile,
            "attest": self._attest,
            "evidence": lambda message: self._evidence(message, fds[0]),
            "credential": self._credential,
            "revoke": self._revoke,
            "revoke_capability": self._revoke_capability,
            "cancel": self._cancel,
            "delete": self._delete,
            "accept": self._accept,
        }[op]

        def answer(reply: dict[str, Any]) -> None:
            if op == "delete" and reply["ok"]:
                reply = self._erased(reply)
            if op == "server_started" and reply["ok"]:
                self._spawn(self._attach(message["server"], fds[0], fds[1]))
            self._send(reply)

        def run() -> dict[str, Any]:
            try:
                return {"re": request, "ok": True, **work(message)}
            except ChioError as error:
                return _refused(request, error)

        failed = {
            "re": request,
            "ok": False,
            "error": {
                "kind": "StateError",
                "what": "the state's disk refused a write",
                "file": self._kernel.path,
                "field": None,
                "why": None,
                "fix": "free space on it and run the same command again",
            },
        }
        self._kernel.writer.submit(Item(run, answer, lambda: self._send(failed)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        task.result()

    # --- operations ----------------------------------------------------------------------------------------------

    def _freeze(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keep the plan of the first run; `plan` is what is frozen now, which the host compares with its own."""
        kernel = self._kernel
        if kernel.host["plan"] is None and message["plan"] is not None:
            plan, inputs = plans.without_inputs(message["plan"])
            kernel.writer.open_commit()
            kernel.store.set_host("plan", plan)
            for process, value in inputs.items():
                kernel.store.put_plan_input(process, value)
            kernel.host["plan"] = plan
        if kernel.host["plan"] is None:
            return {"plan": None, "deleted": []}
        try:
            plan = plans.with_inputs(kernel.host["plan"], kernel.store.plan_inputs())
        except Unsealable as error:
            raise unreadable(kernel.path, error) from error
        return {"plan": plan, "deleted": kernel.store.tombstones()}

    def _progress(self, _message: dict[str, Any]) -> dict[str, Any]:
        kernel = self._kernel
        return {
            "attempts": [
                {name: value for name, value in attempt.items() if name != "credential"}
                for attempt in kernel.store.attempts()
            ],
            "cancelled": [node.id for node in kernel.tree.nodes.values() if not node.running],
            "grants_live": kernel.grants_live(),
        }

    def _reserve(self, message: dict[str, Any]) -> dict[str, Any]:
        """A durable attempt with a credential of its own, before anything is launched."""
        kernel, name = self._kernel, message["process"]
        node = kernel.tree[name]
        if not kernel.lives(node, kernel.clock.now_ms()):
            raise StateError(
                "no grant of this process is still valid",
                file=kernel.path,
                field=name,
                why="they expired or were revoked",
                fix="grants are never renewed: start a new state",
            )
        credential = secrets.token_bytes(32).hex()
        number = 1 + sum(1 for attempt in kernel.store.attempts() if attempt["process"] == name)
        kernel.writer.open_commit()
        kernel.ledger.record("attempt", {"process_id": name, "attempt": number, "event": "reserved"})
        kernel.store.put_attempt(
            name, number, sha256(credential.encode()).digest(), message["confined"], kernel.clock.now_ms()
        )
        return {
            "number": number,
            "connection": kernel.connection(node, credential),
        }

    async def _listen(self, request: int, message: dict[str, Any], fd: int) -> None:
        """Serve the attempt's listening socket: from now on its worker can call."""
        kernel, key = self._kernel, (message["process"], message["number"])
        caller = Caller(kernel.tree[key[0]], key[1], message["launch_id"])
        listener = Listener.of_attempt(caller, sha256(message["credential"].encode()).digest(), message["uid"])
        kernel.live.add(key)
        await kernel.connections.listen(key, listener, socket.socket(fileno=fd))
        self._send({"re": request, "ok": True})

    def _launched(self, message: dict[str, Any]) -> dict[str, Any]:
        """The launch record, committed before the worker's first instruction."""
        kernel = self._kernel
        kernel.writer.open_commit()
        self._keep(message["texts"])
        launch_id, _ = kernel.ledger.signed_record("launch", message["record"])
        kernel.store.launch_attempt(message["process"], message["number"], launch_id)
        return {"launch_id": launch_id}

    def _ended(self, message: dict[str, Any]) -> dict[str, Any]:
        """The exit record, logs and declared exports of one attempt, in one commit; its credential is revoked."""
        kernel, name, number = self._kernel, message["process"], message["number"]
        kernel.connections.close((name, number))
        kernel.live.discard((name, number))
        kernel.writer.open_commit()
        if message["record"] is None:
            recovery.end_attempt(kernel.store, kernel.ledger, name, number, message["outcome"])
        else:
            kernel.ledger.signed_record("exit", message["record"])
            exports = canonical.encode(message["exports"]).decode() if message["exports"] else None
            kernel.store.end_attempt(name, number, message["outcome"], message["record"]["usage"], exports)
        for stream, (kept, written) in message["logs"].items():
            kernel.store.put_log(name, number, stream, base64.b64decode(kept)[:MAX_LOG_BYTES], written)
        return {}

    def _settled(self, message: dict[str, Any]) -> dict[str, Any]:
        """The exports of an attempt are published (or were left from a dead host and are now)."""
        self._kernel.writer.open_commit()
        self._kernel.store.settle_exports(message["process"], message["number"])
        return {}

    def _server_started(self, message: dict[str, Any]) -> dict[str, Any]:
        """The launch record of a tool server, committed before its first instruction. The handshake follows."""
        kernel, server = self._kernel, message["server"]
        kernel.writer.open_commit()
        number = kernel.store.next_server_start(server)
        kernel.store.put_server_start(server, number)
        self._keep(message["texts"])
        launch_id, _ = kernel.ledger.signed_record("launch", {**message["record"], "attempt": number})
        return {"number": number, "launch_id": launch_id}

    def _keep(self, texts: list[list[str]]) -> None:
        """The texts that a launch record names by digest, in its commit; each is kept once."""
        for kind, text in texts:
            self._kernel.store.put_text(sha256(text.encode()).hexdigest(), kind, text)

    async def _attach(self, server: str, stdin: int, stdout: int) -> None:
        """The handshake over a server's pipes, its tools held against the pinned ones; then the host is told."""
        try:
            await self._kernel.router.attach(server, stdin, stdout)
        except ServerFault as error:
            why = str(error)
            record = {"server": server, "detail": f"refused at its start: {why}"}

            def tell(_recorded: Any = None) -> None:
                self._send({"event": "server", "server": server, "up": False, "why": why})
                self._kernel.router.failed(server)

            self._kernel.writer.submit(Item(lambda: self._kernel.ledger.record("incident", record), tell, tell))
        else:
            self._send({"event": "server", "server": server, "up": True, "why": None})

    def _server_ended(self, message: dict[str, Any]) -> dict[str, Any]:
        """A tool server's process is dead: what it was asked is settled; its end and its log are kept."""
        kernel, server, number = self._kernel, message["server"], message["number"]
        self._loop.call_soon(kernel.router.ended, server, f"it ended: {message['outcome']}")
        kernel.writer.open_commit()
        kernel.ledger.record("incident", {"server": server, "start": number, "detail": f"ended: {message['outcome']}"})
        kept, written = message["stderr"]
        kernel.store.end_server(server, number, message["outcome"], base64.b64decode(kept)[:MAX_LOG_BYTES], written)
        return {}

    async def _serve(self, request: int, fd: int) -> None:
        """One socket for every worker that holds a credential of this state."""
        kernel = self._kernel
        callers = {digest: Caller(kernel.tree[process], None, None) for digest, process in kernel.store.credentials()}
        listener = Listener(callers.get, None, MAX_CONNECTIONS * len(kernel.tree.nodes))
        await kernel.connections.listen(("", 0), listener, socket.socket(fileno=fd))
        self._send({"re": request, "ok": True})

    async def _drain(self, request: int) -> None:
        """Stop accepting; let what is being served come to its answer, within limits."""
        kernel = self._kernel
        kernel.connections.stop_accepting()
        kernel.end_waiting()
        deadline = self._loop.time() + DRAIN_S
        while kernel.connections.busy and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        self._send({"re": request, "ok": True, "drained": not kernel.connections.busy})

    # --- what the operator says, with the host stopped -----------------------------------------------------------

    def _reconcile(self, message: dict[str, Any]) -> dict[str, Any]:
        """The operator's statement about an unknown outcome; the receipt stays what it is."""
        return self._kernel.ledger.reconcile(
            message["process"], message["key"], message["outcome"], message["by"], message["evidence_sha256"]
        )

    def _credential(self, message: dict[str, Any]) -> dict[str, Any]:
        """A new credential of a process, for a worker that someone else launches; only its digest is kept."""
        kernel, node = self._kernel, self._node(message)
        credential = secrets.token_bytes(32).hex()
        kernel.writer.open_commit()
        kernel.store.put_credential(sha256(credential.encode()).digest(), node.id, kernel.clock.now_ms())
        return {"connection": kernel.connection(node, credential)}

    def _revoke(self, message: dict[str, Any]) -> dict[str, Any]:
        kernel, node = self._kernel, self._node(message)
        kernel.writer.open_commit()
        count = kernel.store.revoke_credentials(node.id)
        kernel.ledger.record("revocation", {"process_id": node.id, "what": "credentials", "count": count})
        return {"process": node.id, "revoked_credentials": count}

    def _node(self, message: dict[str, Any]) -> Node:
        node = self._kernel.tree.nodes.get(message["process"])
        if node is None:
            raise InputError(
                "there is no such process",
                file=self._kernel.path,
                field="--process",
                why=f"`{message['process']}`",
                fix=f"one of {', '.join(list(self._kernel.tree.nodes)[:20])}",
            )
        return node

    def _attest(self, message: dict[str, Any]) -> dict[str, Any]:
        """One signed observation of a call; the checkpoint that it stands on is committed with it."""
        return attest.attest(self._kernel, message).as_reply()

    def _evidence(self, message: dict[str, Any], fd: int) -> dict[str, Any]:
        """A signed bundle of the whole run, into the descriptor that came with the request."""
        try:
            return evidence.write_bundle(self._kernel, fd, message["withhold"])
        except OSError as error:
            raise InputError(
                "the bundle cannot be written", field="--out", why=error.strerror, fix="make room, or name another disk"
            ) from error
        finally:
            os.close(fd)

    def _revoke_capability(self, message: dict[str, Any]) -> dict[str, Any]:
        kernel = self._kernel
        node = self._node(message)
        kernel.writer.open_commit()
        if kernel.store.revoke(node.capability.id, kernel.clock.now_ms()):
            kernel.ledger.record(
                "revocation", {"process_id": node.id, "capability_id": node.capability.id, "what": "capability"}
            )
        kernel.tree.revoked = kernel.store.revoked()
        return {"capability_id": node.capability.id}

    def _cancel(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"cancelled_processes": self._kernel.cancel(self._node(message).id, "operator")}

    def _delete(self, message: dict[str, Any]) -> dict[str, Any]:
        """Destroy a process's data key, with its tombstone in the same commit; again, it says where that one is."""
        kernel, node = self._kernel, self._node(message)
        before = kernel.store.tombstone(node.id)
        if before is not None:
            return {"tombstone": before}
        vault = kernel.store.vault
        if isinstance(vault, OpenVault):
            raise StateError(
                "the data of a process cannot be deleted",
                file=kernel.path,
                why="the state is not encrypted, so there is no key to destroy",
                fix="remove the state, or make the next one with `init --key-file`",
            )
        if node.running:
            raise StateError(
                "only the data of a cancelled process can be deleted",
                file=kernel.path,
                field="--process",
                why=f"{node.id} is running",
                fix="`chio process cancel` it first",
            )
        kernel.store.overwrite_what_is_deleted()
        kernel.writer.open_commit()
        tombstone = kernel.ledger.record("tombstone", {"process_id": node.id, "by": message["by"]})
        kernel.store.delete_data(node.id, tombstone)
        vault.destroy(node.id)
        kernel.records.state.reload()
        return {"tombstone": tombstone}

    def _erased(self, reply: dict[str, Any]) -> dict[str, Any]:
        """After the commit of a deletion: what it overwrote leaves every file, or the operator is told that it stays.

        A kill before this leaves it to the next start.
        """
        kernel = self._kernel
        kernel.records.state.files.sweep(kernel.store.blob_files())
        if kernel.store.erase_log():
            return reply
        still_there = StateError(
            "the data is deleted, but the database's write-ahead log still holds it",
            file=kernel.path,
            why="somebody is reading the state",
            fix="when they are done, run the same command again",
        )
        return _refused(reply["re"], still_there)

    def _accept(self, message: dict[str, Any]) -> dict[str, Any]:
        """The operator takes a restored state into service: from here on new work is admitted."""
        kernel = self._kernel
        if not kernel.replay_only:
            raise StateError(
                "there is nothing to accept",
                file=kernel.path,
                why="the state was not restored, or was accepted before",
                fix="run or serve it",
            )
        kernel.writer.open_commit()
        epoch_members = epoch.members(kernel.host["epoch"], "accepted", message["by"], kernel.log)
        kernel.ledger.signed_record("epoch", epoch_members)
        kernel.store.set_host("replay_only", 0)
        kernel.ledger.replay_only = False
        return {"epoch": kernel.host["epoch"]}

    def _finish(self, _message: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint of the log, committed before it is shown."""
        self._kernel.writer.open_commit()
        self._kernel.writer.checkpoint_log()
        newest = self._kernel.store.last_checkpoint()
        return {"checkpoint": newest[2] if newest else None}


def _refused(request: int, error: ChioError) -> dict[str, Any]:
    return {"re": request, "ok": False, "error": {"kind": type(error).__name__, **error.as_wire()}}
