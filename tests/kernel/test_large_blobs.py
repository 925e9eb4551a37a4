"""Blobs of over 64 KiB: a file that is on disk before the row that names it, and no file that no row names."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.serving import State, Worker, child, code_of, config, result_of

pytestmark = pytest.mark.timeout(60)

MakeState = Callable[..., State]
KIBIBYTE = 1024
INLINE = 64 * KIBIBYTE
OVER = INLINE + 3  # the same bytes of base64 hold one to three of data


def files(state: State) -> list[Path]:
    return sorted((state.path / ".chio-blobs").iterdir())


def frame(worker: Worker, data: bytes, text: str | None = None) -> bytes:
    encoded = base64.b64encode(data).decode() if text is None else text
    return worker.frame("blob_put", sha256=sha256(data).hexdigest(), data_base64=encoded)


def put(worker: Worker, data: bytes) -> dict[str, Any]:
    return result_of(worker.line(frame(worker, data)))


def read(worker: Worker, data: bytes) -> bytes:
    return base64.b64decode(worker.ask("blob_read", sha256=sha256(data).hexdigest())["data_base64"])


def data(size: int, seed: int = 0) -> bytes:
    return bytes((at * 31 + seed) % 251 for at in range(size))


@pytest.mark.parametrize(("size", "beside"), [(INLINE, 0), (OVER, 1), (KIBIBYTE**2, 1)])
def test_a_blob_of_over_64_kibibytes_is_a_private_file(make_state: MakeState, size: int, beside: int) -> None:
    state, body = make_state(), data(size)
    serving = state.serve()
    worker = serving.worker("a")
    assert put(worker, body) == {"sha256": sha256(body).hexdigest(), "bytes": size}
    assert read(worker, body) == body
    serving.kill()
    assert len(files(state)) == beside
    for file in files(state):
        assert (file.read_bytes(), file.stat().st_mode & 0o777) == (body, 0o600)
    with state.serve() as serving:
        assert read(serving.worker("a"), body) == body


def test_a_repeat_writes_no_second_file_even_when_both_are_on_their_way(make_state: MakeState) -> None:
    state, body = make_state(), data(KIBIBYTE**2)
    with state.serve() as serving:
        worker = serving.worker("a")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: put(worker, body), range(8)))
        assert len({str(answer) for answer in answers}) == 1
        assert len(files(state)) == 1
        used = worker.ask("inspect")["storage"]
        assert (used["process_blobs"], used["process_bytes"]) == (1, len(body))
        assert read(worker, body) == body


def test_a_blob_that_the_tree_has_no_room_for_leaves_no_file_and_takes_no_room(make_state: MakeState) -> None:
    limits = {"max_bytes": 3 * KIBIBYTE**2 // 2, "max_blobs": 16}
    state = make_state(config(child("a"), child("b"), state=limits))
    with state.serve() as serving:
        workers = [serving.worker("a"), serving.worker("b")]
        with ThreadPoolExecutor(2) as pool:  # two that fit one at a time
            answers = list(pool.map(lambda at: workers[at].line(frame(workers[at], data(KIBIBYTE**2, at))), range(2)))
        refused = [answer for answer in answers if b'"ok":false' in answer]
        assert [code_of(answer) for answer in refused] == ["limit_reached"]
        assert len(files(state)) == 1
        assert workers[0].ask("inspect")["storage"]["tree_bytes"] == KIBIBYTE**2


@pytest.mark.parametrize(
    "text",
    ["A", "AA==" * 40_000, "A" * 100_003, "A" * 99_998 + "!!", "A" * 130_000 + "\n", "A" * 99_996 + "A==="],
    ids=["short", "padding inside", "no multiple of four", "no base64", "line feed", "too much padding"],
)
def test_text_that_is_not_base64_is_refused_and_leaves_nothing(make_state: MakeState, text: str) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        assert code_of(worker.line(frame(worker, b"", text))) == "invalid_request"
        assert files(state) == []
        assert worker.ask("inspect")["storage"]["process_blobs"] == 0


def test_a_file_that_no_row_names_is_removed_at_the_next_start(make_state: MakeState) -> None:
    """What a stop between the file and its commit leaves."""
    state, body = make_state(), data(OVER)
    with state.serve() as serving:
        put(serving.worker("a"), body)
    (kept,) = files(state)
    (kept.parent / ("0" * 32)).write_bytes(b"torn")
    with state.serve() as serving:
        assert files(state) == [kept]
        assert read(serving.worker("a"), body) == body


@pytest.mark.parametrize(
    "spoil", [lambda file: file.write_bytes(b"x" * (OVER)), os.unlink, lambda file: os.truncate(file, 9)]
)
def test_a_file_that_rotted_is_a_fault_and_never_other_bytes(
    make_state: MakeState, spoil: Callable[[Path], object]
) -> None:
    state, body = make_state(), data(OVER)
    with state.serve() as serving:
        worker = serving.worker("a")
        put(worker, body)
        spoil(files(state)[0])
        assert worker.refused("blob_read", sha256=sha256(body).hexdigest()) == "runtime_error"
        assert serving.worker("b").refused("blob_read", sha256=sha256(body).hexdigest()) == "blob_missing"


def test_a_disk_that_takes_no_more_refuses_the_blob_and_serves_on(make_state: MakeState) -> None:
    """Its folder is unwritable to the kernel: as a full disk, it is met before anything names the file."""
    state, body = make_state(), data(OVER)
    with state.serve() as serving:
        worker = serving.worker("a")
        moved = (state.path / ".chio-blobs").rename(state.path / "elsewhere")
        moved.rmdir()
        assert code_of(worker.line(frame(worker, body))) == "runtime_error"
        assert worker.ask("checkpoint", expected_revision="0", value=1)["revision"] == "1"
        assert worker.ask("inspect")["storage"]["process_blobs"] == 0
