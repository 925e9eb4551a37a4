"""What only the Node client has: its package and its declarations."""

import json
import re
import subprocess
from pathlib import Path

from tests.clients.drive import ROOT, node

PACKAGE = ROOT / "chio/clients/node"


def test_the_package_is_an_es_module_without_dependencies_that_ships_what_it_exports() -> None:
    package = json.loads((PACKAGE / "package.json").read_text())
    assert (package["name"], package["type"]) == ("@chio-protocol/process", "module")
    assert package["engines"] == {"node": ">=22"}
    assert not {name for name in package if name.endswith("ependencies") or name == "scripts"}
    shipped = set(package["files"])
    assert {Path(path).name for path in package["exports"]["."].values()} <= shipped
    assert all((PACKAGE / name).exists() for name in shipped)


def test_only_the_runtimes_own_modules_are_imported() -> None:
    imported = re.findall(r'from "([^"]+)"', (PACKAGE / "index.js").read_text())
    assert imported
    assert all(name.startswith("node:") for name in imported)


def test_the_declarations_name_exactly_what_the_module_has() -> None:
    script = (
        "const m = await import(process.argv[1]);"
        "const own = Object.getOwnPropertyNames(m.ProcessClient.prototype);"
        "console.log(JSON.stringify([Object.keys(m).sort(), own.sort()]))"
    )
    printed = subprocess.run(
        [node(), "--input-type=module", "-e", script, PACKAGE / "index.js"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    exported, methods = json.loads(printed)
    declared = (PACKAGE / "index.d.ts").read_text()
    assert sorted(re.findall(r"^export declare class (\w+)", declared, re.MULTILINE)) == exported
    body = declared[declared.index("export declare class ProcessClient") :]
    assert sorted(set(re.findall(r"^  (\w+)\(", body, re.MULTILINE))) == methods
