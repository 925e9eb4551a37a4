"""A state for one test, or a kernel that one module's tests share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.serving import Serving, State, Worker, all_of, child, config, mailbox

_SHARED = 30  # processes and mailboxes of a shared kernel: each test takes its own


@pytest.fixture
def make_state(tmp_path: Path) -> Callable[..., State]:
    """Makes states below one folder: `make_state(config, policy)`."""
    numbers = itertools.count()

    def make(host: dict[str, Any] | None = None, rules: dict[str, Any] | None = None) -> State:
        return State.make(tmp_path / str(next(numbers)), host, rules)

    return make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One kernel for a module: processes `p0` … with every tool of every mailbox."""
    boxes = [f"m{n}" for n in range(_SHARED)]
    host = config(
        *(child(f"p{n}", *all_of(*boxes), share=300) for n in range(_SHARED)),
        mailboxes=[mailbox(box) for box in boxes],
        max_calls=1_000_000,
    )
    state = State.make(tmp_path_factory.mktemp("shared") / "state", host)
    with state.serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def _processes() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def worker(shared: Serving, _processes: Iterator[int]) -> Worker:
    """An attempt of its own on the shared kernel; its ending is the kernel's."""
    return shared.worker(f"p{next(_processes) % (_SHARED - 1)}")


@pytest.fixture
def bystander(shared: Serving) -> Worker:
    """Somebody else on the shared kernel, who must be served whatever happens."""
    return shared.worker(f"p{_SHARED - 1}")
