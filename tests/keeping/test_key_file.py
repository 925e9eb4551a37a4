"""The key file: made once, refused when it cannot protect the state, and never seen again."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from chio import keyfile
from tests.host.commands import accepted, chio, contents, refused, run_chio
from tests.kernel.serving import State

pytestmark = pytest.mark.timeout(120)

PLAN = {
    "schema": "chio.process.run.v2",
    "max_parallel": 1,
    "workers": [{"process": "a", "command": ["/bin/true"], "timeout_seconds": 5}],
}


@pytest.fixture
def state(make_state: Callable[..., State]) -> State:
    """A stopped state with a checkpoint and a call, and beside it what the commands ask for."""
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.ask("checkpoint", expected_revision="0", value={"total": 10})
        worker.send("send", "jobs", "m", {"total": 10})
    request = {"operation_key": "send", "server_id": "chio-ipc", "tool_name": "send_jobs", "arguments": {}}
    context = {name: worker.connection[name] for name in ("runtime_id", "process_id", "capability_id")}
    for name, document in (("plan", PLAN), ("request", request), ("context", context)):
        (state.folder / f"{name}.json").write_text(json.dumps(document))
    return state


def every_verb(state: State) -> list[tuple[object, ...]]:
    """Each command that takes a key file, but for the two that make a state."""
    path, folder = state.path, state.folder
    of = ("--process", "a")
    return [
        ("process", "run", "--state", path, "--plan", folder / "plan.json"),
        ("process", "serve", "--state", path, "--socket", folder / "socket"),
        ("process", "credential", "--state", path, *of, "--socket", folder / "socket", "--out", folder / "out"),
        ("process", "revoke", "--state", path, *of),
        ("process", "revoke-capability", "--state", path, *of),
        ("process", "cancel", "--state", path, *of),
        ("process", "reconcile", "--state", path, *of, "--key", "send", "--outcome", "applied", "--by", "me",
         "--evidence", folder / "plan.json"),
        ("process", "attest-call", "--state", path, "--request", folder / "request.json", "--context",
         folder / "context.json", "--out", folder / "out"),
        ("process", "delete", "--state", path, *of, "--by", "me"),
        ("process", "accept", "--state", path, "--by", "me"),
        ("process", "logs", "--state", path, *of, "--attempt", 1),
        ("process", "state", "--state", path, *of),
        ("receipt", "export", "--state", path, "--out", folder / "out"),
    ]  # fmt: skip


def missing(folder: Path, _: State) -> Path:
    return folder / "nowhere.key"


def a_folder(folder: Path, _: State) -> Path:
    (folder / "folder.key").mkdir()
    return folder / "folder.key"


def a_fifo(folder: Path, _: State) -> Path:
    os.mkfifo(folder / "fifo.key", 0o600)
    return folder / "fifo.key"


def readable_by_a_group(folder: Path, state: State) -> Path:
    assert state.key_file is not None
    return copied(state, folder / "group.key", 0o640)


def inside(_: Path, state: State) -> Path:
    return copied(state, state.path / "inside.key", 0o600)


def a_link_to_inside(folder: Path, state: State) -> Path:
    (folder / "link.key").symlink_to(copied(state, state.path / "inside.key", 0o600))
    return folder / "link.key"


def copied(state: State, target: Path, mode: int) -> Path:
    assert state.key_file is not None
    target.write_bytes(state.key_file.read_bytes())
    target.chmod(mode)
    return target


UNUSABLE = {
    missing: "No such file", a_folder: "no regular file", a_fifo: "no regular file", readable_by_a_group: "others can",
    inside: "lies in the state", a_link_to_inside: "lies in the state",
}  # fmt: skip


@pytest.mark.parametrize("how", UNUSABLE, ids=lambda how: how.__name__)
def test_a_key_file_that_protects_nothing_is_refused_by_every_command(
    state: State, tmp_path: Path, how: Callable[[Path, State], Path]
) -> None:
    file = how(tmp_path, state)
    before = contents(state.path)
    for words in every_verb(state):
        line = refused(*words, "--key-file", file)
        assert f"chio: the key file cannot be used ({file}, --key-file, " in line
        assert UNUSABLE[how] in line
    assert contents(state.path) == before
    assert not (state.folder / "out").exists()


def test_a_key_file_of_another_state_and_none_at_all_are_refused(state: State, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.key"
    keyfile.make(foreign)
    before = contents(state.path)
    for words in every_verb(state):
        line = refused(*words, "--key-file", foreign)
        assert f"chio: the key file is not this state's ({foreign}, --key-file, " in line, words
    for words in every_verb(state)[::4]:
        line = refused(*words)
        assert f"chio: the state is encrypted ({state.path}, --key-file, " in line, words
    assert contents(state.path) == before
    assert not (state.folder / "out").exists()
    assert not (state.folder / "socket").exists()


def test_a_refused_key_file_leaves_what_a_kill_left_as_it_is(make_state: Callable[..., State], tmp_path: Path) -> None:
    """The newest commits are in the write-ahead log alone; the first start with the right key puts that in order."""
    state = make_state()
    (state.folder / "plan.json").write_text(json.dumps(PLAN))
    serving = state.serve()
    serving.worker("a").ask("checkpoint", expected_revision="0", value={"total": 10})
    serving.kill()
    foreign = tmp_path / "foreign.key"
    keyfile.make(foreign)
    before = contents(state.path)
    assert before["authority.db-wal"][2]
    for words in (every_verb(state)[0], every_verb(state)[5], every_verb(state)[-2]):
        refused(*words, "--key-file", foreign)
        refused(*words)
    assert contents(state.path) == before
    with state.serve() as again:
        assert again.worker("a").ask("inspect")["checkpoint"]["value"] == {"total": 10}


NO_KEYS = {
    "empty": b"", "short": b"ab" * 31, "long": b"ab" * 33, "no digits": b"xy" * 32, "no text": b"\xff" * 64,
    "two lines": b"ab" * 32 + b"\n\n", "raw": bytes(range(32)), "spaced": b"ab " * 21 + b"ab",
}  # fmt: skip


@pytest.mark.parametrize("text", NO_KEYS.values(), ids=NO_KEYS)
def test_a_file_that_holds_no_key_is_refused_before_anything_is_opened(
    state: State, tmp_path: Path, text: bytes
) -> None:
    file = tmp_path / "odd.key"
    file.write_bytes(text)
    file.chmod(0o600)
    before = contents(state.path)
    for words in (every_verb(state)[0], every_verb(state)[-2]):
        line = refused(*words, "--key-file", file)
        assert line == (
            f"chio: not a key file ({file}, --key-file, it does not hold 64 hex digits; "
            "make one with `chio process key --out FILE`)"
        )
    made = ("process", "init", "--config", state.folder / "host.json", "--state", tmp_path / "new")
    assert "not a key file" in refused(*made, "--key-file", file)
    assert not (tmp_path / "new").exists()
    assert contents(state.path) == before


def test_a_key_file_for_a_state_that_is_not_encrypted_is_refused(tmp_path: Path, key_file: Path) -> None:
    state = State.make(tmp_path / "plain")
    (state.folder / "plan.json").write_text(json.dumps(PLAN))
    before = contents(state.path)
    for words in (every_verb(state)[0], every_verb(state)[5], every_verb(state)[-2]):
        line = refused(*words, "--key-file", key_file)
        assert "chio: the state is not encrypted (" in line
        assert "leave the option out" in line
    assert contents(state.path) == before


def test_the_name_of_the_key_file_may_stand_in_the_environment(state: State, keyed: Path) -> None:
    shown = accepted("process", "state", "--state", state.path, "--process", "a")
    assert shown["data"]["checkpoint"] == {"revision": "1", "value": {"total": 10}}
    assert accepted("process", "cancel", "--state", state.path, "--process", "b")["cancelled_processes"] == 1
    made = accepted("process", "init", "--config", state.folder / "host.json", "--state", state.folder / "another")
    assert made["initialized"] is True
    assert accepted("process", "status", "--state", state.folder / "another")["encrypted"] is True


def test_status_needs_no_key_file_and_says_that_the_state_is_encrypted(state: State) -> None:
    status = accepted("process", "status", "--state", state.path)
    assert (status["encrypted"], status["epoch"], status["replay_only"]) == (True, 0, False)
    assert [entry["tombstone"] for entry in status["processes"]] == [None, None, None]


def test_a_key_is_made_private_once_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "new.key"
    done = run_chio("process", "key", "--out", file)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, {"key_file": str(file)}, "")
    key = file.read_text()
    assert len(bytes.fromhex(key)) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key.strip() not in done.stdout + done.stderr
    assert "it exists" in refused("process", "key", "--out", file)
    assert file.read_text() == key
    other = tmp_path / "other.key"
    accepted("process", "key", "--out", other)
    assert other.read_text() != key
    assert "its folder does not exist" in refused("process", "key", "--out", tmp_path / "no" / "new.key")
    (tmp_path / "link.key").symlink_to(tmp_path / "elsewhere.key")
    assert "it exists" in refused("process", "key", "--out", tmp_path / "link.key")
    assert not (tmp_path / "elsewhere.key").exists()


def test_one_key_file_serves_two_states_and_their_data_keys_differ(make_state: Callable[..., State]) -> None:
    one, two = make_state(), make_state()
    keys = "SELECT wrapped FROM data_key"
    assert not set(one.rows(keys)) & set(two.rows(keys))
    assert len(set(one.rows(keys))) == 4  # the host's, root's, a's, b's


def test_init_with_an_unusable_key_file_leaves_nothing(tmp_path: Path, key_file: Path) -> None:
    made = State.make(tmp_path / "documents")
    config, state = made.folder / "host.json", tmp_path / "new"
    assert "No such file" in refused(
        "process", "init", "--config", config, "--state", state, "--key-file", tmp_path / "nowhere.key"
    )
    assert not state.exists()
    state.mkdir()
    inside = copied(State(made.folder, key_file), state / "inside.key", 0o600)
    assert "lies in the state" in refused("process", "init", "--config", config, "--state", state, "--key-file", inside)
    assert list(state.iterdir()) == [inside]
    assert chio("process", "init", "--config", config, "--state", made.path, "--key-file", key_file).exit_code == 1
