"""Durable external calls per second with 1, 8 and 32 workers, beside DBOS's durable steps in the same run.

A call is two commits (the intent before the first byte, the outcome before the answer) and a signed receipt; its server
is another process, confined, that does nothing. A step of DBOS is a function of the same process that does nothing, and
its recorded result: one commit, in SQLite's default journal (four syncs of the disk) or in WAL (one; Chio's call has
two). Workers are sockets of this process: what is measured is the Chio kernel, not the workers.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import orjson

from chio import schema
from chio.host import Host, initialize
from chio.servers import ToolServers, prepare
from confine import Launcher
from tests.bench.load import drive
from tests.bench.mailbox import raw_commits

WORKERS = (1, 8, 32)
AIMS = {1: 3.0, 32: 10.0}
_SECONDS = 2.0
_ROUNDS = 3
_ROOT = Path(__file__).resolve().parents[2]
_DBOS = _ROOT / "build/dbos/bin/python"


def run(directory: str | None) -> None:
    """Print the table. `directory` is where the files lie: a real disk."""
    if os.geteuid() != 0:
        sys.exit("bench: confining the server needs root in this version")
    if not _DBOS.exists():
        sys.exit("bench: DBOS is not installed; run it with: make bench ARGS=calls")
    with tempfile.TemporaryDirectory(prefix="chio-bench-", dir=directory) as folder:
        commits = raw_commits(Path(folder))
        calls, plain, wal = rates(Path(folder))
    print(f"raw SQLite commits/s {commits:.0f}; a call's two commits, alone, are {2 * calls[1] / commits:.2f} of that")
    print(f"{'':32}" + "".join(f"{n:>10} at once" for n in WORKERS))
    for name, figures in (
        ("external calls/s (Chio)", calls), ("steps/s (DBOS, as it comes)", plain), ("steps/s (DBOS, WAL)", wal),
    ):  # fmt: skip
        print(f"{name:32}" + "".join(f"{figures[n]:18.0f}" for n in WORKERS))
    for name, figures in (("times DBOS", plain), ("times DBOS with WAL", wal)):
        print(f"{name:32}" + "".join(f"{calls[n] / figures[n]:18.1f}" for n in WORKERS))
    print(f"{'to aim at':32}" + "".join(f"{AIMS[n]:18.1f}" if n in AIMS else f"{'':18}" for n in WORKERS))


def rates(folder: Path) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """The median of a few rounds; in each, the three take turns, so that what else the machine does meets all."""
    rounds = []
    with kernel(folder) as workers:
        for number in range(_ROUNDS):
            calls = {n: drive([worker.path for worker in workers[:n]], frames(workers), _SECONDS) for n in WORKERS}
            rounds.append((calls, dbos(folder / f"plain-{number}", "delete"), dbos(folder / f"wal-{number}", "wal")))
    first, second, third = ({n: median([entry[kind][n] for entry in rounds]) for n in WORKERS} for kind in range(3))
    return first, second, third


def median(figures: list[float]) -> float:
    return sorted(figures)[len(figures) // 2]


# --- DBOS ------------------------------------------------------------------------------------------------------------


def dbos(database: Path, journal_mode: str) -> dict[int, float]:
    """Steps per second on a new database. The journal mode lies in the file, so that DBOS itself is left as it is."""
    with closing(sqlite3.connect(database)) as opened:
        opened.execute(f"PRAGMA journal_mode = {journal_mode}")
        opened.execute("VACUUM")  # writes the file's header
    done = subprocess.run(
        [_DBOS, _ROOT / "tests/bench/dbos_steps.py", database, str(_SECONDS / 2), *map(str, WORKERS)],
        check=True, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"], "HOME": str(database.parent)},
    )  # fmt: skip
    return {int(n): rate for n, rate in orjson.loads(done.stdout).items()}


# --- Chio ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    path: str
    credential: str


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[list[Worker]]:
    """A real Chio kernel with one confined server and an attempt with its own socket for each worker."""
    config = documents(folder)
    initialize(config, folder / "state", allow_volatile=False)
    host = Host(folder / "state")
    with contextlib.ExitStack() as held:
        held.callback(host.close)
        with Launcher.start((host.lock,)) as launcher:
            prepared = prepare(
                schema.host_config(host.config_text.encode(), str(config)), str(config), folder / "state"
            )
            servers = ToolServers(prepared, launcher, host.kernel)
            servers.start_all()
            wait(lambda: servers.ready, servers, launcher, host)
            yield [attempt(host, folder, f"w{i}", held) for i in range(max(WORKERS))]
            servers.stop()
            wait(lambda: not servers.alive, servers, launcher, host)


def wait(until: Callable[[], bool], servers: ToolServers, launcher: Launcher, host: Host) -> None:
    """Be the host until something holds."""
    while not until():
        for event, _ in host.kernel.events():
            servers.kernel_said(event)
        for said in launcher.receive():
            servers.launcher_said(said)
        if servers.refusals:
            raise RuntimeError(str(servers.refusals))
        if not until():
            select.select([launcher.fileno(), host.kernel.fileno()], [], [])


def attempt(host: Host, folder: Path, process: str, held: contextlib.ExitStack) -> Worker:
    """Reserve an attempt and have its socket served, as for a worker that is not confined."""
    credential = host.kernel.call("reserve", process=process, confined=False)["connection"]["credential"]
    listening = held.enter_context(closing(socket.socket(socket.AF_UNIX)))
    path = str(folder / f"{process}.sock")
    listening.bind(path)
    listening.listen(64)
    host.kernel.call(
        "listen", (listening.fileno(),), process=process, number=1, credential=credential, launch_id=None, uid=None
    )
    return Worker(path, credential)


def documents(folder: Path) -> Path:
    """The host config and its policy; the config's path."""
    shutil.copy(_ROOT / "tests/bench/noop_server.py", folder / "noop_server.py")
    (folder / "policy.yaml").write_text(
        "kernel: {max_capability_ttl: 86400, delegation_depth_limit: 1, durable_admission_mode: all}\n"
        "capabilities: {default: {tools: [\n"
        "  {server: noop, tool: nothing, operations: [invoke, delegate], ttl: 86400}]}}\n"
    )
    n = max(WORKERS)
    config = {
        "schema": "chio.process.host.v1",
        "policy": "policy.yaml",
        "limits": {"max_processes": n + 1, "max_depth": 1, "max_calls": 100_000_000},
        "servers": [{"id": "noop", "command": [sys.executable, "noop_server.py"]}],
        "children": [
            {
                "id": f"w{i}",
                "parent": "root",
                "budget_share_bps": 10_000 // n,
                "tools": [{"server_id": "noop", "tool_name": "nothing"}],
            }
            for i in range(n)
        ],
    }
    (folder / "host.json").write_bytes(orjson.dumps(config))
    return folder / "host.json"


def frames(workers: list[Worker]) -> Callable[[int, int], bytes]:
    """Every call has a key that was never used before."""
    run = time.monotonic_ns()

    def frame(worker: int, n: int) -> bytes:
        operation = {
            "op": "invoke", "operation_key": f"{run}-{n}", "server_id": "noop", "tool_name": "nothing",
            "arguments": {"items": [2, 3, 5]},
        }  # fmt: skip
        request = {
            "protocol": "chio.process.v1", "credential": workers[worker].credential, "operation": operation,
        }  # fmt: skip
        return orjson.dumps(request) + b"\n"

    return frame
