"""A reply is a promise: whatever was answered before the kernel died is there afterwards, and answered the same."""

from __future__ import annotations

import json
import os
import random
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from chio.errors import HostFault
from tests.kernel.serving import PROTOCOL, State, Worker, all_of, child, config, mailbox, result_of
from verify.log import Checkpoint, root_of, verify_checkpoint

pytestmark = pytest.mark.timeout(120)

MakeState = Callable[..., State]
WORKERS = 6
ROUNDS = 6


@dataclass
class Promised:
    """Every answer that a client has read to its end, in the order in which it read them."""

    calls: dict[tuple[str, str], tuple[bytes, bytes]] = field(default_factory=dict)  # (process, key): frame, reply
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)  # process: {revision, value}
    left: dict[tuple[str, str], bytes] = field(default_factory=dict)  # sent and not answered


def test_what_was_acknowledged_before_a_sigkill_is_there_and_replays_byte_for_byte(make_state: MakeState) -> None:
    names = [f"w{n}" for n in range(WORKERS)]
    state = make_state(
        config(
            *(child(name, *all_of(name), share=1000) for name in names),
            mailboxes=[mailbox(name, max_messages=100_000) for name in names],
            max_calls=1_000_000,
        )
    )
    promised, seen, points = Promised(), [], random.Random(20261129)
    for number in range(ROUNDS):
        serving = state.serve()
        workers = [serving.worker(name) for name in names]
        seen.append(note_of(state, serving.host.kernel.call("finish")["checkpoint"]))
        acknowledged = threading.Semaphore(0)
        with ThreadPoolExecutor(WORKERS) as pool:
            loads = [pool.submit(load, worker, number, promised, acknowledged) for worker in workers]
            for _ in range(points.randrange(1, 400)):
                assert acknowledged.acquire(timeout=20)
            serving.kill()
            for ended in loads:
                ended.result()
        check(state, promised, seen)
    assert len(promised.calls) > ROUNDS
    # Each message once, whatever was interrupted: as many as there are calls that sent one.
    for name in names:
        sends = state.rows("SELECT count(*) FROM call WHERE tool = ?", f"send_{name}")
        assert state.rows("SELECT last_sequence FROM mailbox WHERE id = ?", name) == sends


def load(worker: Worker, number: int, promised: Promised, acknowledged: threading.Semaphore) -> None:
    """Send, acknowledge and save in turn, until the kernel is gone."""
    name = worker.process
    try:
        with worker.connect() as line:

            def exchange(frame: bytes) -> bytes:
                line.send(frame)
                reply = line.read()
                if not reply.endswith(b"\n"):
                    raise ConnectionResetError
                acknowledged.release()
                return reply

            def call(key: str, tool: str, arguments: dict[str, Any]) -> Any:
                frame = worker.call(f"{key} {number} {n}", tool, arguments)
                promised.left[name, f"{key} {number} {n}"] = frame
                reply = exchange(frame)
                promised.calls[name, f"{key} {number} {n}"] = frame, reply
                del promised.left[name, f"{key} {number} {n}"]
                return result_of(reply)

            revision = int(result_of(exchange(worker.frame("inspect")))["checkpoint"]["revision"])
            for n in range(100_000):
                sent = call("send", f"send_{name}", {"message_key": f"{number} {n}", "payload": {"n": n}})
                assert sent["output"]["value"]["status"] == "sent"
                call("ack", f"ack_{name}", {"through_sequence": sent["output"]["value"]["sequence"]})
                call("far", "transfer", {"é": 1.5})
                saved = exchange(worker.frame("checkpoint", expected_revision=str(revision), value=[number, n]))
                promised.checkpoints[name] = result_of(saved)
                revision += 1
    except OSError:
        return


def check(state: State, promised: Promised, seen: list[Checkpoint]) -> None:
    """Reopen, and hold the kernel to every promise."""
    with state.serve() as serving:
        for name in {name for name, _ in promised.calls}:
            worker = serving.worker(name)
            with worker.connect() as line:
                mine = [(frame, reply) for (process, _), (frame, reply) in promised.calls.items() if process == name]
                for frame, reply in mine:
                    line.send(with_credential_of(worker, frame))
                    assert line.read() == reply
                line.send(worker.frame("inspect"))
                kept = result_of(line.read())["checkpoint"]
            saved = promised.checkpoints.get(name, {"revision": "0", "value": None})
            # One save may have been on its way without its answer.
            assert kept == saved or int(kept["revision"]) == int(saved["revision"]) + 1
        for (name, key), frame in promised.left.items():
            worker = serving.worker(name)
            first = worker.line(with_credential_of(worker, frame))
            assert worker.line(with_credential_of(worker, frame)) == first
            promised.calls[name, key] = frame, first
        promised.left.clear()
        seen.append(note_of(state, serving.host.kernel.call("finish")["checkpoint"]))
    log = state.log()
    hashes = [row[0] for row in state.rows("SELECT hash FROM leaf ORDER BY idx")]
    for checkpoint in seen:
        assert root_of(hashes[: checkpoint.size]) == (checkpoint.size, checkpoint.root)
    assert len(log.receipts) == state.rows("SELECT count(*) FROM call")[0][0]
    shown = set(state.receipt_lines())
    assert all(result_of(reply)["receipt_json"].encode() in shown for _, reply in promised.calls.values())


def note_of(state: State, note: str) -> Checkpoint:
    pins = state.pins
    return verify_checkpoint(note.encode(), pins.log_key, f"chio.invalid/{pins.runtime_id}")


def with_credential_of(worker: Worker, frame: bytes) -> bytes:
    """The same request, of a later attempt of its process."""
    request = json.loads(frame)
    assert request["protocol"] == PROTOCOL
    return json.dumps({**request, "credential": worker.credential}).encode() + b"\n"


# --- receipts.ndjson -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"{", b'{"body":{"schema":"chio.re', b"x" * 100_000], ids=["1", "26", "many"])
@pytest.mark.parametrize("calls", [0, 3])
def test_a_torn_last_line_of_the_shown_receipts_is_cut_at_start(make_state: MakeState, torn: bytes, calls: int) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        for n in range(calls):
            worker.invoke(f"key {n}", "transfer", {})
    whole = state.receipt_lines()
    assert len(whole) == calls
    with open(state.path / "receipts.ndjson", "ab") as file:
        file.write(torn)
    with state.serve() as serving:
        assert state.receipt_lines() == whole
        result = serving.worker("a").invoke("one more", "transfer", {})
        assert state.receipt_lines() == [*whole, result["receipt_json"].encode()]


def test_shown_receipts_that_were_lost_are_still_in_the_log(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        serving.worker("a").invoke("key", "transfer", {})
    (state.path / "receipts.ndjson").unlink()
    with state.serve() as serving:
        serving.worker("a").invoke("key", "transfer", {})
    assert len(state.receipt_lines()) == len(state.log().receipts) == 1
    assert (state.path / "receipts.ndjson").stat().st_mode & 0o777 == 0o600


# --- a disk that fails -----------------------------------------------------------------------------------------------


def test_a_commit_that_fails_ends_the_kernel_without_an_answer(
    make_state: MakeState, capfd: pytest.CaptureFixture[str]
) -> None:
    """RLIMIT_FSIZE lets the write-ahead log grow no more: EFBIG for the kernel as ENOSPC would be (setrlimit(2))."""
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        pid = serving.host.kernel.pid
        before = worker.send("before", "jobs", "m0", "kept")
        with worker.connect() as line, worker.connect() as idle:
            size = (state.path / "authority.db-wal").stat().st_size
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            line.send(worker.call("lost", "send_jobs", {"message_key": "m1", "payload": "lost"}))
            assert line.read() == b""
            assert idle.read() == b""
        with pytest.raises(HostFault, match=r"the kernel is gone .*; run the same command again"):
            serving.host.kernel.call("progress")
    stderr = capfd.readouterr().err
    assert stderr.startswith("chio: the Chio kernel stopped (")
    assert stderr.count("\n") == 1
    with state.serve() as serving:
        worker = serving.worker("a")
        assert worker.send("before", "jobs", "m0", "kept") == before
        messages = worker.receive("all", "jobs", "0")["messages"]
        assert [message["payload"] for message in messages] == ["kept"]
        assert worker.send("lost", "jobs", "m1", "now")["sequence"] == "2"
    state.log()


def test_receipts_that_cannot_be_shown_end_the_kernel_before_the_answer(
    make_state: MakeState, capfd: pytest.CaptureFixture[str]
) -> None:
    """The call is committed, but its line is not written: no reply may say otherwise. A repeat is the same call."""
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        long = {"padding": "x" * 1_000_000}
        for n in range(6):
            worker.invoke(f"long {n}", "transfer", long)
        pid, size = serving.host.kernel.pid, (state.path / "receipts.ndjson").stat().st_size
        # Replays write no database page, only their line.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        with worker.connect() as line:
            line.send(worker.call("long 0", "transfer", long))
            assert line.read() == b""
    assert "chio: the Chio kernel stopped (" in capfd.readouterr().err
    with state.serve() as serving:
        assert len(state.receipt_lines()) == 6
        worker = serving.worker("a")
        assert worker.invoke("long 0", "transfer", long)["reason"] == "out_of_scope"
        assert len(state.receipt_lines()) == 7


# --- start and stop --------------------------------------------------------------------------------------------------


def test_a_kernel_that_was_killed_leaves_nothing_that_keeps_the_next_from_starting(make_state: MakeState) -> None:
    state = make_state()
    for number in range(3):
        serving = state.serve()
        serving.worker("a").ask("checkpoint", expected_revision=str(number), value=number)
        serving.kill()
    with state.serve() as serving:
        assert serving.worker("a").ask("inspect")["checkpoint"] == {"revision": "3", "value": 2}
    assert sorted(os.listdir(state.path)) == sorted(
        [
            ".chio-blobs", "authority.db", "bootstrap.json", "host.json", "kernel.pub", "keys.json", "lock",
            "pins.json", "policy.yaml", "receipts.ndjson",
        ]
    )  # fmt: skip


def test_every_start_and_stop_leaves_the_log_under_a_checkpoint(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        serving.worker("a").invoke("key", "transfer", {})
    log = state.log()
    assert log.checkpoints[-1].size == len(log.leaves)
    serving = state.serve()
    serving.worker("a")
    serving.kill()
    assert state.log().checkpoints[-1].size < len(state.log().leaves)
    with state.serve():
        log = state.log()
        assert log.checkpoints[-1].size == len(log.leaves)


def test_a_log_with_a_gap_is_not_served(make_state: MakeState) -> None:
    from tests.kernel.test_state import plant

    state = make_state()
    serving = state.serve()
    for _ in range(3):
        serving.worker("a")
    serving.kill()
    plant(state, "DELETE FROM leaf WHERE idx = 2")
    with pytest.raises(Exception, match="the log has a gap"):
        state.serve()
