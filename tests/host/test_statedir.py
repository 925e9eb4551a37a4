"""State directories that cannot be used as asked: named, with the fix, before anything is started or changed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import CHIO, DEADLINE_S, accepted, chio, contents, refused
from tests.kernel.serving import State, child, config, grant, policy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents, a plan and a state that nobody has used."""
    folder = tmp_path_factory.mktemp("made") / "folder"
    State.make(folder)
    worker = {"process": "a", "command": ["true"], "timeout_seconds": 5}
    plan = {"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker]}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy for one test. The state remembers the documents of the original, which stay as they are."""
    copied = tmp_path / "folder"
    shutil.copytree(made, copied, symlinks=True)
    return copied


def run(folder: Path, state: Path | None = None) -> tuple[object, ...]:
    return ("process", "run", "--state", state or folder / "state", "--plan", folder / "plan.json")


def readers(state: Path, out: Path) -> list[tuple[object, ...]]:
    """Every command that only looks."""
    return [
        ("process", "status", "--state", state),
        ("process", "logs", "--state", state, "--process", "a", "--attempt", 1),
        ("process", "state", "--state", state, "--process", "a"),
        ("receipt", "export", "--state", state, "--out", out / "export.ndjson"),
    ]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: entry[2] for name, entry in contents(folder).items()}


# --- directories -----------------------------------------------------------------------------------------------------


def open_to_others(state: Path) -> str:
    state.chmod(0o710)
    return "chmod 700"


def a_link(state: Path) -> str:
    state.rename(state.parent / "elsewhere")
    state.symlink_to("elsewhere")
    return "it is a link"


def somebody_elses(state: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(state, 12345, 12345)
    return "it belongs to another user"


def absent(state: Path) -> str:
    shutil.rmtree(state)
    return "No such file"


def a_file(state: Path) -> str:
    shutil.rmtree(state)
    state.write_text("mine")
    return "no directory"


def empty(state: Path) -> str:
    shutil.rmtree(state)
    state.mkdir(mode=0o700)
    return "chio process init"


def a_database_that_is_a_link(state: Path) -> str:
    (state / "authority.db").rename(state.parent / "elsewhere.db")
    (state / "authority.db").symlink_to(state.parent / "elsewhere.db")
    return "authority.db"


def a_database_with_two_names(state: Path) -> str:
    os.link(state / "authority.db", state.parent / "elsewhere.db")
    return "authority.db"


def a_database_that_is_no_database(state: Path) -> str:
    (state / "authority.db").write_bytes(b"not a database, but as long as a header of one is" * 4)
    return "authority.db"


def an_empty_database(state: Path) -> str:
    (state / "authority.db").write_bytes(b"")
    return "half initialised"


def a_lock_that_is_gone(state: Path) -> str:
    (state / "lock").unlink()
    return "run init again"


def another_version(state: Path) -> str:
    sql(state, "PRAGMA user_version = 3")
    return "another version"


def another_application(state: Path) -> str:
    sql(state, "PRAGMA application_id = 7")
    return "another version"


def sql(state: Path, script: str) -> None:
    with closing(sqlite3.connect(state / "authority.db")) as database:
        database.executescript(script)


UNUSABLE = [
    open_to_others, a_link, somebody_elses, absent, a_file, empty, a_database_that_is_a_link,
    a_database_with_two_names, a_database_that_is_no_database, an_empty_database, a_lock_that_is_gone,
    another_version, another_application,
]  # fmt: skip


@pytest.mark.parametrize("spoil", UNUSABLE, ids=lambda spoil: spoil.__name__.replace("_", " "))
def test_a_state_that_is_none_of_ours_to_use_is_refused_by_every_command_and_left_as_it_is(
    folder: Path, spoil: Callable[[Path], str]
) -> None:
    word = spoil(folder / "state")
    before = bytes_of(folder)
    for command in (run(folder), *readers(folder / "state", folder)):
        line = refused(*command)
        assert str(folder / "state") in line
        assert word in line
        assert bytes_of(folder) == before


def test_a_state_reached_through_a_link_further_up_is_the_state(folder: Path) -> None:
    """Only the last component may be no link: above it, it is the operator's own file system."""
    (folder.parent / "way").symlink_to(folder)
    status = accepted("process", "status", "--state", folder.parent / "way" / "state")
    assert status["initialized"] is True


# --- what init left unfinished ---------------------------------------------------------------------------------------


def not_ready(state: Path) -> str:
    sql(state, "UPDATE host SET ready = 0")
    return "half initialised"


def without(name: str) -> Callable[[Path], str]:
    def spoil(state: Path) -> str:
        (state / name).unlink()
        return "a pinned file cannot be read"

    spoil.__name__ = f"without {name}"
    return spoil


def other_keys(state: Path) -> str:
    keys = json.loads((state / "keys.json").read_text())
    keys["log"], keys["kernel"] = keys["kernel"], keys["log"]
    (state / "keys.json").write_text(json.dumps(keys))
    return "its keys are not the bootstrap's"


def keys_that_are_no_keys(state: Path) -> str:
    (state / "keys.json").write_text("{}")
    return "a pinned file cannot be read"


def a_changed_policy_inside(state: Path) -> str:
    text = (state / "policy.yaml").read_text()
    (state / "policy.yaml").write_text(text.replace("3600", "7200"))
    return "a pinned document was changed"


def a_changed_config_inside(state: Path) -> str:
    (state / "host.json").write_text((state / "host.json").read_text() + "\n")
    return "a pinned document was changed"


def a_leaf_that_was_torn(state: Path) -> str:
    sql(state, "UPDATE leaf SET body = substr(body, 1, 20) WHERE idx = (SELECT max(idx) FROM leaf)")
    return "the state cannot be read"


UNSERVABLE = [
    a_leaf_that_was_torn, not_ready, without("keys.json"), without("host.json"), without("policy.yaml"), other_keys,
    keys_that_are_no_keys, a_changed_policy_inside, a_changed_config_inside,
]  # fmt: skip


@pytest.mark.parametrize("spoil", UNSERVABLE, ids=lambda spoil: spoil.__name__.replace("_", " "))
def test_a_state_that_is_not_what_its_bootstrap_signed_is_not_served_and_left_as_it_is(
    folder: Path, spoil: Callable[[Path], str]
) -> None:
    word = spoil(folder / "state")
    before = bytes_of(folder)
    line = refused(*run(folder))
    assert str(folder / "state") in line
    assert word in line
    assert bytes_of(folder) == before
    # It can still be looked at.
    assert accepted("process", "status", "--state", folder / "state")["initialized"] is (spoil is not not_ready)


PARTS = ["lock", "keys.json", "policy.yaml", "bootstrap.json", "receipts.ndjson", "authority.db", "authority.db-wal"]


@pytest.mark.parametrize("part", PARTS)
def test_an_init_that_was_killed_on_its_way_leaves_a_state_that_says_so_and_is_never_made_over(
    made: Path, tmp_path: Path, part: str
) -> None:
    """The kernel is killed as soon as a file shows; wherever that lands, the state is whole or says that it is not."""
    for name in ("host.json", "policy.yaml", "plan.json"):
        shutil.copy(made / name, tmp_path)
    state = tmp_path / "state"
    command = [CHIO, "process", "init", "--config", str(tmp_path / "host.json"), "--state", str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as init:
        while not (state / part).exists() and init.poll() is None:
            pass
        for pid in children_of(init.pid):
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = init.communicate(timeout=DEADLINE_S)
    if init.returncode == 0:
        assert json.loads(stdout)["initialized"] is True
        return
    assert stderr.startswith("chio: ")
    assert stdout == ""
    before = without_database(tmp_path)
    line = refused(*run(tmp_path))
    assert "init" in line
    assert str(state) in line
    again = refused("process", "init", "--config", tmp_path / "host.json", "--state", state)
    assert "a state cannot be created here" in again
    assert without_database(tmp_path) == before


def without_database(folder: Path) -> dict[str, bytes]:
    """What SQLite had open when it was killed it puts in order when it is opened; its rows stay what they were."""
    return {name: data for name, data in bytes_of(folder).items() if not name.startswith("state/authority.db")}


def children_of(pid: int) -> list[int]:
    """proc_pid_task_children(5): only this process's own."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


# --- locked ----------------------------------------------------------------------------------------------------------


def test_a_state_is_one_hosts_alone_while_readers_may_look(folder: Path) -> None:
    with State(folder).serve() as serving:
        serving.worker("a").ask("checkpoint", expected_revision="0", value=7)
        assert "a host is running on it" in refused(*run(folder))
        assert accepted("process", "status", "--state", folder / "state")["live"] is True
        assert "it holds a state already" in refused(
            "process", "init", "--config", folder / "host.json", "--state", folder / "state"
        )
        assert serving.worker("a").ask("inspect")["checkpoint"]["value"] == 7


def test_a_process_that_the_host_left_behind_keeps_the_state_locked(folder: Path) -> None:
    """Every process of a host holds the lock: the next host cannot begin while one of them is alive."""
    ours, theirs = socket.socketpair()
    serving = State(folder).serve()
    lock = serving.host.lock
    stray = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=theirs, pass_fds=(lock,), close_fds=True
    )
    theirs.close()
    with open(folder / "state" / "lock") as file:
        try:
            serving.close()
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            ours.close()
            stray.wait(DEADLINE_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- documents that changed since init -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy.yaml", "host.json"])
def test_a_document_that_changed_by_one_byte_since_init_refuses_the_host_by_name(tmp_path: Path, name: str) -> None:
    state = State.make(tmp_path / "folder")
    worker = {"process": "a", "command": ["true"], "timeout_seconds": 5}
    plan = {"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker]}
    (state.folder / "plan.json").write_text(json.dumps(plan))
    original = (state.folder / name).read_bytes()
    (state.folder / name).write_bytes(original + b" ")
    before = bytes_of(state.folder)
    line = refused(*run(state.folder))
    assert f"({state.folder / name}, " in line
    assert bytes_of(state.folder) == before
    # Looking needs no host; and where the documents went away, the pinned ones are what holds.
    accepted("process", "status", "--state", state.path)
    (state.folder / name).unlink()
    with state.serve() as serving:
        assert serving.worker("a").ask("inspect")["state"] == "running"


# --- expired ---------------------------------------------------------------------------------------------------------


def test_an_expired_state_starts_no_attempt_and_says_what_to_do(tmp_path: Path) -> None:
    state = State.make(tmp_path / "folder", config(child("a", "send_jobs"), max_calls=1_000_000), policy(grant(ttl=4)))
    with state.serve() as serving:
        until_expired(serving.worker("a"))
    worker: dict[str, Any] = {"process": "a", "command": ["true"], "timeout_seconds": 5}
    plan = {"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker]}
    (state.folder / "plan.json").write_text(json.dumps(plan))
    attempts = state.rows("SELECT process, number FROM attempt")
    result = chio(*run(state.folder))
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["complete"] is False
    assert result.stderr.count("\n") == 1
    assert "start a new state" in result.stderr
    assert state.rows("SELECT process, number FROM attempt") == attempts
    assert state.rows("SELECT plan FROM host") == [(None,)]
    for command in readers(state.path, state.folder)[2:]:
        accepted(*command)


def until_expired(worker: Any) -> None:
    for n in range(100_000):
        if worker.invoke(f"at {n}", "send_jobs", {"message_key": "m", "payload": 1})["reason"] == "expired":
            return
    raise AssertionError("the grant does not expire")
