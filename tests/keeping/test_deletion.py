"""`delete`: a process's key is destroyed and what it sealed is gone; all that was signed and counted still holds."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from chio.errors import ChioError
from tests.confine.tracing import Stepper
from tests.host.commands import accepted, contents, refused, run_chio
from tests.keeping.residue import everything_of, left_of, sealed_of
from tests.kernel.external import Gate, ToolState
from tests.kernel.serving import Serving, State, all_of, child, code_of, config, mailbox

pytestmark = pytest.mark.timeout(240)

SMALL, LARGE = b"a blob" * 10, b"a large blob" * 10_000
LOG = {"stdout": [base64.b64encode(b"what it printed\n" * 20).decode(), 320], "stderr": ["", 0]}
OF_KIN = [child(f"kin{n}", *all_of("jobs"), share=10) for n in range(200)]


def documents() -> dict[str, Any]:
    """Enough processes that their data keys fill pages."""
    kin = [child("a", *all_of("jobs")), *OF_KIN, child("b", *all_of("jobs"))]
    return config(*kin, mailboxes=[mailbox("jobs")], max_processes=256, max_calls=100_000)


def work(serving: Serving, name: str) -> None:
    """Something in every place where a process's data is kept; two messages of three are acknowledged by nobody."""
    worker = serving.worker(name)
    for revision in range(3):
        worker.ask("checkpoint", expected_revision=str(revision), value={"of": name, "text": "x" * 5000 * revision})
    for data in (SMALL, LARGE):
        encoded = base64.b64encode(data).decode()
        worker.ask("blob_put", sha256=sha256(data).hexdigest(), data_base64=encoded)
    for n in range(3):
        worker.send(f"send {n}", "jobs", f"{name} {n}", {"n": n, "of": name, "text": "y" * 3000})
    worker.invoke("refused", "transfer", {"to": name})
    worker.receive("receive", "jobs", "0")
    serving.host.kernel.call(
        "ended", process=name, number=worker.number, outcome="exit_0", record=None, exports=None, logs=LOG
    )


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> State:
    """A stopped state on which `a` and `b` have worked and `a` was cancelled. Tests take copies."""
    state = State.make(tmp_path_factory.mktemp("worked") / "folder", documents(), key_file=key_file)
    with state.serve() as serving:
        work(serving, "a")
        work(serving, "b")
        serving.host.kernel.call("cancel", process="a", by=None)
    return state


@pytest.fixture
def state(worked: State, tmp_path: Path, keyed: Path) -> State:
    return copied(worked, tmp_path / "folder")


def copied(state: State, folder: Path) -> State:
    shutil.copytree(state.folder, folder)
    return State(folder, state.key_file)


def delete(state: State, process: str = "a") -> Any:
    return accepted("process", "delete", "--state", state.path, "--process", process, "--by", "A. Operator")


# --- what is gone ----------------------------------------------------------------------------------------------------


def test_neither_the_key_nor_anything_that_it_sealed_is_in_a_file_of_the_state(state: State) -> None:
    sealed, others = sealed_of(state, "a"), sealed_of(state, "b")
    kept = everything_of(state.path / "authority.db", "b")
    places = [where for where, texts in sealed.items() if texts]
    assert len(places) == 9, places  # all but plan inputs and arguments in flight
    assert left_of(state, sealed) == sorted(places)
    with state.serve() as serving:
        serving.host.kernel.call("delete", process="a", by="me")
        assert left_of(state, sealed) == []  # before the kernel stops and folds its write-ahead log anyway
    assert left_of(state, sealed) == []
    assert left_of(state, others) == sorted(places)
    assert everything_of(state.path / "authority.db", "b") == kept


def test_what_is_deleted_is_said_to_be_and_everything_else_is_as_it_was(state: State) -> None:
    tombstone = delete(state)["tombstone"]
    status = accepted("process", "status", "--state", state.path)
    told = {entry["process_id"]: entry for entry in status["processes"]}
    assert (told["a"]["tombstone"], told["b"]["tombstone"]) == (tombstone, None)
    assert (told["a"]["calls"], told["b"]["calls"]) == (5, 5)
    assert (told["a"]["checkpoint_revision"], told["a"]["checkpoint_saved_ms"]) == ("0", None)
    for words in (["state"], ["state", "--blob", sha256(SMALL).hexdigest()]):
        line = refused("process", *words, "--state", state.path, "--process", "a")
        assert f"chio: the data of this process was deleted ({state.path}, --process, leaf {tombstone} of" in line
    shown = accepted("process", "state", "--state", state.path, "--process", "b", "--blob", sha256(LARGE).hexdigest())
    assert base64.b64decode(shown["data"]["blob"]["data_base64"]) == LARGE
    logs = accepted("process", "logs", "--state", state.path, "--process", "a", "--attempt", 1)
    assert (logs["state"], logs["stdout"], logs["stderr"]) == ("ended", None, None)
    logs = accepted("process", "logs", "--state", state.path, "--process", "b", "--attempt", 1)
    assert logs["stdout"] == "what it printed\n" * 20


def test_signatures_log_and_budgets_add_up_and_receipts_say_what_is_withheld(state: State) -> None:
    before = state.log()
    counted = state.rows("SELECT * FROM usage UNION ALL SELECT process, used FROM grant_usage")
    tombstone = delete(state)["tombstone"]
    log = state.log()  # each receipt's signature, each leaf's hash, each checkpoint's root
    assert log.leaves[: len(before.leaves)] == before.leaves
    assert log.checkpoints[: len(before.checkpoints)] == before.checkpoints
    (body,) = log.bodies("tombstone")
    assert log.leaves[tombstone] == ("tombstone", body)
    assert (body["process_id"], body["by"]) == ("a", "A. Operator")
    assert log.checkpoints[-1].size == len(log.leaves)
    assert state.rows("SELECT * FROM usage UNION ALL SELECT process, used FROM grant_usage") == counted
    withheld = {receipt.body["call"]["process_id"] for receipt in log.receipts if not receipt.arguments_disclosed}
    assert withheld == {"a"}
    out = state.folder / "receipts"
    assert accepted("receipt", "export", "--state", state.path, "--out", out)["receipts"] == 10
    done = run_chio("receipt", "verify", "--input", out, "--trusted-kernel-pubkey", state.path / "kernel.pub")
    assert done.returncode == 3
    assert json.loads(done.stdout)["checks"] == ["signature", "signer_pin"]
    assert "line 1" in done.stderr
    assert "withheld" in done.stderr


def test_pending_messages_of_who_was_deleted_are_skipped_and_take_no_room(state: State) -> None:
    ((messages, size),) = state.rows("SELECT count(*), sum(bytes) FROM message WHERE sender = 'b'")
    assert messages == 3
    delete(state)
    (box,) = accepted("process", "status", "--state", state.path)["mailboxes"]
    assert (box["pending_messages"], box["pending_bytes"], box["last_sequence"]) == (messages, size, 6)
    with state.serve() as serving:
        worker = serving.worker("b")
        told = worker.receive("after", "jobs", "0")
        assert [(message["sequence"], message["sender"]) for message in told["messages"]] == [
            ("4", "b"), ("5", "b"), ("6", "b"),
        ]  # fmt: skip
        frame = worker.call("again", "send_jobs", {"message_key": "a 0", "payload": 1})
        assert json.loads(worker.line(frame))["result"]["reason"] == "message_conflict"
        assert worker.tool("ack", "ack_jobs", through_sequence="6")["status"] == "acknowledged"
    (box,) = accepted("process", "status", "--state", state.path)["mailboxes"]
    assert (box["pending_messages"], box["pending_bytes"]) == (0, 0)


def test_a_call_of_who_was_deleted_is_not_attested(state: State) -> None:
    with state.serve() as serving:
        worker = serving.worker("a")
        context = {name: worker.connection[name] for name in ("runtime_id", "process_id", "capability_id")}
    request = {
        "operation_key": "refused", "server_id": "chio-ipc", "tool_name": "transfer", "arguments": {"to": "a"},
    }  # fmt: skip
    for name, document in (("request", request), ("context", context)):
        (state.folder / f"{name}.json").write_text(json.dumps(document))
    command = (
        "process", "attest-call", "--state", state.path, "--request", state.folder / "request.json", "--context",
        state.folder / "context.json", "--out", state.folder / "call.json",
    )  # fmt: skip
    accepted(*command)
    (state.folder / "call.json").unlink()
    tombstone = delete(state)["tombstone"]
    line = refused(*command)
    assert "chio: the data of this process was deleted (" in line
    assert f"leaf {tombstone} of the log says so" in line
    assert not (state.folder / "call.json").exists()


def test_its_worker_is_answered_cancelled_and_never_something_else(state: State) -> None:
    delete(state)
    with state.serve() as serving:
        worker = serving.worker("a")
        known = worker.call("send 0", "send_jobs", {"message_key": "a 0", "payload": {"n": 0}})
        assert code_of(worker.line(known)) == "runtime_error"
        assert code_of(worker.line(worker.call("new", "send_jobs", {}))) == "cancelled"
        assert worker.refused("checkpoint", expected_revision="0", value=1) == "cancelled"
        assert worker.refused("blob_read", sha256=sha256(SMALL).hexdigest()) == "cancelled"
        assert worker.ask("inspect")["checkpoint"] == {"revision": "0", "value": None}


def test_a_plan_is_the_same_without_the_input_of_who_was_deleted(state: State) -> None:
    plan = {"plan": {"workers": [{"process": name, "input": {"secret": f"input of {name}"}} for name in ("a", "b")]}}
    with state.serve() as serving:
        frozen = serving.host.kernel.call("freeze", plan=json.dumps(plan))
        assert (json.loads(frozen["plan"]), frozen["deleted"]) == (plan, [])
    sealed = sealed_of(state, "a")
    delete(state)
    assert left_of(state, sealed) == []
    with state.serve() as serving:
        frozen = serving.host.kernel.call("freeze", plan=None)
        plan["plan"]["workers"][0]["input"] = None  # type: ignore[assignment]
        assert (json.loads(frozen["plan"]), frozen["deleted"]) == (plan, ["a"])


def test_a_quarantined_call_is_deleted_with_its_process(make: Callable[..., ToolState], tmp_path: Path) -> None:
    state = make()
    serving = state.serve()
    gate = Gate(tmp_path / "bank", "after_effect")
    worker = serving.worker("a")
    with worker.connect() as line:
        line.send(worker.call("key", "pay", {"to": "x"}, "bank"))
        gate.reached()
        gate.disarm()
        serving.kill()
    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        database.execute("UPDATE call SET binding = 'another'")
    with state.serve() as again:
        again.kernel.call("cancel", process="a", by=None)
        sealed = sealed_of(state, "a")
        assert sum(len(texts) for texts in sealed.values()) == 3  # the key, the salt, the arguments
        again.kernel.call("delete", process="a", by="me")
    assert left_of(state, sealed) == []
    with state.serve():
        assert state.call("key") == "dispatched"
    state.log()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_deletion_is_refused_for_who_runs_or_is_not_there_and_changes_nothing(state: State) -> None:
    before = contents(state.path)
    words = ("process", "delete", "--state", state.path)
    line = refused(*words, "--process", "b", "--by", "me")
    assert "chio: only the data of a cancelled process can be deleted (" in line
    assert "there is no such process" in refused(*words, "--process", "nobody", "--by", "me")
    assert "a statement names who makes it" in refused(*words, "--process", "a", "--by", " ")
    after = contents(state.path)
    assert {name: held[2] for name, held in after.items()} == {name: held[2] for name, held in before.items()}


def test_a_plain_state_has_no_key_to_destroy(tmp_path: Path) -> None:
    state = State.make(tmp_path / "plain")
    accepted("process", "cancel", "--state", state.path, "--process", "a")
    line = refused("process", "delete", "--state", state.path, "--process", "a", "--by", "me")
    assert "there is no key to destroy" in line
    assert state.log().bodies("tombstone") == []


def test_deleting_twice_tells_of_the_one_tombstone(state: State) -> None:
    first = delete(state)
    size = len(state.log().leaves)
    assert delete(state) == first
    assert len(state.log().leaves) == size
    assert accepted("process", "cancel", "--state", state.path, "--process", "b")["cancelled_processes"] == 1
    assert delete(state, "b")["tombstone"] > first["tombstone"]


# --- killed in the middle --------------------------------------------------------------------------------------------


def reading(state: State) -> Iterator[sqlite3.Connection]:
    """Somebody who reads the live state, and so keeps its write-ahead log from being emptied."""
    with closing(sqlite3.connect(f"file:{state.path}/authority.db?mode=ro", uri=True)) as database:
        database.execute("BEGIN")
        yield database


def test_a_kill_after_the_commit_leaves_the_rest_to_the_next_start(state: State) -> None:
    """A reader holds the old rows, so the kernel stands between its commit and the erasing when it is killed."""
    sealed = sealed_of(state, "a")
    serving = state.serve()
    watching = sqlite3.connect(f"file:{state.path}/authority.db?mode=ro", uri=True, isolation_level=None)
    for reader in reading(state):
        reader.execute("SELECT count(*) FROM leaf").fetchone()
        asking = threading.Thread(target=ask_to_delete, args=(serving, "a", []))
        asking.start()
        while watching.execute("SELECT tombstone FROM data_key WHERE process = 'a'").fetchone() == (None,):
            pass
        os.kill(serving.host.kernel.pid, signal.SIGKILL)
        asking.join()
    watching.close()
    serving.close()
    assert left_of(state, sealed), "the kill came too late to show anything"
    with state.serve():
        assert left_of(state, sealed) == []
    assert accepted("process", "status", "--state", state.path)["processes"][1]["tombstone"] is not None
    state.log()


def test_a_deletion_that_a_reader_keeps_from_being_finished_says_so_and_is_finished_by_a_repeat(state: State) -> None:
    sealed = sealed_of(state, "a")
    told: list[Any] = []
    with state.serve() as serving:
        for reader in reading(state):
            reader.execute("SELECT count(*) FROM leaf").fetchone()
            ask_to_delete(serving, "a", told)
    assert "somebody is reading" in str(told[0])
    assert delete(state)["tombstone"] == state.rows("SELECT tombstone FROM data_key WHERE process = 'a'")[0][0]
    assert left_of(state, sealed) == []


def ask_to_delete(serving: Serving, process: str, told: list[Any]) -> None:
    try:
        told.append(serving.host.kernel.call("delete", process=process, by="me")["tombstone"])
    except ChioError as error:
        told.append(error)


def test_a_kill_at_any_system_call_leaves_all_of_it_or_nothing_after_the_next_start(
    worked: State, tmp_path: Path
) -> None:
    """The kernel is stopped at one system call after another of one deletion, and killed there."""
    sealed, others = sealed_of(worked, "a"), sealed_of(worked, "b")
    places = sorted(where for where, texts in sealed.items() if texts)
    outcomes: list[tuple[int, bool]] = []
    for round_, steps in enumerate(range(0, 2_000, 70)):
        state = copied(worked, tmp_path / str(round_))
        done = step_and_kill(state, steps)
        with state.serve():
            left = left_of(state, sealed)
        ((tombstone,),) = state.rows("SELECT tombstone FROM data_key WHERE process = 'a'")
        assert left == ([] if tombstone is not None else places), (steps, left)
        assert left_of(state, others) == places
        outcomes.append((steps, tombstone is not None))
        state.log()
        shutil.rmtree(state.folder)
        if done < steps:
            break
    assert {was for _, was in outcomes} == {False, True}, outcomes


def step_and_kill(state: State, steps: int) -> int:
    """SIGKILL after so many stops at system calls of a deletion, or at its end; how many there were."""
    serving = state.serve()
    stepper = Stepper(serving.host.kernel.pid)
    told: list[Any] = []
    asking = threading.Thread(target=ask_to_delete, args=(serving, "a", told))
    asking.start()
    try:
        return stepper.advance(steps, lambda: bool(told))
    finally:
        stepper.kill()
        asking.join()
        serving.close()
