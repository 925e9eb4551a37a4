from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.peer import Peer


@pytest.fixture(params=["python", "node"])
def client(request: pytest.FixtureRequest) -> str:
    """Which client a test drives: each test of the protocol holds for both."""
    return str(request.param)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path / "s")
    yield made
    made.close()
