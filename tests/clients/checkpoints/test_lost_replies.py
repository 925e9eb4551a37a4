"""Saves in the process state whose reply never comes: rereading decides, and nothing is overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chio_process import ProcessClient, WorkerError
from chio_process.checkpoints import Checkpoint, CheckpointError, ProcessStateStore
from tests.clients.checkpoints.proxy import Proxy
from tests.kernel.serving import Worker

FIRST = Checkpoint.initial("order-42", "run-1", "acme.order", 1, {"phase": "ready"}, now=1_000)
SECOND = FIRST.next({"phase": "validated"}, 2_000)
OTHER = FIRST.next({"phase": "cancelled"}, 2_000)
MEMBER = "chio.checkpoints/order-42"


@pytest.fixture
def lossy(proxy: Proxy, worker: Worker) -> Iterator[ProcessStateStore]:
    with ProcessClient(proxy.path, worker.credential, timeout=20) as client:
        yield ProcessStateStore(client)


@pytest.fixture
def direct(client: ProcessClient) -> ProcessStateStore:
    return ProcessStateStore(client)


def value_of(client: ProcessClient) -> tuple[str, Any]:
    held = client.inspect()["checkpoint"]
    return held["revision"], held["value"]


def test_a_save_whose_reply_is_lost_is_found_by_rereading_and_not_sent_again(
    proxy: Proxy, lossy: ProcessStateStore, client: ProcessClient
) -> None:
    proxy.losses = ["reply"]
    lossy.compare_and_swap(FIRST, None)
    assert proxy.saves == 1
    assert value_of(client) == ("1", {MEMBER: FIRST.to_document()})


def test_a_save_that_never_arrived_is_sent_once_more(
    proxy: Proxy, lossy: ProcessStateStore, client: ProcessClient
) -> None:
    proxy.losses = ["request"]
    lossy.compare_and_swap(FIRST, None)
    assert proxy.saves == 2
    assert value_of(client) == ("1", {MEMBER: FIRST.to_document()})


def test_a_second_send_whose_reply_is_lost_is_found_too(
    proxy: Proxy, lossy: ProcessStateStore, client: ProcessClient
) -> None:
    proxy.losses = ["request", "reply"]
    lossy.compare_and_swap(FIRST, None)
    assert proxy.saves == 2
    assert value_of(client) == ("1", {MEMBER: FIRST.to_document()})


def test_a_save_that_is_lost_twice_is_ambiguous_and_not_sent_a_third_time(
    proxy: Proxy, lossy: ProcessStateStore, client: ProcessClient
) -> None:
    proxy.losses = ["request", "request"]
    with pytest.raises(CheckpointError) as error:
        lossy.compare_and_swap(FIRST, None)
    assert (error.value.kind, proxy.saves) == ("ambiguous", 2)
    assert value_of(client) == ("0", None)


@pytest.mark.parametrize("second", ["pass", "request", "reply"])
def test_a_late_first_send_and_the_second_store_one_revision(
    proxy: Proxy, lossy: ProcessStateStore, client: ProcessClient, second: str
) -> None:
    """The first frame arrives after the reread and right before the second send, which conflicts with it."""
    proxy.losses = ["late", second]
    proxy.on_save = lambda number: proxy.deliver() if number == 2 else None
    lossy.compare_and_swap(FIRST, None)
    assert proxy.saves == 2
    assert value_of(client) == ("1", {MEMBER: FIRST.to_document()})
    proxy.deliver()
    assert value_of(client) == ("1", {MEMBER: FIRST.to_document()})


def test_a_late_frame_after_another_writers_save_changes_nothing(
    proxy: Proxy, lossy: ProcessStateStore, direct: ProcessStateStore, client: ProcessClient
) -> None:
    direct.compare_and_swap(FIRST, None)
    proxy.losses = ["late"]
    proxy.on_loss = lambda: direct.compare_and_swap(OTHER, 0)
    with pytest.raises(CheckpointError) as error:
        lossy.compare_and_swap(SECOND, 0)
    assert (error.value.kind, proxy.saves) == ("conflict", 1)
    proxy.deliver()
    assert direct.load("order-42") == OTHER


def test_another_writer_who_went_further_makes_a_lost_save_ambiguous(
    proxy: Proxy, lossy: ProcessStateStore, direct: ProcessStateStore
) -> None:
    direct.compare_and_swap(FIRST, None)
    third = SECOND.next({"phase": "shipped"}, 3_000)
    proxy.losses = ["reply"]
    proxy.on_loss = lambda: direct.compare_and_swap(third, 1)
    with pytest.raises(CheckpointError) as error:
        lossy.compare_and_swap(SECOND, 0)
    assert (error.value.kind, proxy.saves) == ("ambiguous", 1)
    assert direct.load("order-42") == third


def test_a_value_that_moved_on_for_others_makes_a_lost_save_ambiguous(
    proxy: Proxy, lossy: ProcessStateStore, direct: ProcessStateStore, client: ProcessClient
) -> None:
    direct.compare_and_swap(FIRST, None)
    proxy.losses = ["request"]
    proxy.on_loss = lambda: client.checkpoint("1", {**value_of(client)[1], "report.v1": 1})
    with pytest.raises(CheckpointError) as error:
        lossy.compare_and_swap(SECOND, 0)
    assert (error.value.kind, proxy.saves) == ("ambiguous", 1)
    assert value_of(client) == ("2", {MEMBER: FIRST.to_document(), "report.v1": 1})


def test_a_kernel_that_cannot_be_reread_leaves_it_ambiguous(
    proxy: Proxy, lossy: ProcessStateStore, direct: ProcessStateStore
) -> None:
    def deafen() -> None:
        proxy.deaf = True

    proxy.losses = ["reply"]
    proxy.on_loss = deafen
    with pytest.raises(CheckpointError) as error:
        lossy.compare_and_swap(FIRST, None)
    assert (error.value.kind, proxy.saves) == ("ambiguous", 1)
    assert direct.load("order-42") == FIRST


def test_a_kernel_that_does_not_answer_is_unavailable_and_nothing_was_sent(
    proxy: Proxy, lossy: ProcessStateStore
) -> None:
    proxy.deaf = True
    for act in (lambda: lossy.load("order-42"), lambda: lossy.compare_and_swap(FIRST, None)):
        with pytest.raises(CheckpointError) as error:
            act()
        assert error.value.kind == "unavailable"
        assert isinstance(error.value.__cause__, WorkerError)
    assert proxy.saves == 0


class Overtaken(ProcessClient):
    """A client whose every save is preceded by somebody else's, of another member of the value."""

    overtakings = 0
    at_most = 0

    def checkpoint(self, expected_revision: str, value: Any) -> dict[str, Any]:
        if self.overtakings < self.at_most:
            self.overtakings += 1
            held = self.inspect()["checkpoint"]
            super().checkpoint(held["revision"], {**(held["value"] or {}), "report.v1": self.overtakings})
        return super().checkpoint(expected_revision, value)


@pytest.mark.parametrize(("at_most", "outcome"), [(3, None), (99, "conflict")])
def test_a_save_that_other_members_overtake_carries_them_forward(
    worker: Worker, client: ProcessClient, at_most: int, outcome: str | None
) -> None:
    overtaken = Overtaken(worker.path, worker.credential)
    overtaken.at_most = at_most
    store = ProcessStateStore(overtaken)
    if outcome is None:
        store.compare_and_swap(FIRST, None)
        assert value_of(client) == ("4", {MEMBER: FIRST.to_document(), "report.v1": 3})
    else:
        with pytest.raises(CheckpointError) as error:
            store.compare_and_swap(FIRST, None)
        assert error.value.kind == outcome
        assert value_of(client) == ("8", {"report.v1": 8})


def test_every_other_member_is_carried_forward(direct: ProcessStateStore, client: ProcessClient) -> None:
    others = {"report.v1": {"completed": ["a"]}, "chio.ai-sdk.journal.v1": [1.5, "é"], "n": None}
    client.checkpoint("0", others)
    direct.compare_and_swap(FIRST, None)
    direct.compare_and_swap(SECOND, 0)
    assert value_of(client) == ("3", {**others, MEMBER: SECOND.to_document()})


def test_another_slot_is_another_store(client: ProcessClient, direct: ProcessStateStore) -> None:
    direct.compare_and_swap(FIRST, None)
    other = ProcessStateStore(client, slot="acme.progress")
    with pytest.raises(CheckpointError, match="not_found"):
        other.load("order-42")
    other.compare_and_swap(FIRST, None)
    assert value_of(client)[1].keys() == {MEMBER, "acme.progress/order-42"}


@pytest.mark.parametrize("value", [[], "text", 7, False])
def test_a_value_that_is_not_an_object_is_not_replaced(
    direct: ProcessStateStore, client: ProcessClient, value: Any
) -> None:
    client.checkpoint("0", value)
    for act in (lambda: direct.load("order-42"), lambda: direct.compare_and_swap(FIRST, None)):
        with pytest.raises(CheckpointError, match="corrupt"):
            act()
    assert value_of(client) == ("1", value)


@pytest.mark.parametrize(
    "member",
    [
        None, [], {}, {**FIRST.to_document(), "lease": 1}, {**FIRST.to_document(), "revision": "0"},
        {**FIRST.to_document(), "id": "order-43"},
    ],
)  # fmt: skip
def test_a_member_that_is_no_checkpoint_is_not_replaced(
    direct: ProcessStateStore, client: ProcessClient, member: Any
) -> None:
    client.checkpoint("0", {MEMBER: member})
    for act in (lambda: direct.load("order-42"), lambda: direct.compare_and_swap(FIRST, None)):
        with pytest.raises(CheckpointError, match="corrupt"):
            act()
    assert value_of(client) == ("1", {MEMBER: member})


def test_a_value_that_would_pass_a_mebibyte_is_too_large(direct: ProcessStateStore, client: ProcessClient) -> None:
    client.checkpoint("0", {"big": "x" * 1_048_000})
    large = Checkpoint.initial("order-42", "run-1", "acme.order", 1, {"text": "y" * 600})
    with pytest.raises(CheckpointError) as error:
        direct.compare_and_swap(large, None)
    assert error.value.kind == "too_large"
    assert value_of(client) == ("1", {"big": "x" * 1_048_000})


def test_what_the_kernel_refuses_for_its_own_reasons_is_unavailable(worker: Worker) -> None:
    store = ProcessStateStore(ProcessClient(worker.path, "0" * 64))
    with pytest.raises(CheckpointError) as error:
        store.compare_and_swap(FIRST, None)
    assert error.value.kind == "unavailable"
    assert "unauthenticated" in error.value.message
