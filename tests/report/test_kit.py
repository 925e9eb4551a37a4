"""dist/report.zip, as someone meets it who has the `chio` command and nothing else of this tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.report.walkthrough import ROOT, STEPS, Project

WITHOUT_UV = "python3 -m venv .venv && .venv/bin/python -m pip install --no-index --require-hashes -r requirements.txt"


def pack(target: Path) -> bytes:
    subprocess.run([ROOT / ".ci/kit", target], capture_output=True, timeout=120, check=True)
    return target.read_bytes()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist") / "report.zip"
    pack(target)
    return target


def test_the_kit_holds_the_folder_its_clients_and_locks_that_name_no_host(kit: Path) -> None:
    with zipfile.ZipFile(kit) as archive:
        names = set(archive.namelist())
        texts = {name: archive.read(name).decode() for name in names if not name.endswith((".whl", ".tgz"))}
    kept = {f"report/{path.relative_to(ROOT / 'fixtures/report')}" for path in (ROOT / "fixtures/report").rglob("*.*")
            if path.is_file() and "__pycache__" not in path.parts}
    assert kept <= names
    assert names - kept - {"report/uv.lock"} == {
        "report/package-lock.json",
        "report/requirements.txt",
        "report/vendor/chio_process-0.1.0-py3-none-any.whl",
        "report/vendor/chio-protocol-process-0.1.0.tgz",
    }
    for name, text in texts.items():
        assert "https://" not in text, name
        assert str(ROOT) not in text, name


def test_packing_the_same_tree_again_gives_the_same_bytes(kit: Path, tmp_path: Path) -> None:
    assert pack(tmp_path / "again.zip") == kit.read_bytes()


def test_the_unpacked_kit_installs_offline_and_runs_the_same_steps(kit: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("confining a worker needs root in this version")
    with zipfile.ZipFile(kit) as archive:
        archive.extractall(tmp_path)
    project = Project(tmp_path / "report")
    # An interpreter that workers can see: one below a private home is refused, and the message says what to do.
    project.run(WITHOUT_UV.replace("python3", "/usr/bin/python3", 1))
    project.run("npm ci --offline")
    for step in STEPS:
        step(project)


def test_uv_installs_the_kit_as_its_readme_says(kit: Path, tmp_path: Path) -> None:
    if shutil.which("uv", path=Project(tmp_path).environment["PATH"]) is None:
        pytest.skip("uv is not installed; the kit was packed without uv.lock")
    with zipfile.ZipFile(kit) as archive:
        archive.extractall(tmp_path)
    project = Project(tmp_path / "report")
    project.run("UV_OFFLINE=1 uv sync --locked")
    imported = project.run("UV_OFFLINE=1 uv run python -c 'import chio_process; print(chio_process.__name__)'")
    assert imported == "chio_process\n"
