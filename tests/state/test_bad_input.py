"""What bad input gets, on the raw socket and through each client: the contract's code, and a state that is as it was.

Each case is one operation as its JSON text, the code that the kernel gives it, and, where a client's method can say the
same, that call. `as it was` is every stored row of every process, byte for byte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from tests.clients.drive import Call, bytes_argument, drive
from tests.kernel.serving import Serving, State, Worker, child, code_of, config, result_of

pytestmark = pytest.mark.timeout(60)

MEBIBYTE = 1024 * 1024
MINE, FOREIGN, ABSENT = b"a blob of mine", b"a blob of a sibling's", b"a blob of nobody's"


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass(frozen=True, slots=True)
class Bad:
    """`by_client` is the code through a client, which may refuse it before anything is sent."""

    operation: str
    code: str
    call: Call | None = None
    by_client: str | None = None


def save(value: str, call: Any = None, code: str = "invalid_request", by_client: str | None = None) -> Bad:
    """A save of this JSON text on the current revision; `call` is the same value for a client."""
    return Bad(
        f'{{"op":"checkpoint","expected_revision":"1","value":{value}}}', code,
        Call("checkpoint", ("1", call)) if call is not None else None, by_client,
    )  # fmt: skip


def revision(text: str, code: str = "invalid_request") -> Bad:
    operation = {"op": "checkpoint", "expected_revision": text, "value": "lost"}
    return Bad(json.dumps(operation), code, Call("checkpoint", (text, "lost")))


def put(sha: str, data: str, call: Call | None = None) -> Bad:
    return Bad(json.dumps({"op": "blob_put", "sha256": sha, "data_base64": data}), "invalid_request", call)


def read(sha: str, code: str) -> Bad:
    return Bad(json.dumps({"op": "blob_read", "sha256": sha}), code, Call("readBlob", (sha,)))


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


LONG = "x" * (MEBIBYTE - 1)
BAD = {
    # --- values
    "text that is no JSON": save("{'a':1}", code="invalid_frame"),
    "a value that breaks off": save('{"a":', code="invalid_frame"),
    "what has no JSON form": save("undefined", "$undefined", "invalid_frame", "invalid_request"),
    "a container that is none of JSON's": save("{1,2}", "$map", "invalid_frame", "invalid_request"),
    "not a number": save("NaN", "$nan"),
    "infinity": save("-Infinity", "$infinity"),
    "a number beyond every double": save("1e400"),
    "2^53": save(str(2**53), 2**53),
    "-2^53": save(str(-(2**53)), -(2**53)),
    "2^64": save(str(2**64), 2**64),
    "an integral float beyond 2^53": save("1e16", 1e16),
    "a lone surrogate": save('"\\ud800"', "\ud800"),
    "a member twice": save('{"a":1,"a":2}'),
    "a member twice in two spellings": save('{"a":1,"\\u0061":2}'),
    "63 levels in the request's two": save(json.dumps(nested(63)), nested(63)),
    "10,000 levels": save("[" * 10_000 + "]" * 10_000),
    "a mebibyte and one byte of text": save(json.dumps(LONG), LONG),
    "a mebibyte of two-byte characters": save(f'"{"é" * (MEBIBYTE // 2)}"', "é" * (MEBIBYTE // 2)),
    "more than a request can hold": save(json.dumps(LONG * 2), LONG * 2, "invalid_frame", "request_too_large"),
    "no value at all": Bad('{"op":"checkpoint","expected_revision":"1"}', "invalid_request"),
    "a field too many": Bad('{"op":"checkpoint","expected_revision":"1","value":1,"force":true}', "invalid_request"),
    # --- revisions
    "a revision with a plus": revision("+1"),
    "a revision with a minus": revision("-1"),
    "a revision of minus zero": revision("-0"),
    "a revision with a zero in front": revision("01"),
    "an empty revision": revision(""),
    "a revision with a space": revision("1 "),
    "a revision with a newline": revision("1\n"),
    "a revision with a fraction": revision("1.0"),
    "a revision with an exponent": revision("1e0"),
    "a revision in other digits": revision("\u0661"),
    "a revision that is a number": Bad(
        '{"op":"checkpoint","expected_revision":1,"value":0}', "invalid_request", Call("checkpoint", (1, 0))
    ),
    "no revision": Bad(
        '{"op":"checkpoint","expected_revision":null,"value":0}', "invalid_request", Call("checkpoint", (None, 0))
    ),
    "the revision before": revision("0", "checkpoint_conflict"),
    "the next revision": revision("2", "checkpoint_conflict"),
    "a revision far in the future": revision("9" * 5000, "checkpoint_conflict"),
    # --- blobs
    "bytes under another digest": put(digest(ABSENT), encoded(b"other bytes")),
    "bytes under the digest of what is kept": put(digest(MINE), encoded(b"other bytes")),
    "a digest in capitals": put(digest(ABSENT).upper(), encoded(ABSENT)),
    "half a digest": put(digest(ABSENT)[:32], encoded(ABSENT)),
    "base64 without its padding": put(digest(b"a"), "YQ"),
    "base64 of another alphabet": put(digest(b"\xfb\xff"), "-_8="),
    "base64 with white space": put(digest(b"a"), "YQ==\n"),
    "a blob of a mebibyte and one byte": put(
        digest(bytes(MEBIBYTE + 1)), encoded(bytes(MEBIBYTE + 1)),
        Call("putBlob", (bytes_argument(bytes(MEBIBYTE + 1)),)),
    ),
    "a blob that nobody stored": read(digest(ABSENT), "blob_missing"),
    "a blob that a sibling stored": read(digest(FOREIGN), "blob_missing"),
    "a read by what is no digest": read("../authority.db", "invalid_request"),
    "a read by a digest in capitals": read(digest(MINE).upper(), "invalid_request"),
}  # fmt: skip


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    state = State.make(tmp_path_factory.mktemp("bad") / "folder", config(child("a"), child("b")))
    with state.serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def worker(serving: Serving) -> Worker:
    mine, sibling = serving.worker("a"), serving.worker("b")
    mine.ask("checkpoint", expected_revision="0", value={"kept": [1.5, "é", None]})
    mine.ask("blob_put", sha256=digest(MINE), data_base64=encoded(MINE))
    sibling.ask("blob_put", sha256=digest(FOREIGN), data_base64=encoded(FOREIGN))
    return mine


def stored(serving: Serving) -> list[Any]:
    """Every row that a worker's state is made of."""
    rows = [serving.state.rows(f"SELECT * FROM {table} ORDER BY 1, 2") for table in ("worker_checkpoint", "blob")]
    assert all(rows)
    return rows


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_request_gets_its_code_and_changes_nothing(serving: Serving, worker: Worker, bad: Bad) -> None:
    before, told = stored(serving), worker.ask("inspect")
    request = f'{{"protocol":"chio.process.v1","credential":"{worker.credential}","operation":{bad.operation}}}\n'
    assert code_of(worker.line(request.encode())) == bad.code
    assert stored(serving) == before
    assert worker.ask("inspect") == told


CALLS = {name: bad for name, bad in BAD.items() if bad.call is not None}


@pytest.mark.parametrize("client", ["python", "node"])
def test_each_client_says_the_code_of_a_bad_call_and_nothing_changes(
    serving: Serving, worker: Worker, client: str
) -> None:
    before, told = stored(serving), worker.ask("inspect")
    calls = [bad.call for bad in CALLS.values() if bad.call is not None]
    outcomes = drive(client, worker.path, *calls, credential=worker.credential)
    codes = {name: outcome.code for name, outcome in zip(CALLS, outcomes, strict=True)}
    assert codes == {name: bad.by_client or bad.code for name, bad in CALLS.items()}
    assert stored(serving) == before
    assert worker.ask("inspect") == told


def test_the_edges_of_what_is_good_are_stored(serving: Serving) -> None:
    """The same requests, one step inside: what was refused was refused for what the case is named after."""
    with serving.state.copy() as database:
        (revisions,) = database.execute("SELECT count(*) FROM worker_checkpoint WHERE process = 'b'").fetchone()
    assert revisions == 0
    sibling = serving.worker("b")
    good = [2**53 - 1, -(2**53) + 1, 1e15, "\U0001f600", nested(62), LONG[1:], {"a": 1, "A": 2}]
    for number, value in enumerate(good):
        saved = sibling.ask("checkpoint", expected_revision=str(number), value=value)
        assert saved == {"revision": str(number + 1), "value": value}
    most = bytes(MEBIBYTE)
    assert sibling.ask("blob_put", sha256=digest(most), data_base64=encoded(most))["bytes"] == MEBIBYTE


def test_a_digest_says_nothing_of_whether_another_process_stored_it(serving: Serving, worker: Worker) -> None:
    """Not in a byte of the answer, and not in what a put of the same bytes answers or costs."""
    foreign, absent = (worker.line(worker.frame("blob_read", sha256=digest(data))) for data in (FOREIGN, ABSENT))
    assert foreign == absent
    before = worker.ask("inspect")["storage"]
    for data in (FOREIGN, b"never stored by anybody"):
        answer = result_of(worker.line(worker.frame("blob_put", sha256=digest(data), data_base64=encoded(data))))
        assert answer == {"sha256": digest(data), "bytes": len(data)}
        after = worker.ask("inspect")["storage"]
        assert after["process_blobs"] == before["process_blobs"] + 1
        assert after["tree_bytes"] == before["tree_bytes"] + len(data)
        before = after
