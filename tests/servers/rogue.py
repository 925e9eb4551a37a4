"""`rogue.py FOLDER`: an MCP server that does wrong what a server can do wrong, as the caller asks it to.

`how` in the arguments of `do` (an effect) and `look` (a read) names the way; each call it takes is a line of
FOLDER/seen.ndjson. FOLDER/next_start, when there is one, names how it goes wrong before any call.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {"name": "do", "inputSchema": {"type": "object"}},
    {"name": "look", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
]
GARBAGE = [
    b"\xff\xfe\x00 no text", b"{", b"[1,2,3]", b"null", b"17", b'"text"', b"[" * 100_000, b"", b"   ",
    b'{"jsonrpc":"2.0","id":true,"result":{}}', b'{"jsonrpc":"2.0","id":1e300,"result":{}}', b'{"method":7}',
    b'{"jsonrpc":"2.0","id":null,"result":{}}', b'{"jsonrpc":"2.0","id":99999,"result":{"n":"unasked"}}', b"{}",
]  # fmt: skip


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(message: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def value(members: dict[str, Any]) -> dict[str, Any]:
    return {"content": [], "structuredContent": members}


def raw(number: int, result: bytes) -> None:
    write(b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (number, result))


class Rogue:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.start = ""
        if os.path.exists(f"{folder}/next_start"):
            with open(f"{folder}/next_start") as named:
                self.start = named.read()
        self.messages = self.read()
        self.calls = 0

    def read(self) -> Iterator[dict[str, Any]]:
        for line in sys.stdin.buffer:
            yield json.loads(line)

    def call(self) -> dict[str, Any]:
        """The next call that comes."""
        return next(message for message in self.messages if message.get("method") == "tools/call")

    def main(self) -> None:
        if self.start == "exit":
            sys.exit("this server does not want to start")
        for message in self.messages:
            number = message.get("id")
            if number is None:
                continue
            match message["method"]:
                case "initialize":
                    self.initialize(message)
                case "tools/list":
                    self.list(number, message.get("params", {}))
                case "tools/call":
                    self.take(message)
                case _:
                    say({"id": number, "result": {}})

    def initialize(self, message: dict[str, Any]) -> None:
        if self.start == "no_version":
            say({"id": message["id"], "result": {"capabilities": {}}})
        elif self.start == "refuses":
            say({"id": message["id"], "error": {"code": -32000, "message": "not for you"}})
        elif self.start == "list_as_answer":
            say({"id": message["id"], "result": [1]})
        else:
            version = message["params"]["protocolVersion"]
            info = {"name": "rogue", "version": "1"}
            if self.start == "garbage":
                write(b"".join(line + b"\n" for line in GARBAGE))
            say({"id": message["id"], "result": {"protocolVersion": version, "capabilities": {}, "serverInfo": info}})

    def list(self, number: int, parameters: dict[str, Any]) -> None:
        odd: dict[str, Any] = {
            "other_tools": {"tools": [*TOOLS, {"name": "more", "inputSchema": {"type": "object"}}]},
            "other_hint": {"tools": [{**TOOLS[0], "annotations": {"readOnlyHint": True}}, TOOLS[1]]},
            "no_list": {"tools": 7},
            "list_of_text": {"tools": ["do", "look"]},
            "annotations_are_text": {"tools": [{**TOOLS[0], "annotations": "readOnlyHint"}, TOOLS[1]]},
            "name_twice": {"tools": [TOOLS[0], TOOLS[0]]},
            "large_integer": {"tools": [{**TOOLS[0], "maximum": 2**53 + 1}, TOOLS[1]]},
            "endless": {"tools": [], "nextCursor": str(parameters.get("cursor"))[-8:] + "x"},
            "odd_cursor": {"tools": TOOLS, "nextCursor": 7},
        }
        if self.start == "pages":
            last = parameters.get("cursor") == "second"
            say(
                {"id": number, "result": {"tools": TOOLS[1:]} if last else {"tools": TOOLS[:1], "nextCursor": "second"}}
            )
        else:
            say({"id": number, "result": odd.get(self.start, {"tools": TOOLS})})
        if self.start == "exit_after_list":
            sys.exit(3)

    # --- calls ---------------------------------------------------------------------------------------------------

    def take(self, message: dict[str, Any]) -> None:
        arguments = message["params"]["arguments"]
        self.calls += 1
        with open(f"{self.folder}/seen.ndjson", "a") as seen:
            seen.write(json.dumps({"tool": message["params"]["name"], "arguments": arguments}) + "\n")
        how = arguments.get("how", "ok")
        getattr(self, f"how_{how}")(message["id"], arguments)

    def how_ok(self, number: int, arguments: dict[str, Any]) -> None:
        say({"id": number, "result": value({"got": arguments.get("n")})})

    def how_garbage(self, number: int, _: dict[str, Any]) -> None:
        write(b"".join(line + b"\n" for line in GARBAGE))
        say({"id": number, "result": value({"after": "garbage"})})

    def how_garbage_without_end(self, _number: int, _: dict[str, Any]) -> None:
        write(b"no message\n" * 2000)

    def how_garbage_and_exit(self, _number: int, _: dict[str, Any]) -> None:
        write(b"".join(line + b"\n" for line in GARBAGE) + b'{"jsonrpc":"2.0","id":')
        sys.exit(1)

    def how_twice(self, number: int, _: dict[str, Any]) -> None:
        for n in (1, 2):
            say({"id": number, "result": value({"answer": n})})

    def how_swapped(self, number: int, _: dict[str, Any]) -> None:
        """Keeps this call until the next one has come, and answers that first."""
        other = self.call()
        for taken, n in ((other["id"], 2), (number, 1)):
            say({"id": taken, "result": value({"answer": n})})

    def how_huge(self, number: int, _: dict[str, Any]) -> None:
        write(b'{"jsonrpc":"2.0","id":%d,"result":{"text":"' % number)
        for _n in range(100):
            write(b"x" * (1 << 20))
        write(b'"}}\n')

    def how_large(self, number: int, _: dict[str, Any]) -> None:
        raw(number, b'{"text":"' + b"x" * (3 << 20) + b'"}')

    def how_never(self, _number: int, _: dict[str, Any]) -> None:
        """Takes the call and says nothing."""

    def how_late(self, number: int, _: dict[str, Any]) -> None:
        """Answers when it has been told that nobody waits any more."""
        for message in self.messages:
            if message.get("method") == "notifications/cancelled" and message["params"]["requestId"] == number:
                say({"id": number, "result": value({"late": True})})
                return
            if message.get("method") == "tools/call":
                self.take(message)

    def how_late_when_told(self, number: int, _: dict[str, Any]) -> None:
        """Answers when the test tells it to."""
        with open(f"{self.folder}/late.go") as gate:
            gate.read()
        say({"id": number, "result": value({"late": True})})

    def how_text_id(self, number: int, _: dict[str, Any]) -> None:
        say({"id": str(number), "result": value({})})

    def how_both(self, number: int, _: dict[str, Any]) -> None:
        say({"id": number, "result": value({}), "error": {"code": 1, "message": "both"}})

    def how_neither(self, number: int, _: dict[str, Any]) -> None:
        say({"id": number})

    def how_rpc_error(self, number: int, _: dict[str, Any]) -> None:
        say({"id": number, "error": {"code": -32602, "message": "no such account"}})

    def how_is_error(self, number: int, _: dict[str, Any]) -> None:
        say({"id": number, "result": {"content": [{"type": "text", "text": "declined"}], "isError": True}})

    def how_raw(self, number: int, arguments: dict[str, Any]) -> None:
        raw(number, arguments["result"].encode("utf-8"))

    def how_no_text(self, number: int, _: dict[str, Any]) -> None:
        raw(number, b'{"text":"\xff\xfe"}')

    def how_asks(self, number: int, _: dict[str, Any]) -> None:
        """Asks the client this and that first, and tells what it was answered."""
        answers = {}
        for name, method in (("p", "ping"), ("s", "sampling/createMessage"), ("r", "roots/list")):
            say({"id": name, "method": method, "params": {}})
            answers[name] = next(message for message in self.messages if message.get("id") == name)
        say({"id": number, "result": value(answers)})

    def how_chatters(self, number: int, _: dict[str, Any]) -> None:
        for n in range(50):
            say({"method": "notifications/progress", "params": {"progressToken": number, "progress": n}})
            say({"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
        say({"method": "notifications/tools/list_changed"})
        say({"method": "notifications/cancelled", "params": {"requestId": number}})
        say({"id": number, "result": value({"chattered": True})})

    def how_exit(self, _number: int, _: dict[str, Any]) -> None:
        sys.exit("this server has had enough")

    def how_shut_stdin(self, number: int, _: dict[str, Any]) -> None:
        """Nobody can write to it any more; it is not dead."""
        os.close(0)
        say({"id": number, "result": value({"shut": True})})
        with open(f"{self.folder}/shut.go") as gate:
            gate.read()

    def how_deaf(self, number: int, _: dict[str, Any]) -> None:
        """Reads nothing more until it is told to."""
        say({"id": number, "result": value({"deaf": True})})
        with open(f"{self.folder}/deaf.go") as gate:
            gate.read()


if __name__ == "__main__":
    Rogue(sys.argv[1]).main()
