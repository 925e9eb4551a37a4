"""The offline readers: status, logs, state, receipts. They authenticate as nobody, start nothing, write nothing.

A live state is read in place through its WAL, one snapshot. A stopped one is copied first and the copy is opened: a
read-only open of a killed WAL database either writes its `-shm` file or misses acknowledged rows.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import peewee

from chio import statedir
from chio.errors import InputError, StateError
from chio.kernel import receipts
from chio.kernel.store import APPLICATION_ID, SCHEMA_VERSION, half_initialised, unreadable

_WAL = f"{statedir.DATABASE}-wal"


class Reader:
    """One snapshot of a state. `live` says whether a host was running on it."""

    def __init__(self, database: peewee.SqliteDatabase, path: Path, live: bool) -> None:
        self._database = database
        self._path = path
        self.live = live
        version, application = self._one("PRAGMA user_version")[0], self._one("PRAGMA application_id")[0]
        if (application, version) == (0, 0):
            raise half_initialised(str(path))
        if application != APPLICATION_ID or version != SCHEMA_VERSION:
            raise StateError(
                "the state is of another version",
                file=str(path),
                field="user_version",
                why=f"{version}, this program reads {SCHEMA_VERSION}",
                fix="use the program that made it",
            )

    def _rows(self, statement: str, *values: Any) -> list[dict[str, Any]]:
        cursor = self._database.execute_sql(statement, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def _one(self, statement: str, *values: Any) -> tuple[Any, ...]:
        row = self._database.execute_sql(statement, values).fetchone()
        if row is None:
            raise half_initialised(str(self._path))
        return row  # type: ignore[no-any-return]

    def status(self) -> dict[str, Any]:
        """`chio.process.status.v1`."""
        runtime_id, created_ms, ready, planned = self._one(
            "SELECT runtime_id, created_ms, ready, plan IS NOT NULL FROM host"
        )
        attempts = self._rows(
            "SELECT process, number, state, confined, launch_id, outcome, peak_resident_bytes, cpu_ms FROM attempt"
            " ORDER BY process, number"
        )
        processes = self._rows(
            "SELECT process.id AS process_id, parent AS parent_id, depth, state, ceiling, calls, capability_id,"
            " coalesce(revision, '0') AS checkpoint_revision FROM process JOIN usage ON usage.process = process.id"
            " LEFT JOIN worker_checkpoint ON worker_checkpoint.process = process.id ORDER BY position"
        )
        for process in processes:
            process["attempts"] = [
                {
                    name: bool(value) if name == "confined" else value
                    for name, value in attempt.items()
                    if name != "process"
                }
                for attempt in attempts
                if attempt["process"] == process["process_id"]
            ]
        return {
            "schema": "chio.process.status.v1",
            "runtime_id": runtime_id,
            "created_ms": created_ms,
            "initialized": bool(ready),
            "live": self.live,
            "planned": bool(planned),
            "processes": processes,
            "mailboxes": self._rows(
                "SELECT id, last_sequence, acknowledged_through, pending_messages, pending_bytes FROM mailbox"
            ),
            "servers": self._rows(
                "SELECT server, number, coalesce(outcome, 'running') AS outcome, bytes AS stderr_bytes"
                " FROM server_start ORDER BY server, number"
            ),
            "calls": {
                row["state"]: row["n"] for row in self._rows("SELECT state, count(*) AS n FROM call GROUP BY state")
            },
            "log": {
                "size": self._one("SELECT count(*) FROM leaf")[0],
                "checkpoint": self._one("SELECT note FROM log_checkpoint ORDER BY size DESC LIMIT 1")[0],
            },
        }

    def logs(self, process: str, number: int) -> dict[str, Any]:
        """`chio.process.logs.v1` of exactly one attempt."""
        self._require_process(process)
        found = self._rows("SELECT state, outcome FROM attempt WHERE process = ? AND number = ?", process, number)
        if not found:
            raise InputError(
                "there is no such attempt",
                file=str(self._path),
                field="--attempt",
                why=f"{process} has no attempt {number}",
                fix="see `chio process status`",
            )
        streams = {
            row["stream"]: row
            for row in self._rows(
                "SELECT stream, kept, bytes FROM attempt_log WHERE process = ? AND number = ?", process, number
            )
        }
        document: dict[str, Any] = {"schema": "chio.process.logs.v1", "process": process, "attempt": number, **found[0]}
        for stream in ("stdout", "stderr"):
            row = streams.get(stream)
            document[stream] = row["kept"].decode("utf-8", "replace") if row else None
            document[f"{stream}_bytes"] = row["bytes"] if row else None
        return document

    def server_log(self, server: str, number: int | None) -> dict[str, Any]:
        """`chio.process.server-log.v1`: what a tool server wrote to stderr; the newest start without a number."""
        found = self._rows(
            "SELECT number, outcome, kept, bytes FROM server_start WHERE server = ?1 AND number = coalesce(?2,"
            " (SELECT max(number) FROM server_start WHERE server = ?1))",
            server,
            number,
        )
        if not found:
            names = sorted({row["server"] for row in self._rows("SELECT server FROM server_start")})
            raise InputError(
                "there is no log of such a start",
                file=str(self._path),
                field="--server",
                why=f"`{server}`" + (f", start {number}" if number else ""),
                fix=f"one of {', '.join(names)}; the newest starts are kept" if names else "no tool server was started",
            )
        row = found[0]
        return {
            "schema": "chio.process.server-log.v1",
            "server": server,
            "start": row["number"],
            "outcome": row["outcome"],
            "stderr": row["kept"].decode("utf-8", "replace") if row["kept"] is not None else None,
            "stderr_bytes": row["bytes"],
        }

    def state(self, process: str, blob: str | None) -> dict[str, Any]:
        """`chio.process.application-state.v1`: the checkpoint, or one blob verified against its digest."""
        self._require_process(process)
        if blob is None:
            rows = self._rows("SELECT revision, value FROM worker_checkpoint WHERE process = ?", process)
            held = rows[0] if rows else {"revision": "0", "value": "null"}
            data: dict[str, Any] = {"checkpoint": {"revision": held["revision"], "value": orjson.loads(held["value"])}}
        else:
            rows = self._rows("SELECT data FROM blob WHERE process = ? AND sha256 = ?", process, blob)
            if not rows or sha256(rows[0]["data"]).hexdigest() != blob:
                raise InputError(
                    "there is no such blob",
                    file=str(self._path),
                    field="--blob",
                    why="missing" if not rows else "its bytes do not match its digest",
                    fix="name a digest that the process stored",
                )
            body: bytes = rows[0]["data"]
            data = {"blob": {"sha256": blob, "bytes": len(body), "data_base64": base64.b64encode(body).decode()}}
        return {"schema": "chio.process.application-state.v1", "process": process, "data": data}

    def receipts(self) -> Iterator[bytes]:
        """Every receipt in log order, its original text."""
        cursor = self._database.execute_sql(
            "SELECT body, disclosed, signature FROM leaf WHERE type = 'receipt' ORDER BY idx"
        )
        for body, disclosed, signature in cursor:
            yield receipts.text(body.encode(), disclosed.encode(), signature.encode())

    def _require_process(self, process: str) -> None:
        if not self._rows("SELECT 1 FROM process WHERE id = ?", process):
            names = ", ".join(row["id"] for row in self._rows("SELECT id FROM process ORDER BY position LIMIT 20"))
            raise InputError(
                "there is no such process",
                file=str(self._path),
                field="--process",
                why=f"`{process}`",
                fix=f"one of {names}",
            )


@contextmanager
def open_state(path: Path) -> Iterator[Reader]:
    """A snapshot of the state at `path`. Raises `StateError`."""
    directory = statedir.open_existing(path)
    lock = statedir.lock_for_reading(directory, path)
    try:
        if lock is None:
            with _opened(path / statedir.DATABASE, "ro", path, True) as reader:
                yield reader
            return
        with tempfile.TemporaryDirectory(prefix="chio-read-") as private:
            for name in (statedir.DATABASE, _WAL):
                _copy(directory, name, Path(private) / name)
            os.close(lock)
            lock = None
            with _opened(Path(private) / statedir.DATABASE, "rw", path, False) as reader:
                yield reader
    finally:
        if lock is not None:
            os.close(lock)
        os.close(directory)


@contextmanager
def _opened(file: Path, mode: str, path: Path, live: bool) -> Iterator[Reader]:
    database = peewee.SqliteDatabase(f"{file.absolute().as_uri()}?mode={mode}", uri=True, autoconnect=False)
    try:
        database.connect()
        database.execute_sql("BEGIN")
        yield Reader(database, path, live)
    except peewee.DatabaseError as error:
        raise unreadable(str(path), error) from error
    finally:
        database.close()


def _copy(directory: int, name: str, target: Path) -> None:
    """Copy one file of the state without touching even its access time."""
    try:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return
    with os.fdopen(source, "rb") as read, open(target, "xb") as write:
        while chunk := os.sendfile(write.fileno(), read.fileno(), None, 1 << 24):
            del chunk
