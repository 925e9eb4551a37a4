"""A launcher process per test module, and a folder to run in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from confine import Launcher
from tests.confine.launching import Runner


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Launcher.start() as launcher:
        yield Runner(launcher)


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """A folder that everyone may read, as an ordinary project's is."""
    folder = tmp_path / "project"
    folder.mkdir()
    tmp_path.chmod(0o700)
    folder.chmod(0o755)
    return folder
