"""The snapshot modules as their packages ship them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from chio_process import WorkerError
from chio_process.snapshot import SnapshotError
from tests.clients.drive import ROOT, node

NODE = ROOT / "chio/clients/node"


def test_the_node_package_exports_the_snapshot_module_with_all_that_it_imports() -> None:
    package = json.loads((NODE / "package.json").read_text())
    assert package["exports"]["./snapshot"] == {"types": "./snapshot.d.ts", "default": "./snapshot.js"}
    shipped = set(package["files"])
    assert {"snapshot.js", "snapshot.d.ts"} <= shipped
    for name in shipped:
        if name.endswith(".js"):
            imported = re.findall(r'^(?:import|export) .*from "([^"]+)"', (NODE / name).read_text(), re.MULTILINE)
            assert imported, name
            assert all(path.startswith("node:") or path.removeprefix("./") in shipped for path in imported), name


def test_the_node_declarations_name_exactly_what_the_module_has() -> None:
    script = (
        "const m = await import(process.argv[1]);"
        "const own = Object.getOwnPropertyNames(m.JsonSnapshot.prototype);"
        "console.log(JSON.stringify([Object.keys(m).sort(), own.sort()]))"
    )
    printed = subprocess.run(
        [node(), "--input-type=module", "-e", script, NODE / "snapshot.js"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    exported, methods = json.loads(printed)
    declared = (NODE / "snapshot.d.ts").read_text()
    assert sorted(re.findall(r"^export declare class (\w+)", declared, re.MULTILINE)) == exported
    body = declared[declared.index("export declare class JsonSnapshot") :]
    assert sorted(set(re.findall(r"^  (\w+)\(", body, re.MULTILINE))) == methods


def test_a_snapshots_error_is_caught_with_those_of_the_client() -> None:
    assert issubclass(SnapshotError, WorkerError)


def test_the_snapshot_modules_need_nothing_but_the_client_and_the_standard_library(tmp_path: Path) -> None:
    """Not even what happens to be installed beside it."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import chio_process.snapshot"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, ROOT / "chio/clients/python"], check=True, cwd=tmp_path, timeout=60
    )
