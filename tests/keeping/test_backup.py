"""`backup`: a stopped state as a folder, complete, without touching the state; and what is not made or not taken."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import accepted, contents, refused
from tests.kernel.serving import Serving, State

pytestmark = pytest.mark.timeout(120)

SMALL, LARGE = b"a blob", b"a large blob" * 10_000
MakeState = Callable[..., State]


def work(serving: Serving) -> None:
    worker = serving.worker("a")
    worker.ask("checkpoint", expected_revision="0", value={"total": 10})
    for data in (SMALL, LARGE):
        encoded = base64.b64encode(data).decode()
        worker.ask("blob_put", sha256=sha256(data).hexdigest(), data_base64=encoded)
    worker.send("send", "jobs", "m", {"total": 10})
    worker.invoke("refused", "transfer", {})


def backup(state: State, out: Path, *more: str) -> Any:
    return accepted("process", "backup", "--state", state.path, "--out", out, *more)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_a_backup_has_every_file_but_the_signing_keys_and_says_what_it_has(
    make_state: MakeState, tmp_path: Path
) -> None:
    state = make_state()
    with state.serve() as serving:
        work(serving)
    (state.path / "exported").mkdir()
    (state.path / "exported" / "result.json").write_text("{}")
    out = tmp_path / "backup"
    told = backup(state, out)
    log = state.log()
    assert told == {
        "backup": str(out), "runtime_id": state.pins.runtime_id, "size": len(log.leaves),
        "root": log.checkpoints[-1].root.hex(), "signing_key": False,
    }  # fmt: skip
    manifest = json.loads((out / "backup.json").read_text())
    assert (manifest["schema"], manifest["epoch"]) == ("chio.backup.v1", 0)
    listed = {entry["name"] for entry in manifest["files"]}
    assert listed | {"backup.json"} == names(out)
    assert listed == names(state.path) - {"keys.json", "lock", "authority.db-shm", "authority.db-wal"}
    for entry in manifest["files"]:
        data = (out / entry["name"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), sha256(data).hexdigest())
    for path in [out, *out.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_signing_keys_are_copied_when_they_are_asked_for(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state()
    assert backup(state, tmp_path / "backup", "--with-signing-key")["signing_key"] is True
    assert (tmp_path / "backup" / "keys.json").read_bytes() == (state.path / "keys.json").read_bytes()


def test_no_signing_key_is_in_any_byte_of_a_backup(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state()
    backup(state, tmp_path / "backup")
    seeds = json.loads((state.path / "keys.json").read_text())
    files = [path.read_bytes() for path in (tmp_path / "backup").rglob("*") if path.is_file()]
    assert len([seeds.pop("schema"), *seeds]) == 4
    for seed in seeds.values():
        assert not [data for data in files if seed.encode() in data or bytes.fromhex(seed) in data]


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_the_state_is_left_as_it_was_found(make_state: MakeState, tmp_path: Path, killed: bool) -> None:
    """A killed host leaves its newest commits in the write-ahead log: they are in the backup, and stay there too."""
    state = make_state()
    serving = state.serve()
    work(serving)
    serving.kill() if killed else serving.close()
    assert (state.path / "authority.db-wal").exists() is killed
    rows = {table: state.rows(f"SELECT * FROM {table}") for table in ("call", "message", "worker_checkpoint", "leaf")}
    old = (1_000_000_000_000_000_000, 1_500_000_000_000_000_000)
    paths = [*state.path.rglob("*"), state.path]
    for path in paths:
        os.utime(path, ns=old)  # accessed before it was changed: any further access is noted (mount(8), relatime)
    before = {path: path.stat() for path in paths}
    backup(state, tmp_path / "backup")
    for path, about in before.items():
        now = path.stat()
        assert (now.st_atime_ns, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_mode, now.st_size) == (
            about.st_atime_ns, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_mode, about.st_size,
        ), path  # fmt: skip
    assert set(before) == {*state.path.rglob("*"), state.path}
    with closing(sqlite3.connect(tmp_path / "backup" / "authority.db")) as database:
        for table, held in rows.items():
            assert database.execute(f"SELECT * FROM {table}").fetchall() == held
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_live_state_is_not_backed_up(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state()
    with state.serve() as serving:
        line = refused("process", "backup", "--state", state.path, "--out", tmp_path / "backup")
        assert f"chio: a live state cannot be backed up ({state.path}, a host is running on it; stop it first)" == line
        assert serving.worker("a").ask("inspect")["tree_calls"] == 0
    assert not (tmp_path / "backup").exists()


def test_a_backup_goes_neither_into_the_state_nor_over_something(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state()
    (tmp_path / "link").symlink_to(state.path)
    before = contents(state.path)
    for out in (state.path, state.path / "backup", tmp_path / "link" / "backup", state.path / "no" / ".." / "backup"):
        assert "a backup does not go into the state (" in refused(
            "process", "backup", "--state", state.path, "--out", out
        )
    assert contents(state.path) == before
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    for out in (full, full / "mine", tmp_path / "link"):
        refused("process", "backup", "--state", state.path, "--out", out)
    assert names(full) == {"mine"}
    assert (full / "mine").read_text() == "mine"


def test_what_is_no_state_is_not_backed_up(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    for state in (tmp_path / "empty", tmp_path / "nowhere"):
        assert "not a usable state directory" in refused(
            "process", "backup", "--state", state, "--out", tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_a_state_whose_log_was_changed_makes_no_backup(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state()
    with state.serve() as serving:
        work(serving)
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        database.execute("UPDATE leaf SET body = replace(body, 'transfer', 'TRANSFER') WHERE type = 'receipt'")
    line = refused("process", "backup", "--state", state.path, "--out", tmp_path / "backup")
    assert "chio: the log is damaged (" in line
    assert not (tmp_path / "backup" / "backup.json").exists()


def test_a_state_whose_log_was_written_anew_makes_no_backup(make_state: MakeState, tmp_path: Path) -> None:
    """Every leaf fits its hash, but the newest checkpoint was of other leaves."""
    state = make_state()
    with state.serve() as serving:
        work(serving)
    from chio.kernel.log import leaf_hash

    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        index, body = database.execute("SELECT idx, body FROM leaf WHERE type = 'attempt' LIMIT 1").fetchone()
        changed = body.replace('"reserved"', '"RESERVED"')
        assert changed != body
        hashed = leaf_hash("attempt", changed.encode(), None)
        database.execute("UPDATE leaf SET body = ?, hash = ? WHERE idx = ?", (changed, hashed, index))
    line = refused("process", "backup", "--state", state.path, "--out", tmp_path / "backup")
    assert "chio: the log is not the one that its checkpoints signed (" in line
    assert not (tmp_path / "backup" / "backup.json").exists()


def test_a_file_whose_name_no_manifest_can_have_is_named(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state()
    with open(os.fsencode(state.path) + b"/odd \xff", "w") as odd:
        odd.write("left here by somebody")
    line = refused("process", "backup", "--state", state.path, "--out", tmp_path / "backup")
    assert "its name, 'odd \\udcff', is not UTF-8" in line
    assert not (tmp_path / "backup" / "backup.json").exists()


def test_half_a_backup_is_none(make_state: MakeState, tmp_path: Path) -> None:
    """What a kill left has no manifest, which is written last."""
    state = make_state()
    out = tmp_path / "backup"
    backup(state, out, "--with-signing-key")
    (out / "backup.json").unlink()
    line = refused("process", "restore", "--backup", out, "--state", tmp_path / "new", "--by", "me")
    assert line.startswith(f"chio: not a backup ({out}/backup.json, ")
    assert not (tmp_path / "new").exists()
    shutil.rmtree(out)
