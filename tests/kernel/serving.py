"""A real Chio kernel over a real state, with workers that are sockets of this process.

Only confinement is left out: `Serving` is the host's side of the control socket, and a `Worker` is one reserved attempt
with its own listening socket and credential, spoken to line by line.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chio.host import Host, initialize
from chio.kernel.vault import vault_of
from verify.keys import Pins, PublicKey
from verify.log import Checkpoint, leaf_hash, receipt_leaf, root_of, verify_checkpoint
from verify.receipts import Receipt, verify_receipt

PROTOCOL = "chio.process.v1"
PATIENCE_S = 20
MAILBOX_VERBS = ("send", "receive", "ack")


# --- documents -------------------------------------------------------------------------------------------------------


def grant(tool: str = "*", **changes: Any) -> dict[str, Any]:
    """One entry of a policy's tools."""
    return {"server": "chio-ipc", "tool": tool, "operations": ["invoke", "delegate"], "ttl": 3600, **changes}


def policy(*tools: dict[str, Any], **kernel: Any) -> dict[str, Any]:
    """A policy; without tools it grants root every mailbox. JSON is YAML."""
    return {
        "kernel": {
            "max_capability_ttl": 3600, "delegation_depth_limit": 8, "durable_admission_mode": "all", **kernel,
        },
        "capabilities": {"default": {"tools": list(tools) or [grant()]}},
    }  # fmt: skip


def child(name: str, *tools: str, parent: str = "root", share: int = 1000) -> dict[str, Any]:
    routes = [{"server_id": "chio-ipc", "tool_name": tool} for tool in tools]
    return {"id": name, "parent": parent, "tools": routes, "budget_share_bps": share}


def mailbox(name: str, **limits: int) -> dict[str, Any]:
    return {"id": name, "limits": limits}


def all_of(*mailboxes: str) -> list[str]:
    """The three tools of each mailbox."""
    return [f"{verb}_{name}" for name in mailboxes for verb in MAILBOX_VERBS]


def config(
    *children: dict[str, Any], mailboxes: Iterable[dict[str, Any]] = (), max_calls: int = 10_000, **limits: Any
) -> dict[str, Any]:
    """A host config; without children, two workers that share the mailbox `jobs`."""
    return {
        "schema": "chio.process.host.v1",
        "policy": "policy.yaml",
        "limits": {"max_processes": 64, "max_depth": 4, "max_calls": max_calls, **limits},
        "mailboxes": list(mailboxes) or [mailbox("jobs")],
        "children": list(children) or [child("a", *all_of("jobs")), child("b", *all_of("jobs"))],
    }


# --- a worker --------------------------------------------------------------------------------------------------------


class Line:
    """One connection: bytes out, lines in."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(path)
        self._received = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> bytes:
        """The next line with its newline; what is left when the kernel has closed, so b"" at the end."""
        while (end := self._received.find(b"\n")) < 0:
            chunk = self.socket.recv(1 << 20)
            if not chunk:
                end = len(self._received) - 1
                break
            self._received += chunk
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def code(self) -> str:
        """The next line is an error of the protocol: its code."""
        return code_of(self.read())

    def closed(self) -> bool:
        return self.read() == b""

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def code_of(line: bytes) -> str:
    reply = json.loads(line)
    assert reply == {"protocol": PROTOCOL, "ok": False, "error": {"code": reply["error"]["code"]}}, line
    return str(reply["error"]["code"])


def result_of(line: bytes) -> dict[str, Any]:
    reply = json.loads(line)
    assert reply == {"protocol": PROTOCOL, "ok": True, "result": reply.get("result")}, line
    return dict(reply["result"])


@dataclass(slots=True)
class Worker:
    """One live attempt, from the worker's side."""

    process: str
    number: int
    path: str
    connection: dict[str, Any]
    listening: socket.socket

    @property
    def credential(self) -> str:
        return str(self.connection["credential"])

    def connect(self) -> Line:
        return Line(self.path)

    def frame(self, op: str, **members: Any) -> bytes:
        request = {"protocol": PROTOCOL, "credential": self.credential, "operation": {"op": op, **members}}
        return json.dumps(request).encode() + b"\n"

    def call(self, key: str, tool: str, arguments: dict[str, Any], server: str = "chio-ipc", **more: Any) -> bytes:
        """The frame of an `invoke`."""
        named = {"operation_key": key, "server_id": server, "tool_name": tool, "arguments": arguments}
        return self.frame("invoke", **named, **more)

    def line(self, frame: bytes) -> bytes:
        """The whole answer to one frame on a connection of its own."""
        with self.connect() as line:
            line.send(frame)
            return line.read()

    def ask(self, op: str, **members: Any) -> dict[str, Any]:
        return result_of(self.line(self.frame(op, **members)))

    def refused(self, op: str, **members: Any) -> str:
        return code_of(self.line(self.frame(op, **members)))

    def invoke(self, key: str, tool: str, arguments: dict[str, Any], server: str = "chio-ipc", **more: Any) -> Any:
        return result_of(self.line(self.call(key, tool, arguments, server, **more)))

    def tool(self, key: str, tool: str, **arguments: Any) -> dict[str, Any]:
        """The value that an allowed call returned."""
        result = self.invoke(key, tool, arguments)
        assert result["verdict"] == "allow", result
        assert result["output"]["kind"] == "value", result
        return dict(result["output"]["value"])

    def send(self, key: str, mailbox: str, message_key: str, payload: Any) -> dict[str, Any]:
        return self.tool(key, f"send_{mailbox}", message_key=message_key, payload=payload)

    def receive(self, key: str, mailbox: str, after: str, limit: int = 16) -> dict[str, Any]:
        return self.tool(key, f"receive_{mailbox}", after_sequence=after, limit=limit)


# --- a state and its kernel ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Log:
    """Everything that was checked of a log: its leaves in order, its receipts, its checkpoints."""

    leaves: list[tuple[str, dict[str, Any]]]
    receipts: list[Receipt]
    checkpoints: list[Checkpoint]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [body for found, body in self.leaves if found == kind]


@dataclass(frozen=True, slots=True)
class State:
    """A state directory, the two documents it was made from, and the key file of an encrypted one."""

    folder: Path
    key_file: Path | None = None

    @property
    def path(self) -> Path:
        return self.folder / "state"

    @classmethod
    def make(
        cls,
        folder: Path,
        host: dict[str, Any] | None = None,
        rules: dict[str, Any] | None = None,
        key_file: Path | None = None,
    ) -> Self:
        folder.mkdir(exist_ok=True)
        (folder / "policy.yaml").write_text(json.dumps(rules or policy()))
        (folder / "host.json").write_text(json.dumps(host or config()))
        initialize(folder / "host.json", folder / "state", allow_volatile=False, key_file=key_file)
        return cls(folder, key_file)

    def serve(self) -> Serving:
        return Serving(self)

    @property
    def pins(self) -> Pins:
        return Pins.from_file(str(self.path / "pins.json"))

    @property
    def kernel_key(self) -> PublicKey:
        return self.pins.kernel_key

    def receipt_lines(self) -> list[bytes]:
        """`receipts.ndjson`, whose every line is whole."""
        text = (self.path / "receipts.ndjson").read_bytes()
        assert text == b"" or text.endswith(b"\n")
        return text.split(b"\n")[:-1]

    @contextmanager
    def copy(self) -> Iterator[sqlite3.Connection]:
        """The rows as they are now, from a copy: whoever reads must not take part."""
        with tempfile.TemporaryDirectory(dir=self.folder) as private:
            for name in ("authority.db", "authority.db-wal"):
                if (self.path / name).exists():
                    shutil.copyfile(self.path / name, Path(private) / name)
            with closing(sqlite3.connect(Path(private) / "authority.db")) as database:
                yield database

    def shown(self, receipt: bytes) -> bytes:
        """The line of `receipts.ndjson`: the receipt, in an encrypted state without what it discloses."""
        if self.key_file is None:
            return receipt
        body, _, _ = receipt.partition(b',"disclosed":')
        _, _, signature = receipt.rpartition(b',"signature":')
        return body + b',"disclosed":{},"signature":' + signature

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.copy() as database:
            return database.execute(statement, values).fetchall()

    def disclosed(self, database: sqlite3.Connection) -> Callable[[str, int, bytes | None], bytes]:
        """What opens what a receipt of a process discloses; nothing is left of what was deleted."""
        key = None
        if self.key_file is not None:
            key = bytes.fromhex(self.key_file.read_text())
        wrapped = dict(database.execute("SELECT process, wrapped FROM data_key WHERE wrapped IS NOT NULL"))
        ((runtime_id,),) = database.execute("SELECT runtime_id FROM host").fetchall()
        vault = vault_of(key, runtime_id, wrapped, str(self.path), str(self.key_file))
        return lambda process, index, sealed: vault.open(process, f"disclosed/{index}", sealed) if sealed else b"{}"

    def log(self) -> Log:
        """The log, recomputed by the verifier's own functions: each leaf, each receipt, each checkpoint's root."""
        pins = self.pins
        with self.copy() as database:
            opened = self.disclosed(database)
            rows = database.execute(
                "SELECT idx, type, body, signature, disclosed, hash FROM leaf ORDER BY idx"
            ).fetchall()
            notes = database.execute("SELECT size, note FROM log_checkpoint ORDER BY size").fetchall()
        assert [row[0] for row in rows] == list(range(len(rows)))
        hashes, receipts = [], []
        for index, kind, body, signature, disclosed, hashed in rows:
            if kind == "receipt":
                told = opened(json.loads(body)["call"]["process_id"], index, disclosed)
                text = f'{{"body":{body},"disclosed":{told.decode()},"signature":"{signature}"}}'
                receipt = verify_receipt(text.encode(), pins.kernel_key, pins.runtime_id)
                assert receipt.body["log_index"] == index
                receipts.append(receipt)
                leaf = receipt_leaf(receipt)
            else:
                leaf = b'{"body":%b,"signature":%b,"type":"%b"}' % (
                    body.encode(), json.dumps(signature).encode(), kind.encode(),
                )  # fmt: skip
                if signature is not None:
                    pins.kernel_key.verify_record(kind, body.encode(), signature)
            assert leaf_hash(leaf) == hashed
            hashes.append(hashed)
        checkpoints = [
            verify_checkpoint(note.encode(), pins.log_key, f"chio.invalid/{pins.runtime_id}") for _, note in notes
        ]
        for checkpoint in checkpoints:
            assert root_of(hashes[: checkpoint.size]) == (checkpoint.size, checkpoint.root)
        return Log([(kind, json.loads(body)) for _, kind, body, *_ in rows], receipts, checkpoints)


class Serving:
    """A live kernel on a state, until it is closed or killed."""

    def __init__(self, state: State, checkpointed: Callable[[str], None] = lambda _note: None) -> None:
        self.state = state
        self.host = Host(state.path, key_file=state.key_file, checkpointed=checkpointed)
        self._sockets = tempfile.TemporaryDirectory(prefix="chio-test-")
        self._listening: list[socket.socket] = []

    def worker(self, process: str) -> Worker:
        """A new attempt of a process, reserved by the kernel and served on a socket of its own."""
        kernel = self.host.kernel
        reserved = kernel.call("reserve", process=process, confined=False)
        number, connection = reserved["number"], reserved["connection"]
        path = f"{self._sockets.name}/{process}-{number}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen(128)
        self._listening.append(listening)
        kernel.call(
            "listen", (listening.fileno(),), process=process, number=number,
            credential=connection["credential"], launch_id=None, uid=None,
        )  # fmt: skip
        return Worker(process, number, path, connection, listening)

    def end(self, worker: Worker) -> None:
        """The attempt has ended, as far as the host knows."""
        self.host.kernel.call(
            "ended", process=worker.process, number=worker.number, outcome="exit_0", record=None, exports=None, logs={}
        )

    def kill(self) -> None:
        """SIGKILL to the kernel, and the host's end with it."""
        os.kill(self.host.kernel.pid, 9)
        self.close()

    def close(self) -> None:
        for listening in self._listening:
            listening.close()
        self.host.close()
        self._sockets.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
