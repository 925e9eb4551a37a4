"""`make setup`: what it says when it may not install, and that it does nothing when there is nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.report.walkthrough import ROOT

NOBODY = 65534
INPUTS = ("requirements.txt", "pyproject.toml", "chio/clients/python/pyproject.toml")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with what the set-up reads, in a folder that everybody may write to."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / ".ci", tree / ".ci")
    for name in INPUTS:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return tree


def tools_without(missing: set[str], folder: Path) -> str:
    """A PATH that lacks some of the commands that the set-up asks for, as on a new machine."""
    folder.mkdir()
    asked_for = {"dirname", "sha256sum", "id", "uname", "grep", "cc", "npm", "node", "python3"}
    for name in asked_for - missing:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return str(folder)


def test_an_ordinary_user_is_told_the_command_that_root_must_run(tree: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving up root takes root")
    path = tools_without({"cc", "npm", "node"}, tmp_path / "bin")
    before = sorted(tree.rglob("*"))
    for folder in (tree, *tree.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", ".ci/setup"], cwd=tree, env={"PATH": path, "HOME": str(tree)}, text=True, capture_output=True,
        timeout=60, check=False, user=NOBODY, group=NOBODY, extra_groups=[],
    )
    assert done.returncode == 1
    command = done.stdout.removesuffix("\n")
    assert command.startswith("apt-get update && apt-get install --yes --no-install-recommends ")
    assert {"gcc", "libc6-dev", "nodejs", "npm"} <= set(command.split())
    assert "as root, run:" in done.stderr
    assert sorted(tree.rglob("*")) == before


def test_a_second_set_up_does_nothing_quickly() -> None:
    command = [ROOT / ".ci/setup"]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    started = time.monotonic()
    done = subprocess.run(command, text=True, capture_output=True, timeout=600, check=False)
    took = time.monotonic() - started
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert took < 0.3
