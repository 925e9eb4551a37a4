"""A worker's own records: checkpoints that are compared and swapped, blobs that are what their digest says."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import pytest

from tests.kernel.serving import Serving, State, Worker, child, code_of, config, result_of

pytestmark = pytest.mark.timeout(60)

MakeState = Callable[..., State]
MEBIBYTE = 1024 * 1024


def save(worker: Worker, revision: str, value: Any) -> dict[str, Any]:
    return worker.ask("checkpoint", expected_revision=revision, value=value)


def put(worker: Worker, data: bytes, digest: str | None = None) -> bytes:
    """The whole answer to a blob_put."""
    encoded = base64.b64encode(data).decode()
    return worker.line(worker.frame("blob_put", sha256=digest or sha256(data).hexdigest(), data_base64=encoded))


def read(worker: Worker, data: bytes) -> bytes:
    answer = worker.ask("blob_read", sha256=sha256(data).hexdigest())
    assert answer == {
        "sha256": sha256(data).hexdigest(), "bytes": len(data), "data_base64": base64.b64encode(data).decode(),
    }  # fmt: skip
    return data


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_begins_at_revision_zero_with_null(worker: Worker) -> None:
    assert worker.ask("inspect")["checkpoint"] == {"revision": "0", "value": None}


def test_each_save_names_the_revision_it_replaces_and_makes_the_next(make_state: MakeState) -> None:
    values: list[Any] = [{"b": 1, "a": [1.5, "é", None]}, None, False, 0, "", [], {}, "x"] + list(range(8, 12))
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        for n, value in enumerate(values):
            assert save(worker, str(n), value) == {"revision": str(n + 1), "value": value}
            assert worker.ask("inspect")["checkpoint"] == {"revision": str(n + 1), "value": value}
        assert serving.worker("b").ask("inspect")["checkpoint"]["revision"] == "0"
    with state.serve() as serving:
        assert serving.worker("a").ask("inspect")["checkpoint"] == {"revision": "12", "value": 11}


@pytest.mark.parametrize("revision", ["0", "2", "10", "9" * 5000])
def test_a_save_against_another_revision_is_a_conflict_and_changes_nothing(worker: Worker, revision: str) -> None:
    save(worker, "0", "kept")
    assert worker.refused("checkpoint", expected_revision=revision, value="lost") == "checkpoint_conflict"
    assert worker.ask("inspect")["checkpoint"] == {"revision": "1", "value": "kept"}


@pytest.mark.parametrize(
    "revision", ["", "00", "01", "+1", "-0", "-1", " 1", "1 ", "1\n", "1.0", "1e0", "0x1", "\u0661"]
)
def test_a_revision_in_another_spelling_is_no_revision(worker: Worker, revision: str) -> None:
    save(worker, "0", 0)
    assert worker.refused("checkpoint", expected_revision=revision, value=1) == "invalid_request"
    assert worker.ask("inspect")["checkpoint"]["revision"] == "1"


def test_revisions_go_on_beyond_every_machine_word(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        save(serving.worker("a"), "0", "first")
    before = "9" * 25
    plant(state, "UPDATE worker_checkpoint SET revision = ?", before)
    with state.serve() as serving:
        worker = serving.worker("a")
        assert save(worker, before, "next") == {"revision": "1" + "0" * 25, "value": "next"}
        assert worker.refused("checkpoint", expected_revision=before, value=0) == "checkpoint_conflict"


def plant(state: State, statement: str, *values: Any) -> None:
    """Change a row of a stopped state, as no kernel would."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(state.path / "authority.db")) as database, database:
        assert database.execute(statement, values).rowcount == 1


def test_a_value_may_have_a_mebibyte_of_canonical_text_and_no_byte_more(worker: Worker) -> None:
    most = "x" * (MEBIBYTE - 2)
    assert save(worker, "0", most) == {"revision": "1", "value": most}
    assert worker.refused("checkpoint", expected_revision="1", value=most + "x") == "invalid_request"
    assert worker.refused("checkpoint", expected_revision="1", value=most[:-1] + "é") == "invalid_request"
    assert worker.ask("inspect")["checkpoint"] == {"revision": "1", "value": most}


def test_white_space_and_escapes_of_the_request_do_not_count_but_canonical_text_does(worker: Worker) -> None:
    """Half a mebibyte of `é` written as six characters each is three times too long as sent, and fits as kept."""
    value = "é" * (200 * 1024)
    frame = worker.frame("checkpoint", expected_revision="0", value=value)
    assert len(frame) > MEBIBYTE
    assert result_of(worker.line(frame)) == {"revision": "1", "value": value}


def test_of_many_saves_at_once_against_one_revision_exactly_one_is_kept(worker: Worker) -> None:
    frames = [worker.frame("checkpoint", expected_revision="0", value=n) for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(worker.line, frames))
    kept = [json.loads(line)["result"] for line in answers if json.loads(line)["ok"]]
    assert len(kept) == 1
    assert {code_of(line) for line in answers if not json.loads(line)["ok"]} == {"checkpoint_conflict"}
    assert worker.ask("inspect")["checkpoint"] == kept[0]


def test_a_checkpoint_belongs_to_the_process_and_not_to_the_attempt(shared: Serving, worker: Worker) -> None:
    save(worker, "0", {"step": 3})
    shared.end(worker)
    assert shared.worker(worker.process).ask("inspect")["checkpoint"] == {"revision": "1", "value": {"step": 3}}


def test_checkpoints_and_blobs_are_no_calls_and_leave_no_leaves(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        before = state.rows("SELECT count(*) FROM leaf")
        save(worker, "0", 1)
        put(worker, b"blob")
        assert state.rows("SELECT count(*) FROM leaf") == before
        assert worker.ask("inspect")["tree_calls"] == 0


# --- blobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0", b"blob", bytes(range(256)) * 4096], ids=["empty", "NUL", "text", "1 MiB"])
def test_a_blob_comes_back_as_it_went_in(worker: Worker, data: bytes) -> None:
    stored = {"sha256": sha256(data).hexdigest(), "bytes": len(data)}
    assert result_of(put(worker, data)) == stored
    assert result_of(put(worker, data)) == stored
    read(worker, data)


def test_a_blob_of_more_than_a_mebibyte_is_refused_and_not_kept(worker: Worker) -> None:
    data = bytes(MEBIBYTE + 1)
    assert code_of(put(worker, data)) == "invalid_request"
    assert worker.refused("blob_read", sha256=sha256(data).hexdigest()) == "blob_missing"


def test_a_blob_under_another_digest_is_refused_and_not_kept(worker: Worker) -> None:
    other = sha256(b"other").hexdigest()
    assert code_of(put(worker, b"blob", other)) == "invalid_request"
    assert worker.refused("blob_read", sha256=other) == "blob_missing"
    assert worker.refused("blob_read", sha256=sha256(b"blob").hexdigest()) == "blob_missing"


@pytest.mark.parametrize("text", ["====", "YQ", "YQ==YQ==", "Y Q==", "YQ==\n", "YQ=\u00e9", "-_8="])
def test_data_that_is_no_standard_base64_is_refused(worker: Worker, text: str) -> None:
    digest = sha256(b"a").hexdigest()
    assert worker.refused("blob_put", sha256=digest, data_base64=text) == "invalid_request"


def test_the_digest_of_somebody_elses_blob_opens_nothing(worker: Worker, bystander: Worker) -> None:
    data = f"of {worker.process} alone".encode()
    put(worker, data)
    assert bystander.refused("blob_read", sha256=sha256(data).hexdigest()) == "blob_missing"
    before = bystander.ask("inspect")["storage"]["process_blobs"]
    # Even a put of the same bytes is a blob of its own, counted like any other.
    put(bystander, data)
    assert bystander.ask("inspect")["storage"]["process_blobs"] == before + 1


def test_the_trees_quota_is_shared_and_a_repeated_put_is_free_even_when_it_is_full(make_state: MakeState) -> None:
    host = config(child("a"), child("b"), state={"max_bytes": 10, "max_blobs": 4})
    state = make_state(host)
    with state.serve() as serving:
        a, b = serving.worker("a"), serving.worker("b")
        put(a, b"123456")
        assert code_of(put(b, b"12345")) == "limit_reached"
        assert b.refused("blob_read", sha256=sha256(b"12345").hexdigest()) == "blob_missing"
        put(b, b"1234")
        assert code_of(put(a, b"1")) == "limit_reached"
        assert result_of(put(a, b"123456"))["bytes"] == 6
        assert code_of(put(b, b"123456")) == "limit_reached"  # the bytes are another process's
        assert result_of(put(a, b""))["bytes"] == 0  # no bytes, but the third record
        assert result_of(put(b, b""))["bytes"] == 0
        storage = a.ask("inspect")["storage"]
        assert storage == {
            "max_blob_bytes": MEBIBYTE,
            "limits": {"max_bytes": 10, "max_blobs": 4},
            "process_bytes": 6,
            "process_blobs": 2,
            "tree_bytes": 10,
            "tree_blobs": 4,
        }
    with state.serve() as serving:
        a = serving.worker("a")
        assert a.ask("inspect")["storage"] == storage
        assert code_of(put(a, b"1")) == "limit_reached"
        assert result_of(put(a, b"123456"))["bytes"] == 6
        read(a, b"123456")


def test_the_number_of_blobs_is_limited_too(make_state: MakeState) -> None:
    with make_state(config(child("a"), state={"max_blobs": 2})).serve() as serving:
        worker = serving.worker("a")
        put(worker, b"one")
        put(worker, b"two")
        assert code_of(put(worker, b"three")) == "limit_reached"
        assert result_of(put(worker, b"two"))["bytes"] == 3


def test_many_puts_at_once_never_pass_the_quota(make_state: MakeState) -> None:
    with make_state(config(child("a"), state={"max_bytes": 50})).serve() as serving:
        worker = serving.worker("a")
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda n: put(worker, b"%010d" % n), range(16)))
        assert sum(json.loads(line)["ok"] for line in answers) == 5
        assert worker.ask("inspect")["storage"]["tree_bytes"] == 50


def test_a_blob_that_rotted_on_disk_is_never_handed_out(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        put(serving.worker("a"), b"blob")
    plant(state, "UPDATE blob SET data = ?", b"blub")
    with state.serve() as serving:
        worker = serving.worker("a")
        assert worker.refused("blob_read", sha256=sha256(b"blob").hexdigest()) == "runtime_error"
        assert worker.ask("inspect")["state"] == "running"


def test_a_read_write_and_inspect_of_one_connection_see_each_other(worker: Worker) -> None:
    """Pipelined, so that nothing but their order makes them do so."""
    data = worker.process.encode()
    encoded, digest = base64.b64encode(data).decode(), sha256(data).hexdigest()
    with worker.connect() as line:
        line.send(
            worker.frame("checkpoint", expected_revision="0", value={"blob": digest})
            + worker.frame("blob_put", sha256=digest, data_base64=encoded)
            + worker.frame("blob_read", sha256=digest)
            + worker.frame("inspect")
        )
        answers = [result_of(line.read()) for _ in range(4)]
    assert answers[2]["data_base64"] == encoded
    assert answers[3]["checkpoint"] == answers[0]
