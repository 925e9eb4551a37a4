"""Texts that a search must find in a plain state and must not find in an encrypted one, and where they are planted."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.kernel.confined import PYTHON
from tests.kernel.external import child, mailbox_routes, tool
from tests.kernel.serving import grant, mailbox, policy

# Does each operation of its input and prints what it is told to. Standard library only: it runs confined.
WORKER = """
import json, socket, sys
bootstrap = json.load(sys.stdin)
connection, given = bootstrap["connection"], bootstrap["input"]
print(given["stdout"], flush=True)
print(given["stderr"], file=sys.stderr, flush=True)
for operation in given["operations"]:
    if operation.get("operation_key") == "told":  # anew in each attempt
        operation["operation_key"] += " %d" % bootstrap["attempt"]
    request = {"protocol": connection["protocol"], "credential": connection["credential"], "operation": operation}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(connection["socket_path"])
        line.sendall(json.dumps(request).encode() + b"\\n")
        line.makefile("rb").readline()
"""
LARGE = 200_000


@dataclass(slots=True)
class Planted:
    """What was planted, by where; `digested` are whole values of which no plain digest may stand anywhere."""

    texts: dict[str, str] = field(default_factory=dict)
    digested: dict[str, bytes] = field(default_factory=dict)

    def text(self, where: str) -> str:
        """A new text, unlike any other, that JSON may write in more than one way."""
        return self.texts.setdefault(where, f"planted {where} é {secrets.token_hex(12)}")

    def told(self) -> dict[str, Any]:
        """Arguments, and what the server makes of them in its answer and on stderr."""
        text = self.text("arguments")
        self.texts["output"], self.texts["stderr of the server"] = text.upper(), text[::-1]
        return {"text": text}

    def whole(self, where: str, value: Any) -> Any:
        """A value that is stored as its canonical text."""
        self.digested[where] = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
        return value

    def blob(self, where: str, size: int) -> dict[str, Any]:
        data = (self.text(where).encode() + b"\n") * (1 + size // 64)
        self.digested[where] = data
        return {"op": "blob_put", "sha256": sha256(data).hexdigest(), "data_base64": base64.b64encode(data).decode()}

    def invoke(self, key: str, server: str, tool_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.whole(f"arguments of {key}", arguments)
        return {
            "op": "invoke", "operation_key": key, "server_id": server, "tool_name": tool_name, "arguments": arguments,
        }  # fmt: skip

    def operations(self) -> list[dict[str, Any]]:
        """A worker's: one for each place where its data is kept, and at last a call that is never answered."""
        payload = self.whole("payload", {"text": self.text("payload")})
        return [
            {"op": "checkpoint", "expected_revision": "0", "value": {"text": self.text("overwritten checkpoint")}},
            {"op": "checkpoint", "expected_revision": "1",
             "value": self.whole("checkpoint", {"text": self.text("checkpoint")})},
            self.blob("small blob", 100),
            self.blob("large blob", LARGE),
            self.invoke("told", "telling", "tell", self.told()),
            self.invoke("out of scope", "telling", "unknown", {"text": self.text("arguments out of scope")}),
            self.invoke("constrained", "telling", "tell", {"text": 1, "n": self.text("constrained arguments")}),
            self.invoke("not sent", "chio-ipc", "send_jobs", {"text": self.text("arguments of no message")}),
            self.invoke("sent", "chio-ipc", "send_jobs",
                        {"message_key": self.text("message key"), "payload": payload}),
            self.invoke("in flight", "telling", "hang", {"text": self.text("arguments in flight")}),
        ]  # fmt: skip


def forms(text: str) -> Iterator[bytes]:
    """The ways in which a text may stand in a file."""
    data = text.encode()
    yield data
    yield json.dumps(text)[1:-1].encode()
    yield text.encode("utf-16-le")
    yield data.hex().encode()
    yield data.hex().upper().encode()
    for shift in range(3):  # base64 in the middle of something longer: without the characters that neighbours share
        encoded = base64.b64encode(b"\0" * shift + data)
        inner = encoded[4 if shift else 0 : len(encoded) - 4]
        yield inner
        yield inner.translate(bytes.maketrans(b"+/", b"-_"))
    yield from digests(data)
    yield from digests(json.dumps(text, ensure_ascii=False).encode())


def digests(data: bytes) -> Iterator[bytes]:
    yield sha256(data).digest()
    yield sha256(data).hexdigest().encode()


def found(state: Path, planted: Planted) -> set[str]:
    """Where what was planted shows in any byte of any file, or any name, below a folder."""
    shown = set()
    files = [path for path in state.rglob("*") if path.is_file()]
    held = [str(path.relative_to(state)).encode() for path in files] + [path.read_bytes() for path in files]
    for data in held:
        shown.update(where for where, text in planted.texts.items() if any(form in data for form in forms(text)))
        shown.update(
            f"digest of {where}" for where, whole in planted.digested.items() if any(d in data for d in digests(whole))
        )
    return shown


@dataclass(frozen=True, slots=True)
class Ground:
    """A folder with a host, a plan and a tool server; the state is beside it."""

    folder: Path
    planted: Planted

    @property
    def state(self) -> Path:
        return self.folder.parent / "state"

    @classmethod
    def make(cls, folder: Path) -> Ground:
        ground = cls(folder, Planted())
        (folder / "gates").mkdir(parents=True)
        os.mkfifo(folder / "gates" / "hang.reached")
        (folder / "gates" / "hang.reached").chmod(0o666)
        (folder / "worker.py").write_text(WORKER)
        shutil.copyfile(Path(__file__).with_name("telling_server.py"), folder / "telling_server.py")
        for name, document in ground.documents().items():
            (folder / name).write_text(json.dumps(document))
        return ground

    def documents(self) -> dict[str, Any]:
        constraint = {"properties": {"text": {"type": "string"}}}
        given = {
            "stdout": self.planted.text("stdout"), "stderr": self.planted.text("stderr"),
            "unused": self.planted.text("input"), "operations": self.planted.operations(),
        }  # fmt: skip
        gates = str(self.folder / "gates")
        return {
            "policy.yaml": policy(tool("telling", "tell", constraints=constraint), tool("telling", "hang"), grant()),
            "host.json": {
                "schema": "chio.process.host.v1",
                "policy": "policy.yaml",
                "limits": {"max_processes": 3, "max_depth": 1, "max_calls": 100},
                "mailboxes": [mailbox("jobs")],
                "servers": [
                    {
                        "id": "telling",
                        "command": [PYTHON, "-I", "telling_server.py", gates],
                        "confinement": {"write": [gates]},
                    }
                ],
                "children": [
                    child("w", "telling/tell", "telling/hang", *mailbox_routes("jobs")),
                    child("r", *mailbox_routes("jobs")),
                ],
            },
            "plan.json": {
                "schema": "chio.process.run.v2",
                "max_parallel": 1,
                "workers": [
                    {"process": "w", "command": [PYTHON, "-I", "worker.py"], "input": given, "timeout_seconds": 60}
                ],
            },
        }
