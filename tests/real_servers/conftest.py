"""The servers are installed once, pinned, as their authors published them."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.report.walkthrough import ROOT


@pytest.fixture(scope="session", autouse=True)
def installed_servers() -> None:
    """`.ci/servers`, quick when nothing has to be done; two at once wait for each other."""
    if os.geteuid() != 0:
        pytest.skip("confining a server needs root in this version")
    subprocess.run([ROOT / ".ci/servers"], check=True, timeout=280)
