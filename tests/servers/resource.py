"""`resource.py FOLDER`: an MCP server that owns its effects. It alone writes FOLDER/effects.ndjson, and syncs it.

`pay` is an effect each time it is asked, unless the caller gives an `idempotency_key`; `balance` is a read, and each
reading is a line of FOLDER/reads.ndjson. At a cut point (`before_effect`, `after_effect`, `before_answer`,
`before_reading`) for which FOLDER holds two FIFOs, POINT.reached and POINT.go, it says that it is there and goes on
when it is told to.
Standard library only, in one file: it also runs confined, from wherever a test has put it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOLS = [
    {
        "name": "pay",
        "description": "Move money, each time it is called.",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": False},
    },
    {
        "name": "balance",
        "description": "How much was paid to whom.",
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": True},
    },
]


class Resource:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def cut(self, point: str) -> None:
        reached = f"{self.folder}/{point}.reached"
        if not os.path.exists(reached):
            return
        with open(reached, "w") as gate:
            gate.write(str(os.getpid()))
        with open(f"{self.folder}/{point}.go") as gate:
            gate.read()

    def append(self, file: str, entry: dict[str, Any]) -> None:
        fd = os.open(f"{self.folder}/{file}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(fd, json.dumps(entry).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, file: str) -> list[dict[str, Any]]:
        if not os.path.exists(f"{self.folder}/{file}"):
            return []
        with open(f"{self.folder}/{file}") as lines:
            return [json.loads(line) for line in lines]

    def pay(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The effect, once for each request; for each idempotency key if one is given."""
        self.cut("before_effect")
        effects = self.read("effects.ndjson")
        key = arguments.get("idempotency_key")
        known = [effect for effect in effects if key is not None and effect["arguments"].get("idempotency_key") == key]
        number = known[0]["effect"] if known else len(effects) + 1
        if not known:
            self.append("effects.ndjson", {"effect": number, "arguments": arguments})
        self.cut("after_effect")
        return {"effect": number}

    def balance(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.append("reads.ndjson", {"arguments": arguments})
        self.cut("before_reading")
        to = arguments.get("to")
        paid = [effect["arguments"] for effect in self.read("effects.ndjson")]
        return {"to": to, "cents": sum(entry.get("cents", 0) for entry in paid if entry.get("to") == to)}

    def answer(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return {
                "protocolVersion": parameters["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "resource", "version": "1"},
            }
        if method == "tools/list":
            return {"tools": TOOLS}
        if method == "tools/call":
            value = {"pay": self.pay, "balance": self.balance}[parameters["name"]](parameters["arguments"])
            return {"content": [{"type": "text", "text": json.dumps(value)}], "structuredContent": value}
        return {}


def main() -> None:
    resource = Resource(sys.argv[1])
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = resource.answer(message["method"], message.get("params", {}))
        text = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode() + b"\n"
        if message["method"] == "tools/call":
            resource.cut("before_answer")
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
