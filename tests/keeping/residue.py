"""What is sealed under one process's key, and whether any of it is still in a file of the state."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tests.kernel.serving import State

_SEALED = (
    "SELECT wrapped FROM data_key WHERE process = ?1",
    "SELECT value FROM worker_checkpoint WHERE process = ?1",
    "SELECT data FROM blob WHERE process = ?1 AND data IS NOT NULL",
    "SELECT kept FROM attempt_log WHERE process = ?1",
    "SELECT value FROM plan_input WHERE process = ?1",
    "SELECT parameter_salt FROM call WHERE process = ?1",
    "SELECT output FROM call WHERE process = ?1 AND output IS NOT NULL",
    "SELECT parameters FROM call WHERE process = ?1 AND parameters IS NOT NULL",
    "SELECT payload FROM message WHERE sender = ?1 AND payload IS NOT NULL",
    "SELECT disclosed FROM leaf WHERE type = 'receipt' AND json_extract(body, '$.call.process_id') = ?1"
    " AND disclosed IS NOT NULL",
)
_PIECE = 24  # a text that spans pages stands in pieces; a shorter one has its key's nonce, tag and one byte


def sealed_of(state: State, process: str) -> dict[str, list[bytes]]:
    """Every sealed text of a process as it stands in its row or its file, by the statement that finds it."""
    found: dict[str, list[bytes]] = {}
    with state.copy() as database:
        for statement in _SEALED:
            found[statement] = [row[0] for row in database.execute(statement, (process,))]
        names = database.execute("SELECT file FROM blob WHERE process = ? AND file IS NOT NULL", (process,)).fetchall()
    found["files"] = [(state.path / ".chio-blobs" / name).read_bytes() for (name,) in names]
    return found


def left_of(state: State, texts: dict[str, list[bytes]]) -> list[str]:
    """Which of these, or of their pieces, some file of the state still holds."""
    files = [path.read_bytes() for path in state.path.rglob("*") if path.is_file()]
    return sorted(
        where
        for where, held in texts.items()
        if any(piece in data for text in held for piece in pieces(text) for data in files)
    )


def pieces(text: bytes) -> Iterator[bytes]:
    step = max(_PIECE, len(text) // 32)
    yield from (text[at : at + _PIECE] for at in range(0, max(1, len(text) - _PIECE + 1), step))
    yield text[-_PIECE:]


def everything_of(database_file: Path, process: str) -> list[tuple[object, ...]]:
    """The rows of a process, as they are."""
    tables = ("worker_checkpoint", "blob", "attempt_log", "plan_input", "call")
    with closing(sqlite3.connect(database_file)) as database:
        return [
            row for table in tables for row in database.execute(f"SELECT * FROM {table} WHERE process = ?", (process,))
        ]
