"""The distribution `chio-verify` where nothing else of the project is: its wheel, and its own tests with that wheel.

An ordinary user, an empty directory, no network, and a virtual environment that holds the wheel, what it depends on and
what its tests need.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS_NEED = ("pytest", "hypothesis", "cryptography")  # cryptography: the lax verifier of a control
NOBODY = 65534


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that any user may enter."""
    with tempfile.TemporaryDirectory(prefix="chio-verify-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    source = place / "source"  # a build writes beside its source
    shutil.copytree(ROOT / "verify", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "-w", str(place / "dist"), str(source)], check=True, timeout=120)
    (made,) = (place / "dist").glob("*.whl")
    return made


def closure(*names: str) -> set[str]:
    """The distributions that these need here, extras left out."""
    found: set[str] = set()
    waiting = [name.lower() for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in metadata.distribution(name).requires or []:
            text, _, marker = requirement.partition(";")
            needed = re.split(r"[^A-Za-z0-9._-]", text.strip())[0].lower()
            if "extra" not in marker and is_installed(needed):  # one that is not is for another platform
                waiting.append(needed)
    return found


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def install(name: str, packages: Path) -> None:
    for file in metadata.distribution(name).files or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)


@pytest.fixture(scope="module")
def python(place: Path, wheel: Path) -> Path:
    """The interpreter of an environment with the wheel, its dependencies and the tests' own."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(place / "venv")], check=True, timeout=60)
    interpreter = place / "venv" / "bin" / "python"
    (packages,) = (place / "venv" / "lib").glob("python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    declared = tomllib.loads((ROOT / "verify" / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in closure(*(re.split(r"[^A-Za-z0-9-]", text)[0] for text in declared), *TESTS_NEED):
        install(name, packages)
    return interpreter


def alone(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs it without a network and, where this is root, as nobody."""
    if os.geteuid() == 0:
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        command = ["unshare", "--net", "--", *user, *command]
    else:
        command = ["unshare", "--map-root-user", "--net", "--", *command]
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
        "CHIO_FUZZ_EXAMPLES": "20", "CHIO_MUTATIONS": "10",  # the suite itself has more
    }  # fmt: skip
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture
def empty(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="empty-", dir=place) as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def test_the_wheel_holds_the_package_its_command_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        scripts = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        told = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0] for name in names} == {"verify", "chio_verify-0.1.0.dist-info"}
    assert {name for name in names if name.endswith(".py")} == {
        f"verify/{path.name}" for path in (ROOT / "verify").glob("*.py")
    }
    assert "verify/py.typed" in names
    assert "chio-verify = verify.cli:main" in scripts
    needs = sorted(re.findall(r"^Requires-Dist: ([a-z0-9]+)", told, re.MULTILINE))
    assert needs == ["click", "pynacl", "rfc8785"]


def test_its_version_is_the_projects() -> None:
    projects = [tomllib.loads((ROOT / name).read_text()) for name in ("pyproject.toml", "verify/pyproject.toml")]
    versions = [project["project"]["version"] for project in projects]
    assert versions[0] == versions[1]


def test_nothing_else_of_the_project_can_be_imported_there(python: Path, empty: Path) -> None:
    assert alone([str(python), "-c", "import verify.cli, verify.receipts"], empty).returncode == 0
    for name in ("chio", "confine", "policies", "msgspec", "orjson", "yaml"):
        done = alone([str(python), "-c", f"import {name}"], empty)
        assert f"No module named '{name}'" in done.stderr


def test_there_is_no_network_there(python: Path, empty: Path) -> None:
    reach = "import socket; socket.create_connection(('192.0.2.1', 9), 5)"
    assert "unreachable" in alone([str(python), "-c", reach], empty).stderr


def test_its_own_tests_pass_there(python: Path, place: Path, empty: Path) -> None:
    copy = place / "copy"
    for name in ("tests/verify", "fixtures/artifacts", "fixtures/vectors"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "tests" / "__init__.py", copy / "tests" / "__init__.py")
    pytest_there = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--basetemp", str(empty / "tmp")]
    done = alone([*pytest_there, "--rootdir", str(copy), str(copy / "tests" / "verify")], empty)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 700
