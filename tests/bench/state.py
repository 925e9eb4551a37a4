"""What keeping state costs: saves with history and with size, snapshot edits, and small saves beside a 1 MiB blob.

Each figure stands beside raw SQLite doing the same writes in the same run (WAL, `synchronous=FULL`, one commit each),
so that what else the machine does meets both. The Chio kernel is a process of its own and its worker a socket of this
one; whoever puts blobs is a process too, so that nothing but the kernel is shared.
"""

from __future__ import annotations

import base64
import fcntl
import multiprocessing
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from chio_process import ProcessClient
from chio_process.snapshot import JsonSnapshot
from tests.kernel.serving import State, Worker, child, config

HISTORY = (1, 1_000, 100_000)
SIZES = (1 << 10, 10 << 10, 100 << 10, 1 << 20)
_MEBIBYTE = 1 << 20
_SECONDS = 0.8
_ROUNDS = 3
_PACE_S = 0.1
_WRITERS = 32  # who make the history
_PUTS = 80  # of 1 MiB, at most, in one measurement


def run(directory: str | None) -> None:
    """Print the tables. `directory` is where the files lie: a real disk."""
    with tempfile.TemporaryDirectory(prefix="chio-bench-", dir=directory) as folder:
        names = [f"w{n}" for n in range(_WRITERS + len(SIZES) + 3)]
        host = config(*(child(name, share=1) for name in names))
        host["limits"] |= {"max_processes": len(names) + 1, "state": {"max_bytes": 1 << 30, "max_blobs": 16_384}}
        state = State.make(Path(folder) / "chio", host)
        with state.serve() as serving:
            workers = [serving.worker(name) for name in names]
            raw = Raw(Path(folder) / "raw.db")
            history(workers[:_WRITERS], raw)
            sizes(workers[_WRITERS:], raw)
            snapshots(workers[-1], raw)
            beside_blobs(workers[-2], workers[-3], raw)


def median(figures: list[float]) -> float:
    return sorted(figures)[len(figures) // 2]


# --- the two that are compared ---------------------------------------------------------------------------------------


class Saver:
    """One worker's connection; each save is on the revision that the one before made."""

    def __init__(self, worker: Worker) -> None:
        self._line = worker.connect()
        self._head = orjson.dumps({"protocol": "chio.process.v1", "credential": worker.credential})[:-1]
        self.revision = int(worker.ask("inspect")["checkpoint"]["revision"])

    def save(self, text: bytes) -> None:
        self.send(text)
        self.answered()

    def send(self, text: bytes) -> None:
        head = b'%b,"operation":{"op":"checkpoint","expected_revision":"%d","value":' % (self._head, self.revision)
        self._line.send(head + text + b"}}\n")

    def answered(self) -> None:
        answer = self._line.read()
        if b'"ok":true' not in answer:
            raise RuntimeError(f"a save was refused: {answer[:300]!r}")
        self.revision += 1


class Raw:
    """The same writes without a Chio kernel: a compare-and-swap of one row, or a new blob, and a commit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = wal")
        self._database.execute("PRAGMA synchronous = full")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS checkpoint"
            " (process TEXT PRIMARY KEY, revision INTEGER NOT NULL, value TEXT NOT NULL) STRICT"
        )
        self._database.execute("CREATE TABLE IF NOT EXISTS blob (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL) STRICT")
        self._database.execute("INSERT OR IGNORE INTO checkpoint VALUES ('a', 0, 'null')")
        self.revision = 0

    def save(self, text: bytes) -> None:
        changed = self._database.execute(
            "UPDATE checkpoint SET revision = revision + 1, value = ? WHERE process = 'a' AND revision = ?",
            (text.decode(), self.revision),
        )
        if changed.rowcount != 1:
            raise RuntimeError("the row is at another revision")
        self.revision += 1

    def put(self, data: bytes) -> None:
        self._database.execute("INSERT INTO blob VALUES (?, ?)", (sha256(data).hexdigest(), data))

    def put_each(self, rows: list[bytes]) -> None:
        for row in rows:
            self.put(row)

    def make_up_to(self, made: int, text: bytes) -> None:
        self._database.execute("BEGIN")
        while self.revision < made:
            self.save(text)
        self._database.execute("COMMIT")


def rates(*works: Callable[[], object]) -> list[float]:
    """How often each can be done per second: the median of a few rounds in which they take turns."""
    rounds = [[_rate(work) for work in works] for _ in range(_ROUNDS)]
    return [median([figures[n] for figures in rounds]) for n in range(len(works))]


def _rate(work: Callable[[], object]) -> float:
    start, done = time.perf_counter(), 0
    while (now := time.perf_counter()) - start < _SECONDS:
        work()
        done += 1
    return done / (now - start)


def value(size: int) -> bytes:
    """A value of that many bytes of canonical text, as the members of an object are."""
    entry = {"done": True, "name": "step", "note": "x" * 40}
    text = orjson.dumps({"entries": [entry] * (size // len(orjson.dumps(entry)) + 1)})
    return text[: size - 3].rpartition(b',{"done"')[0] + b"]}" if size > 200 else b'{"n":1}'


# --- the tables ------------------------------------------------------------------------------------------------------


def history(workers: list[Worker], raw: Raw) -> None:
    """Saves of 1 KiB when so many were made before, by this worker and others: many at once share their commits."""
    savers, text, first = [Saver(worker) for worker in workers], value(1 << 10), 0.0
    print(f"{'saves already made':>20}{'saves/s':>10}{'raw/s':>10}{'of raw':>8}{'of the first':>14}")
    for made in HISTORY:
        while sum(saver.revision for saver in savers) < made:
            for saver in savers:
                saver.send(text)
            for saver in savers:
                saver.answered()
        raw.make_up_to(made, text)
        kept, plain = rates(lambda: savers[0].save(text), lambda: raw.save(text))
        first = first or kept / plain
        print(f"{made:>20,}{kept:>10.0f}{plain:>10.0f}{kept / plain:>8.2f}{kept / plain / first:>14.2f}")


def sizes(workers: list[Worker], raw: Raw) -> None:
    """Saves of larger values, each size by a process of its own."""
    print(f"\n{'bytes in a save':>20}{'saves/s':>10}{'raw/s':>10}{'of raw':>8}{'ns per byte':>14}{'raw':>8}")
    for size, worker in zip(SIZES, workers, strict=False):
        saver, text = Saver(worker), value(size)
        kept, plain = rates(lambda s=saver, t=text: s.save(t), lambda t=text: raw.save(t))  # type: ignore[misc]
        per_byte, raw_per_byte = 1e9 / kept / len(text), 1e9 / plain / len(text)
        ratio = kept / plain
        print(f"{len(text):>20,}{kept:>10.0f}{plain:>10.0f}{ratio:>8.2f}{per_byte:>14.1f}{raw_per_byte:>8.1f}")


def snapshots(worker: Worker, raw: Raw) -> None:
    """An 8 MiB document: written, written with one field changed, written without a change, and read."""
    document: dict[str, Any] = {"title": "draft", "pages": []}
    while len(document["pages"]) < 8_000:
        number = len(document["pages"])
        document["pages"].append({"number": number, "text": f"Page {number}. " + os.urandom(480).hex()})

    def write(name: str, change: Callable[[], object]) -> None:
        change()
        before = worker.ask("inspect")["storage"]
        took, reference = timed(lambda: snapshot.write(document))
        after = worker.ask("inspect")["storage"]
        new, count = (after[f"process_{unit}"] - before[f"process_{unit}"] for unit in ("bytes", "blobs"))
        rows = [os.urandom(new // count) for _ in range(count)]
        plain, _ = timed(lambda: raw.put_each(rows))
        beside = f"{took / plain:>8.1f}" if rows else f"{'':>8}"
        print(f"{name:>28}{new:>12,}{count:>7}{took * 1000:>9.0f}{plain * 1000:>9.0f}{beside}")
        references.append(reference)

    references: list[dict[str, Any]] = []
    with ProcessClient(worker.path, worker.credential) as client:
        snapshot = JsonSnapshot(client)
        size = len(orjson.dumps(document))
        heads = ("new bytes", 12), ("blobs", 7), ("ms", 9), ("raw ms", 9), ("of raw", 8)
        print(f"\n{f'{size:,} bytes of JSON':>28}" + "".join(f"{head:>{width}}" for head, width in heads))
        write("first write", lambda: None)
        write("no change", lambda: None)
        write("one field at the front", lambda: document["pages"][0].update(text="changed"))
        write("one field in the middle", lambda: document["pages"][4_000].update(text="changed"))
        write("one page inserted", lambda: document["pages"].insert(2_000, {"number": -1, "text": "new"}))
        took, found = timed(lambda: JsonSnapshot(client).read(references[-1]))
        assert found == document
        print(f"{'read':>28}{'':>12}{'':>7}{took * 1000:>9.0f}")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


# --- small saves beside large blobs ----------------------------------------------------------------------------------


def beside_blobs(small: Worker, large: Worker, raw: Raw) -> None:
    """How long a small save waits while another process puts blobs of 1 MiB, now and then or without a pause."""
    text, saver, turns = value(1 << 10), Saver(small), raw.path.with_name("turns")
    print(f"\n{'small saves':>30}{'p50 us':>9}{'p99 us':>9}{'max us':>9}{'p50':>7}{'p99':>7}{'puts/s':>8}")
    with open(turns, "wb") as lock:

        def raw_save() -> None:
            """The file has one writer at a time: whoever comes waits for its turn."""
            fcntl.flock(lock, fcntl.LOCK_EX)
            raw.save(text)
            fcntl.flock(lock, fcntl.LOCK_UN)

        compared: list[tuple[str, Callable[[], object], Callable[[Connection, float], None]]] = [
            ("Chio", lambda: saver.save(text), lambda link, pace: put_to_kernel(large, link, pace)),
            ("raw", raw_save, lambda link, pace: put_to_file(raw, turns, link, pace)),
        ]
        rows = [Waited(name, save, put, pace) for name, save, put in compared for pace in (None, _PACE_S, 0.0)]
        for _ in range(_ROUNDS):
            for row in rows:
                row.measure()
    for row, alone in zip(rows, [rows[0]] * 3 + [rows[3]] * 3, strict=True):
        row.show(alone)


@dataclass(slots=True)
class Waited:
    """How long small saves took, alone (`pace_s` is None) or beside puts; over several rounds."""

    name: str
    save: Callable[[], object]
    put: Callable[[Connection, float], None]
    pace_s: float | None
    seconds: list[float] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)

    def measure(self) -> None:
        if self.pace_s is None:
            self._save_until(lambda: False)
            return
        with Puts(self.put, self.pace_s) as puts:
            self._save_until(puts.over)
        self.puts.append(puts.per_second)

    def _save_until(self, over: Callable[[], bool]) -> None:
        end = time.perf_counter() + 2 * _SECONDS
        while time.perf_counter() < end and not over():
            self.seconds.append(timed(self.save)[0])

    def at(self, part: float) -> float:
        """This quantile, in microseconds."""
        return sorted(self.seconds)[int(part * (len(self.seconds) - 1))] * 1e6

    def show(self, alone: Waited) -> None:
        how = {None: "alone", 0.0: "puts without a pause"}.get(self.pace_s, f"a put every {_PACE_S * 1000:.0f} ms")
        times = "".join(f"{self.at(part):>9.0f}" for part in (0.5, 0.99, 1))
        ratios = "".join(f"{self.at(part) / alone.at(part):>7.1f}" for part in (0.5, 0.99))
        rate = f"{median(self.puts):>8.0f}" if self.puts else ""
        print(f"{f'{self.name}, {how}':>30}{times}{ratios}{rate}")


class Puts:
    """A process that puts blobs, one every `pace_s`, from the moment it is ready until it is stopped or has no more."""

    def __init__(self, put: Callable[[Connection, float], None], pace_s: float) -> None:
        self._link, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=put, args=(theirs, pace_s))
        self._process.start()
        theirs.close()
        self._link.recv()
        self._start = time.perf_counter()

    def over(self) -> bool:
        return self._link.poll()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.send("stop")
        done = self._link.recv()
        self.per_second = done / (time.perf_counter() - self._start)
        self._process.join()


def put_all(link: Connection, pace_s: float, puts: Iterable[Callable[[], object]]) -> None:
    """Everything is made before the first is put. Tells how many were."""
    ready, done = list(puts), 0
    link.send("ready")
    for put in ready:
        if link.poll(pace_s):
            break
        put()
        done += 1
    link.send(done)


def put_to_kernel(worker: Worker, link: Connection, pace_s: float) -> None:
    with worker.connect() as line:

        def put(frame: bytes) -> None:
            line.send(frame)
            if b'"ok":true' not in (answer := line.read()):
                raise RuntimeError(f"a put was refused: {answer[:300]!r}")

        def frame() -> bytes:
            data = os.urandom(_MEBIBYTE)
            encoded = base64.b64encode(data).decode()
            return worker.frame("blob_put", sha256=sha256(data).hexdigest(), data_base64=encoded)

        put_all(link, pace_s, (partial(put, frame()) for _ in range(_PUTS)))


def put_to_file(raw: Raw, turns: Path, link: Connection, pace_s: float) -> None:
    own = Raw(raw.path)
    with open(turns, "wb") as lock:

        def put(data: bytes) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            own.put(data)
            fcntl.flock(lock, fcntl.LOCK_UN)

        put_all(link, pace_s, (partial(put, os.urandom(_MEBIBYTE)) for _ in range(_PUTS)))
