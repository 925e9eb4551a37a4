"""What a start does about the host that was here before, when everything it had started is dead.

It uses the functions of the normal path: a call found dispatched moves by the same table (`Ledger.settle`), an attempt
ends by the same row. Nothing is dispatched again here; only a worker's repeat may do that. A second recovery finds
nothing to do.
"""

from __future__ import annotations

import os

import orjson

from chio import statedir
from chio.errors import StateError
from chio.kernel.calls import Event
from chio.kernel.ledger import Ledger
from chio.kernel.log import Log
from chio.kernel.store import Store

_LONGEST_LINE = 32 * 1024 * 1024


def restore_log(store: Store, log: Log, path: str) -> None:
    """The log's frontier, from its newest checkpoint and the leaves after it."""
    newest = store.last_checkpoint()
    if newest is not None:
        size, frontier, _ = newest
        log.restore((size, tuple(frontier[at : at + 32] for at in range(0, len(frontier), 32)), size))
    for index, hashed in store.leaf_hashes(log.size):
        if log.append(hashed) != index:
            raise StateError(
                "the log has a gap",
                file=f"{path}/{statedir.DATABASE}",
                field=f"leaf {index}",
                fix="restore the state from a backup",
            )


def newest_time_ms(store: Store) -> int:
    """The newest time that any record was given, for the clock (0 in an empty log)."""
    return max((orjson.loads(body).get("time_ms", 0) for body in store.newest_bodies(100)), default=0)


def recover(store: Store, ledger: Ledger) -> tuple[int, int]:
    """(calls found dispatched, attempts found unfinished): each is settled in the commit that is open.

    A call whose row contradicts itself is quarantined instead: it is reported once, and blocks no other.
    """
    calls = store.dispatched_calls()
    for call in calls:
        why = ledger.damage(call)
        if why is None:
            ledger.settle(call, Event.FOUND_AT_START, "the host ended before the outcome was recorded")
        else:
            ledger.quarantine(call, why)
    attempts = [attempt for attempt in store.attempts() if attempt["state"] != "ended"]
    for attempt in attempts:
        end_attempt(store, ledger, attempt["process"], attempt["number"], "host_interrupted")
    store.end_server_starts("host_interrupted")
    return len(calls), len(attempts)


def end_attempt(store: Store, ledger: Ledger, process: str, number: int, outcome: str) -> None:
    """An attempt whose exit nobody observed: its end is a leaf of its own."""
    ledger.record("attempt", {"process_id": process, "attempt": number, "event": "ended", "outcome": outcome})
    store.end_attempt(process, number, outcome, {}, None)


def open_receipts(directory: int) -> int:
    """`receipts.ndjson` for appending, a torn last line cut (it is a convenience; the log is the truth)."""
    fd = os.open(
        statedir.RECEIPTS, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
    )
    size = os.fstat(fd).st_size
    start = max(0, size - _LONGEST_LINE)
    tail = os.pread(fd, size - start, start)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(fd, start + tail.rfind(b"\n") + 1)
    return fd
