"""A worker's own records over the protocol: inspect, checkpoint, blobs, notes (contract section 7).

Each write is an item of the writer's next commit, and is answered after it. A large blob's bytes are on disk in a file
before the commit that names it is begun, so other requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from chio import schema, wire
from chio.kernel import blobs, counters
from chio.kernel.connections import Connection
from chio.kernel.invocations import Caller, CallError
from chio.kernel.state import MAX_BLOB_BYTES, StateRefused, WorkerState
from chio.kernel.tree import Node
from chio.kernel.writer import Item

if TYPE_CHECKING:
    from chio.kernel.process import Kernel


class WorkerRecords:
    """Serves these operations for one kernel, whose parts it uses."""

    def __init__(self, kernel: Kernel, files: blobs.BlobFiles) -> None:
        self._kernel = kernel
        self._files = files
        self.state = WorkerState(kernel.store, files, kernel.config.limits.state)
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, caller: Caller, operation: dict[str, Any], plain: bool, connection: Connection) -> None:
        """One request; the connection is answered exactly once. Raises `CallError`, `StateRefused`, `NotCanonical`."""
        node = caller.node
        match operation["op"]:
            case "inspect":
                only(operation, "op")
                connection.reply(wire.ok_frame(self._inspect(node)))
            case "checkpoint":
                self.submit(caller, connection, lambda: self._checkpoint(node, operation, plain))
            case "blob_read":
                require_running(node)
                digest, data = self.state.read_blob(node.id, operation)
                members = {"sha256": digest, "bytes": len(data), "data_base64": base64.b64encode(data).decode()}
                connection.reply(wire.ok_frame(orjson.dumps(members)))
            case "blob_put":
                self._put_blob(caller, connection, *self.state.blob_fields(operation))
            case "note":
                noted = counters.read_note(operation)
                if noted is None:
                    raise CallError("invalid_request")
                self.submit(caller, connection, lambda: self._note(node, *noted))
            case _:
                raise CallError("invalid_request")

    def submit(
        self,
        caller: Caller,
        connection: Connection,
        work: Callable[[], bytes],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Work of a commit whose result is the answer; `after` is called when it has ended either way."""

        def run() -> bytes:
            try:
                self._require_served(caller.node)
                return wire.ok_frame(work())
            except (CallError, StateRefused) as error:
                return wire.error_frame(error.code)

        def answer(frame: bytes) -> None:
            after()
            connection.reply(frame)

        self._kernel.writer.submit(Item(run, answer, lambda: answer(wire.error_frame("runtime_error"))))

    def close(self) -> None:
        self._files.close()

    def _require_served(self, node: Node) -> None:
        """A process that may write records of its own now."""
        require_running(node)
        if self._kernel.replay_only:
            raise CallError("runtime_error")

    def _note(self, node: Node, name: str, age_ms: int | None) -> bytes:
        """What a worker says of its own resume, for the operator's counters."""
        kernel = self._kernel
        kernel.writer.open_commit()
        kernel.store.count(node.id, name, 1)
        if age_ms is not None:
            kernel.store.gauge(node.id, counters.RESUME_AGE_MS, age_ms)
        return b"{}"

    def _checkpoint(self, node: Node, operation: dict[str, Any], plain: bool) -> bytes:
        kernel = self._kernel
        try:
            revision, value = self.state.next_checkpoint(node.id, operation, plain)
        except StateRefused as error:
            if error.code == "checkpoint_conflict":
                kernel.counters.add(node.id, counters.CONFLICTS)
            raise
        kernel.writer.open_commit()
        kernel.store.put_worker_checkpoint(node.id, revision, value, kernel.clock.now_ms())
        return b'{"revision":"' + revision.encode() + b'","value":' + value + b"}"

    def _put_blob(self, caller: Caller, connection: Connection, digest: str, text: str) -> None:
        if len(text) > blobs.INLINE_TEXT:
            task = asyncio.get_running_loop().create_task(self._put_large(caller, connection, digest, text))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
            return

        def work() -> bytes:
            data = self.state.small_blob(digest, text)
            self._link(caller.node, digest, len(data), data)
            return _stored(digest, len(data))

        self.submit(caller, connection, work)

    async def _put_large(self, caller: Caller, connection: Connection, digest: str, text: str) -> None:
        process = caller.node.id
        try:
            self._require_served(caller.node)
            data = await self.state.large_blob(digest, text)
            if not self.state.is_new_blob(process, digest, len(data)):
                connection.reply(wire.ok_frame(_stored(digest, len(data))))
                return
            written = await self._files.write(self._kernel.store.vault, process, digest, data)
        except (CallError, StateRefused) as error:
            connection.reply(wire.error_frame(error.code))
            return
        except OSError:  # a full or failing disk: nothing names the file, and nothing was said
            connection.reply(wire.error_frame("runtime_error"))
            return
        named = False

        def work() -> bytes:
            nonlocal named
            named = self._link(caller.node, digest, len(data), written)
            return _stored(digest, len(data))

        def after() -> None:
            # Decided anew in the commit: another put of it may have come first, or the tree may have filled.
            if not named:
                self._files.remove(written)

        self.submit(caller, connection, work, after)

    def _link(self, node: Node, digest: str, size: int, held: bytes | str) -> bool:
        """Name a blob's bytes in the commit that is open; False for a repeat, which needs nothing."""
        if not self.state.is_new_blob(node.id, digest, size):
            return False
        self._kernel.writer.open_commit()
        self.state.put_blob(node.id, digest, size, held)
        return True

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def _inspect(self, node: Node) -> bytes:
        kernel = self._kernel
        revision, value = kernel.store.checkpoint(node.id)
        own, total, limits = self.state.usage.get(node.id), self.state.total(), kernel.config.limits
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
                "tree_calls": kernel.tree[schema.ROOT].calls,
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


def _stored(digest: str, size: int) -> bytes:
    return orjson.dumps({"sha256": digest, "bytes": size})


def require_running(node: Node) -> None:
    if not all(above.running for above in node.path):
        raise CallError("cancelled")


def only(operation: dict[str, Any], *fields: str) -> None:
    if operation.keys() != set(fields):
        raise CallError("invalid_request")
