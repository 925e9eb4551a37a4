"""`make demo`, less the set-up, in a folder of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.report.walkthrough import ROOT, TEN

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="confining a worker needs root in this version")


def attempt(folder: Path) -> subprocess.CompletedProcess[str]:
    """Under the strictest umask that people have: workers read the project under uids of their own."""
    return subprocess.run(
        [ROOT / ".ci/demo", folder], text=True, capture_output=True, timeout=120, check=False, umask=0o077
    )


def demo(folder: Path) -> str:
    done = attempt(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_second_demo_shows_that_no_attempt_was_added(tmp_path: Path) -> None:
    first = demo(tmp_path / "demo")
    assert TEN in first
    assert "consistent with each other, and no more" in first
    assert "consumer 1, producer 1. Run `make demo` again" in first

    second = demo(tmp_path / "demo")
    assert TEN in second
    assert "init" not in second.partition("== The result")[0]
    assert "consumer 1, producer 1: the same as before. No attempt was added." in second


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("kept")
    done = attempt(tmp_path / "mine")
    assert done.returncode == 1
    assert "no demo made it" in done.stderr
    assert (tmp_path / "mine/file").read_text() == "kept"
