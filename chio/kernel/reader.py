"""The offline readers: status, logs, state, receipts. They authenticate as nobody, start nothing, write nothing.

A live state is read in place through its WAL, one snapshot. A stopped one is copied first and the copy is opened: a
read-only open of a killed WAL database either writes its `-shm` file or misses acknowledged rows.
"""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import peewee

from chio import keyfile, statedir
from chio.errors import InputError
from chio.kernel import receipts
from chio.kernel.counters import NAMES
from chio.kernel.database import half_initialised, require_version, unreadable
from chio.kernel.vault import HOST, Unsealable, Vault, read_key, vault_of

_WAL = f"{statedir.DATABASE}-wal"
_COPIES = "chio-read-"


class Reader:
    """One snapshot of a state. `live` says whether a host was running on it. `key` is that of its key file."""

    def __init__(self, database: peewee.SqliteDatabase, path: Path, live: bool, key: tuple[bytes, str] | None) -> None:
        self._database = database
        self._path = path
        self.live = live
        self._key = key
        require_version(database, str(path))

    @cached_property
    def _vault(self) -> Vault:
        """What opens the workers' data; asked for by the readers that show some. Raises `StateError`."""
        wrapped = dict(self._database.execute_sql("SELECT process, wrapped FROM data_key WHERE wrapped IS NOT NULL"))
        key, file = self._key or (None, None)
        return vault_of(key, self._one("SELECT runtime_id FROM host")[0], wrapped, str(self._path), file)

    def _opened(self, owner: str, place: str, sealed: bytes) -> bytes:
        try:
            return self._vault.open(owner, place, sealed)
        except Unsealable as error:
            raise unreadable(str(self._path), error) from error

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
        runtime_id, created_ms, ready, planned, epoch, replay_only = self._one(
            "SELECT runtime_id, created_ms, ready, plan IS NOT NULL, epoch, replay_only FROM host"
        )
        attempts = self._rows(
            "SELECT process, number, state, confined, launch_id, outcome, peak_resident_bytes, cpu_ms FROM attempt"
            " ORDER BY process, number"
        )
        processes = self._rows(
            "SELECT process.id AS process_id, parent AS parent_id, depth, state, ceiling, calls, capability_id,"
            " coalesce(revision, '0') AS checkpoint_revision, coalesce(bytes, 0) AS checkpoint_bytes,"
            " saved_ms AS checkpoint_saved_ms, tombstone FROM process JOIN usage ON usage.process = process.id"
            " LEFT JOIN worker_checkpoint ON worker_checkpoint.process = process.id"
            " LEFT JOIN data_key ON data_key.process = process.id ORDER BY position"
        )
        counted: dict[str, dict[str, int]] = {}
        for row in self._rows("SELECT process, name, value FROM counter"):
            counted.setdefault(row["process"], {})[row["name"]] = row["value"]
        for process in processes:
            process["counters"] = {name: counted.get(process["process_id"], {}).get(name, 0) for name in NAMES}
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
            "encrypted": self._one("SELECT count(*) FROM data_key")[0] > 0,
            "epoch": epoch,
            "replay_only": bool(replay_only),
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
        self._require_key()
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
            kept = self._opened(process, f"log/{number}/{stream}", row["kept"]) if row else None
            document[stream] = kept.decode("utf-8", "replace") if kept is not None else None
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
        kept = row["kept"]
        if kept is not None:
            kept = self._opened(HOST, f"server/{server}/{row['number']}", kept)
        return {
            "schema": "chio.process.server-log.v1",
            "server": server,
            "start": row["number"],
            "outcome": row["outcome"],
            "stderr": kept.decode("utf-8", "replace") if kept is not None else None,
            "stderr_bytes": row["bytes"],
        }

    def state(self, process: str, blob: str | None) -> dict[str, Any]:
        """`chio.process.application-state.v1`: the checkpoint, or one blob verified against its digest."""
        self._require_key()
        self._require_process(process)
        self._require_data(process)
        if blob is None:
            rows = self._rows("SELECT revision, value FROM worker_checkpoint WHERE process = ?", process)
            revision, value = "0", b"null"
            if rows:
                revision = rows[0]["revision"]
                value = self._opened(process, f"checkpoint/{revision}", rows[0]["value"])
            data: dict[str, Any] = {"checkpoint": {"revision": revision, "value": orjson.loads(value)}}
        else:
            named = self._vault.digest(process, "blob", blob)
            rows = self._rows("SELECT data, file FROM blob WHERE process = ? AND sha256 = ?", process, named)
            body = self._opened(process, f"blob/{blob}", self._blob_bytes(rows[0])) if rows else None
            if body is None or sha256(body).hexdigest() != blob:
                raise InputError(
                    "there is no such blob",
                    file=str(self._path),
                    field="--blob",
                    why="missing" if body is None else "its bytes do not match its digest",
                    fix="name a digest that the process stored",
                )
            data = {"blob": {"sha256": blob, "bytes": len(body), "data_base64": base64.b64encode(body).decode()}}
        return {"schema": "chio.process.application-state.v1", "process": process, "data": data}

    def receipts(self) -> Iterator[bytes]:
        """Every receipt in log order, its original text; of a process whose data was deleted, what is left of it.

        The key file is asked for at once, what is damaged when it is come to.
        """
        self._require_key()
        return self._receipts()

    def _receipts(self) -> Iterator[bytes]:
        cursor = self._database.execute_sql(
            "SELECT idx, body, disclosed, signature, json_extract(body, '$.call.process_id') FROM leaf"
            " WHERE type = 'receipt' ORDER BY idx"
        )
        for index, body, sealed, signature, process in cursor:
            disclosed = self._opened(process, f"disclosed/{index}", sealed) if sealed is not None else b"{}"
            yield receipts.text(body.encode(), disclosed, signature.encode())

    def _blob_bytes(self, row: dict[str, Any]) -> bytes:
        """Sealed; read from its file without touching even its access time."""
        if row["file"] is None:
            return bytes(row["data"])
        path = self._path / statedir.BLOBS / row["file"]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(str(self._path), error) from error
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def checkpoint(self) -> tuple[int, str]:
        """(size, note) of the newest checkpoint of the log: what the exports below stand on."""
        size, note = self._one("SELECT size, note FROM log_checkpoint ORDER BY size DESC LIMIT 1")
        return size, note

    def leaves(self, start: int, end: int) -> Iterator[tuple[str, str, str | None]]:
        """(type, body, signature) of the leaves of a half-open range. They hold nothing that is sealed."""
        cursor: Iterator[tuple[str, str, str | None]] = self._database.execute_sql(
            "SELECT type, body, signature FROM leaf WHERE idx >= ? AND idx < ? ORDER BY idx", (start, end)
        )
        return cursor

    def leaf_hashes(self, start: int, end: int) -> Iterator[bytes]:
        cursor = self._database.execute_sql(
            "SELECT hash FROM leaf WHERE idx >= ? AND idx < ? ORDER BY idx", (start, end)
        )
        return (row[0] for row in cursor)

    def _require_key(self) -> None:
        """Refuse a missing or wrong key file before anything is shown."""
        self._vault  # noqa: B018

    def _require_data(self, process: str) -> None:
        """Refuse to show what was deleted as if it had never been."""
        rows = self._rows("SELECT tombstone FROM data_key WHERE process = ? AND tombstone IS NOT NULL", process)
        if rows:
            raise InputError(
                "the data of this process was deleted",
                file=str(self._path),
                field="--process",
                why=f"leaf {rows[0]['tombstone']} of the log says so",
                fix="nothing brings it back; its receipts and its budget still verify",
            )

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
def open_state(path: Path, key_file: Path | None = None) -> Iterator[Reader]:
    """A snapshot of the state at `path`. Raises `StateError`; a key file is needed for the data of an encrypted one."""
    directory = statedir.open_existing(path)
    key = _read_key_file(key_file, path) if key_file is not None else None
    lock = statedir.lock_for_reading(directory, path)
    try:
        if lock is None:
            with _opened(path / statedir.DATABASE, "ro", path, True, key) as reader:
                yield reader
            return
        with _private_folder() as private:
            for name in (statedir.DATABASE, _WAL):
                _copy(directory, name, private / name)
            os.close(lock)
            lock = None
            with _opened(private / statedir.DATABASE, "rw", path, False, key) as reader:
                yield reader
    finally:
        if lock is not None:
            os.close(lock)
        os.close(directory)


@contextmanager
def _opened(file: Path, mode: str, path: Path, live: bool, key: tuple[bytes, str] | None) -> Iterator[Reader]:
    database = peewee.SqliteDatabase(f"{file.absolute().as_uri()}?mode={mode}", uri=True, autoconnect=False)
    try:
        database.connect()
        database.execute_sql("BEGIN")
        yield Reader(database, path, live, key)
    except peewee.DatabaseError as error:
        raise unreadable(str(path), error) from error
    finally:
        database.close()


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder of mode 0700 for a copy, held by a lock for as long as its reader lives.

    Those of readers that were killed are removed first: nobody holds their locks.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_COPIES}*"):
        _remove_abandoned(left)
    while True:
        with tempfile.TemporaryDirectory(prefix=_COPIES, ignore_cleanup_errors=True) as made:
            fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.path.isdir(made):  # another reader may have found it unlocked, and removed it
                    yield Path(made)
                    return
            finally:
                os.close(fd)


def _remove_abandoned(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # its reader lives
    finally:
        os.close(fd)


def _read_key_file(file: Path, state: Path) -> tuple[bytes, str]:
    fd = keyfile.open_for(file, state)
    try:
        return read_key(fd, str(file)), str(file)
    finally:
        os.close(fd)


def _copy(directory: int, name: str, target: Path) -> None:
    """Copy one file of the state without touching even its access time."""
    try:
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return
    with os.fdopen(source, "rb") as read, open(target, "xb") as write:
        while chunk := os.sendfile(write.fileno(), read.fileno(), None, 1 << 24):
            del chunk
