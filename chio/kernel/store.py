"""All SQL that writes. One SQLite database, one connection, one writer.

peewee opens it and applies the schema; the path of a call uses prepared statements on the same connection, since a
model read costs about fifteen times a prepared select. Offline reading is `chio.kernel.reader`.

A commit is WAL with `synchronous=FULL`. An error at COMMIT ends the kernel (`CommitFailed`): after a failed fsync
nobody knows what is on disk, so nothing may be retried or answered.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peewee

from chio import statedir
from chio.errors import StateError
from chio.kernel.calls import State

SCHEMA_VERSION = 1
MAX_SERVER_STARTS = 8
APPLICATION_ID = 0x4348494F  # "CHIO"

_SCHEMA = Path(__file__).with_name("schema.sql")
_PRAGMAS = {
    "journal_mode": "wal",
    "synchronous": "full",
    "foreign_keys": 1,
    "trusted_schema": 0,
    "temp_store": "memory",
    "cache_size": -16_000,
    "wal_autocheckpoint": 4000,  # pages: hot ones are written back once instead of four times
}


def unreadable(path: str, error: Exception) -> StateError:
    return StateError(
        "the state cannot be read", file=f"{path}/{statedir.DATABASE}", why=str(error), fix="restore it from a backup"
    )


def half_initialised(path: str) -> StateError:
    return StateError(
        "the state is half initialised",
        file=path,
        why="`init` did not finish",
        fix="remove it and run `chio process init` again",
    )


class CommitFailed(Exception):
    """COMMIT reported an I/O error. The kernel must end without answering."""


@dataclass(slots=True)
class CallRow:
    """One row of `call`, as it is stored."""

    process: str
    operation_key: str
    state: State
    server: str
    tool: str
    recovery_policy: str
    binding: str
    parameter_salt: bytes
    parameter_hash: str
    parameters: bytes | None
    dispatch: int
    request_id: str
    attempt: int | None
    launch_id: str | None
    debited: str | None
    reason: str | None
    output: bytes | None
    receipt: int | None
    reconciliation: str | None = None


_CALL_COLUMNS = (
    "process, operation_key, state, server, tool, recovery_policy, binding, parameter_salt, parameter_hash, parameters,"
    " dispatch, request_id, attempt, launch_id, debited, reason, output, receipt, reconciliation"
)


def _text(value: bytes | None) -> str | None:
    return value.decode() if value is not None else None


class Store:
    """The open database. `begin` is lazy: reads and replays never start a transaction."""

    def __init__(self, database: peewee.SqliteDatabase, directory: int) -> None:
        self._database = database
        self._connection: sqlite3.Connection = database.connection()
        self._execute = self._connection.execute
        self._directory = directory

    # --- opening -------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, directory: int) -> Store:
        """A new database in the state directory, which must be the working directory."""
        statedir.write_new(directory, statedir.DATABASE, b"")
        database = _connect()
        database.connection().executescript(_SCHEMA.read_text())
        database.execute_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
        os.fsync(directory)
        return cls(database, directory)

    @classmethod
    def open(cls, directory: int, path: str) -> Store:
        """The database of an existing state. Raises `StateError` for another version or a broken file."""
        if os.stat(statedir.DATABASE, dir_fd=directory).st_size == 0:
            raise half_initialised(path)  # before SQLite makes a database of it
        try:
            database = _connect()
        except peewee.DatabaseError as error:
            raise unreadable(path, error) from error
        try:
            cls._check(database, path)
        except peewee.DatabaseError as error:
            database.close()
            raise unreadable(path, error) from error
        except StateError:
            database.close()
            raise
        os.fsync(directory)
        return cls(database, directory)

    @staticmethod
    def _check(database: peewee.SqliteDatabase, path: str) -> None:
        application = database.execute_sql("PRAGMA application_id").fetchone()[0]
        version = database.execute_sql("PRAGMA user_version").fetchone()[0]
        journal = database.execute_sql("PRAGMA journal_mode").fetchone()[0]
        if (application, version) == (0, 0):
            raise half_initialised(path)
        if application != APPLICATION_ID or version != SCHEMA_VERSION:
            raise StateError(
                "the state is of another version",
                file=f"{path}/{statedir.DATABASE}",
                field="user_version",
                why=f"{version}, this program reads {SCHEMA_VERSION}",
                fix="use the program that made it, or start a new state",
            )
        if journal != "wal":
            raise StateError(
                "the state cannot be served durably",
                file=path,
                field="journal_mode",
                why=journal,
                fix="move it to a local disk",
            )

    def close(self) -> None:
        self._database.close()

    # --- transactions --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if not self._connection.in_transaction:
            self._execute("BEGIN IMMEDIATE")

    def savepoint(self) -> None:
        self._execute("SAVEPOINT item")

    def release(self) -> None:
        self._execute("RELEASE item")

    def rollback(self) -> None:
        if self._connection.in_transaction:
            self._execute("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def commit(self) -> None:
        try:
            self._execute("COMMIT")
        except sqlite3.Error as error:
            raise CommitFailed(str(error)) from error

    # --- host ----------------------------------------------------------------------------------------------------

    def put_host(self, **columns: Any) -> None:
        names = ", ".join(columns)
        self._execute(
            f"INSERT INTO host (id, {names}) VALUES (1, {', '.join('?' * len(columns))})", tuple(columns.values())
        )

    def set_host(self, column: str, value: Any) -> None:
        self._execute(f"UPDATE host SET {column} = ? WHERE id = 1", (value,))

    def host(self) -> dict[str, Any]:
        cursor = self._execute("SELECT * FROM host WHERE id = 1")
        row = cursor.fetchone()
        return dict(zip((column[0] for column in cursor.description), row, strict=True)) if row else {}

    # --- processes, usage, revocations ---------------------------------------------------------------------------

    def put_process(
        self,
        position: int,
        name: str,
        parent: str | None,
        depth: int,
        share: int,
        ceiling: int,
        capability_id: str,
        capability: str,
    ) -> None:
        self._execute(
            "INSERT INTO process VALUES (?, ?, ?, ?, ?, ?, 'running', ?, ?)",
            (position, name, parent, depth, share, ceiling, capability_id, capability),
        )
        self._execute("INSERT INTO usage VALUES (?, 0)", (name,))

    def processes(self) -> list[tuple[str, str | None, int, int, str, str, str, int]]:
        """(id, parent, depth, ceiling, state, capability_id, capability, calls), root first."""
        return self._execute(
            "SELECT id, parent, depth, ceiling, state, capability_id, capability, calls FROM process"
            " JOIN usage ON usage.process = process.id ORDER BY position"
        ).fetchall()

    def usage(self) -> list[tuple[str, int]]:
        return self._execute("SELECT process, calls FROM usage").fetchall()

    def debit_calls(self, names: Iterable[str]) -> None:
        for name in names:
            self._execute("UPDATE usage SET calls = calls + 1 WHERE process = ?", (name,))

    def grant_used(self, process: str, position: int) -> int:
        row = self._execute(
            "SELECT used FROM grant_usage WHERE process = ? AND position = ?", (process, position)
        ).fetchone()
        return row[0] if row else 0

    def debit_grant(self, process: str, position: int, by: int) -> None:
        self._execute(
            "INSERT INTO grant_usage VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET used = used + excluded.used"
            if by > 0
            else "UPDATE grant_usage SET used = used + ?3 WHERE process = ?1 AND position = ?2",
            (process, position, by),
        )

    def cancel(self, names: list[str]) -> None:
        for name in names:
            self._execute("UPDATE process SET state = 'cancelled' WHERE id = ?", (name,))

    def revoke(self, capability_id: str, now_ms: int) -> bool:
        """True when it was not revoked before."""
        return self._execute("INSERT OR IGNORE INTO revocation VALUES (?, ?)", (capability_id, now_ms)).rowcount == 1

    def revoked(self) -> frozenset[str]:
        return frozenset(row[0] for row in self._execute("SELECT capability_id FROM revocation"))

    def put_credential(self, digest: bytes, process: str, now_ms: int) -> None:
        self._execute("INSERT INTO credential VALUES (?, ?, ?, 0)", (digest, process, now_ms))

    def credentials(self) -> list[tuple[bytes, str]]:
        """(digest, process) of every credential that still counts."""
        return self._execute("SELECT digest, process FROM credential WHERE revoked = 0").fetchall()

    def revoke_credentials(self, process: str) -> int:
        """How many there were."""
        return self._execute("UPDATE credential SET revoked = 1 WHERE process = ? AND revoked = 0", (process,)).rowcount

    # --- log -----------------------------------------------------------------------------------------------------

    def put_leaf(
        self, index: int, kind: str, body: bytes, signature: str | None, disclosed: bytes | None, hashed: bytes
    ) -> None:
        self._execute(
            "INSERT INTO leaf VALUES (?, ?, ?, ?, ?, ?)",
            (index, kind, body.decode(), signature, _text(disclosed), hashed),
        )

    def leaf(self, index: int) -> tuple[str, str, str | None, str | None]:
        """(type, body, signature, disclosed)."""
        row = self._execute("SELECT type, body, signature, disclosed FROM leaf WHERE idx = ?", (index,)).fetchone()
        if row is None:
            raise sqlite3.DatabaseError(f"leaf {index} is missing")
        return row

    def put_checkpoint(self, size: int, frontier: bytes, note: bytes) -> None:
        self._execute("INSERT INTO log_checkpoint VALUES (?, ?, ?)", (size, frontier, note.decode()))

    def last_checkpoint(self) -> tuple[int, bytes, str] | None:
        row = self._execute("SELECT size, frontier, note FROM log_checkpoint ORDER BY size DESC LIMIT 1").fetchone()
        return row

    def leaf_hashes(self, start: int) -> Iterable[tuple[int, bytes]]:
        return self._execute("SELECT idx, hash FROM leaf WHERE idx >= ? ORDER BY idx", (start,))

    def intents(self, process: str, key: str) -> list[int]:
        """Indexes of a call's intents. It reads the whole log: for an operator's command, not for a call's path."""
        rows = self._execute(
            "SELECT idx FROM leaf WHERE type = 'intent' AND json_extract(body, '$.call.process_id') = ?"
            " AND json_extract(body, '$.call.operation_key') = ? ORDER BY idx",
            (process, key),
        )
        return [row[0] for row in rows]

    def newest_bodies(self, count: int) -> list[str]:
        return [row[0] for row in self._execute("SELECT body FROM leaf ORDER BY idx DESC LIMIT ?", (count,))]

    # --- calls ---------------------------------------------------------------------------------------------------

    def find_call(self, process: str, key: str) -> CallRow | None:
        row = self._execute(
            f"SELECT {_CALL_COLUMNS} FROM call WHERE process = ? AND operation_key = ?", (process, key)
        ).fetchone()
        return _call(row) if row else None

    def dispatched_calls(self) -> list[CallRow]:
        """The calls on their way, oldest first, without those that are quarantined."""
        rows = self._execute(
            f"SELECT {_CALL_COLUMNS} FROM call WHERE state = 'dispatched'"
            " AND (process, operation_key) NOT IN (SELECT process, operation_key FROM quarantine) ORDER BY id"
        ).fetchall()
        return [_call(row) for row in rows]

    def quarantine(self, process: str, key: str, why: str) -> None:
        self._execute("INSERT INTO quarantine VALUES (?, ?, ?)", (process, key, why))

    def quarantined(self) -> set[tuple[str, str]]:
        return set(self._execute("SELECT process, operation_key FROM quarantine"))

    def put_call(self, call: CallRow) -> None:
        self._execute(
            f"INSERT INTO call ({_CALL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                call.process,
                call.operation_key,
                call.state.value,
                call.server,
                call.tool,
                call.recovery_policy,
                call.binding,
                call.parameter_salt,
                call.parameter_hash,
                _text(call.parameters),
                call.dispatch,
                call.request_id,
                call.attempt,
                call.launch_id,
                call.debited,
                call.reason,
                _text(call.output),
                call.receipt,
                call.reconciliation,
            ),
        )

    def move_call(self, call: CallRow, before: State) -> None:
        """Write a call that changed state; the old state stands in the WHERE, so no move can happen twice."""
        changed = self._execute(
            "UPDATE call SET state = ?, parameters = ?, dispatch = ?, request_id = ?, attempt = ?, launch_id = ?,"
            " debited = ?, reason = ?, output = ?, receipt = ?, reconciliation = ?"
            " WHERE process = ? AND operation_key = ? AND state = ?",
            (
                call.state.value,
                _text(call.parameters),
                call.dispatch,
                call.request_id,
                call.attempt,
                call.launch_id,
                call.debited,
                call.reason,
                _text(call.output),
                call.receipt,
                call.reconciliation,
                call.process,
                call.operation_key,
                before.value,
            ),
        ).rowcount
        if changed != 1:
            raise sqlite3.DatabaseError(f"call {call.operation_key} is not in state {before.value}")

    # --- attempts ------------------------------------------------------------------------------------------------

    def put_attempt(self, process: str, number: int, credential: bytes, confined: bool, now_ms: int) -> None:
        self._execute(
            "INSERT INTO attempt (process, number, state, credential, confined, reserved_ms)"
            " VALUES (?, ?, 'reserved', ?, ?, ?)",
            (process, number, credential, int(confined), now_ms),
        )

    def launch_attempt(self, process: str, number: int, launch_id: str) -> None:
        self._one(
            "UPDATE attempt SET state = 'running', launch_id = ?"
            " WHERE process = ? AND number = ? AND state = 'reserved'",
            (launch_id, process, number),
        )

    def end_attempt(self, process: str, number: int, outcome: str, usage: dict[str, Any], exports: str | None) -> None:
        self._one(
            "UPDATE attempt SET state = 'ended', outcome = ?, peak_resident_bytes = ?, peak_resident_source = ?,"
            " cpu_ms = ?, exports = ? WHERE process = ? AND number = ? AND state IN ('reserved', 'running')",
            (
                outcome,
                usage.get("peak_resident_bytes"),
                usage.get("peak_resident_source"),
                usage.get("cpu_ms"),
                exports,
                process,
                number,
            ),
        )

    def settle_exports(self, process: str, number: int) -> None:
        self._execute("UPDATE attempt SET exports = NULL WHERE process = ? AND number = ?", (process, number))

    def next_server_start(self, server: str) -> int:
        row = self._execute("SELECT max(number) FROM server_start WHERE server = ?", (server,)).fetchone()
        return (row[0] or 0) + 1

    def put_server_start(self, server: str, number: int) -> None:
        """A start of a tool server; only the newest few are kept."""
        self._execute("INSERT INTO server_start (server, number) VALUES (?, ?)", (server, number))
        self._execute("DELETE FROM server_start WHERE server = ? AND number <= ?", (server, number - MAX_SERVER_STARTS))

    def end_server(self, server: str, number: int, outcome: str, kept: bytes, written: int) -> None:
        self._execute(
            "UPDATE server_start SET outcome = ?, kept = ?, bytes = ? WHERE server = ? AND number = ?",
            (outcome, kept, written, server, number),
        )

    def end_server_starts(self, outcome: str) -> None:
        """Those whose end nobody saw; writes nothing when there are none."""
        if self._execute("SELECT 1 FROM server_start WHERE outcome IS NULL LIMIT 1").fetchone() is None:
            return
        self.begin()
        self._execute("UPDATE server_start SET outcome = ? WHERE outcome IS NULL", (outcome,))

    def put_text(self, digest: str, kind: str, text: str) -> None:
        """A text that a launch record names by its digest."""
        self._execute("INSERT OR IGNORE INTO text VALUES (?, ?, ?)", (digest, kind, text))

    def texts(self) -> list[tuple[str, str]]:
        """(kind, text) of each."""
        return self._execute("SELECT kind, text FROM text ORDER BY kind, sha256").fetchall()

    def put_log(self, process: str, number: int, stream: str, kept: bytes, written: int) -> None:
        self._execute("INSERT INTO attempt_log VALUES (?, ?, ?, ?, ?)", (process, number, stream, kept, written))

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt, oldest first within a process."""
        cursor = self._execute("SELECT * FROM attempt ORDER BY process, number")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def _one(self, statement: str, values: tuple[Any, ...]) -> None:
        if self._execute(statement, values).rowcount != 1:
            raise sqlite3.DatabaseError(f"no row to change: {statement.split(' SET', maxsplit=1)[0]}")

    # --- worker state --------------------------------------------------------------------------------------------

    def checkpoint(self, process: str) -> tuple[str, str]:
        """(revision, value as JCS)."""
        row = self._execute("SELECT revision, value FROM worker_checkpoint WHERE process = ?", (process,)).fetchone()
        return row or ("0", "null")

    def put_worker_checkpoint(self, process: str, revision: str, value: bytes) -> None:
        self._execute(
            "INSERT INTO worker_checkpoint VALUES (?, ?, ?)"
            " ON CONFLICT DO UPDATE SET revision = excluded.revision, value = excluded.value",
            (process, revision, value.decode()),
        )

    def blob(self, process: str, sha256: str) -> bytes | None:
        row = self._execute("SELECT data FROM blob WHERE process = ? AND sha256 = ?", (process, sha256)).fetchone()
        return row[0] if row else None

    def put_blob(self, process: str, sha256: str, data: bytes) -> None:
        self._execute("INSERT INTO blob VALUES (?, ?, ?, ?)", (process, sha256, len(data), data))

    def blob_usage(self) -> list[tuple[str, int, int]]:
        """(process, bytes, blobs)."""
        return self._execute("SELECT process, sum(bytes), count(*) FROM blob GROUP BY process").fetchall()

    # --- mailboxes -----------------------------------------------------------------------------------------------

    def put_mailbox(self, name: str) -> None:
        self._execute("INSERT INTO mailbox VALUES (?, 0, 0, 0, 0)", (name,))

    def mailbox(self, name: str) -> tuple[int, int, int, int]:
        """(last_sequence, acknowledged_through, pending_messages, pending_bytes)."""
        row = self._execute(
            "SELECT last_sequence, acknowledged_through, pending_messages, pending_bytes FROM mailbox WHERE id = ?",
            (name,),
        ).fetchone()
        if row is None:
            raise sqlite3.DatabaseError(f"mailbox {name} is missing")
        return row

    def mailboxes(self) -> list[tuple[str, int, int, int, int]]:
        return self._execute("SELECT * FROM mailbox ORDER BY id").fetchall()

    def message_by_key(self, mailbox: str, key: str) -> tuple[int, str, str] | None:
        """(sequence, sender, payload_sha256)."""
        row = self._execute(
            "SELECT sequence, sender, payload_sha256 FROM message WHERE mailbox = ? AND message_key = ?", (mailbox, key)
        ).fetchone()
        return row

    def messages_after(self, mailbox: str, sequence: int, limit: int) -> list[tuple[int, str, str]]:
        """(sequence, payload JCS, sender), oldest first, unacknowledged ones only."""
        return self._execute(
            "SELECT sequence, payload, sender FROM message WHERE mailbox = ? AND sequence > ? AND payload IS NOT NULL"
            " ORDER BY sequence LIMIT ?",
            (mailbox, sequence, limit),
        ).fetchall()

    def put_message(self, mailbox: str, sequence: int, key: str, sender: str, digest: str, payload: bytes) -> None:
        self._execute(
            "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?)", (mailbox, sequence, key, sender, digest, payload.decode())
        )
        self._execute(
            "UPDATE mailbox SET last_sequence = ?, pending_messages = pending_messages + 1,"
            " pending_bytes = pending_bytes + ? WHERE id = ?",
            (sequence, len(payload), mailbox),
        )

    def acknowledge(self, mailbox: str, after: int, through: int) -> None:
        """Drop the payloads of the messages after `after`, up to `through`; the keys stay.

        Only these rows are looked at, so that the cost does not grow with the mailbox's history.
        """
        count, size = self._execute(
            "SELECT count(*), coalesce(sum(length(CAST(payload AS BLOB))), 0) FROM message"
            " WHERE mailbox = ? AND sequence > ? AND sequence <= ?",
            (mailbox, after, through),
        ).fetchone()
        self._execute(
            "UPDATE message SET payload = NULL WHERE mailbox = ? AND sequence > ? AND sequence <= ?",
            (mailbox, after, through),
        )
        self._execute(
            "UPDATE mailbox SET acknowledged_through = ?, pending_messages = pending_messages - ?,"
            " pending_bytes = pending_bytes - ? WHERE id = ?",
            (through, count, size, mailbox),
        )


def _connect() -> peewee.SqliteDatabase:
    database = peewee.SqliteDatabase(
        statedir.DATABASE, pragmas=_PRAGMAS, autoconnect=False, thread_safe=False, cached_statements=256
    )
    database.connect()
    return database


def _call(row: tuple[Any, ...]) -> CallRow:
    (
        process,
        key,
        state,
        server,
        tool,
        policy,
        binding,
        salt,
        parameter_hash,
        parameters,
        dispatch,
        request_id,
        attempt,
        launch_id,
        debited,
        reason,
        output,
        receipt,
        reconciliation,
    ) = row
    return CallRow(
        process,
        key,
        State(state),
        server,
        tool,
        policy,
        binding,
        salt,
        parameter_hash,
        parameters.encode() if parameters is not None else None,
        dispatch,
        request_id,
        attempt,
        launch_id,
        debited,
        reason,
        output.encode() if output is not None else None,
        receipt,
        reconciliation,
    )
