"""Both stores, each over the real thing; every test takes a process, or a file, of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chio_process import ProcessClient
from chio_process.checkpoints import CheckpointStore, ProcessStateStore, SqliteStore
from tests.clients.checkpoints.proxy import Proxy
from tests.kernel.serving import Serving, State, Worker, child, config

_PROCESSES = 60


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One kernel for a module's tests."""
    children = [child(f"p{n}", share=100) for n in range(_PROCESSES)]
    host = config(*children, max_calls=1_000_000, max_processes=_PROCESSES + 1)
    with State.make(tmp_path_factory.mktemp("kernel") / "folder", host).serve() as made:
        yield made


@pytest.fixture(scope="module")
def _numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def worker(serving: Serving, _numbers: Iterator[int]) -> Worker:
    """An attempt of a process that no other test has."""
    return serving.worker(f"p{next(_numbers)}")


@pytest.fixture
def client(worker: Worker) -> Iterator[ProcessClient]:
    with ProcessClient(worker.path, worker.credential) as made:
        yield made


@pytest.fixture
def proxy(worker: Worker, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(tmp_path / "proxy", worker.path)
    yield made
    made.close()


OpenStore = Callable[[], CheckpointStore]


@pytest.fixture(params=["sqlite", "process"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the same store again, as another program would."""
    opened: list[SqliteStore | ProcessClient] = []

    def sqlite() -> CheckpointStore:
        opened.append(store := SqliteStore(tmp_path / "checkpoints.db"))
        return store

    def process() -> CheckpointStore:
        worker = request.getfixturevalue("worker")
        opened.append(client := ProcessClient(worker.path, worker.credential))
        return ProcessStateStore(client)

    yield sqlite if request.param == "sqlite" else process
    for one in opened:
        one.close()


@pytest.fixture
def store(open_store: OpenStore) -> CheckpointStore:
    return open_store()
