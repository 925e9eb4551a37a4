"""What a command loads before it answers: nothing that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel.serving import State

# Runs one command line in a process of its own, and tells which modules it had loaded when it was done.
LOADED = """
import sys
before = set(sys.modules)
from chio.__main__ import main
sys.argv = ["chio", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
else:
    code = 0
import json
print(json.dumps([code, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""

HOST = {"chio.host", "chio.plans", "chio.runner", "chio.sockets", "chio.live", "chio.wire", "confine", "rich"}
KERNEL = {"chio.kernel.process", "chio.kernel.control", "chio.kernel.ledger", "chio.signing", "cryptography", "uvloop"}
DOCUMENTS = {"chio.schema", "msgspec", "yaml"}
DATABASE = {"peewee", "sqlite3", "chio.kernel", "chio.kernel.store", "chio.kernel.reader"}
VERIFIER = {"verify", "nacl"}
COMMON = {"asyncio", "subprocess", "multiprocessing", "prctl", "pyroute2", "ctypes"}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    made = State.make(tmp_path_factory.mktemp("startup") / "folder")
    with made.serve() as serving:
        serving.worker("a").invoke("key", "transfer", {})
    return made


def loaded(*arguments: object) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOADED, *map(str, arguments)],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    code, names = json.loads(done.stderr.strip().split("\n")[-1])
    assert code == 0, done.stderr
    return set(names)


def within(names: set[str], *groups: set[str]) -> set[str]:
    """Those that belong to one of the groups, by their package."""
    return {name for name in names for group in groups for top in group if name == top or name.startswith(top + ".")}


def test_the_version_is_told_without_even_a_parser() -> None:
    names = loaded("--version")
    assert {name for name in names if name.split(".")[0] in ("chio", "confine", "verify")} == {"chio", "chio.__main__"}
    assert within(names, HOST, KERNEL, DOCUMENTS, DATABASE, VERIFIER, COMMON, {"click", "orjson", "pathlib"}) == set()


def test_status_logs_and_state_load_the_reader_and_nothing_that_runs(state: State) -> None:
    for command in (
        ("process", "status", "--state", state.path),
        ("process", "logs", "--state", state.path, "--process", "a", "--attempt", 1),
        ("process", "state", "--state", state.path, "--process", "a"),
    ):
        names = loaded(*command)
        assert within(names, HOST, KERNEL, DOCUMENTS, VERIFIER, COMMON) == set()
        assert "chio.kernel.reader" in names


def test_verifying_receipts_loads_the_verifier_and_nothing_of_the_host(state: State) -> None:
    receipts, key = state.path / "receipts.ndjson", state.path / "kernel.pub"
    names = loaded("receipt", "verify", "--input", receipts, "--trusted-kernel-pubkey", key)
    assert within(names, HOST, KERNEL, DOCUMENTS, DATABASE, COMMON, {"orjson", "chio.canonical"}) == set()
    assert "verify.receipts" in names


def test_help_of_a_command_loads_nothing_that_the_command_would_use() -> None:
    for command in ("init", "run", "status", "logs", "state"):
        names = loaded("process", command, "--help")
        assert within(names, HOST, KERNEL, DOCUMENTS, DATABASE, VERIFIER, COMMON) == set()


def test_a_refused_document_starts_no_kernel(state: State, tmp_path: Path) -> None:
    """A config that cannot be read is refused by the host's own reading of it."""
    (tmp_path / "host.json").write_text("{}")
    command = ("process", "init", "--config", tmp_path / "host.json", "--state", tmp_path / "state")
    done = subprocess.run(
        [sys.executable, "-I", "-c", LOADED, *map(str, command)],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    code, names = json.loads(done.stderr.strip().split("\n")[-1])
    assert code == 1
    assert within(set(names), KERNEL, DATABASE, VERIFIER, {"confine", "chio.runner", "chio.plans"}) == set()
