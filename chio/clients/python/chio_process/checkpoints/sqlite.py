"""Checkpoints and effects in a plain SQLite file, for programs that run without a Chio kernel."""

import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chio_process.checkpoints.document import decode, invalid
from chio_process.checkpoints.envelope import Checkpoint
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.store import check_swap

# The file's header says whose it is (sqlite.org/fileformat2.html, "application id" and "user version").
_APPLICATION_ID = 0x43686943
_FILE_VERSION = 1
_BUSY_SECONDS = 10.0
_SELECT = "SELECT revision, document FROM checkpoint WHERE id = ?"

_SCHEMA = (
    # `document`: the checkpoint's wire form, whole. `revision`: the one in it, for a reader with SQL.
    "CREATE TABLE checkpoint (id TEXT PRIMARY KEY, revision INTEGER NOT NULL, document TEXT NOT NULL) STRICT",
    # `state`: started before the effect runs, completed once its result is known. `attempt` counts the runs.
    "CREATE TABLE effect (key TEXT PRIMARY KEY, digest TEXT NOT NULL, state TEXT NOT NULL"
    " CHECK (state IN ('started', 'completed')), attempt INTEGER NOT NULL, result TEXT,"
    " CHECK ((state = 'completed') = (result IS NOT NULL))) STRICT",
)


class SqliteFile:
    """One SQLite file, made with mode 0600 if it is absent. Threads may share it; a forked child opens its own.

    Every transaction is one BEGIN IMMEDIATE and is on the disk when it ends: write-ahead log, `synchronous = FULL`,
    and the folder synced when the file is new (sqlite.org/pragma.html#pragma_synchronous).
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        """CheckpointError `invalid` for a file that is not this package's or that others may read."""
        self.path = Path(path)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        _prepare(self.path, create)
        with self._faults():
            self._database = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        try:
            with self._faults():
                self._open()
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        if self._owner == os.getpid():
            self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commits at the end; an error on the way leaves everything as it was. CheckpointError `ambiguous` if it was
        the commit itself that failed: what was written may come back when the file is next recovered."""
        self._check_owner()
        with self._lock, self._faults():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                with self._faults(CheckpointErrorKind.AMBIGUOUS):
                    self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def rows(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        """One reading statement, which waits for no writer."""
        self._check_owner()
        with self._lock, self._faults():
            return self._database.execute(statement, values).fetchall()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        # NORMAL would lose acknowledged commits when the power fails in WAL mode.
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("BEGIN IMMEDIATE")  # nothing of a foreign file is changed before it is known as one
        application_id = _pragma(self._database, "application_id")
        version = _pragma(self._database, "user_version")
        if (application_id, version, _pragma(self._database, "schema_version")) == (0, 0, 0):
            for statement in _SCHEMA:
                self._database.execute(statement)
            self._database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._database.execute(f"PRAGMA user_version = {_FILE_VERSION}")
        elif (application_id, version) != (_APPLICATION_ID, _FILE_VERSION):
            invalid(f"{self.path} is not a checkpoint file of version {_FILE_VERSION}")
        self._database.execute("COMMIT")
        self._database.execute("PRAGMA journal_mode = WAL")

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            # SQLite forbids to carry a connection over a fork (sqlite.org/howtocorrupt.html, section 2.6).
            invalid(f"{self.path} was opened before a fork; open it again in the child")

    @contextmanager
    def _faults(self, kind: CheckpointErrorKind = CheckpointErrorKind.UNAVAILABLE) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                kind = CheckpointErrorKind.CORRUPT
            raise CheckpointError(kind, f"{self.path}: {error}") from error


class SqliteStore(SqliteFile):
    """A `CheckpointStore` in a SQLite file of its own."""

    def load(self, id: str) -> Checkpoint:
        stored = _parsed(id, self.rows(_SELECT, id))
        if stored is None:
            raise CheckpointError(CheckpointErrorKind.NOT_FOUND, f"no checkpoint has the id {id!r}")
        return stored

    def compare_and_swap(self, checkpoint: Checkpoint, expected: int | None) -> None:
        self.compare_and_swap_all([(checkpoint, expected)])

    def compare_and_swap_all(self, swaps: Iterable[tuple[Checkpoint, int | None]]) -> None:
        """Several swaps in one transaction: all of them, or none and the first one's error."""
        documents = [(checkpoint, expected, checkpoint.encoded()) for checkpoint, expected in swaps]
        with self.transaction() as database:
            for checkpoint, expected, document in documents:
                # The write lock is held since BEGIN IMMEDIATE: what is read here is what the statement replaces.
                rows = database.execute(_SELECT, (checkpoint.id,)).fetchall()
                check_swap(_parsed(checkpoint.id, rows), checkpoint, expected)
                database.execute(
                    "INSERT INTO checkpoint VALUES (?, ?, ?)"
                    " ON CONFLICT (id) DO UPDATE SET revision = excluded.revision, document = excluded.document",
                    (checkpoint.id, checkpoint.revision, document),
                )

    def ids(self) -> list[str]:
        """The ids of all checkpoints in the file, sorted."""
        return [id for (id,) in self.rows("SELECT id FROM checkpoint ORDER BY id")]


def _parsed(id: str, rows: list[tuple[Any, ...]]) -> Checkpoint | None:
    if not rows:
        return None
    ((revision, document),) = rows
    try:
        stored = Checkpoint.from_document(decode(document))
    except CheckpointError as error:
        raise CheckpointError(CheckpointErrorKind.CORRUPT, f"{id!r} is stored as no checkpoint: {error}") from error
    if (stored.id, stored.revision) != (id, revision):
        raise CheckpointError(CheckpointErrorKind.CORRUPT, f"{id!r} is stored as another checkpoint or revision")
    return stored


def _prepare(path: Path, create: bool) -> None:
    """Makes the file before SQLite would, which takes the umask's mode; its -wal and -shm then take the file's."""
    try:
        if create:
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                pass
            else:
                _sync_folder(path.parent)
        about = path.lstat()
    except OSError as error:
        raise CheckpointError(CheckpointErrorKind.UNAVAILABLE, f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(about.st_mode):
        invalid(f"{path} is not a regular file")
    if stat.S_IMODE(about.st_mode) & 0o077:
        invalid(f"{path} is open to others (mode {stat.S_IMODE(about.st_mode):04o}); chmod 600 it")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pragma(database: sqlite3.Connection, name: str) -> int:
    (value,) = database.execute(f"PRAGMA {name}").fetchone()
    return int(value)
