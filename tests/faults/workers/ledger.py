"""`ledger.py FOLDER`: an MCP server that owns its effects and writes each of them down, synced, before it answers.

`pay` is an effect, a line of FOLDER/effects.ndjson, each time it is asked; `look` reads; `vanish` is an effect after
which the server ends without an answer. Standard library only: it runs confined.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOLS = [
    {
        "name": name,
        "description": name,
        "inputSchema": {"type": "object"},
        "annotations": {"readOnlyHint": name == "look"},
    }
    for name in ("pay", "look", "vanish")
]


def effect(folder: str, arguments: dict[str, Any]) -> None:
    fd = os.open(f"{folder}/effects.ndjson", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.write(fd, json.dumps(arguments).encode() + b"\n")
        os.fsync(fd)
        os.fsync(above)  # the first effect makes the file: its name has to last, too
    finally:
        os.close(fd)
        os.close(above)


def answer(folder: str, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "l", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        if parameters["name"] != "look":
            effect(folder, parameters["arguments"])
        if parameters["name"] == "vanish":
            os._exit(0)
        return {"content": [], "structuredContent": {"done": parameters["name"]}}
    return {}


def main() -> None:
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = answer(sys.argv[1], message["method"], message.get("params", {}))
        sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
