"""The fixtures of tests/kernel and tests/external, over states that are encrypted under one key file."""

from __future__ import annotations

from pathlib import Path

import pytest

from chio import keyfile
from tests.external.conftest import make  # noqa: F401 - these fixtures take `key_file` from here
from tests.kernel.conftest import _processes, bystander, make_state, shared, worker  # noqa: F401


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "chio.key"
    keyfile.make(file)
    return file


@pytest.fixture
def keyed(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command of the test, and what it starts, is told of the key file by its environment."""
    monkeypatch.setenv("CHIO_KEY_FILE", str(key_file))
    return key_file
