"""The kernel's own classes over an in-memory database, with everything around them simulated.

`Kernel`, `Control`, `Writer`, `Ledger`, `Store`, `Log` and the recovery are the product's. Simulated are the event
loop, the two ends of every connection and the tool servers. A crash drops the open transaction and every object but the
database; what the tool servers did stays done.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import peewee

from chio.kernel.control import Control
from chio.kernel.initialize import Source, initialize
from chio.kernel.invocations import Caller
from chio.kernel.process import Kernel
from chio.kernel.store import Store
from chio.tools.mcp import End, Ended, Tool
from tests.faults.exchanges import Exchange
from tests.faults.simulation.loop import Loop

SERVER = "pay"
TOOLS = {"pay": False, "read": True, "limited": False, "checked": False}  # free of side effects?
MAX_CENTS = 5
LIMITED = 4
CHECKED_TTL_S = 40  # of the grant of `checked`: the only one that a history outlives
BOX = "jobs"
PARENTS = {"a": "root", "b": "root", "c": "b"}
SHARES = {"a": 4000, "b": 5000, "c": 2000}
MAX_CALLS = 24
BOX_LIMITS = {"max_pending_messages": 3, "max_messages": 6}
TIMEOUT_S = 10
_PRAGMAS = {"foreign_keys": 1, "trusted_schema": 0, "temp_store": "memory"}


class Crash(BaseException):
    """The kernel's process is gone, here and now."""


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """(host config, policy)."""
    routes = [{"server_id": "chio-ipc", "tool_name": f"{verb}_{BOX}"} for verb in ("send", "receive", "ack")]
    routes += [{"server_id": SERVER, "tool_name": tool} for tool in TOOLS]
    host = {
        "schema": "chio.process.host.v1",
        "policy": "policy.yaml",
        "limits": {"max_processes": 8, "max_depth": 3, "max_calls": MAX_CALLS},
        "mailboxes": [{"id": BOX, "limits": BOX_LIMITS}],
        "servers": [{"id": SERVER, "command": ["/bin/false"], "request_timeout_seconds": TIMEOUT_S}],
        "children": [
            {"id": name, "parent": parent, "tools": routes, "budget_share_bps": SHARES[name]}
            for name, parent in PARENTS.items()
        ],
    }
    grant = {"operations": ["invoke", "delegate"], "ttl": 86400}
    policy = {
        "kernel": {"max_capability_ttl": 86400, "delegation_depth_limit": 8, "durable_admission_mode": "all"},
        "capabilities": {
            "default": {
                "tools": [
                    {"server": "chio-ipc", "tool": "*", **grant},
                    {"server": SERVER, "tool": "pay", **grant},
                    {"server": SERVER, "tool": "read", **grant},
                    {"server": SERVER, "tool": "limited", "max_invocations": LIMITED, **grant},
                    {"server": SERVER, "tool": "checked", **grant, "ttl": CHECKED_TTL_S,
                     "constraints": {"properties": {"cents": {"maximum": MAX_CENTS}}}},
                ]
            }
        },
    }  # fmt: skip
    return host, policy


@dataclass(frozen=True, slots=True)
class Template:
    """A state as `init` makes it: its directory, and its database as the bytes of one."""

    directory: int
    path: str
    image: bytes


@contextmanager
def template() -> Iterator[Template]:
    """Nothing of a simulation need last, so memory will do: the state says that it is volatile."""
    host, policy = documents()
    below = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="chio-simulation-", dir=below) as folder:
        path = Path(folder) / "state"
        tools = [
            Tool(name, read, {"name": name, "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": read}})
            for name, read in TOOLS.items()
        ]
        sources = (
            Source(f"{folder}/{name}", json.dumps(document).encode())
            for name, document in (("host.json", host), ("policy.yaml", policy))
        )
        initialize(path, *sources, allow_volatile=True, servers={SERVER: sorted(tools, key=lambda tool: tool.name)})
        with sqlite3.connect(path / "authority.db") as made:
            made.execute("PRAGMA journal_mode = delete")
            image = made.serialize()
        made.close()
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fchdir(directory)
            yield Template(directory, str(path), image)
        finally:
            os.chdir("/")
            os.close(directory)


# --- tool servers ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Sent:
    """One request that the kernel gave to a server's client. `written`: the pipe took it; `applied`: it took effect."""

    process: str
    key: str
    tool: str
    done: Callable[[Ended], None]
    late: Callable[[bytes], None]
    written: bool = False
    applied: bool = False
    given_up: bool = False


class Server:
    """`chio.tools.mcp.StdioClient` from the kernel's side; behind it a server that lasts as long as its process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.open: list[Sent] = []
        self.late: list[Sent] = []
        self.closed = False

    def call(
        self,
        tool: str,
        arguments: bytes,
        timeout_s: float,
        done: Callable[[Ended], None],
        late: Callable[[bytes], None],
    ) -> Sent:
        named = json.loads(arguments)
        sent = Sent(named["process"], named["key"], tool, done, late)
        self._world.about_to_send(sent)
        self.open.append(sent)
        return sent

    def cancel(self, request: object, reason: str) -> None:
        pass

    def write(self, sent: Sent) -> None:
        sent.written = True

    def apply(self, sent: Sent) -> None:
        sent.written = sent.applied = True
        self._world.effects[sent.process, sent.key] = self._world.effects.get((sent.process, sent.key), 0) + 1

    def answer(self, sent: Sent) -> None:
        self.open.remove(sent)
        sent.done(Ended(End.ANSWERED, "answered", json.dumps({"key": sent.key}).encode()))

    def garble(self, sent: Sent) -> None:
        """An answer that is not text."""
        self.open.remove(sent)
        sent.done(Ended(End.ANSWERED, "answered", b"\xff\xfe"))

    def time_out(self, sent: Sent) -> None:
        self.open.remove(sent)
        if not sent.written:
            sent.done(Ended(End.NOT_SENT, "the server took no byte in time"))
            return
        self.late.append(sent)
        sent.done(Ended(End.LOST, "no answer in time"))

    def answer_late(self, sent: Sent) -> None:
        self.late.remove(sent)
        sent.late(b'{"late":true}')

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        requests, self.open = self.open, []
        for sent in requests:
            sent.done(Ended(End.LOST if sent.written else End.NOT_SENT, reason))
        self._world.server_lost(self)


# --- workers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Client:
    """A connection with one request on its way; the kernel calls `reply` and sets `on_lost`."""

    world: World
    digest: str
    operation: dict[str, Any]
    on_lost: Callable[[], None] | None = None
    answered: bool = False
    gone: bool = False

    def reply(self, frame: bytes) -> None:
        self.on_lost = None
        if self.gone:
            return
        if self.answered:
            self.world.wrong.append(f"{self.operation}: answered twice")
        self.answered = True
        self.world.replied(self, frame)

    def lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None


class Host:
    """The host's end of the control socket: `chio.wire.Channel` as `Control` uses it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        self._world.told_host(message)


class Statements:
    """The store's connection: the trap hears of each statement before it is executed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._connection = world.connection

    def execute(self, statement: str, *values: Any) -> Any:
        if self._world.trap is not None:
            self._world.trap(statement)
        return self._connection.execute(statement, *values)

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction


# --- the world -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class World:
    """One state and what lives around it. `exchanges` are all answers that ever left, in order."""

    made: Template
    effects: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    callers: dict[str, tuple[Caller, str]] = field(
        default_factory=dict
    )  # of each process: its live attempt, its digest
    attempts: dict[tuple[str, int], str] = field(default_factory=dict)  # the digest of each one's credential
    waiting: list[Client] = field(default_factory=list)
    server: Server | None = None
    server_wanted: bool = False
    opened: int = 0
    trap: Callable[[str], None] | None = None
    _asked: dict[int, dict[str, Any]] = field(default_factory=dict)
    database: peewee.SqliteDatabase = field(init=False)
    connection: sqlite3.Connection = field(init=False)
    loop: Loop = field(init=False)
    kernel: Kernel = field(init=False)
    control: Control = field(init=False)

    def __post_init__(self) -> None:
        self.database = peewee.SqliteDatabase(
            ":memory:", pragmas=_PRAGMAS, autoconnect=False, thread_safe=False, cached_statements=256
        )
        self.database.connect()
        self.connection = self.database.connection()
        self.connection.deserialize(self.made.image)
        os.truncate("receipts.ndjson", 0)  # the one file that is shared by all histories: this is its folder

    def open(self) -> None:
        """A start of the kernel over what is there. Its servers are down, its workers have no attempts."""
        self.loop = Loop()
        store = Store(self.database)
        traced: Any = Statements(self)
        store._connection, store._execute = traced, traced.execute
        channel: Any = Host(self)
        loop: Any = self.loop
        self.control = Control(loop, channel)
        self.kernel = Kernel(loop, store, self.made.directory, self.made.path, True, self.control)
        self.control._kernel = self.kernel
        closing: Any = self.kernel.connections
        closing.close = self._closed
        self.opened += 1

    def crash(self) -> None:
        """What was not committed is gone, and so is everybody who spoke with the kernel."""
        os.close(self.kernel.writer._receipts_fd)
        self.forget()

    def forget(self) -> None:
        if self.connection.in_transaction:
            self.connection.rollback()
        self.trap = None
        self.server, self.server_wanted = None, False
        self.callers.clear()
        self.waiting.clear()

    def close(self) -> None:
        self.database.close()

    # --- the host ------------------------------------------------------------------------------------------------

    def tell(self, op: str, **members: Any) -> None:
        self._asked[len(self._asked) + 1] = {"op": op, **members}
        self.control._handle({"id": len(self._asked), "op": op, **members}, [])

    def end(self, process: str, number: int | None) -> None:
        self.callers.pop(process)
        self.tell("ended", process=process, number=number, outcome="exit_1", record=None, exports=None, logs={})

    def _closed(self, attempt: tuple[str, int]) -> None:
        """`Connections.close`: from now on nothing more is written, and a little later each connection is seen lost."""
        digest = self.attempts.get(attempt)
        for client in [client for client in self.waiting if client.digest == digest]:
            self.waiting.remove(client)
            client.gone = True
            self.loop.call_soon(client.lost)

    def told_host(self, message: dict[str, Any]) -> None:
        if message.get("event") == "server_needed":  # a wish, and nothing that anybody is held to
            self.server_wanted = True
        elif "re" in message:
            self.promise("told")
            request = self._asked[message["re"]]
            self.exchanges.append(Exchange(len(self.exchanges), "", request, message, b""))
            if request["op"] == "reserve" and message["ok"]:
                self._started(request["process"], message)

    def _started(self, process: str, message: dict[str, Any]) -> None:
        """The new attempt's worker may call."""
        number = message["number"]
        self.kernel.live.add((process, number))
        digest = sha256(message["connection"]["credential"].encode()).hexdigest()
        self.attempts[process, number] = digest
        self.callers[process] = Caller(self.kernel.tree[process], number, None), digest

    # --- the tool server -----------------------------------------------------------------------------------------

    def start_server(self) -> None:
        self.server_wanted = False
        self.server = Server(self)
        found = self.kernel.router._servers[SERVER]
        client: Any = self.server
        found.client = client
        self.kernel.router._release(found, True)

    def refuse_server(self) -> None:
        self.server_wanted = False
        self.kernel.router.failed(SERVER)

    def server_lost(self, server: Server) -> None:
        self.server = None
        self.kernel.router._servers[SERVER].client = None

    def about_to_send(self, sent: Sent) -> None:
        """The first byte may leave: then the intent is committed."""
        self.promise("sent")
        row = self.connection.execute(
            "SELECT state FROM call WHERE process = ? AND operation_key = ?", (sent.process, sent.key)
        ).fetchone()
        if row is None or row[0] != "dispatched":
            self.wrong.append(f"{sent.process}/{sent.key}: sent to its server in state {row and row[0]}")
        self.sent.append((sent.process, sent.key))

    # --- workers -------------------------------------------------------------------------------------------------

    def ask(self, process: str, operation: dict[str, Any]) -> Client | None:
        """A worker's request; None when the process has no live attempt."""
        if process not in self.callers:
            return None
        caller, digest = self.callers[process]
        client = Client(self, digest, operation)
        self.waiting.append(client)
        connection: Any = client
        self.kernel.serve(caller, operation, False, connection)
        return client

    def replied(self, client: Client, frame: bytes) -> None:
        self.promise("reply")
        if client in self.waiting:
            self.waiting.remove(client)
        self.exchanges.append(Exchange(len(self.exchanges), client.digest, client.operation, json.loads(frame), frame))

    def lose(self, client: Client) -> None:
        """The client hangs up before its answer."""
        self.waiting.remove(client)
        client.gone = True
        client.lost()

    def promise(self, what: str) -> None:
        """Something leaves the kernel: nothing that it says may still be uncommitted."""
        if self.connection.in_transaction:
            self.wrong.append(f"{what}, before the commit")
        if self.trap is not None:
            self.trap(what)
