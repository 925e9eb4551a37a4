"""The one SQLite database of a state: how it is made, opened and told apart from any other.

peewee opens it and applies the schema. A commit is WAL with `synchronous=FULL`. An error at COMMIT ends the kernel
(`CommitFailed`): after a failed fsync nobody knows what is on disk, so nothing may be retried or answered.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peewee

from chio import statedir
from chio.errors import StateError

SCHEMA_VERSION = 2
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


class CommitFailed(Exception):
    """COMMIT reported an I/O error. The kernel must end without answering."""


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


def create(directory: int) -> peewee.SqliteDatabase:
    """A new database with its schema in the state directory, which must be the working directory.

    What is deleted or moved while it is made is overwritten with zeros: the wrapped data keys are written now, and no
    copy of one may outlive its deletion.
    """
    statedir.write_new(directory, statedir.DATABASE, b"")
    database = connect(statedir.DATABASE)
    database.execute_sql("PRAGMA secure_delete = ON")
    database.connection().executescript(_SCHEMA.read_text())
    database.execute_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
    os.fsync(directory)
    return database


def open_existing(directory: int, path: str) -> peewee.SqliteDatabase:
    """The database of an existing state. Raises `StateError` for another version or a broken file."""
    if os.stat(statedir.DATABASE, dir_fd=directory).st_size == 0:
        raise half_initialised(path)  # before SQLite makes a database of it
    try:
        database = connect(statedir.DATABASE)
    except peewee.DatabaseError as error:
        raise unreadable(path, error) from error
    try:
        require_version(database, path)
        _require_wal(database, path)
    except peewee.DatabaseError as error:
        database.close()
        raise unreadable(path, error) from error
    except StateError:
        database.close()
        raise
    os.fsync(directory)
    return database


def require_version(database: peewee.SqliteDatabase, path: str) -> None:
    """Refuse what is not a state of this version."""
    application = database.execute_sql("PRAGMA application_id").fetchone()[0]
    version = database.execute_sql("PRAGMA user_version").fetchone()[0]
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


def _require_wal(database: peewee.SqliteDatabase, path: str) -> None:
    journal = database.execute_sql("PRAGMA journal_mode").fetchone()[0]
    if journal != "wal":
        raise StateError(
            "the state cannot be served durably",
            file=path,
            field="journal_mode",
            why=journal,
            fix="move it to a local disk",
        )


def connect(file: str) -> peewee.SqliteDatabase:
    """An open connection with the pragmas of the one writer."""
    database = peewee.SqliteDatabase(
        file, pragmas=_PRAGMAS, autoconnect=False, thread_safe=False, cached_statements=256
    )
    database.connect()
    return database


@contextmanager
def copied(file: Path, path: str) -> Iterator[peewee.SqliteDatabase]:
    """A database that is nobody's state (yet): a copy, told of as `path` in errors. Raises `StateError`."""
    opened = None
    try:
        opened = connect(str(file))
        require_version(opened, path)
        yield opened
    except (peewee.DatabaseError, sqlite3.DatabaseError) as error:
        raise unreadable(path, error) from error
    finally:
        if opened is not None:
            opened.close()


def commit(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise CommitFailed(str(error)) from error
