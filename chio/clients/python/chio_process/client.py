"""The operations of a worker. Each sends one request, once."""

import base64
import binascii
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from chio_process.connection import Connection
from chio_process.errors import WorkerError

PROTOCOL = "chio.process.v1"
MAX_REQUEST_BYTES = 2 * 1024 * 1024  # including the newline

# The members a reply must have to be worth handing on, and their types. Further members pass through.
_RESULT_MEMBERS: dict[str, dict[str, type]] = {
    "inspect": {"process_id": str, "state": str, "checkpoint": dict},
    "invoke": {"request_id": str, "verdict": str, "terminal_state": dict, "receipt_json": str},
    "checkpoint": {"revision": str},
    "blob_put": {"sha256": str, "bytes": int},
    "blob_read": {"sha256": str, "bytes": int, "data_base64": str},
    "cancel": {},
    "note": {},
}


class ProcessClient:
    """A worker's connection to its Chio kernel.

    `socket_path` and `credential` come from the bootstrap's `connection`; `timeout` bounds each call, in seconds.
    Every method raises `WorkerError`, and none of them repeats a request: whether to make the same call again is
    the application's decision. Threads may share a client; a call that finds the kept connection taken opens another.
    """

    def __init__(self, socket_path: str | os.PathLike[str], credential: str, timeout: float = 60.0) -> None:
        self._socket_path = os.fspath(socket_path)
        self._credential = credential
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: Connection | None = None
        self._owner = os.getpid()

    def inspect(self) -> dict[str, Any]:
        """This process: process_id, state, limits, checkpoint {revision, value}, storage."""
        return self._call({"op": "inspect"})

    def invoke(
        self,
        key: str,
        server: str,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        known_outcome_only: bool = False,
    ) -> dict[str, Any]:
        """Calls a tool under an operation key that stays the same whenever this same work is tried again.

        Returns request_id, verdict (`allow` or `deny`), terminal_state, output, reason and receipt_json. A refusal
        is a result, not an exception. `known_outcome_only` asks the kernel never to dispatch this key a second time.
        """
        operation: dict[str, Any] = {
            "op": "invoke",
            "operation_key": key,
            "server_id": server,
            "tool_name": tool,
            "arguments": dict(arguments),
        }
        if known_outcome_only:
            operation["known_outcome_only"] = True
        return self._call(operation)

    def checkpoint(self, expected_revision: str, value: Any) -> dict[str, Any]:
        """Saves `value` if the checkpoint is still at `expected_revision` (a decimal string; `"0"` before the first).

        Returns {revision, value}. `checkpoint_conflict` means that somebody else saved: inspect, then decide.
        After `transport_error` or `truncated_response`, inspect as well: the value may have been saved.
        """
        return self._call({"op": "checkpoint", "expected_revision": expected_revision, "value": value})

    def put_blob(self, data: bytes) -> dict[str, Any]:
        """Stores at most 1 MiB, for ever and for this process alone. Returns {sha256, bytes}."""
        digest = hashlib.sha256(data).hexdigest()
        encoded = base64.b64encode(data).decode("ascii")
        stored = self._call({"op": "blob_put", "sha256": digest, "data_base64": encoded})
        if stored["sha256"] != digest or stored["bytes"] != len(data):
            _invalid("the stored blob is not the one that was sent")
        return stored

    def read_blob(self, sha256: str) -> bytes:
        """The bytes of a blob that this process stored, checked against `sha256`."""
        read = self._call({"op": "blob_read", "sha256": sha256})
        try:
            data = base64.b64decode(read["data_base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise WorkerError("invalid_response", "the blob is not base64") from error
        if read["bytes"] != len(data) or hashlib.sha256(data).hexdigest() != sha256:
            _invalid("the blob does not match its digest")
        return data

    def cancel(self) -> dict[str, Any]:
        """Cancels this process and all below it, for good. Returns {cancelled_processes}."""
        return self._call({"op": "cancel"})

    def note(self, event: str, age_ms: int | None = None) -> dict[str, Any]:
        """Counts an event of this worker's own recovery, for the operator's `status`; it is no evidence. Returns {}.

        `event` is `resumed`, `ambiguous_resume` or `schema_refused`; `age_ms` is how old what it resumed from was.
        """
        operation: dict[str, Any] = {"op": "note", "event": event}
        if age_ms is not None:
            operation["age_ms"] = age_ms
        return self._call(operation)

    def close(self) -> None:
        """Closes the kept connection. The client stays usable; its next call connects again."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            idle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, operation: dict[str, Any]) -> dict[str, Any]:
        frame = _encode({"protocol": PROTOCOL, "credential": self._credential, "operation": operation})
        deadline = time.monotonic() + self._timeout
        connection = self._take_idle() or Connection(self._socket_path, deadline)
        try:
            result = _decode(connection.exchange(frame, deadline), _RESULT_MEMBERS[operation["op"]])
        except BaseException:
            # Also after a refusal: the kernel closes some connections behind one, and the next call must not race it.
            connection.close()
            raise
        self._keep(connection)
        return result

    def _take_idle(self) -> Connection | None:
        with self._lock:
            idle, self._idle = self._idle, None
            forked = self._owner != os.getpid()
            self._owner = os.getpid()
        if idle is None:
            return None
        # After a fork the parent still holds the other copy, and two writers on one stream would mix their frames.
        if forked or not idle.is_fresh():
            idle.close()
            return None
        return idle

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            if self._idle is None:
                self._idle = connection
                return
        connection.close()


def _encode(request: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        frame = text.encode("utf-8") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        # Raised without its cause: the encoder's message can quote the request, and that holds the credential.
        raise WorkerError("invalid_request", f"an argument is not JSON ({type(error).__name__})") from None
    if len(frame) > MAX_REQUEST_BYTES:
        raise WorkerError("request_too_large", f"{len(frame)} bytes, at most {MAX_REQUEST_BYTES} can be sent")
    return frame


def _decode(line: bytes, members: dict[str, type]) -> dict[str, Any]:
    try:
        reply = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WorkerError("invalid_response", f"the reply is not JSON of the protocol: {error}") from error
    if not isinstance(reply, dict) or reply.get("protocol") != PROTOCOL:
        _invalid(f"the reply is not one of {PROTOCOL}")
    match reply:
        case {"ok": False, "error": {"code": str(code)}} if len(reply) == 3 and code:
            raise WorkerError(code, "refused by the kernel")
        case {"ok": True, "result": dict(result)} if len(reply) == 3:
            for name, kind in members.items():
                if type(result.get(name)) is not kind:
                    _invalid(f"the result has no {name} of type {kind.__name__}")
            return result
    _invalid("the reply is neither a result nor an error")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _invalid(why: str) -> NoReturn:
    raise WorkerError("invalid_response", why)
