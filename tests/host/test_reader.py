"""`status`, `logs`, `state`, `receipt export`: they see what was acknowledged and leave no trace of having looked."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from chio.kernel.reader import open_state
from tests.host.commands import accepted, refused, run_chio
from tests.kernel.serving import Serving, State, all_of, child, config, mailbox
from verify.keys import Pins
from verify.receipt_file import check_receipts

pytestmark = pytest.mark.timeout(60)

BLOB = b"a blob of bytes \x00\xff"


@pytest.fixture
def state(tmp_path: Path) -> State:
    host = config(
        child("a", *all_of("jobs")), child("b", *all_of("jobs")), mailboxes=[mailbox("jobs"), mailbox("more")]
    )
    return State.make(tmp_path / "folder", host)


def work(serving: Serving) -> None:
    """One attempt that ended, with logs; one that runs; a checkpoint, a blob, calls of every kind."""
    first = serving.worker("a")
    serving.host.kernel.call(
        "ended", process="a", number=1, outcome="exit_3", record=None, exports=None,
        logs={"stdout": [base64.b64encode(b"out \xff\n").decode(), 6], "stderr": ["", 100_000]},
    )  # fmt: skip
    first.listening.close()
    worker = serving.worker("a")
    worker.send("send", "jobs", "m", {"total": 10})
    worker.invoke("far", "transfer", {})
    worker.ask("checkpoint", expected_revision="0", value={"total": 10, "é": [1.5]})
    worker.ask("blob_put", sha256=sha256(BLOB).hexdigest(), data_base64=base64.b64encode(BLOB).decode())


def traces(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Bytes and every time of every file and of the folder itself; looking at them here changes no time either."""
    found = {}
    for path in [folder, *sorted(folder.iterdir())]:
        data = b""
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
            with open(fd, "rb") as file:
                data = file.read()
        about = path.stat()
        times = (about.st_mtime_ns, about.st_ctime_ns, about.st_atime_ns)
        found[path.name] = (data, about.st_mode, about.st_ino, about.st_nlink, *times)
    return found


def look(state: State, pins: Pins, lines: list[bytes], *, running: int = 0, live: bool = False) -> None:
    """Every reader, and that each shows what `work` was acknowledged. The caller has read pins and shown receipts."""
    path = state.path
    status = accepted("process", "status", "--state", path)
    assert status["schema"] == "chio.process.status.v1"
    assert (status["runtime_id"], status["live"]) == (pins.runtime_id, live)
    assert (status["initialized"], status["planned"]) == (True, False)
    processes = {entry["process_id"]: entry for entry in status["processes"]}
    assert list(processes) == ["root", "a", "b"]
    assert {name: entry["calls"] for name, entry in processes.items()} == {"root": 2, "a": 2, "b": 0}
    assert [processes[name]["checkpoint_revision"] for name in ("root", "a", "b")] == ["0", "1", "0"]
    attempts = [(entry["number"], entry["state"], entry["outcome"]) for entry in processes["a"]["attempts"]]
    assert attempts[0] == (1, "ended", "exit_3")
    assert [entry[1] for entry in attempts].count("reserved") == running
    assert status["mailboxes"][0] == {
        "id": "jobs", "last_sequence": 1, "acknowledged_through": 0, "pending_messages": 1, "pending_bytes": 12,
    }  # fmt: skip
    assert status["calls"] == {"completed": 1, "refused": 1}
    assert status["log"]["checkpoint"].startswith(f"chio.invalid/{pins.runtime_id}\n")

    assert accepted("process", "logs", "--state", path, "--process", "a", "--attempt", 1) == {
        "schema": "chio.process.logs.v1", "process": "a", "attempt": 1, "state": "ended", "outcome": "exit_3",
        "stdout": "out \ufffd\n", "stdout_bytes": 6, "stderr": "", "stderr_bytes": 100_000,
    }  # fmt: skip

    kept = accepted("process", "state", "--state", path, "--process", "a")
    assert kept["schema"] == "chio.process.application-state.v1"
    assert kept["data"] == {"checkpoint": {"revision": "1", "value": {"total": 10, "é": [1.5]}}}
    nothing = accepted("process", "state", "--state", path, "--process", "root")
    assert nothing["data"] == {"checkpoint": {"revision": "0", "value": None}}
    blob = accepted("process", "state", "--state", path, "--process", "a", "--blob", sha256(BLOB).hexdigest())
    assert base64.b64decode(blob["data"]["blob"]["data_base64"]) == BLOB

    export = state.folder / "export.ndjson"
    assert accepted("receipt", "export", "--state", path, "--out", export)["receipts"] == 2
    verdict = check_receipts(str(export), pins.kernel_key, pins.runtime_id)
    assert (verdict.lines, verdict.distinct) == (2, 2)
    assert export.read_bytes().split(b"\n")[:2] == lines
    export.unlink()


def test_a_live_state_is_read_in_one_snapshot_and_its_host_notices_nothing(state: State) -> None:
    with state.serve() as serving:
        work(serving)
        pins, lines = state.pins, state.receipt_lines()
        before = {name: data[0] for name, data in traces(state.path).items() if name != "authority.db-shm"}
        look(state, pins, lines, running=1, live=True)
        # Readers of a live write-ahead log hold their places in -shm; no other byte is theirs.
        assert {name: data[0] for name, data in traces(state.path).items() if name != "authority.db-shm"} == before
        assert serving.worker("a").ask("inspect")["tree_calls"] == 2


def test_a_stopped_state_is_read_without_a_trace(state: State) -> None:
    with state.serve() as serving:
        work(serving)
    with state.serve():
        pass  # the attempt that ran is ended by this start
    pins, lines, before = state.pins, state.receipt_lines(), traces(state.path)
    look(state, pins, lines)
    assert traces(state.path) == before


def test_a_killed_state_shows_every_acknowledged_save_and_is_left_as_it_was_found(state: State) -> None:
    """What was acknowledged last is in the write-ahead log alone, and no reader may put it in order."""
    serving = state.serve()
    work(serving)
    serving.kill()
    assert (state.path / "authority.db-wal").stat().st_size > 0
    pins, lines, before = state.pins, state.receipt_lines(), traces(state.path)
    look(state, pins, lines, running=1)
    assert traces(state.path) == before


def test_a_state_in_which_nothing_can_be_written_can_be_read(state: State) -> None:
    with state.serve() as serving:
        work(serving)
    with state.serve():
        pass
    for path in state.path.iterdir():
        path.chmod(0o400)
    state.path.chmod(0o500)
    look(state, state.pins, state.receipt_lines())


def test_looking_needs_neither_keys_nor_documents(state: State) -> None:
    with state.serve() as serving:
        work(serving)
    with state.serve():
        pass
    for name in ("keys.json", "host.json", "policy.yaml", "bootstrap.json"):
        (state.path / name).unlink()
    look(state, state.pins, state.receipt_lines())


def test_reading_works_after_a_process_was_cancelled(state: State) -> None:
    with state.serve() as serving:
        work(serving)
        serving.worker("a").ask("cancel")
    status = accepted("process", "status", "--state", state.path)
    assert [entry["state"] for entry in status["processes"]] == ["running", "cancelled", "running"]
    kept = accepted("process", "state", "--state", state.path, "--process", "a")
    assert kept["data"]["checkpoint"]["revision"] == "1"


# --- questions that have no answer -----------------------------------------------------------------------------------


def test_what_is_not_there_is_named_with_what_is(state: State) -> None:
    with state.serve() as serving:
        work(serving)
    path = state.path
    assert "root, a, b" in refused("process", "state", "--state", path, "--process", "c")
    assert "root, a, b" in refused("process", "logs", "--state", path, "--process", "c", "--attempt", 1)
    assert "b has no attempt 1" in refused("process", "logs", "--state", path, "--process", "b", "--attempt", 1)
    assert "missing" in refused("process", "state", "--state", path, "--process", "a", "--blob", "0" * 64)
    other = sha256(BLOB).hexdigest()
    assert "missing" in refused("process", "state", "--state", path, "--process", "b", "--blob", other)


def test_a_blob_that_rotted_is_not_shown(state: State) -> None:
    with state.serve() as serving:
        work(serving)
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        database.execute("UPDATE blob SET data = X'00'")
    line = refused("process", "state", "--state", state.path, "--process", "a", "--blob", sha256(BLOB).hexdigest())
    assert "do not match" in line


def test_the_copy_of_a_reader_that_was_killed_is_removed_by_the_next_and_a_live_ones_is_not(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, live = tmp_path / "chio-read-killed", tmp_path / "chio-read-live"
    for folder in (killed, live):
        folder.mkdir(mode=0o700)
        (folder / "authority.db").write_bytes(b"a copy")
    held = os.open(live, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with open_state(state.path) as reader:
        reader.status()
        assert not killed.exists()
        assert (live / "authority.db").exists()
        assert len(list(tmp_path.glob("chio-read-*"))) == 2
    os.close(held)
    assert [path.name for path in tmp_path.glob("chio-read-*")] == ["chio-read-live"]


def test_an_attempt_that_still_runs_has_no_logs_yet_and_never_anothers(state: State) -> None:
    with state.serve() as serving:
        work(serving)
        logs = accepted("process", "logs", "--state", state.path, "--process", "a", "--attempt", 2)
    assert (logs["attempt"], logs["state"], logs["outcome"]) == (2, "reserved", None)
    assert (logs["stdout"], logs["stdout_bytes"], logs["stderr"], logs["stderr_bytes"]) == (None,) * 4


def test_an_export_never_writes_over_a_file(state: State) -> None:
    with state.serve() as serving:
        work(serving)
    out = state.folder / "mine"
    out.write_text("mine")
    assert "--out" in refused("receipt", "export", "--state", state.path, "--out", out)
    assert out.read_text() == "mine"
    out.unlink()
    out.symlink_to(state.folder / "elsewhere")
    refused("receipt", "export", "--state", state.path, "--out", out)
    assert not (state.folder / "elsewhere").exists()


def test_output_that_is_piped_is_one_line_of_json(state: State) -> None:
    """A process of its own, with a pipe for its standard output."""
    done = run_chio("process", "status", "--state", state.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["schema"] == "chio.process.status.v1"


def test_a_relative_path_means_the_same_state(state: State) -> None:
    absolute = run_chio("process", "status", "--state", state.path)
    relative = run_chio("process", "status", "--state", "state", cwd=state.folder)
    assert json.loads(absolute.stdout) == json.loads(relative.stdout)


def test_the_private_copy_of_a_reader_is_gone_afterwards(state: State, tmp_path: Path, monkeypatch: Any) -> None:
    serving = state.serve()
    work(serving)
    serving.kill()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    accepted("process", "status", "--state", state.path)
    assert list(temporary.iterdir()) == []
    shutil.rmtree(temporary)
