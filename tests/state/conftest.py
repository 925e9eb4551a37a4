"""What every test of the recipes stands on: a copy of the project that is ready to run."""

from __future__ import annotations

import subprocess

import pytest

from tests.report.walkthrough import ROOT, Project
from tests.state.recipes import LANGUAGES


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy for one module; tests in it take state directories of their own."""
    folder = tmp_path_factory.mktemp("recipes") / "project"
    subprocess.run([ROOT / ".ci/report-env", folder, "recipes"], check=True, timeout=60)
    return Project(folder)


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    """Which language's recipes a test runs: all of it holds for each."""
    return str(request.param)
