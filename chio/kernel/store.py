"""All SQL that writes, as prepared statements on the one connection: a peewee model read costs fifteen times one.

What a worker's data reaches goes through the vault on its way in and out (`chio.kernel.vault`); nothing above this
module knows whether the state is encrypted. Offline reading is `chio.kernel.reader`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import peewee

from chio.kernel import database
from chio.kernel.calls import State
from chio.kernel.vault import HOST, OpenVault, Unsealable, Vault

MAX_SERVER_STARTS = 8


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


class Store:
    """The open database. `begin` is lazy: reads and replays never start a transaction."""

    def __init__(self, opened: peewee.SqliteDatabase, vault: Vault | None = None) -> None:
        self._database = opened
        self._connection: sqlite3.Connection = opened.connection()
        self._execute = self._connection.execute
        self.vault: Vault = vault or OpenVault()

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
        database.commit(self._connection)

    def erase_log(self) -> None:
        """Empty the write-ahead log into the database: what was overwritten is in no file of the state any more."""
        self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    # --- what is sealed -------------------------------------------------------------------------------------------

    def _seal(self, owner: str, place: str, data: bytes | None) -> bytes | None:
        return self.vault.seal(owner, place, data) if data is not None else None

    def _open(self, owner: str, place: str, sealed: bytes | None) -> bytes | None:
        """None for what was deleted or does not open: whoever needs it then finds it damaged."""
        try:
            return self.vault.open(owner, place, sealed) if sealed is not None else None
        except Unsealable:
            return None

    def data_keys(self) -> dict[str, bytes]:
        """The wrapped data key of each process (the host's under an empty name) that was not destroyed."""
        return dict(self._execute("SELECT process, wrapped FROM data_key WHERE wrapped IS NOT NULL"))

    def put_data_keys(self, wrapped: dict[str, bytes]) -> None:
        self._connection.executemany("INSERT INTO data_key VALUES (?, ?, NULL)", wrapped.items())

    def tombstone(self, process: str) -> int | None:
        """The leaf that says that a process's data was deleted."""
        row = self._execute("SELECT tombstone FROM data_key WHERE process = ?", (process,)).fetchone()
        return row[0] if row else None

    def tombstones(self) -> list[str]:
        return [row[0] for row in self._execute("SELECT process FROM data_key WHERE tombstone IS NOT NULL")]

    def delete_data(self, process: str, tombstone: int) -> None:
        """Destroy a process's data key and drop everything that was sealed under it, overwriting it with zeros."""
        self._execute("UPDATE data_key SET wrapped = NULL, tombstone = ? WHERE process = ?", (tombstone, process))
        self._execute(
            "UPDATE leaf SET disclosed = NULL WHERE idx IN (SELECT receipt FROM call WHERE process = ?1)"
            " OR (type = 'receipt' AND json_extract(body, '$.call.process_id') = ?1)",
            (process,),
        )
        self._execute(
            "UPDATE call SET parameter_salt = x'', output = NULL WHERE process = ? AND state <> 'dispatched'",
            (process,),
        )
        for table in ("worker_checkpoint", "blob", "attempt_log", "plan_input"):
            self._execute(f"DELETE FROM {table} WHERE process = ?", (process,))
        for mailbox, count, size in self._execute(
            "SELECT mailbox, count(*), sum(bytes) FROM message WHERE sender = ? AND payload IS NOT NULL"
            " GROUP BY mailbox",
            (process,),
        ).fetchall():
            self._execute(
                "UPDATE mailbox SET pending_messages = pending_messages - ?, pending_bytes = pending_bytes - ?"
                " WHERE id = ?",
                (count, size, mailbox),
            )
        self._execute("UPDATE message SET payload = NULL WHERE sender = ?", (process,))

    def overwrite_what_is_deleted(self) -> None:
        self._execute("PRAGMA secure_delete = ON").fetchone()

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

    def put_plan_input(self, process: str, value: bytes) -> None:
        self._execute("INSERT INTO plan_input VALUES (?, ?)", (process, self.vault.seal(process, "input", value)))

    def plan_inputs(self) -> dict[str, bytes]:
        """Each worker's input as JCS; those of a process whose data was deleted are not there."""
        rows = self._execute("SELECT process, value FROM plan_input").fetchall()
        return {process: self.vault.open(process, "input", value) for process, value in rows}

    def count(self, process: str, name: str, by: int) -> None:
        self._execute(
            "INSERT INTO counter VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            (process, name, by),
        )

    def gauge(self, process: str, name: str, value: int) -> None:
        self._execute(
            "INSERT INTO counter VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            (process, name, value),
        )

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
        self,
        index: int,
        kind: str,
        body: bytes,
        signature: str | None,
        hashed: bytes,
        disclosed: tuple[str, bytes] | None = None,
    ) -> None:
        """`disclosed`: whose it is, and the text."""
        sealed = self.vault.seal(disclosed[0], f"disclosed/{index}", disclosed[1]) if disclosed else None
        self._execute(
            "INSERT INTO leaf VALUES (?, ?, ?, ?, ?, ?)", (index, kind, body.decode(), signature, sealed, hashed)
        )

    def leaf(self, index: int) -> tuple[str, str, str | None]:
        """(type, body, signature)."""
        row = self._execute("SELECT type, body, signature FROM leaf WHERE idx = ?", (index,)).fetchone()
        if row is None:
            raise sqlite3.DatabaseError(f"leaf {index} is missing")
        return row

    def disclosed(self, index: int, process: str) -> bytes | None:
        """What a receipt of this process discloses beside its body; None when that was deleted."""
        row = self._execute("SELECT disclosed FROM leaf WHERE idx = ?", (index,)).fetchone()
        return self._open(process, f"disclosed/{index}", row[0]) if row else None

    def put_checkpoint(self, size: int, frontier: bytes, note: bytes) -> None:
        self._execute("INSERT INTO log_checkpoint VALUES (?, ?, ?)", (size, frontier, note.decode()))

    def last_checkpoint(self) -> tuple[int, bytes, str] | None:
        row = self._execute("SELECT size, frontier, note FROM log_checkpoint ORDER BY size DESC LIMIT 1").fetchone()
        return row

    def checkpoint_frontiers(self) -> Iterable[tuple[int, bytes]]:
        return self._execute("SELECT size, frontier FROM log_checkpoint")

    def leaves(self) -> Iterable[tuple[int, str, str, str | None, bytes]]:
        """(index, type, body, signature, hash), in order."""
        return self._execute("SELECT idx, type, body, signature, hash FROM leaf ORDER BY idx")

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
        return self._call(row) if row else None

    def dispatched_calls(self) -> list[CallRow]:
        """The calls on their way, oldest first, without those that are quarantined."""
        rows = self._execute(
            f"SELECT {_CALL_COLUMNS} FROM call WHERE state = 'dispatched'"
            " AND (process, operation_key) NOT IN (SELECT process, operation_key FROM quarantine) ORDER BY id"
        ).fetchall()
        return [self._call(row) for row in rows]

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
                self._seal(call.process, _place(call, "salt"), call.parameter_salt),
                call.parameter_hash,
                self._seal(call.process, _place(call, "parameters"), call.parameters),
                call.dispatch,
                call.request_id,
                call.attempt,
                call.launch_id,
                call.debited,
                call.reason,
                self._seal(call.process, _place(call, "output"), call.output),
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
                self._seal(call.process, _place(call, "parameters"), call.parameters),
                call.dispatch,
                call.request_id,
                call.attempt,
                call.launch_id,
                call.debited,
                call.reason,
                self._seal(call.process, _place(call, "output"), call.output),
                call.receipt,
                call.reconciliation,
                call.process,
                call.operation_key,
                before.value,
            ),
        ).rowcount
        if changed != 1:
            raise sqlite3.DatabaseError(f"call {call.operation_key} is not in state {before.value}")

    def _call(self, row: tuple[Any, ...]) -> CallRow:
        """What does not open is left out: a salt or parameters that are missing are damage, which the ledger finds."""
        call = CallRow(*row)
        call.state = State(call.state)
        owner = call.process
        call.parameter_salt = self._open(owner, _place(call, "salt"), call.parameter_salt) or b""
        call.parameters = self._open(owner, _place(call, "parameters"), call.parameters)
        call.output = self._open(owner, _place(call, "output"), call.output)
        return call

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
            (outcome, self.vault.seal(HOST, f"server/{server}/{number}", kept), written, server, number),
        )

    def end_server_starts(self, outcome: str) -> None:
        """Those whose end nobody saw; writes nothing when there are none."""
        if self._execute("SELECT 1 FROM server_start WHERE outcome IS NULL LIMIT 1").fetchone() is None:
            return
        self.begin()
        self._execute("UPDATE server_start SET outcome = ? WHERE outcome IS NULL", (outcome,))

    def put_log(self, process: str, number: int, stream: str, kept: bytes, written: int) -> None:
        sealed = self.vault.seal(process, f"log/{number}/{stream}", kept)
        self._execute("INSERT INTO attempt_log VALUES (?, ?, ?, ?, ?)", (process, number, stream, sealed, written))

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt, oldest first within a process."""
        cursor = self._execute("SELECT * FROM attempt ORDER BY process, number")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def _one(self, statement: str, values: tuple[Any, ...]) -> None:
        if self._execute(statement, values).rowcount != 1:
            raise sqlite3.DatabaseError(f"no row to change: {statement.split(' SET', maxsplit=1)[0]}")

    # --- worker state --------------------------------------------------------------------------------------------

    def revision(self, process: str) -> str:
        row = self._execute("SELECT revision FROM worker_checkpoint WHERE process = ?", (process,)).fetchone()
        return row[0] if row else "0"

    def checkpoint(self, process: str) -> tuple[str, bytes]:
        """(revision, value as JCS). Raises `Unsealable`."""
        row = self._execute("SELECT revision, value FROM worker_checkpoint WHERE process = ?", (process,)).fetchone()
        return (row[0], self.vault.open(process, f"checkpoint/{row[0]}", row[1])) if row else ("0", b"null")

    def put_worker_checkpoint(self, process: str, revision: str, value: bytes, now_ms: int) -> None:
        self._execute(
            "INSERT INTO worker_checkpoint VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
            " revision = excluded.revision, value = excluded.value, bytes = excluded.bytes,"
            " saved_ms = excluded.saved_ms",
            (process, revision, self.vault.seal(process, f"checkpoint/{revision}", value), len(value), now_ms),
        )

    def has_blob(self, process: str, digest: str) -> bool:
        named = self.vault.digest(process, "blob", digest)
        found = self._execute("SELECT 1 FROM blob WHERE process = ? AND sha256 = ?", (process, named)).fetchone()
        return found is not None

    def blob(self, process: str, digest: str) -> bytes | None:
        """None when this process has none; raises `Unsealable`."""
        named = self.vault.digest(process, "blob", digest)
        row = self._execute("SELECT data FROM blob WHERE process = ? AND sha256 = ?", (process, named)).fetchone()
        return self.vault.open(process, f"blob/{digest}", row[0]) if row else None

    def put_blob(self, process: str, digest: str, data: bytes) -> None:
        self._execute(
            "INSERT INTO blob VALUES (?, ?, ?, ?)",
            (
                process,
                self.vault.digest(process, "blob", digest),
                len(data),
                self.vault.seal(process, f"blob/{digest}", data),
            ),
        )

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

    def payload_digest(self, sender: str, payload: bytes) -> str:
        """What a payload is told apart by."""
        return self.vault.digest(sender, "payload", sha256(payload).hexdigest())

    def message_by_key(self, mailbox: str, key: str) -> tuple[int, str, str] | None:
        """(sequence, sender, payload's digest)."""
        row = self._execute(
            "SELECT sequence, sender, payload_digest FROM message WHERE mailbox = ? AND message_key = ?",
            (mailbox, self.vault.digest(HOST, f"message/{mailbox}", key)),
        ).fetchone()
        return row

    def messages_after(self, mailbox: str, sequence: int, limit: int) -> list[tuple[int, bytes, str]]:
        """(sequence, payload JCS, sender), oldest first, unacknowledged ones only."""
        rows = self._execute(
            "SELECT sequence, payload, sender FROM message WHERE mailbox = ? AND sequence > ? AND payload IS NOT NULL"
            " ORDER BY sequence LIMIT ?",
            (mailbox, sequence, limit),
        ).fetchall()
        return [(at, self.vault.open(sender, f"message/{mailbox}/{at}", sealed), sender) for at, sealed, sender in rows]

    def put_message(self, mailbox: str, sequence: int, key: str, sender: str, digest: str, payload: bytes) -> None:
        named = self.vault.digest(HOST, f"message/{mailbox}", key)
        sealed = self.vault.seal(sender, f"message/{mailbox}/{sequence}", payload)
        self._execute(
            "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?)",
            (mailbox, sequence, named, sender, digest, len(payload), sealed),
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
            "SELECT count(*), coalesce(sum(bytes), 0) FROM message"
            " WHERE mailbox = ? AND sequence > ? AND sequence <= ? AND payload IS NOT NULL",
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


def _place(call: CallRow, column: str) -> str:
    return f"call/{call.operation_key}/{column}"
