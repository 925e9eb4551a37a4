"""A state for one test, or a kernel that one module's tests share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.serving import Serving, State, Worker, all_of, child, config, mailbox

# What a shared kernel has: each test takes its own.
_PROCESSES = 128
_MAILBOXES = 30


@pytest.fixture(scope="session")
def key_file() -> Path | None:
    """The key file of every state: none here. tests/keeping has one, and runs some of these tests with it."""
    return None


@pytest.fixture
def make_state(tmp_path: Path, key_file: Path | None) -> Callable[..., State]:
    """Makes states below one folder: `make_state(config, policy)`."""
    numbers = itertools.count()

    def make(host: dict[str, Any] | None = None, rules: dict[str, Any] | None = None) -> State:
        return State.make(tmp_path / str(next(numbers)), host, rules, key_file)

    return make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, key_file: Path | None) -> Iterator[Serving]:
    """One kernel for a module: processes `p0` … with every tool of every mailbox."""
    boxes = [f"m{n}" for n in range(_MAILBOXES)]
    host = config(
        *(child(f"p{n}", *all_of(*boxes), share=70) for n in range(_PROCESSES)),
        mailboxes=[mailbox(box) for box in boxes],
        max_calls=1_000_000,
        max_processes=_PROCESSES + 1,
    )
    state = State.make(tmp_path_factory.mktemp("shared") / "state", host, key_file=key_file)
    with state.serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def _processes() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def worker(shared: Serving, _processes: Iterator[int]) -> Worker:
    """A process that no other test of the module has, and its attempt on the shared kernel."""
    number = next(_processes)
    assert number < _PROCESSES - 1, "raise _PROCESSES"
    return shared.worker(f"p{number}")


@pytest.fixture
def bystander(shared: Serving) -> Worker:
    """Somebody else on the shared kernel, who must be served whatever happens."""
    return shared.worker(f"p{_PROCESSES - 1}")
