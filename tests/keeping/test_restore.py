"""`restore` and `accept`: what is no whole, own backup makes no state; a good one begins an epoch and only replays."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from chio import keyfile
from chio.errors import ChioError
from chio.host import KernelProcess
from tests.confine.tracing import Stepper
from tests.host.commands import accepted, contents, refused
from tests.kernel.external import Gate, ToolState, effects
from tests.kernel.serving import Serving, State, Worker, code_of, result_of
from verify.keys import PublicKey

pytestmark = pytest.mark.timeout(240)

SMALL, LARGE = b"a blob", b"a large blob" * 10_000
SEND = ("send_jobs", {"message_key": "m", "payload": {"total": 10}})
PLAN = {
    "schema": "chio.process.run.v2",
    "max_parallel": 1,
    "workers": [{"process": "a", "command": ["/bin/true"], "timeout_seconds": 5}],
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A state, its backup, and what an operator kept beside it: the signing keys, an early and the last checkpoint."""

    state: State
    backup: Path
    early: Path
    last: Path
    first_answer: bytes

    @property
    def keys(self) -> Path:
        return self.state.path / "keys.json"

    def restore(self, target: Path, *more: object) -> tuple[object, ...]:
        return (
            "process", "restore", "--backup", self.backup, "--state", target, "--by", "A. Operator", "--signing-key",
            self.keys, *more,
        )  # fmt: skip


def as_state(kept: Kept, path: Path) -> State:
    """A restored state, in the shape that the helpers take."""
    assert path.name == "state"
    return State(path.parent, kept.state.key_file)


def note_of(state: State, file: Path) -> Path:
    file.write_text(accepted("process", "status", "--state", state.path)["log"]["checkpoint"])
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Kept:
    folder = tmp_path_factory.mktemp("made")
    state = State.make(folder / "origin", key_file=key_file)
    early = note_of(state, folder / "early.note")
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.ask("checkpoint", expected_revision="0", value={"total": 10})
        for data in (SMALL, LARGE):
            encoded = base64.b64encode(data).decode()
            worker.ask("blob_put", sha256=sha256(data).hexdigest(), data_base64=encoded)
        answer = worker.line(worker.call("send", *SEND))
    last = note_of(state, folder / "last.note")
    accepted("process", "backup", "--state", state.path, "--out", folder / "backup")
    return Kept(state, folder / "backup", early, last, answer)


@pytest.fixture
def kept(made: Kept, tmp_path: Path, keyed: Path) -> Kept:
    """A backup of the test's own."""
    shutil.copytree(made.backup, tmp_path / "backup")
    return Kept(made.state, tmp_path / "backup", made.early, made.last, made.first_answer)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    return tmp_path / "new" / "state"


def nothing_servable(target: Path) -> None:
    assert not target.exists() or list(target.iterdir()) == []


def manifest(kept: Kept, change: Callable[[dict[str, Any]], object]) -> None:
    file = kept.backup / "backup.json"
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


# --- what is no backup -----------------------------------------------------------------------------------------------


def entry(name: str, data: bytes = b"") -> dict[str, Any]:
    return {"name": name, "bytes": len(data), "sha256": sha256(data).hexdigest()}


def test_a_changed_or_missing_file_is_named_and_makes_no_state(kept: Kept, target: Path) -> None:
    names = [found["name"] for found in json.loads((kept.backup / "backup.json").read_text())["files"]]
    (blob,) = [name for name in names if name.startswith(".chio-blobs/")]
    for name in ("authority.db", "pins.json", blob):
        file = kept.backup / name
        data = file.read_bytes()
        file.write_bytes(data[:-1] + b"?" if data else b"?")
        assert f"chio: the backup is damaged ({file}, " in refused(*kept.restore(target))
        file.write_bytes(data)
        file.rename(file.with_name("away"))
        assert f"chio: the backup is damaged ({file}, " in refused(*kept.restore(target))
        file.symlink_to(file.with_name("away"))
        assert f"chio: the backup is damaged ({file}, " in refused(*kept.restore(target))
        file.unlink()
        file.with_name("away").rename(file)
        nothing_servable(target)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", "/etc/chio", "a/../../outside", "a/../b", "./a", "a//b", ".", "..", "a\0b", "lock", "backup.json",
        "authority.db-wal", "authority.db-shm", "authority.db-journal", "keys.json", "pins.json",
    ],
)  # fmt: skip
def test_a_name_that_a_backup_never_has_is_refused(kept: Kept, target: Path, name: str) -> None:
    """Most of all a write-ahead log: SQLite would take it for the database's, after everything was checked."""
    manifest(kept, lambda document: document["files"].append(entry(name)))
    line = refused(*kept.restore(target))
    assert line.startswith(f"chio: not a backup ({kept.backup}/backup.json, files["), line
    assert not target.exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda document: document.update(schema="chio.backup.v2"), "schema"),
        (lambda document: document.update(epoch=-1), "epoch"),
        (lambda document: document.update(size=0), "size"),
        (lambda document: document.update(root="0" * 63), "root"),
        (lambda document: document.update(more=1), "more"),
        (lambda document: document.pop("files"), "files"),
        (lambda document: document.update(signing_key="yes"), "signing_key"),
        (lambda document: document.update(signing_key=True), "files"),
        (lambda document: document.update(files=[]), "files"),
    ],
)
def test_a_manifest_of_another_shape_is_refused_with_its_field(
    kept: Kept, target: Path, change: Callable[[dict[str, Any]], object], field: str
) -> None:
    manifest(kept, change)
    line = refused(*kept.restore(target))
    assert field in line
    assert "backup.json" in line
    assert not target.exists()


def test_a_manifest_of_other_figures_is_refused(kept: Kept, target: Path) -> None:
    manifest(kept, lambda document: document.update(root="0" * 64))
    assert "chio: the backup is damaged (" in refused(*kept.restore(target))
    manifest(kept, lambda document: document.update(size=1))
    assert "chio: the backup is damaged (" in refused(*kept.restore(target))
    nothing_servable(target)


def test_a_database_whose_log_was_changed_is_refused_although_the_manifest_fits_it(kept: Kept, target: Path) -> None:
    file = kept.backup / "authority.db"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE leaf SET body = replace(body, 'chio-ipc', 'CHIO-ipc') WHERE type = 'receipt'")
    for leftover in kept.backup.glob("authority.db-*"):
        leftover.unlink()
    named = entry("authority.db", file.read_bytes())
    manifest(
        kept,
        lambda document: document.update(
            files=[named if found["name"] == "authority.db" else found for found in document["files"]]
        ),
    )
    assert "chio: the log is damaged (" in refused(*kept.restore(target))
    nothing_servable(target)


# --- what it is restored with ----------------------------------------------------------------------------------------


def test_signing_keys_are_needed_and_must_be_the_states(kept: Kept, target: Path, tmp_path: Path) -> None:
    without = [word for word in kept.restore(target) if word not in ("--signing-key", kept.keys)]
    line = refused(*without)
    assert f"chio: a restored state needs its signing keys ({kept.backup}, --signing-key, " in line
    other = State.make(tmp_path / "other")
    for file, why in (
        (other.path / "keys.json", "its keys are not the bootstrap's"),
        (tmp_path / "nowhere", "it is no regular file"),
        (tmp_path, "it is no regular file"),
        (kept.early, "cannot be read"),
    ):
        assert why in refused(*without, "--signing-key", file)
        nothing_servable(target)


def test_a_key_file_of_another_state_is_refused_and_none_is_needed(kept: Kept, target: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.key"
    keyfile.make(foreign)
    assert "chio: the key file is not this state's (" in refused(*kept.restore(target, "--key-file", foreign))
    nothing_servable(target)
    (target / "inside.key").parent.mkdir(exist_ok=True)
    shutil.copyfile(foreign, target / "inside.key")
    (target / "inside.key").chmod(0o600)
    assert "lies in the state" in refused(*kept.restore(target, "--key-file", target / "inside.key"))
    (target / "inside.key").unlink()
    os.environ.pop("CHIO_KEY_FILE")
    assert accepted(*kept.restore(target))["replay_only"] is True
    assert kept.state.key_file is not None
    shown = accepted("process", "state", "--state", target, "--process", "a", "--key-file", kept.state.key_file)
    assert shown["data"]["checkpoint"]["value"] == {"total": 10}


def test_nothing_that_is_there_is_restored_over(kept: Kept, target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("mine")
    assert "it is not empty" in refused(*kept.restore(target))
    assert [path.name for path in target.iterdir()] == ["mine"]
    before = contents(kept.state.path)
    assert "it holds a state already" in refused(*kept.restore(kept.state.path))
    assert contents(kept.state.path) == before
    (target / "mine").unlink()
    target.chmod(0o755)
    accepted(*kept.restore(target))
    assert target.stat().st_mode & 0o777 == 0o700


def test_a_checkpoint_that_is_not_this_logs_is_refused(kept: Kept, target: Path, tmp_path: Path) -> None:
    other = State.make(tmp_path / "other")
    note = kept.last.read_text()
    name, size, root, blank, signature = note.removesuffix("\n").split("\n")
    forged = tmp_path / "forged"
    signed = base64.b64decode(signature.split(" ")[2])
    changed = base64.b64encode(signed[:-1] + bytes([signed[-1] ^ 1])).decode()
    texts = {
        "of another log": note_of(other, tmp_path / "of other").read_text(),
        "of another root": "\n".join([name, size, base64.b64encode(b"0" * 32).decode(), blank, signature, ""]),
        "of another size": "\n".join([name, str(int(size) - 1), root, blank, signature, ""]),
        "signed by nobody": "\n".join([name, size, root, blank, ""]),
        "signed wrong": "\n".join([name, size, root, blank, " ".join([*signature.split(" ")[:2], changed]), ""]),
        "not base64": "\n".join([name, size, root, blank, " ".join([*signature.split(" ")[:2], "???"]), ""]),
        "empty": "",
    }  # fmt: skip
    for why, text in texts.items():
        forged.write_text(text)
        line = refused(*kept.restore(target, "--checkpoint", forged))
        assert f"chio: not a checkpoint of this log ({forged}, --checkpoint, " in line, why
        nothing_servable(target)
    assert "cannot be read" in refused(*kept.restore(target, "--checkpoint", tmp_path / "nowhere"))
    nothing_servable(target)


def test_a_backup_older_than_a_checkpoint_that_was_kept_is_refused(
    make_state: Callable[..., State], target: Path, tmp_path: Path, keyed: Path
) -> None:
    state = make_state()
    accepted("process", "backup", "--state", state.path, "--out", tmp_path / "old", "--with-signing-key")
    with state.serve() as serving:
        serving.worker("a").invoke("later", *SEND)
    newer = note_of(state, tmp_path / "newer.note")
    words = ("process", "restore", "--backup", tmp_path / "old", "--state", target, "--by", "me")
    line = refused(*words, "--checkpoint", newer)
    assert "chio: the backup does not hold what the checkpoint covers (" in line
    nothing_servable(target)
    assert accepted(*words)["epoch"] == 1


def test_a_fork_of_the_log_is_refused_by_a_checkpoint_of_the_other_branch(
    kept: Kept, target: Path, tmp_path: Path
) -> None:
    """Two lives of one backup: each has leaves of its own under the same signing keys."""
    accepted(*kept.restore(target))
    accepted("process", "accept", "--state", target, "--by", "me")
    ours = note_of(as_state(kept, target), tmp_path / "ours.note")
    with kept.state.serve() as serving:
        for n in range(8):
            serving.worker("b").invoke(f"theirs {n}", "transfer", {})
    accepted("process", "backup", "--state", kept.state.path, "--out", tmp_path / "theirs")
    again = tmp_path / "again"
    words = [tmp_path / "theirs" if word == kept.backup else word for word in kept.restore(again)]
    line = refused(*words, "--checkpoint", ours)
    assert "leaves are others" in line
    nothing_servable(again)


# --- a state that only replays ---------------------------------------------------------------------------------------


def test_a_restored_state_continues_the_log_that_was_seen_before(kept: Kept, target: Path) -> None:
    before = kept.state.log()
    (target.parent / "early").write_text(kept.early.read_text())
    told = accepted(*kept.restore(target, "--checkpoint", kept.last))
    size = json.loads((kept.backup / "backup.json").read_text())["size"]
    assert told == {
        "restored": True, "runtime_id": kept.state.pins.runtime_id, "epoch": 1, "size": size + 1, "replay_only": True,
    }  # fmt: skip
    log = as_state(kept, target).log()  # each hash, each signature, each checkpoint's root, by the verifier's functions
    assert log.leaves[:size] == before.leaves[:size]
    (body,) = log.bodies("epoch")
    root = json.loads((kept.backup / "backup.json").read_text())["root"]
    assert {name: body[name] for name in ("schema", "epoch", "event", "by", "size", "root")} == {
        "schema": "chio.epoch.v1", "epoch": 1, "event": "restored", "by": "A. Operator", "size": size, "root": root,
    }  # fmt: skip
    assert body["time_ms"] >= max(leaf.get("time_ms", 0) for _, leaf in before.leaves[:size])
    assert log.checkpoints[-1].size == size + 1
    with closing(sqlite3.connect(target / "authority.db")) as database:
        ((signature, text),) = database.execute("SELECT signature, body FROM leaf WHERE type = 'epoch'").fetchall()
    PublicKey.from_hex(kept.state.kernel_key.hex).verify_record("epoch", text.encode(), signature)
    status = accepted("process", "status", "--state", target)
    assert (status["epoch"], status["replay_only"], status["encrypted"]) == (1, True, True)


def nothing_new(serving: Serving, state: State, first: bytes) -> Worker:
    """What is known is answered as it was; what is new is a fault of nobody, and changes nothing."""
    worker = serving.worker("a")
    size = len(state.log().leaves)
    assert worker.line(worker.call("send", *SEND)) == first
    kept = worker.ask("inspect")
    assert kept["checkpoint"] == {"revision": "1", "value": {"total": 10}}
    for data in (SMALL, LARGE):
        read = worker.ask("blob_read", sha256=sha256(data).hexdigest())
        assert base64.b64decode(read["data_base64"]) == data
    for key, tool, arguments in (
        ("new", *SEND), ("receive", "receive_jobs", {"after_sequence": "0", "limit": 1}), ("refused", "transfer", {}),
    ):  # fmt: skip
        assert code_of(worker.line(worker.call(key, tool, arguments))) == "runtime_error"
    assert code_of(worker.line(worker.call("send", "send_jobs", {}))) == "conflict"
    assert worker.refused("checkpoint", expected_revision="1", value={"total": 11}) == "runtime_error"
    for data in (b"new", b"new and large" * 10_000):
        encoded = base64.b64encode(data).decode()
        put = worker.refused("blob_put", sha256=sha256(data).hexdigest(), data_base64=encoded)
        assert put == "runtime_error"
    assert worker.refused("cancel") == "runtime_error"
    assert worker.refused("note", event="resumed") == "runtime_error"
    assert worker.ask("inspect") == kept
    assert len(state.log().leaves) == size
    assert len(list((state.path / ".chio-blobs").iterdir())) == 1
    return worker


def test_until_it_is_accepted_a_restored_state_only_replays(kept: Kept, target: Path) -> None:
    accepted(*kept.restore(target))
    state = as_state(kept, target)
    with state.serve() as serving:
        nothing_new(serving, state, kept.first_answer)
    (target.parent / "plan.json").write_text(json.dumps(PLAN))
    with state.serve():
        pass  # the attempt that asked is ended by this start
    size = len(state.log().leaves)
    line = refused("process", "run", "--state", target, "--plan", target.parent / "plan.json")
    assert "chio process accept" in line
    assert len(state.log().leaves) == size
    assert accepted("process", "status", "--state", target)["planned"] is False

    assert accepted("process", "accept", "--state", target, "--by", "A. Operator") == {"accepted": True, "epoch": 1}
    assert "there is nothing to accept" in refused("process", "accept", "--state", target, "--by", "A. Operator")
    assert [(body["epoch"], body["event"]) for body in state.log().bodies("epoch")] == [
        (1, "restored"),
        (1, "accepted"),
    ]
    with state.serve() as serving:
        worker = serving.worker("a")
        assert worker.line(worker.call("send", *SEND)) == kept.first_answer
        assert worker.invoke("new", "send_jobs", {"message_key": "n", "payload": 1})["verdict"] == "allow"
        assert worker.ask("checkpoint", expected_revision="1", value={"total": 11})["revision"] == "2"
    status = accepted("process", "status", "--state", target)
    assert (status["epoch"], status["replay_only"]) == (1, False)


def test_a_call_that_was_in_flight_at_the_backup_is_unknown_and_is_not_sent_again(
    make: Callable[..., ToolState], target: Path, tmp_path: Path, keyed: Path
) -> None:
    state = make()
    serving = state.serve()
    gate = Gate(tmp_path / "bank", "after_effect")
    worker = serving.worker("a")
    with worker.connect() as line:
        line.send(worker.call("paid", "pay", {"to": "x"}, "bank"))
        gate.reached()
        gate.disarm()
        serving.kill()
    accepted("process", "backup", "--state", state.path, "--out", tmp_path / "hot", "--with-signing-key")
    accepted("process", "restore", "--backup", tmp_path / "hot", "--state", target, "--by", "me")
    restored = ToolState(target.parent, state.key_file)
    paid = len(effects(tmp_path / "bank"))
    with restored.serve() as again:
        worker = again.worker("a")
        answers = [worker.line(worker.call("paid", "pay", {"to": "x"}, "bank")) for _ in range(2)]
        assert answers[0] == answers[1]
        assert result_of(answers[0])["terminal_state"]["reason"] == "outcome_unknown_after_dispatch"
        assert code_of(worker.line(worker.call("new", "pay", {"to": "y"}, "bank"))) == "runtime_error"
    assert len(effects(tmp_path / "bank")) == paid == 1
    restored.log()


def test_a_state_that_was_never_restored_has_nothing_to_accept(make_state: Callable[..., State], keyed: Path) -> None:
    state = make_state()
    assert "there is nothing to accept" in refused("process", "accept", "--state", state.path, "--by", "me")
    assert "a statement names who makes it" in refused("process", "accept", "--state", state.path, "--by", "")
    assert state.log().bodies("epoch") == []


def test_each_restore_begins_the_next_epoch(kept: Kept, target: Path, tmp_path: Path) -> None:
    accepted(*kept.restore(target))
    accepted("process", "backup", "--state", target, "--out", tmp_path / "second")
    again = tmp_path / "again" / "state"
    again.parent.mkdir()
    words = [tmp_path / "second" if word == kept.backup else word for word in kept.restore(again)]
    assert accepted(*words)["epoch"] == 2
    state = as_state(kept, again)
    assert [(body["epoch"], body["event"]) for body in state.log().bodies("epoch")] == [
        (1, "restored"),
        (2, "restored"),
    ]
    assert accepted("process", "accept", "--state", again, "--by", "me") == {"accepted": True, "epoch": 2}


def test_a_plain_backup_with_its_keys_is_restored_without_any_file_more(target: Path, tmp_path: Path) -> None:
    """No blob, so that the folder of large ones is empty; a folder with an export."""
    state = State.make(tmp_path / "plain")
    (state.path / "exported").mkdir()
    (state.path / "exported" / "result.json").write_text("{}")
    accepted("process", "backup", "--state", state.path, "--out", tmp_path / "plain backup", "--with-signing-key")
    words = ("process", "restore", "--backup", tmp_path / "plain backup", "--state", target, "--by", "me")
    accepted(*words)
    assert (target / "exported" / "result.json").read_text() == "{}"
    accepted("process", "accept", "--state", target, "--by", "me")
    with State(target.parent).serve() as serving:
        worker = serving.worker("a")
        encoded = base64.b64encode(LARGE).decode()
        assert worker.ask("blob_put", sha256=sha256(LARGE).hexdigest(), data_base64=encoded)["bytes"] == len(LARGE)


# --- killed in the middle --------------------------------------------------------------------------------------------


def test_a_kill_at_any_system_call_of_a_restore_leaves_nothing_to_serve_or_all_of_it(
    kept: Kept, tmp_path: Path
) -> None:
    whole = 0
    rounds = list(range(0, 3_000, 90))
    for steps in rounds:
        target = tmp_path / str(steps) / "state"
        target.parent.mkdir()
        done = step_and_kill(kept, target, steps)
        if (target / "authority.db").exists():
            whole += 1
            assert accepted("process", "status", "--state", target)["replay_only"] is True
            state = as_state(kept, target)
            assert [body["event"] for body in state.log().bodies("epoch")] == ["restored"]
            with state.serve() as serving:
                nothing_new(serving, state, kept.first_answer)
        elif target.exists():
            assert "not a usable state directory" in refused("process", "status", "--state", target)
        if done < steps:
            break
    assert 0 < whole < len(rounds)


def step_and_kill(kept: Kept, target: Path, steps: int) -> int:
    """SIGKILL after so many stops at system calls, counted from the new directory; how many there were."""
    kernel = KernelProcess()
    stepper = Stepper(kernel.pid)
    ended: list[object] = []

    def ask() -> None:
        try:
            kernel.call(
                "restore", backup=str(kept.backup), path=str(target), by="me", signing_keys=str(kept.keys),
                checkpoint=None, key_file=None, allow_volatile=False,
            )  # fmt: skip
            ended.append(None)
        except ChioError as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        stepper.advance(1_000_000, lambda: target.exists() or bool(ended))  # Python's own start, and the checks
        return stepper.advance(steps, lambda: bool(ended))
    finally:
        stepper.kill()
        asking.join()
        kernel.close()
