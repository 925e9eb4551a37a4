"""A start on a state with a million receipts and a thousand unfinished calls, beside a cold read of its files."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from chio.host import Host
from chio.kernel import database
from chio.kernel.initialize import Source, initialize
from chio.kernel.invocations import Answer, Caller, Dispatch, Request
from chio.kernel.process import Kernel
from chio.kernel.store import Store
from chio.tools.mcp import Tool
from tests.faults.power.reopen import NoHost

RECEIPTS = 1_000_000
UNFINISHED = 1_000
_GROUP = 500  # calls in one commit
_CHUNK = 1 << 20
_SERVER = "noop"


def run(directory: str | None) -> None:
    """Print the table. `directory` is where the files lie: a real disk, with a few GiB free."""
    with tempfile.TemporaryDirectory(prefix="chio-bench-", dir=directory) as folder:
        state = Path(folder) / "state"
        start = time.perf_counter()
        make(state, RECEIPTS, UNFINISHED)
        print(f"state of {RECEIPTS} receipts and {UNFINISHED} unfinished calls, made in {since(start):.0f} s")
        files = [path for name in ("authority.db", "authority.db-wal") if (path := state / name).exists()]
        size = sum(file.stat().st_size for file in files)
        forget(files)
        read = cold_read(files)
        forget(files)
        recovery = start_of(state)
        assert unknown(state) == UNFINISHED
        forget([state / "authority.db"])
        cold, warm = start_of(state), start_of(state)
    print(f"cold read of its {size / 1e6:8.0f} MB    {read:8.2f} s")
    for name, seconds in (("recovery, cold", recovery), ("start, cold", cold), ("start, warm", warm)):
        print(f"{name:26} {seconds:8.2f} s   {seconds / read:6.3f} of the cold read")


def since(start: float) -> float:
    return time.perf_counter() - start


def forget(files: list[Path]) -> None:
    """Nothing of them stays in memory (posix_fadvise(2))."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cold_read(files: list[Path]) -> float:
    start = time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as data:
            while data.read(_CHUNK):
                pass
    return since(start)


def start_of(state: Path) -> float:
    """Seconds until a host stands on it."""
    start = time.perf_counter()
    host = Host(state)
    seconds = since(start)
    host.close()
    return seconds


def unknown(state: Path) -> int:
    """Calls whose outcome is unknown: those that a recovery settled."""
    with closing(sqlite3.connect(f"{(state / 'authority.db').as_uri()}?mode=ro", uri=True)) as opened:
        return int(opened.execute("SELECT count(*) FROM call WHERE state = 'unknown'").fetchone()[0])


# --- making it -------------------------------------------------------------------------------------------------------


def make(state: Path, receipts: int, unfinished: int) -> None:
    """A state whose kernel was killed while it served, written by the kernel's own ledger in large commits."""
    grant = {"server": _SERVER, "tool": "nothing", "operations": ["invoke", "delegate"], "ttl": 86400}
    policy = {
        "kernel": {"max_capability_ttl": 86400, "delegation_depth_limit": 1, "durable_admission_mode": "all"},
        "capabilities": {"default": {"tools": [grant]}},
    }
    config = {
        "schema": "chio.process.host.v1",
        "policy": "policy.yaml",
        "limits": {"max_processes": 2, "max_depth": 1, "max_calls": 100_000_000},
        "servers": [{"id": _SERVER, "command": ["/bin/false"]}],
        "children": [
            {"id": "w", "parent": "root", "budget_share_bps": 10_000,
             "tools": [{"server_id": _SERVER, "tool_name": "nothing"}]},
        ],
    }  # fmt: skip
    sources = (
        Source(str(state.with_name(name)), orjson.dumps(document))
        for name, document in (("host.json", config), ("policy.yaml", policy))
    )
    tool = Tool("nothing", False, {"name": "nothing", "inputSchema": {"type": "object"}})
    initialize(state, *sources, allow_volatile=False, servers={_SERVER: [tool]})
    filler = multiprocessing.get_context("fork").Process(target=_fill, args=(state, receipts, unfinished))
    filler.start()
    filler.join()
    assert filler.exitcode == 0, filler.exitcode


def _fill(state: Path, receipts: int, unfinished: int) -> None:
    """Refused calls and, at the end, dispatched ones; it ends as if it were killed."""
    directory = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(directory)
    store = Store(database.open_existing(directory, str(state)))
    kernel = Kernel(asyncio.new_event_loop(), store, directory, str(state), False, NoHost())
    client: Any = object()
    kernel.router._servers[_SERVER].client = client  # up, as far as the decision looks
    caller = Caller(kernel.tree["w"], None, None)

    def call(number: int, tool: str) -> None:
        arguments = {"items": [2, 3, 5], "note": secrets.token_hex(8)}
        request = Request(f"call-{number}", _SERVER, tool, arguments, orjson.dumps(arguments), "default", True)
        done = kernel.ledger.invoke(caller, request, may_wait=False)
        assert isinstance(done, Answer if tool == "other" else Dispatch), done

    def group(numbers: range, tool: str) -> None:
        for number in numbers:
            call(number, tool)
        kernel.writer.now(lambda: None)

    for at in range(0, receipts, _GROUP):
        group(range(at, min(at + _GROUP, receipts)), "other")
    group(range(receipts, receipts + unfinished), "nothing")
    os._exit(0)
