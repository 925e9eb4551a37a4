"""`chio process state` of hosts that are stopped, killed, cancelled or expired: it shows what was acknowledged, writes
nothing, starts nothing."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import accepted
from tests.host.test_reader import traces
from tests.kernel.serving import Serving, State, Worker, all_of, child, config, grant, policy
from tests.kernel.test_calls import until_expired

pytestmark = pytest.mark.timeout(120)

VALUE = {"total": 10, "é": [1.5, None]}
BLOB = b"bytes of a worker's \x00\xff"
DIGEST = sha256(BLOB).hexdigest()

# What a program does when it starts another or opens a connection (Python's table of audit events), as lines on fd 3.
AUDITED = """
import os, sys
STARTS = ("subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.", "socket.connect")
def hook(event, arguments):
    if event.startswith(STARTS):
        os.write(3, event.encode() + b"\\n")
sys.addaudithook(hook)
from chio.cli import main
main()
"""


def started_by(*arguments: object) -> tuple[list[str], Any]:
    """(every start of a program or connection, the document printed) of one command, run as a process of its own."""
    read_end, write_end = os.pipe()
    code = f"import os; os.dup2({write_end}, 3)\n{AUDITED}"
    with open(read_end, "rb") as events:
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            pass_fds=(write_end,), capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        os.close(write_end)
        assert done.returncode == 0, done.stderr
        return events.read().decode().split(), json.loads(done.stdout)


@pytest.fixture
def state(tmp_path: Path) -> State:
    host = config(child("a", *all_of("jobs")), child("b", *all_of("jobs")), max_calls=1_000_000)
    rules = policy(grant("receive_jobs", ttl=4), grant("send_jobs"), grant("ack_jobs"))
    return State.make(tmp_path / "folder", host, rules)


def save(worker: Worker, revision: int, value: Any) -> None:
    saved = worker.ask("checkpoint", expected_revision=str(revision), value=value)
    assert saved["revision"] == str(revision + 1)


def put(worker: Worker, data: bytes) -> str:
    digest = sha256(data).hexdigest()
    worker.ask("blob_put", sha256=digest, data_base64=base64.b64encode(data).decode())
    return digest


def work(serving: Serving) -> Worker:
    worker = serving.worker("a")
    save(worker, 0, VALUE)
    put(worker, BLOB)
    return worker


def stopped(state: State) -> None:
    with state.serve() as serving:
        work(serving)


def killed(state: State) -> None:
    serving = state.serve()
    work(serving)
    serving.kill()
    assert (state.path / "authority.db-wal").stat().st_size > 0, "a killed host leaves its write-ahead log"


def cancelled(state: State) -> None:
    with state.serve() as serving:
        work(serving).ask("cancel")


def expired(state: State) -> None:
    with state.serve() as serving:
        assert until_expired(state, work(serving), "receive_jobs")["reason"] == "expired"


ENDS = {"stopped": stopped, "killed": killed, "cancelled": cancelled, "expired": expired}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_reader_shows_what_was_kept_and_leaves_every_byte_and_time_as_they_were(
    state: State, end: Callable[[State], None]
) -> None:
    end(state)
    before = traces(state.path)
    starts, kept = started_by("process", "state", "--state", state.path, "--process", "a")
    blob_starts, blob = started_by("process", "state", "--state", state.path, "--process", "a", "--blob", DIGEST)
    assert traces(state.path) == before
    assert starts == blob_starts == []
    assert kept == {
        "schema": "chio.process.application-state.v1", "process": "a",
        "data": {"checkpoint": {"revision": "1", "value": VALUE}},
    }  # fmt: skip
    assert blob["data"]["blob"] == {
        "sha256": DIGEST, "bytes": len(BLOB), "data_base64": base64.b64encode(BLOB).decode(),
    }  # fmt: skip


def test_the_audit_sees_what_another_command_starts(state: State) -> None:
    """The control: `cancel` starts a Chio kernel."""
    starts, _ = started_by("process", "cancel", "--state", state.path, "--process", "a")
    assert "subprocess.Popen" in starts


def test_a_reader_starts_no_tool_server(tmp_path: Path) -> None:
    """Nor does it need one: the server's program is gone, and what it would have written stays unwritten."""
    if os.geteuid() != 0:
        pytest.skip("confining a server needs root in this version")
    folder = tmp_path / "folder"
    folder.mkdir()
    program = folder / "server.py"
    program.write_text((Path(__file__).parents[1] / "bench/noop_server.py").read_text())
    host = {**config(child("a")), "servers": [{"id": "noop", "command": [sys.executable, "server.py"]}]}
    state = State.make(folder, host)
    serving = state.serve()
    work(serving)
    serving.kill()
    program.unlink()
    before = traces(state.path)
    starts, kept = started_by("process", "state", "--state", state.path, "--process", "a")
    assert (starts, kept["data"]["checkpoint"]["value"]) == ([], VALUE)
    assert traces(state.path) == before
    assert accepted("process", "status", "--state", state.path)["servers"] == []


def test_no_acknowledged_save_is_missed_however_soon_after_it_the_kernel_is_killed(state: State) -> None:
    for number in range(10):
        serving = state.serve()
        worker = serving.worker("a")
        digest = put(worker, b"%d" % number)
        save(worker, number, {"number": number, "blob": digest})
        serving.kill()
        before = traces(state.path)
        kept = accepted("process", "state", "--state", state.path, "--process", "a")["data"]["checkpoint"]
        assert kept == {"revision": str(number + 1), "value": {"number": number, "blob": digest}}
        blob = accepted("process", "state", "--state", state.path, "--process", "a", "--blob", digest)
        assert base64.b64decode(blob["data"]["blob"]["data_base64"]) == b"%d" % number
        assert traces(state.path) == before


@pytest.fixture
def saving(state: State) -> Iterator[list[int]]:
    """A writer that saves one number after the other on a live host; the list is those acknowledged."""
    acknowledged: list[int] = []
    stop = threading.Event()
    with state.serve() as serving:
        worker = serving.worker("a")

        def write() -> None:
            number = 0
            while not stop.is_set():
                save(worker, number, {"number": number + 1})
                number += 1
                acknowledged.append(number)

        writer = threading.Thread(target=write)
        writer.start()
        yield acknowledged
        stop.set()
        writer.join()


def test_a_reader_of_a_live_host_sees_whole_saves_and_none_older_than_what_was_acknowledged(
    state: State, saving: list[int]
) -> None:
    last = 0
    for _ in range(25):
        acknowledged = len(saving)
        kept = accepted("process", "state", "--state", state.path, "--process", "a")["data"]["checkpoint"]
        revision = int(kept["revision"])
        assert kept["value"] == ({"number": revision} if revision else None)
        assert max(last, acknowledged) <= revision <= len(saving) + 1
        last = revision
    assert last > 0
