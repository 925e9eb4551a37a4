"""`telling_server.py FOLDER`: an MCP server that is told a text and writes it backwards to stderr.

`tell` answers it in capitals. `hang` says at FOLDER/hang.reached, a FIFO, that it was asked,
if that is there, and never answers. Standard library only, in one file: it runs confined.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in ("tell", "hang")]


def say(number: Any, result: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}), flush=True)


def main() -> None:
    gate = os.path.join(sys.argv[1], "hang.reached")
    for line in sys.stdin:
        message = json.loads(line)
        match message.get("method"):
            case "initialize":
                version = message["params"]["protocolVersion"]
                info = {"name": "telling", "version": "1"}
                say(message["id"], {"protocolVersion": version, "capabilities": {}, "serverInfo": info})
            case "tools/list":
                say(message["id"], {"tools": TOOLS})
            case "tools/call":
                text = message["params"]["arguments"]["text"]
                print(text[::-1], file=sys.stderr, flush=True)
                if message["params"]["name"] == "tell":
                    say(message["id"], {"content": [], "structuredContent": {"answer": text.upper()}})
                elif os.path.exists(gate):
                    with open(gate, "w") as reached:
                        reached.write("here")


if __name__ == "__main__":
    main()
