"""The other end of a client's socket: it records what arrives and plays what a test tells it to."""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROTOCOL = "chio.process.v1"
CREDENTIAL = "c0ffee" * 10 + "abcd"

RESULTS: dict[str, dict[str, Any]] = {
    "inspect": {"process_id": "producer", "state": "running", "checkpoint": {"revision": "0", "value": None}},
    "invoke": {
        "request_id": "process:" + "0" * 64,
        "verdict": "allow",
        "output": {"kind": "value", "value": {"status": "sent", "sequence": "1"}},
        "reason": None,
        "terminal_state": {"state": "completed"},
        "receipt_json": '{"body":{"z":1,"a":"\\u00e9 é \\" \\\\"},"signature":"00"}',
        "execution_nonce_json": None,
    },
    "checkpoint": {"revision": "1", "value": {"n": 1}},
    "cancel": {"cancelled_processes": 1},
    "note": {},
}


class Stream:
    """One accepted connection, as a script sees it."""

    def __init__(self, connection: socket.socket, frames: list[bytes]) -> None:
        self._connection = connection
        self._frames = frames
        self._buffer = b""

    def read(self) -> dict[str, Any] | None:
        """The next request; None when the client has closed."""
        while b"\n" not in self._buffer:
            chunk = self._connection.recv(1 << 20)
            if not chunk:
                return None
            self._buffer += chunk
        frame, _, self._buffer = self._buffer.partition(b"\n")
        self._frames.append(frame + b"\n")
        request: dict[str, Any] = json.loads(frame)
        return request

    def send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has had enough, which is what some tests are about

    def wait_for_close(self) -> None:
        try:
            while self._connection.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass


Script = Callable[[Stream], None]


class Peer:
    """Plays `scripts` on the connections that arrive, one each; `frames` holds every whole request, `closed` is a
    semaphore that is released when a script has ended and its connection is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: list[bytes] = []
        self.connections = 0
        self.closed = threading.Semaphore(0)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._scripts: list[Script] = []
        self._threads: list[threading.Thread] = []

    def play(self, *scripts: Script) -> None:
        self._scripts.extend(scripts)
        self._listener.listen(16)
        thread = threading.Thread(target=self._accept, args=(len(scripts),), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self, count: int) -> None:
        for _ in range(count):
            connection, _ = self._listener.accept()
            script = self._scripts[self.connections]
            self.connections += 1
            thread = threading.Thread(target=self._run, args=(script, connection), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self, script: Script, connection: socket.socket) -> None:
        with connection:
            script(Stream(connection, self.frames))
        self.closed.release()

    def close(self) -> None:
        self._listener.close()


def ok(result: dict[str, Any]) -> bytes:
    reply = {"protocol": PROTOCOL, "ok": True, "result": result}
    return json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def error(code: str) -> bytes:
    return json.dumps({"protocol": PROTOCOL, "ok": False, "error": {"code": code}}).encode() + b"\n"


def answering(*replies: bytes) -> Script:
    """Answers one request with each reply, then waits for the client to close."""

    def script(stream: Stream) -> None:
        for reply in replies:
            if stream.read() is None:
                return
            stream.send(reply)
        stream.wait_for_close()

    return script


def closing_after(*replies: bytes) -> Script:
    """Answers one request with each reply, then closes."""

    def script(stream: Stream) -> None:
        for reply in replies:
            stream.read()
            stream.send(reply)

    return script


def kernel_like(stream: Stream) -> None:
    """Answers every operation with its usual result until the client closes."""
    while (request := stream.read()) is not None:
        stream.send(ok(RESULTS[request["operation"]["op"]]))
