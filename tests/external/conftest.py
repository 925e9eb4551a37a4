"""A kernel with a rogue tool server, shared by a module's tests; each test takes a process of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.external import (
    ToolServing,
    ToolState,
    child,
    host_config,
    server,
    tool,
)
from tests.kernel.serving import Worker, grant, policy

_PROCESSES = 90
MakeState = Callable[..., ToolState]


@pytest.fixture(scope="session")
def key_file() -> Path | None:
    """The key file of every state that a test makes: none here. tests/keeping has one."""
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("external")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[ToolServing]:
    """One kernel for the module. `quick` is the rogue with a deadline of a second; `deaf` too, for who stops it."""
    servers = [
        server("bank", "resource.py", folder / "bank"),
        server("rogue", "rogue.py", folder / "rogue"),
        server("quick", "rogue.py", folder / "quick", timeout_s=1),
        server("deaf", "rogue.py", folder / "deaf", timeout_s=1),
    ]
    routes = [f"bank/{name}" for name in ("pay", "balance")]
    routes += [f"{name}/{verb}" for name in ("rogue", "quick", "deaf") for verb in ("do", "look")]
    children = [child(f"p{n}", *routes, share=100) for n in range(_PROCESSES)]
    host = host_config(servers, *children, max_calls=1_000_000, max_processes=_PROCESSES + 1)
    rules = policy(tool("bank"), tool("rogue"), tool("quick"), tool("deaf"))
    with ToolState.make(folder / "state", host, rules).serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def _processes() -> Iterator[int]:
    return iter(range(_PROCESSES))


@pytest.fixture
def worker(shared: ToolServing, _processes: Iterator[int]) -> Worker:
    return shared.worker(f"p{next(_processes)}")


@pytest.fixture
def key(worker: Worker) -> str:
    """An operation key that names its call in the whole state."""
    return f"key of {worker.process}"


@pytest.fixture
def make(tmp_path: Path, key_file: Path | None) -> MakeState:
    """Makes a state of its own with the servers `bank` and `rogue`, and with `quick` where it is named."""
    numbers = itertools.count()

    def make_state(*children: dict[str, Any], rules: list[dict[str, Any]] | None = None, **limits: Any) -> ToolState:
        servers = [
            server("bank", "resource.py", tmp_path / "bank"),
            server("rogue", "rogue.py", tmp_path / "rogue"),
            server("quick", "rogue.py", tmp_path / "quick", timeout_s=1),
        ]
        allowed = rules or [tool("bank"), tool("rogue"), tool("quick"), grant()]
        kin = list(children) or [child("a", "bank/pay", "bank/balance", "rogue/do", "rogue/look", "quick/do")]
        host = host_config(servers, *kin, **limits)
        return ToolState.make(tmp_path / str(next(numbers)), host, policy(*allowed), key_file)

    return make_state
