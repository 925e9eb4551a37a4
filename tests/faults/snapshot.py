"""All rows of a state, from a copy: whoever looks must not take part."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATABASE = "authority.db"
BLOBS = ".chio-blobs"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tables[name]` in the order of rowid or key; a blob's row has its bytes, also where a file holds them. `damage`
    is what SQLite's own check says, empty when sound."""

    tables: dict[str, list[Row]]
    damage: str

    def __getitem__(self, table: str) -> list[Row]:
        return self.tables.get(table, [])

    @property
    def usable(self) -> bool:
        """Whether `init` had come to its end: before that there is no state to keep a promise."""
        return not self.damage and bool(self["host"]) and self["host"][0]["ready"] == 1

    @classmethod
    def of(cls, state: Path) -> Snapshot | None:
        """None where there is no database."""
        if not (state / DATABASE).exists():
            return None
        with tempfile.TemporaryDirectory(prefix="chio-faults-", dir=state.parent) as private:
            for name in (DATABASE, f"{DATABASE}-wal"):
                if (state / name).exists():
                    shutil.copyfile(state / name, Path(private) / name)
            with closing(sqlite3.connect(Path(private) / DATABASE)) as database:
                found = cls._read(database)
        for row in found["blob"]:
            if row.get("file") is not None:
                file = state / BLOBS / row["file"]
                row["data"] = file.read_bytes() if file.exists() else b""
        return found

    @classmethod
    def _read(cls, database: sqlite3.Connection) -> Snapshot:
        database.row_factory = sqlite3.Row
        try:
            (said,) = database.execute("PRAGMA integrity_check").fetchone()
            names = [
                row[0] for row in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
            ]
            tables = {
                name: [dict(row) for row in database.execute(f"SELECT * FROM {name} ORDER BY 1, 2")] for name in names
            }
        except sqlite3.DatabaseError as error:
            return cls({}, str(error))
        return cls(tables, "" if said == "ok" else said)

    def differences(self, other: Snapshot) -> list[str]:
        """In which tables, and in how many rows, another snapshot is not this one."""
        found = []
        for name in sorted({*self.tables, *other.tables}):
            mine, its = (sorted(map(repr, snapshot[name])) for snapshot in (self, other))
            if mine != its:
                gone, come = set(mine) - set(its), set(its) - set(mine)
                found.append(f"{name}: {len(gone)} rows gone, {len(come)} come")
        return found
