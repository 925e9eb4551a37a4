"""The run of `fixtures/orders`, in a folder of its own: tool servers, a lost call, refusals, a retry, exports.

`python -m tests.host.orders FOLDER`, as root, runs it in a new folder and writes the bundle that `tests.verify` changes
into lies. The folder's name stands in its records.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.host.commands import accepted, chio

ROOT = Path(__file__).resolve().parents[2]
RECONCILE = ("--process", "clerk", "--key", "lost-1", "--outcome", "applied", "--by", "A. Operator")


def make(folder: Path, *options: object) -> Path:
    """The project with an initialised state; the state. `options` are of `init` and of what opens the state."""
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
    accepted("process", "init", "--config", folder / "host.json", "--state", folder / "state", *options)
    return folder / "state"


def run(folder: Path, *options: object) -> Path:
    """`make`, the run, and what the operator did after it; the state."""
    state = make(folder, *options)
    accepted("process", "run", "--state", state, "--plan", folder / "plan.json", *options)
    accepted("process", "reconcile", "--state", state, *RECONCILE, "--evidence", folder / "evidence.txt", *options)
    for verb, process in (("revoke-capability", "auditor"), ("cancel", "packer")):
        assert chio("process", verb, "--state", state, "--process", process, *options).exit_code == 0
    return state


def main(folder: Path) -> None:
    bundles = ROOT / "fixtures/artifacts/valid/bundles"
    state = run(folder)
    (bundles / "orders.chio").unlink(missing_ok=True)
    rule = ("--withhold", "arguments:rogue/do")
    accepted("process", "evidence", "--state", state, "--out", bundles / "orders.chio", *rule)
    (bundles / "orders.chio").chmod(0o644)
    shutil.copy(state / "pins.json", bundles / "orders-pins.json")
    (bundles / "orders-pins.json").chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
