"""One kernel for a module; every test has processes of its own on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.clients.snapshots.driving import Snapshots, opened
from tests.kernel.serving import Serving, State, Worker, child, config

_PROCESSES = 160


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One kernel for the module; every test has processes of its own."""
    host = config(
        *(child(f"p{n}", share=50) for n in range(_PROCESSES)),
        max_processes=_PROCESSES + 1,
        state={"max_bytes": 1 << 30, "max_blobs": 16_384},
    )
    with State.make(tmp_path_factory.mktemp("shared") / "state", host).serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def make_worker(shared: Serving) -> Callable[[], Worker]:
    """A worker of a process that no other test has."""
    numbers = itertools.count()
    return lambda: shared.worker(f"p{next(numbers)}")


@pytest.fixture
def worker(make_worker: Callable[[], Worker]) -> Worker:
    return make_worker()


@pytest.fixture
def snapshots(client: str, worker: Worker) -> Iterator[Snapshots]:
    with opened(client, worker) as made:
        yield made
