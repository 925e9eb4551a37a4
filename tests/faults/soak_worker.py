"""`soak_worker.py CONNECTION RECORD`: one worker that never stops asking, and writes down every answer it has read.

It is killed at any moment and started again: it goes on after the last line of its record, with the key that may have
been on its way. Standard library only.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

_AGAIN_S = 0.05
_PATIENCE_S = 30.0


class Gone(Exception):
    """The host is not there, or no longer."""


class Worker:
    def __init__(self, connection: dict[str, Any], record: Path) -> None:
        self.connection = connection
        self.name: str = connection["process_id"]
        self.record = open(record, "a+b", buffering=0)  # noqa: SIM115  open as long as the worker lives
        self.record.seek(0)
        text = self.record.read()
        self.record.truncate(text.rfind(b"\n") + 1)  # torn by a kill
        self.lines = [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
        self.socket: socket.socket | None = None
        self.draw = random.Random()

    def exchange(self, operation: dict[str, Any]) -> bytes:
        """One answer line. Raises `Gone`."""
        frame = {"protocol": "chio.process.v1", "credential": self.connection["credential"], "operation": operation}
        try:
            if self.socket is None:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.settimeout(_PATIENCE_S)
                self.socket.connect(self.connection["socket_path"])
            self.socket.sendall(json.dumps(frame).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                chunk = self.socket.recv(1 << 20)
                if not chunk:
                    raise Gone
                answer += chunk
            return answer
        except (OSError, Gone) as error:
            if self.socket is not None:
                self.socket.close()
            self.socket = None
            raise Gone from error

    def ask(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Until it is answered with more than that it cannot be now; written down before anything else is done."""
        while True:
            try:
                raw = self.exchange(operation)
            except Gone:
                time.sleep(_AGAIN_S)  # for a host that is being started again nothing can be waited on
                continue
            answer: dict[str, Any] = json.loads(raw)
            if not answer["ok"] and answer["error"]["code"] == "runtime_error":
                time.sleep(_AGAIN_S)
                continue
            self.record.write(json.dumps({"request": operation, "raw": raw.decode()}).encode() + b"\n")
            self.lines.append({"request": operation, "raw": raw.decode()})
            return answer

    def call(self, key: str, server: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        named = {"operation_key": key, "server_id": server, "tool_name": tool, "arguments": arguments}
        return self.ask({"op": "invoke", **named})

    def run(self) -> None:
        calls = [line["request"] for line in self.lines if line["request"]["op"] == "invoke"]
        turn = 1 + max((int(request["operation_key"].rpartition("-")[2]) for request in calls), default=-1)
        while True:
            self.turn(turn)
            turn += 1

    def turn(self, n: int) -> None:
        owner = {"process": self.name, "key": f"pay-{n}"}
        sent = self.call(f"send-{n}", "chio-ipc", f"send_{self.name}", {"message_key": str(n), "payload": {"n": n}})
        sequence = sent["result"]["output"]["value"]["sequence"]
        self.call(f"ack-{n}", "chio-ipc", f"ack_{self.name}", {"through_sequence": sequence})
        self.call(f"pay-{n}", "ledger", "pay", owner)
        self.call(f"look-{n}", "ledger", "look", {"key": f"look-{n}"})
        now = self.ask({"op": "inspect"})["result"]["checkpoint"]["revision"]
        self.ask({"op": "checkpoint", "expected_revision": now, "value": {"turn": n}})
        old = self.draw.choice(self.lines)["request"]
        if old["op"] == "invoke":
            self.ask(old)


def main() -> None:
    connection, record = sys.argv[1:]
    Worker(json.loads(Path(connection).read_text()), Path(record)).run()


if __name__ == "__main__":
    main()
