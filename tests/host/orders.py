"""The run of `fixtures/orders`, in a folder of its own: tool servers, a lost call, refusals, a retry, exports."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.host.commands import accepted, chio

ROOT = Path(__file__).resolve().parents[2]
RECONCILE = ("--process", "clerk", "--key", "lost-1", "--outcome", "applied", "--by", "A. Operator")


def make(folder: Path) -> Path:
    """The project with an initialised state; the state."""
    shutil.copytree(ROOT / "fixtures/orders", folder, dirs_exist_ok=True)
    for script in ("resource.py", "rogue.py"):
        shutil.copy(ROOT / "tests/servers" / script, folder)
    shutil.copytree(ROOT / "chio/clients/python/chio_process", folder / "lib/chio_process")
    for name in ("bank", "rogue", "exports"):
        (folder / name).mkdir()
    os.mkfifo(folder / "rogue/deaf.go")
    os.chmod(folder / "rogue/deaf.go", 0o666)
    for name in ("bank", "rogue"):
        (folder / name).chmod(0o777)
    (folder / "evidence.txt").write_text("said by the bank\n")
    accepted("process", "init", "--config", folder / "host.json", "--state", folder / "state")
    return folder / "state"


def run(folder: Path) -> Path:
    """`make`, the run, and what the operator did after it; the state."""
    state = make(folder)
    accepted("process", "run", "--state", state, "--plan", folder / "plan.json")
    accepted("process", "reconcile", "--state", state, *RECONCILE, "--evidence", folder / "evidence.txt")
    for verb, process in (("revoke-capability", "auditor"), ("cancel", "packer")):
        assert chio("process", verb, "--state", state, "--process", process).exit_code == 0
    return state
