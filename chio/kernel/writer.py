"""Group commit: everything that is ready shares one commit, and no reply leaves before it is on disk.

The kernel is one thread. Requests that arrive while a commit is being synced wait in their sockets and form the next
group, so a lone request commits at once and many requests share the cost. Each item of a group has its savepoint.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chio.kernel.counters import Counters
from chio.kernel.log import MAX_LEAVES_PER_CHECKPOINT, Log
from chio.kernel.store import Store


class Parked:
    """What an item's work returns when it waits for something and has written nothing."""


PARKED = Parked()


@dataclass(slots=True, eq=False)
class Item:
    """One unit of a commit. `work` decides and writes; `answer` is called with its result when that is durable.

    `work` may raise only `sqlite3.Error`; everything else it answers itself. `failed` answers for a fault of the disk.
    """

    work: Callable[[], Any]
    answer: Callable[[Any], None]
    failed: Callable[[], None]


class Writer:
    """The one writer of the state. `rolled_back` reloads what is mirrored in memory.

    `checkpointed` is told each checkpoint of the log once it is on disk; the first is the newest at the start.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        log: Log,
        counters: Counters,
        rolled_back: Callable[[], None],
        receipts_fd: int,
        checkpointed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._store = store
        self._log = log
        self._counters = counters
        self._rolled_back = rolled_back
        self._receipts_fd = receipts_fd
        self._checkpointed = checkpointed
        newest = store.last_checkpoint()
        self._untold = newest[2] if newest else None  # a host that died may have told nobody
        self._queue: list[Item] = []
        self._scheduled = False
        self._grouped = False
        self._in_savepoint = False
        self._lines: list[bytes] = []

    def submit(self, item: Item) -> None:
        self._queue.append(item)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def show_receipt(self, text: bytes) -> None:
        """A reply of this group carries this receipt: one line of `receipts.ndjson`, written before the reply."""
        self._lines.append(text)

    def open_commit(self) -> None:
        """Before an item's first write."""
        self._store.begin()
        if self._grouped and not self._in_savepoint:
            self._store.savepoint()
            self._in_savepoint = True

    def now(self, work: Callable[[], Any]) -> Any:
        """Run one unit and commit it at once; for start and stop, when no request is served."""
        result = work()
        self.checkpoint_log()
        if self._counters.waiting:
            self._store.begin()
            self._counters.flush()
        if self._store.in_transaction:
            self._store.commit()
        self._tell_checkpoint()
        return result

    def checkpoint_log(self) -> None:
        """Commit a checkpoint of the log's present size, unless it has one."""
        if self._log.size > self._log.checkpointed:
            self._store.begin()
            note = self._log.note()
            self._store.put_checkpoint(self._log.size, b"".join(self._log.frontier), note)
            self._untold = note.decode()
            self._log.checkpointed = self._log.size

    def _tell_checkpoint(self) -> None:
        """After the commit that holds it."""
        if self._untold is not None:
            note, self._untold = self._untold, None
            self._checkpointed(note)

    def flush(self) -> None:
        """Commit what is ready. Called by the loop; at the end also by whoever stops the kernel."""
        self._scheduled = False
        batch, self._queue = self._queue, []
        done = self._perform(batch)
        if done is None:  # the whole group was rolled back: one at a time shows whose fault it is
            for item in batch:
                alone = self._perform([item])
                if alone is None:
                    item.failed()
                else:
                    self._release(alone)
            return
        self._release(done)

    def _perform(self, batch: list[Item]) -> list[tuple[Item, Any]] | None:
        """Run and commit a group; None when the database refused a statement and everything was rolled back."""
        mark = self._log.mark()
        self._lines.clear()
        self._grouped = len(batch) > 1
        done: list[tuple[Item, Any]] = []
        try:
            for item in batch:
                result = item.work()
                if self._in_savepoint:
                    self._in_savepoint = False
                    self._store.release()
                if result is not PARKED:
                    done.append((item, result))
            if self._store.in_transaction and self._log.size - self._log.checkpointed >= MAX_LEAVES_PER_CHECKPOINT:
                self.checkpoint_log()
            if self._counters.waiting and self._store.in_transaction:
                self._counters.flush()
        except sqlite3.Error:
            self._in_savepoint = False
            self._untold = None
            self._store.rollback()
            self._log.restore(mark)
            self._rolled_back()
            return None
        if self._store.in_transaction:
            self._store.commit()
        self._tell_checkpoint()
        return done

    def _release(self, done: list[tuple[Item, Any]]) -> None:
        if self._lines:
            _write_all(self._receipts_fd, b"\n".join(self._lines) + b"\n")
            self._lines.clear()
        for item, result in done:
            item.answer(result)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
