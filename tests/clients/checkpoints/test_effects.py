"""Effect stores: what was recorded is replayed, what was started is not started again by itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chio_process import ProcessClient
from chio_process.checkpoints import (
    Checkpoint,
    CheckpointError,
    Effect,
    EffectsByWork,
    KernelEffects,
    SqliteEffects,
    SqliteStore,
    Standing,
    Work,
)
from tests.clients.checkpoints.proxy import Proxy
from tests.clients.peer import CREDENTIAL, RESULTS, Peer, answering, ok
from tests.kernel.serving import Serving, State, Worker, all_of

ASK = Effect("turn-0", Work.MODEL, "model-1", {"prompt": "p"})
SEND = Effect(
    "send-1", Work.TOOL, "send_jobs",
    {"server": "chio-ipc", "tool": "send_jobs", "arguments": {"message_key": "1", "payload": {"n": 1}}},
)  # fmt: skip


def kind_of(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as error:
        act()
    return str(error.value.kind)


# --- in a file ---


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "effects.db")


def never(effect: Effect) -> Any:
    raise AssertionError("performed again")


def test_a_recorded_result_is_replayed_by_another_program(file: str) -> None:
    with SqliteEffects(file, lambda effect: {"said": [1, 2.5, None], "by": effect.name}) as first:
        assert first.standing(ASK) is Standing.ABSENT
        result = first.perform(ASK)
        assert first.standing(ASK) is Standing.COMPLETED
    with SqliteEffects(file, never) as second:
        for repeat in (False, True):
            assert second.perform(ASK, repeat=repeat) == result == {"said": [1, 2.5, None], "by": "model-1"}


@pytest.mark.parametrize(
    "other",
    [
        Effect("turn-0", Work.MODEL, "model-1", {"prompt": "q"}),
        Effect("turn-0", Work.MODEL, "model-2", {"prompt": "p"}),
        Effect("turn-0", Work.STEP, "model-1", {"prompt": "p"}),
    ],
)
def test_one_key_is_one_request(file: str, other: Effect) -> None:
    with SqliteEffects(file, lambda effect: 1) as effects:
        effects.perform(ASK)
        assert kind_of(lambda: effects.standing(other)) == "effect_conflict"
        assert kind_of(lambda: effects.perform(other, repeat=True)) == "effect_conflict"
        assert effects.perform(ASK) == 1


def test_work_that_failed_is_started_and_is_repeated_only_if_that_is_allowed(file: str) -> None:
    def fail(effect: Effect) -> Any:
        raise ConnectionError("went away")

    with SqliteEffects(file, fail) as effects, pytest.raises(ConnectionError):
        effects.perform(ASK)
    with SqliteEffects(file, lambda effect: "done") as effects:
        assert effects.standing(ASK) is Standing.STARTED
        assert kind_of(lambda: effects.perform(ASK)) == "effect_unknown"
        assert effects.perform(ASK, repeat=True) == "done"
        assert effects.rows("SELECT attempt FROM effect") == [(2,)]


def test_a_result_that_is_not_json_leaves_the_effect_started(file: str) -> None:
    with SqliteEffects(file, lambda effect: {1, 2}) as effects:
        assert kind_of(lambda: effects.perform(ASK)) == "invalid"
        assert effects.standing(ASK) is Standing.STARTED


def test_of_two_that_perform_one_effect_at_once_the_second_is_refused(file: str) -> None:
    started, go = threading.Event(), threading.Event()

    def wait(effect: Effect) -> str:
        started.set()
        assert go.wait(20)
        return "first"

    results: list[Any] = []
    with SqliteEffects(file, wait) as first, SqliteEffects(file, lambda effect: "second") as second:
        thread = threading.Thread(target=lambda: results.append(first.perform(ASK)))
        thread.start()
        assert started.wait(20)
        assert kind_of(lambda: second.perform(ASK)) == "effect_unknown"
        assert second.perform(ASK, repeat=True) == "second"  # what the policy acknowledged
        go.set()
        thread.join()
        assert results == ["second"]  # one result for everybody, the one that was kept first
        assert first.perform(ASK) == "second"


def test_effects_and_checkpoints_can_share_a_file(file: str) -> None:
    with SqliteEffects(file, lambda effect: 1) as effects, SqliteStore(file) as store:
        effects.perform(ASK)
        store.compare_and_swap(Checkpoint.initial("a", "run-1", "acme.order", 1, {}), None)
        assert (store.ids(), effects.standing(ASK)) == (["a"], Standing.COMPLETED)


# --- the file itself ---


def test_the_file_and_what_sqlite_puts_beside_it_are_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SqliteStore(tmp_path / "c.db") as store:
            store.compare_and_swap(Checkpoint.initial("a", "run-1", "acme.order", 1, {}), None)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes.keys() >= {"c.db", "c.db-wal"}
    assert set(modes.values()) == {0o600}


def test_every_commit_is_synced(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "c.db") as store:
        assert store.rows("PRAGMA synchronous") == [(2,)]  # FULL
        assert store.rows("PRAGMA journal_mode") == [("wal",)]


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "c.db").close()
    (tmp_path / "c.db").chmod(0o640)
    assert kind_of(lambda: SqliteStore(tmp_path / "c.db")) == "invalid"


def test_a_link_a_folder_and_a_place_that_is_not_there_are_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "c.db").close()
    (tmp_path / "link.db").symlink_to(tmp_path / "c.db")
    assert kind_of(lambda: SqliteStore(tmp_path / "link.db")) == "invalid"
    assert kind_of(lambda: SqliteStore(tmp_path)) == "invalid"
    assert kind_of(lambda: SqliteStore(tmp_path / "absent" / "c.db")) == "unavailable"
    assert kind_of(lambda: SqliteStore(tmp_path / "absent.db", create=False)) == "unavailable"
    assert not (tmp_path / "absent.db").exists()


def test_a_database_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE notes (text TEXT)")
    other.close()
    path.chmod(0o600)
    before = path.read_bytes()
    assert kind_of(lambda: SqliteStore(path)) == "invalid"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    ["document = '{}'", "document = 'x'", "revision = 5", "document = replace(document, '\"a\"', '\"b\"')"],
)
def test_a_row_that_was_tampered_with_is_corrupt_and_not_replaced(tmp_path: Path, change: str) -> None:
    with SqliteStore(tmp_path / "c.db") as store:
        first = Checkpoint.initial("a", "run-1", "acme.order", 1, {})
        store.compare_and_swap(first, None)
        with store.transaction() as database:
            database.execute(f"UPDATE checkpoint SET {change}")
        rows = store.rows("SELECT * FROM checkpoint")
        assert kind_of(lambda: store.load("a")) == "corrupt"
        assert kind_of(lambda: store.compare_and_swap(first.next({}), 0)) == "corrupt"
        assert store.rows("SELECT * FROM checkpoint") == rows


def test_a_commit_that_the_disk_refuses_is_ambiguous_and_the_file_stays_whole(tmp_path: Path) -> None:
    """RLIMIT_FSIZE lets the write-ahead log grow no more: EFBIG, as ENOSPC would be (setrlimit(2))."""
    first = Checkpoint.initial("a", "run-1", "acme.order", 1, {})
    with SqliteStore(tmp_path / "c.db") as store:
        store.compare_and_swap(first, None)
        child = os.fork()
        if child == 0:
            with SqliteStore(tmp_path / "c.db") as full:
                size = (tmp_path / "c.db-wal").stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
                try:
                    full.compare_and_swap(first.next({"large": "x" * 100_000}), 0)
                except CheckpointError as error:
                    os._exit(0 if error.kind == "ambiguous" else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.load("a") == first
        store.compare_and_swap(first.next({}), 0)


def test_a_store_is_not_carried_over_a_fork(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "c.db") as store:
        child = os.fork()
        if child == 0:
            try:
                store.ids()
            except CheckpointError as error:
                os._exit(0 if error.kind == "invalid" else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.ids() == []


def _create(path: Path, n: int) -> None:
    with SqliteStore(path) as store:
        store.compare_and_swap(Checkpoint.initial(str(n), "run-1", "acme.order", 1, {}), None)


def test_programs_that_make_the_file_at_the_same_time_share_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    starters = [context.Process(target=_create, args=(tmp_path / "c.db", n)) for n in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert [starter.exitcode for starter in starters] == [0, 0, 0, 0]
    with SqliteStore(tmp_path / "c.db") as store:
        assert store.ids() == ["0", "1", "2", "3"]


# --- by the kernel ---


@pytest.fixture(scope="module")
def mail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A host whose two workers share the mailbox `jobs`."""
    with State.make(tmp_path_factory.mktemp("mail") / "folder").serve() as made:
        yield made


@pytest.fixture
def sender(mail: Serving) -> Worker:
    return mail.worker("a")


def test_a_repeated_key_is_the_kernels_original_answer(mail: Serving, sender: Worker) -> None:
    assert "send_jobs" in all_of("jobs")
    with ProcessClient(sender.path, sender.credential) as client:
        effects = KernelEffects(client)
        assert effects.standing(SEND) is Standing.FENCED
        first = effects.perform(SEND)
        assert first["verdict"] == "allow"
        assert effects.perform(SEND, repeat=True)["receipt_json"] == first["receipt_json"]
        other = Effect("send-1", Work.TOOL, "send_jobs", {**SEND.request, "arguments": {"message_key": "2"}})
        assert kind_of(lambda: effects.perform(other)) == "effect_conflict"
    (row,) = mail.state.rows("SELECT count(*) FROM call WHERE operation_key = 'send-1'")
    assert row == (1,)


def test_a_refusal_by_the_kernel_is_a_result(sender: Worker) -> None:
    outside = Effect("send-9", Work.TOOL, "x", {"server": "chio-ipc", "tool": "send_nothing", "arguments": {}})
    with ProcessClient(sender.path, sender.credential) as client:
        response = KernelEffects(client).perform(outside)
    assert (response["verdict"], response["terminal_state"]["state"]) == ("deny", "completed")


def test_a_call_without_a_reply_is_ambiguous_and_performing_it_again_resolves_it(
    mail: Serving, sender: Worker, tmp_path: Path
) -> None:
    proxy = Proxy(tmp_path / "proxy", sender.path)
    proxy.deaf = True
    lost = Effect("send-7", Work.TOOL, "x", {**SEND.request, "arguments": {"message_key": "7", "payload": 7}})
    with ProcessClient(proxy.path, sender.credential) as client:
        effects = KernelEffects(client)
        assert kind_of(lambda: effects.perform(lost)) == "ambiguous"
        proxy.deaf = False
        assert effects.perform(lost)["verdict"] == "allow"
    proxy.close()


@pytest.mark.parametrize(
    ("terminal", "kind"),
    [
        ({"state": "incomplete", "reason": "outcome_unknown_after_dispatch"}, "effect_unknown"),
        ({"state": "incomplete", "reason": "not_dispatched"}, "effect_not_done"),
    ],
)
def test_an_incomplete_outcome_is_shown_with_the_kernels_whole_answer(
    tmp_path: Path, terminal: dict[str, str], kind: str
) -> None:
    answer = {
        **RESULTS["invoke"], "verdict": "deny", "output": None, "terminal_state": terminal,
        "reconciliation": {"outcome": "applied", "by": "somebody", "record": 3},
    }  # fmt: skip
    peer = Peer(tmp_path / "s")
    peer.play(answering(ok(answer)))
    with ProcessClient(peer.path, CREDENTIAL) as client, pytest.raises(CheckpointError) as error:
        KernelEffects(client).perform(SEND, repeat=True)
    peer.close()
    assert (str(error.value.kind), error.value.response) == (kind, answer)
    (frame,) = peer.frames
    assert json.loads(frame)["operation"]["known_outcome_only"] is True


@pytest.mark.parametrize("request_", [{}, {"server": "a", "tool": "b"}, {**SEND.request, "key": "k"}])
def test_a_request_that_is_no_call_is_refused_before_it_is_sent(sender: Worker, request_: dict[str, Any]) -> None:
    with ProcessClient(sender.path, sender.credential) as client:
        effects = KernelEffects(client)
        wrong = Effect("wrong", Work.TOOL, "x", request_)
        assert kind_of(lambda: effects.standing(wrong)) == "invalid"
        assert kind_of(lambda: effects.perform(wrong)) == "invalid"


def test_each_kind_of_work_has_its_store(file: str, sender: Worker) -> None:
    with ProcessClient(sender.path, sender.credential) as client, SqliteEffects(file, lambda effect: 1) as own:
        effects = EffectsByWork({Work.TOOL: KernelEffects(client), Work.MODEL: own})
        assert effects.standing(SEND) is Standing.FENCED
        assert effects.perform(ASK) == 1
        assert own.standing(ASK) is Standing.COMPLETED
        assert kind_of(lambda: effects.perform(Effect("s", Work.STEP, "s", {}))) == "invalid"


@pytest.mark.parametrize(
    "document",
    [
        {}, {"key": "a", "work": "tool", "name": "b"}, {"key": "a", "work": "magic", "name": "b", "request": {}},
        {"key": "", "work": "tool", "name": "b", "request": {}},
        {"key": "a", "work": "tool", "name": "b", "request": []},
        {"key": "a", "work": ["tool"], "name": "b", "request": {}},
        {"key": "a", "work": "tool", "name": "b", "request": {}, "more": 1},
    ],
)  # fmt: skip
def test_an_effect_that_is_none_is_refused(document: Any) -> None:
    assert kind_of(lambda: Effect.from_document(document)) == "invalid"


def test_an_effect_reads_back_as_it_was_written() -> None:
    assert Effect.from_document(SEND.to_document()) == SEND
    assert Effect.from_document(SEND.to_document()).digest == SEND.digest != ASK.digest
