"""What every checkpoint store does, over a SQLite file and over a real kernel."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from chio_process.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from tests.clients.checkpoints.conftest import OpenStore

DEEP: Any = None
for _ in range(55):
    DEEP = [DEEP]


def order(**changes: Any) -> Checkpoint:
    return replace(Checkpoint.initial("order-42", "run-1", "acme.order", 1, {"phase": "ready"}, now=1_000), **changes)


def refused(kind: str, store: CheckpointStore, checkpoint: Checkpoint, expected: int | None) -> None:
    """The swap ends with this kind of error, and what is stored is what it was."""
    before = stored(store)
    with pytest.raises(CheckpointError) as error:
        store.compare_and_swap(checkpoint, expected)
    assert error.value.kind == kind
    assert stored(store) == before


def stored(store: CheckpointStore) -> str | None:
    try:
        return store.load("order-42").encoded()
    except CheckpointError as error:
        if error.kind != "not_found":
            raise
        return None


def test_what_is_created_is_loaded_again_by_another_program(open_store: OpenStore) -> None:
    created = order(payload={"text": "é \u2028 \x00 😀", "list": [1, -1.5, None, True, {}], "deep": DEEP, "e": 1e-7})
    open_store().compare_and_swap(created, None)
    assert open_store().load("order-42") == created


def test_a_checkpoint_that_is_not_there_is_not_found(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError) as error:
        store.load("order-42")
    assert error.value.kind == "not_found"


def test_revisions_follow_each_other_and_time_does_not_go_back(store: CheckpointStore) -> None:
    current = order()
    store.compare_and_swap(current, None)
    for now in (1_005, 900, 2_000):
        following = current.next({"at": now}, now)
        store.compare_and_swap(following, current.revision)
        current = store.load("order-42")
        assert current == following
    assert (current.revision, current.updated_at) == (3, 2_000)
    store.compare_and_swap(current.next({}, 5), 3)
    assert store.load("order-42").updated_at == 2_000


def test_creating_is_for_revision_zero_of_what_is_absent(store: CheckpointStore) -> None:
    refused("invalid", store, order(revision=1), None)
    store.compare_and_swap(order(), None)
    refused("conflict", store, order(payload={"phase": "other"}), None)
    refused("conflict", store, order(), None)


def test_of_two_writers_on_one_revision_the_second_is_refused(open_store: OpenStore) -> None:
    a, b = open_store(), open_store()
    a.compare_and_swap(order(), None)
    seen_by_a, seen_by_b = a.load("order-42"), b.load("order-42")
    a.compare_and_swap(seen_by_a.next({"by": "a"}), 0)
    refused("conflict", b, seen_by_b.next({"by": "b"}), 0)
    refused("conflict", b, seen_by_b.next({"by": "a"}, seen_by_b.updated_at), 0)
    assert b.load("order-42").payload == {"by": "a"}


@pytest.mark.parametrize(
    ("changes", "expected", "kind"),
    [
        ({"revision": 3}, 1, "invalid"),  # not the next one
        ({"revision": 1}, 1, "invalid"),
        ({"revision": 0}, 1, "invalid"),
        ({"revision": 1}, 0, "conflict"),  # from a revision that is past
        ({"revision": 8}, 7, "conflict"),  # from one that has not been
        ({"revision": 2, "run_id": "run-2"}, 1, "foreign_run"),
        ({"revision": 0, "run_id": "run-2"}, None, "foreign_run"),
        ({"revision": 2, "kind": "acme.invoice"}, 1, "kind_mismatch"),
        ({"revision": 2, "updated_at": 999}, 1, "invalid"),  # earlier than what is stored
        ({"revision": 0}, -1, "invalid"),
    ],
)
def test_any_other_step_is_refused_and_changes_nothing(
    store: CheckpointStore, changes: dict[str, Any], expected: int | None, kind: str
) -> None:
    store.compare_and_swap(order(), None)
    store.compare_and_swap(order().next({"phase": "validated"}, 1_000), 0)
    refused(kind, store, order(**changes), expected)


def test_what_is_absent_cannot_be_updated(store: CheckpointStore) -> None:
    refused("not_found", store, order(revision=1), 0)


def test_a_revision_is_a_number_and_true_is_none(store: CheckpointStore) -> None:
    store.compare_and_swap(order(), None)
    store.compare_and_swap(order().next({}, 1_000), 0)
    refused("invalid", store, order().next({}).next({}), True)


def test_two_checkpoints_of_one_store_do_not_touch_each_other(store: CheckpointStore) -> None:
    other = order(id="order-43", run_id="run-2", kind="acme.invoice")
    store.compare_and_swap(order(), None)
    store.compare_and_swap(other, None)
    store.compare_and_swap(order().next({"n": 1}), 0)
    assert store.load("order-43") == other


def test_writers_that_race_are_each_told_the_truth(open_store: OpenStore) -> None:
    """Each acknowledged revision is some writer's own, none is lost, and their number is the last revision."""
    open_store().compare_and_swap(order(payload={"done": []}), None)
    won: dict[int, list[int]] = {n: [] for n in range(4)}
    refusals: list[str] = []
    stores = {n: open_store() for n in won}

    def write(n: int) -> None:
        for _ in range(15):
            current = stores[n].load("order-42")
            try:
                stores[n].compare_and_swap(
                    current.next({"done": [*current.payload["done"], n]}, 1_000), current.revision
                )
            except CheckpointError as error:
                refusals.append(error.kind)
            else:
                won[n].append(current.revision)

    threads = [threading.Thread(target=write, args=(n,)) for n in won]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = open_store().load("order-42")
    assert set(refusals) <= {"conflict"}
    assert sorted(revision for revisions in won.values() for revision in revisions) == list(range(last.revision))
    assert all(last.payload["done"][revision] == n for n, revisions in won.items() for revision in revisions)
