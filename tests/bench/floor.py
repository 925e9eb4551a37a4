"""The floor of a durable call: frame, decide, sign, one commit. `python -m tests.bench.floor DIRECTORY`.

A stripped server with the same parts as the Chio kernel (uvloop, orjson, cryptography, SQLite in WAL with
`synchronous=FULL`, commits shared by what is ready) and nothing else: no capabilities, budgets, log or receipts.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import cast

import orjson
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class Floor:
    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self.loop = loop
        self.key = Ed25519PrivateKey.generate()
        self.database = sqlite3.connect(directory / "floor.db", isolation_level=None)
        self.database.execute("PRAGMA journal_mode = wal")
        self.database.execute("PRAGMA synchronous = full")
        self.database.execute(
            "CREATE TABLE call (key TEXT PRIMARY KEY, body TEXT, signature TEXT) STRICT, WITHOUT ROWID"
        )
        self.queue: list[tuple[asyncio.Transport, dict[str, object]]] = []

    def submit(self, transport: asyncio.Transport, request: dict[str, object]) -> None:
        self.queue.append((transport, request))
        if len(self.queue) == 1:
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        batch, self.queue = self.queue, []
        self.database.execute("BEGIN IMMEDIATE")
        replies = []
        for transport, request in batch:
            body = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
            signature = self.key.sign(body).hex()
            self.database.execute("INSERT INTO call VALUES (?, ?, ?)", (request["key"], body.decode(), signature))
            replies.append((transport, b'{"ok":true,"signature":"' + signature.encode() + b'"}\n'))
        self.database.execute("COMMIT")
        for transport, reply in replies:
            transport.write(reply)


class Connection(asyncio.Protocol):
    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        line, newline, rest = self.buffer.partition(b"\n")
        if newline:
            self.buffer = rest
            request = orjson.loads(line)
            if request.keys() == {"key", "payload"}:
                self.floor.submit(self.transport, request)


async def main() -> None:
    directory = Path(sys.argv[1])
    floor = Floor(asyncio.get_running_loop(), directory)
    server = await floor.loop.create_unix_server(lambda: Connection(floor), str(directory / "floor.sock"), backlog=64)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main())
