"""Durable mailbox calls per second with 1, 8 and 32 workers, beside what they are made of."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chio.host import Host, initialize
from tests.bench.load import drive

WORKERS = (1, 8, 32)
_SECONDS = 3.0


def run(directory: str | None) -> None:
    """Print the table. `directory` is where the files lie: a real disk."""
    with tempfile.TemporaryDirectory(prefix="chio-bench-", dir=directory) as folder:
        where = Path(folder)
        commits, signatures = raw_commits(where), raw_signatures()
        print(f"raw SQLite commits/s        {commits:10.0f}")
        print(f"Ed25519 signatures/s        {signatures:10.0f}")
        with floor(where) as path:
            floors = {n: drive([path] * n, floor_frame, _SECONDS) for n in WORKERS}
        with kernel(where) as (paths, credentials):
            calls = {n: drive(paths[:n], mailbox_frames(credentials, n), _SECONDS) for n in WORKERS}
    for n in WORKERS:
        print(f"stripped loop/s, {n:2} clients {floors[n]:10.0f}")
    for n in WORKERS:
        print(
            f"mailbox calls/s, {n:2} workers {calls[n]:10.0f}   {calls[n] / floors[n]:.2f} of the stripped loop,"
            f" {calls[n] / calls[1]:.2f} times alone, {calls[n] / commits:.2f} of raw commits"
        )
    print_start_up()


def raw_commits(directory: Path) -> float:
    database = sqlite3.connect(directory / "raw.db", isolation_level=None)
    database.execute("PRAGMA journal_mode = wal")
    database.execute("PRAGMA synchronous = full")
    database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, body TEXT) STRICT")
    return rate(lambda n: database.execute("INSERT INTO t VALUES (?, ?)", (n, "x" * 500)))


def raw_signatures() -> float:
    key = Ed25519PrivateKey.generate()
    return rate(lambda n: key.sign(b"x" * 1000))


def rate(work: object, seconds: float = 1.0) -> float:
    assert callable(work)
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            work(n)
            n += 1
    return n / (time.perf_counter() - start)


@contextlib.contextmanager
def floor(directory: Path) -> Iterator[str]:
    """The stripped loop, in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.floor", str(directory)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield str(directory / "floor.sock")
    finally:
        process.kill()
        process.wait()


def floor_frame(worker: int, n: int) -> bytes:
    return orjson.dumps({"key": f"{time.perf_counter_ns()}-{worker}-{n}", "payload": {"items": [2, 3, 5]}}) + b"\n"


@contextlib.contextmanager
def kernel(directory: Path) -> Iterator[tuple[list[str], list[str]]]:
    """A real Chio kernel with 32 attempts, each with its own socket, mailbox and grants."""
    n = max(WORKERS)
    (directory / "policy.yaml").write_text(
        "kernel: {max_capability_ttl: 3600, delegation_depth_limit: 1, durable_admission_mode: all}\n"
        "capabilities: {default: {tools: [{server: chio-ipc, tool: '*', operations: [invoke, delegate], ttl: 3600}]}}\n"
    )
    config = {
        "schema": "chio.process.host.v1",
        "policy": "policy.yaml",
        "limits": {"max_processes": n + 1, "max_depth": 1, "max_calls": 100_000_000},
        "mailboxes": [{"id": f"m{i}", "limits": {"max_messages": 100_000}} for i in range(n)],
        "children": [
            {
                "id": f"w{i}",
                "parent": "root",
                "budget_share_bps": 10_000 // n,
                "tools": [{"server_id": "chio-ipc", "tool_name": f"{verb}_m{i}"} for verb in ("send", "ack")],
            }
            for i in range(n)
        ],
    }
    (directory / "host.json").write_bytes(orjson.dumps(config))
    initialize(directory / "host.json", directory / "state", allow_volatile=False)
    host = Host(directory / "state")
    paths, credentials, sockets = [], [], []
    try:
        for i in range(n):
            reserved = host.kernel.call("reserve", process=f"w{i}", confined=False)
            sock = socket.socket(socket.AF_UNIX)
            paths.append(str(directory / f"{i}.sock"))
            sock.bind(paths[-1])
            sock.listen(64)
            credentials.append(reserved["connection"]["credential"])
            host.kernel.call(
                "listen", (os.dup(sock.fileno()),), process=f"w{i}", number=1, credential=credentials[-1],
                launch_id=None, uid=None,
            )  # fmt: skip
            sockets.append(sock)
        yield paths, credentials
    finally:
        for sock in sockets:
            sock.close()
        host.close()


def mailbox_frames(credentials: list[str], run: int) -> object:
    """Each worker sends a message to its mailbox, then acknowledges it: every call is a durable commit."""
    sequences = [0] * len(credentials)
    offset = {1: 0, 8: 30_000, 32: 60_000}[run]

    def frame(worker: int, n: int) -> bytes:
        if n % 2 == 0:
            key, tool = f"send-{run}-{n}", f"send_m{worker}"
            arguments: dict[str, object] = {"message_key": f"{offset + n}", "payload": {"items": [2, 3, 5]}}
            sequences[worker] += 1
        else:
            key, tool = f"ack-{run}-{n}", f"ack_m{worker}"
            arguments = {"through_sequence": str(acknowledge[worker] + 1)}
            acknowledge[worker] += 1
        return (
            orjson.dumps(
                {
                    "protocol": "chio.process.v1",
                    "credential": credentials[worker],
                    "operation": {
                        "op": "invoke", "operation_key": key, "server_id": "chio-ipc", "tool_name": tool,
                        "arguments": arguments,
                    },
                }
            )
            + b"\n"
        )  # fmt: skip

    return frame


acknowledge = [0] * max(WORKERS)


def print_start_up() -> None:
    """`chio --version` beside a bare interpreter, the median of 15 each."""
    chio = str(Path(sys.executable).with_name("chio"))

    def median(command: list[str]) -> float:
        times = []
        for _ in range(15):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2] * 1000

    bare, version = median([sys.executable, "-c", "pass"]), median([chio, "--version"])
    print(f"chio --version {version:.0f} ms, python -c pass {bare:.0f} ms: {version / bare:.1f} times")
