"""What the kernel says by itself reaches the host whatever the host was just waiting for."""

from __future__ import annotations

import select
from collections.abc import Callable
from pathlib import Path

import pytest

from chio.errors import HostFault
from chio.host import KernelProcess
from tests.kernel.serving import State

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State.make(tmp_path / "made")


def cancel_as_worker(state: State, then: Callable[[KernelProcess], None]) -> None:
    with state.serve() as serving:
        serving.worker("a").ask("cancel")  # the kernel tells the host of it
        then(serving.host.kernel)


def test_an_event_that_arrived_before_an_answer_is_pending_though_the_socket_is_silent(state: State) -> None:
    def then(kernel: KernelProcess) -> None:
        kernel.call("progress")
        assert select.select([kernel], [], [], 0)[0] == []
        assert kernel.pending
        assert [event for event, _ in kernel.events()] == [{"event": "cancelled", "processes": ["a"]}]
        assert not kernel.pending

    cancel_as_worker(state, then)


def test_what_is_pending_is_given_once_and_nothing_is_taken_by_asking(state: State) -> None:
    def then(kernel: KernelProcess) -> None:
        kernel.call("progress")
        assert [kernel.pending for _ in range(3)] == [True] * 3
        assert len(kernel.events()) == 1
        assert kernel.events() == []

    cancel_as_worker(state, then)


def test_a_kernel_that_is_gone_is_a_fault_of_whoever_asks(state: State) -> None:
    serving = state.serve()
    kernel = serving.host.kernel
    serving.host.kernel._process.kill()
    serving.host.kernel._process.wait()
    with pytest.raises(HostFault):
        _ = kernel.pending
    serving.close()
