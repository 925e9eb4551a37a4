"""What an operator watches: how often a process met a conflict, came back, or met records that it does not know.

Counts, not evidence. A refused save writes nothing, so its count waits in memory for the next commit (or the stop) and
a crash may lose it; what a worker notes about its own resume is committed before it is answered.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from chio.kernel.store import Store

CONFLICTS = "checkpoint_conflicts"
AMBIGUOUS = "ambiguous_recoveries"
# A worker's own notes: what each is counted as.
NOTES = {"resumed": "resumes", "ambiguous_resume": "ambiguous_resumes", "schema_refused": "schema_refusals"}
RESUME_AGE_MS = "resume_age_ms"
NAMES = (CONFLICTS, AMBIGUOUS, *NOTES.values(), RESUME_AGE_MS)
_MOST_MS = 2**53 - 1


class Counters:
    """Counts that wait for a commit."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: Counter[tuple[str, str]] = Counter()

    def add(self, process: str, name: str) -> None:
        self._waiting[process, name] += 1

    def flush(self) -> None:
        """Into the commit that is open."""
        for (process, name), count in self._waiting.items():
            self._store.count(process, name, count)
        self._waiting.clear()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)


def read_note(operation: dict[str, Any]) -> tuple[str, int | None] | None:
    """(counter, age in ms or None) of the operation `note`; None when it is not one."""
    name = NOTES.get(operation["event"]) if type(operation.get("event")) is str else None
    age = operation.get("age_ms")
    if name is None or not {"op", "event"} <= operation.keys() <= {"op", "event", "age_ms"}:
        return None
    if "age_ms" in operation and (type(age) is not int or not 0 <= age <= _MOST_MS):
        return None
    return name, age
