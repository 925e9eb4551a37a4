"""Kernels with one defect each, made by replacing a function of the product's in this process.

Each must be caught within a few hundred histories; the name of what catches it stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from chio.kernel import ledger, recovery
from chio.kernel.admission import decide
from chio.kernel.calls import TRANSITIONS, Counts, Event, State, Transition
from chio.kernel.ledger import Ledger
from chio.kernel.log import Log
from chio.kernel.process import Kernel
from chio.kernel.state import WorkerState, _increment
from chio.kernel.store import Store
from chio.kernel.tree import Tree
from chio.kernel.writer import Writer


@dataclass(frozen=True, slots=True)
class Defect:
    """`caught_by` is a part of what a history must say."""

    name: str
    caught_by: str
    instead: Callable[[], tuple[Any, str, Any]]  # (where, name, what instead)


def _any_unknown_again() -> tuple[Any, str, Any]:
    real = Ledger._repeat_event

    def event(self: Ledger, call: Any, node: Any) -> Event | None:
        return Event.REPEATED_READ if call.state is State.UNKNOWN else real(self, call, node)

    return Ledger, "_repeat_event", event


def _refund_twice() -> tuple[Any, str, Any]:
    real = Store.debit_grant

    def debit(self: Store, process: str, position: int, by: int) -> None:
        real(self, process, position, by if by > 0 else 2 * by)

    return Store, "debit_grant", debit


def _table(key: tuple[State | None, Event], instead: Transition) -> Callable[[], tuple[Any, str, Any]]:
    return lambda: (TRANSITIONS, "", (key, instead))


def _answer_before_commit() -> tuple[Any, str, Any]:
    real = Writer._perform

    def perform(self: Writer, batch: list[Any]) -> Any:
        for item in batch:
            work, answer = item.work, item.answer

            def early(work: Any = work, answer: Any = answer) -> Any:
                result = work()
                if result.__class__.__name__ != "Parked":
                    answer(result)
                return result

            item.work, item.answer = early, lambda _: None
        return real(self, batch)

    return Writer, "_perform", perform


def _leaf_left_out() -> tuple[Any, str, Any]:
    return Ledger, "incident", lambda self, call, detail, **members: None


def _nothing_recovered() -> tuple[Any, str, Any]:
    return Store, "dispatched_calls", lambda self: []


def _recovered_as_not_sent() -> tuple[Any, str, Any]:
    real = Ledger.settle

    def settle(self: Ledger, call: Any, event: Event, detail: str, output: bytes | None = None) -> Any:
        return real(self, call, Event.NOT_SENT if event is Event.FOUND_AT_START else event, detail, output)

    return Ledger, "settle", settle


def _signed_again() -> tuple[Any, str, Any]:
    real = Ledger._replay

    def replay(self: Ledger, call: Any) -> Any:
        node = self._tree[call.process]
        self._receipt(call, node, b"{}", (), None)
        self._store._execute(
            "UPDATE call SET receipt = ? WHERE process = ? AND operation_key = ?",
            (call.receipt, call.process, call.operation_key),
        )
        return real(self, call)

    return Ledger, "_replay", replay


def _any_revision() -> tuple[Any, str, Any]:
    real = WorkerState.next_checkpoint

    def following(self: WorkerState, process: str, operation: dict[str, Any], plain: bool) -> tuple[str, bytes]:
        revision, _ = self._store.checkpoint(process)
        _, value = real(self, process, {**operation, "expected_revision": revision}, plain)
        return _increment(operation["expected_revision"]), value

    return WorkerState, "next_checkpoint", following


def _keeps_no_key() -> tuple[Any, str, Any]:
    return Store, "message_by_key", lambda self, mailbox, key: None


def _second_recovery() -> tuple[Any, str, Any]:
    real = recovery.recover

    def recover(store: Store, of: Ledger) -> tuple[int, int]:
        of.record("epoch", {"detail": "started"})
        return real(store, of)

    return recovery, "recover", recover


def _decides_without(**facts: Any) -> Callable[[], tuple[Any, str, Any]]:
    return lambda: (ledger, "decide", lambda known: decide(replace(known, **facts)))


def _log_not_put_back() -> tuple[Any, str, Any]:
    real = Log.restore

    def restore(self: Log, mark: tuple[int, tuple[bytes, ...], int]) -> None:
        if self.size == 0:  # at a start
            real(self, mark)

    return Log, "restore", restore


DEFECTS: dict[str, Defect] = {
    defect.name: defect
    for defect in (
        Defect("an unknown call is dispatched again", "dispatched again", _any_unknown_again),
        Defect("a refund is given twice", "grant_usage", _refund_twice),
        Defect(
            "a refund is not given", "grant_usage",
            _table((State.DISPATCHED, Event.NOT_SENT), Transition(State.COMPENSATED, ("receipt",))),
        ),
        Defect(
            "a refused call is not counted", "usage",
            _table((None, Event.REFUSED), Transition(State.REFUSED, ("receipt",))),
        ),
        Defect(
            "no intent is recorded", "intent",
            _table((None, Event.ADMITTED), Transition(State.DISPATCHED, (), Counts.CALL | Counts.GRANTS)),
        ),
        Defect("an answer leaves before its commit", "before the commit", _answer_before_commit),
        Defect("a leaf is left out", "its incident does not follow", _leaf_left_out),
        Defect("a dispatched call is not recovered", "still dispatched", _nothing_recovered),
        Defect("a dispatched call is recovered as never sent", "effect", _recovered_as_not_sent),
        Defect("a replay is signed again", "second receipt", _signed_again),
        Defect("a stale checkpoint is saved", "checkpoint_history", _any_revision),
        Defect("a mailbox forgets its keys", "answered", _keeps_no_key),
        Defect("each start writes something", "second recovery changed rows", _second_recovery),
        Defect(
            "the tree is not read again after a rollback", "the tree in memory",
            lambda: (Tree, "reload", lambda self: None),
        ),
        Defect("the log is not put back after a rollback", "leaves", _log_not_put_back),
        Defect("an expired grant is used", "expired", _decides_without(now_ms=0)),
        Defect("a revoked capability is used", "revoked", _decides_without(revoked=frozenset())),
        Defect("a cancelled process goes on", "cancelled", lambda: (Kernel, "cancel", _cancels_itself)),
    )
}  # fmt: skip


def _cancels_itself(self: Kernel, process: str, by: str) -> int:
    self.writer.open_commit()
    self.store.cancel([process])
    self.ledger.record("cancellation", {"process_id": process, "by": by, "processes": [process]})
    self.tree[process].running = False
    return 1


@contextmanager
def applied(defect: Defect) -> Iterator[None]:
    where, name, instead = defect.instead()
    if where is TRANSITIONS:
        key, move = instead
        before, TRANSITIONS[key] = TRANSITIONS[key], move
        try:
            yield
        finally:
            TRANSITIONS[key] = before
        return
    before = vars(where)[name]
    setattr(where, name, instead)
    try:
        yield
    finally:
        setattr(where, name, before)
