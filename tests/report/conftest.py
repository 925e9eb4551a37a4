"""What every test of the report project stands on: a copy of it that is ready to run."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.report.walkthrough import ROOT, Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy for one module; tests in it take state directories of their own."""
    if os.geteuid() != 0:
        pytest.skip("confining a worker needs root in this version")
    folder = tmp_path_factory.mktemp("report") / "project"
    subprocess.run([ROOT / ".ci/report-env", folder], check=True, timeout=60)
    return Project(folder)
