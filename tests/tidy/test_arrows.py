"""Who may import whom: the arrows of docs/architecture.md, held against the source."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable

import pytest

import chio
from tests.tidy.source import ROOT, Module, modules

MODULES = modules()


def importers(target: str) -> set[str]:
    """The modules that import this one or anything below it, themselves not below it."""
    return {
        module.name
        for module in MODULES.values()
        if not below(module.name, target) and any(below(name, target) for name in module.imports)
    }


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def modules_of(package: str) -> Iterable[Module]:
    return (module for module in MODULES.values() if below(module.name, package))


def test_there_is_something_to_look_at() -> None:
    assert {"chio.cli", "chio.kernel.store", "confine.plan", "verify.log"} <= MODULES.keys()
    assert "chio.kernel.store" in MODULES["chio.kernel.ledger"].imports
    assert "chio.kernel.reader" in MODULES["chio.cli"].imports


def test_the_verifier_shares_no_code_with_what_it_verifies() -> None:
    for module in modules_of("verify"):
        assert not [name for name in module.imports if below(name, "chio") or below(name, "confine")], module.name


def test_nothing_of_the_host_imports_the_verifier() -> None:
    """The command line mounts it by name, when it is asked for."""
    assert importers("verify") == set()


def test_confinement_knows_nothing_of_chio() -> None:
    for module in modules_of("confine"):
        assert not [name for name in module.imports if below(name, "chio")], module.name


def test_only_the_host_and_the_kernels_own_lock_down_use_confinement() -> None:
    # chio.cli names its errors, chio.kernel.__main__ confines itself.
    assert importers("confine") <= {
        "chio.cli", "chio.command", "chio.kernel.__main__", "chio.plans", "chio.records", "chio.runner", "chio.serve", "chio.servers",
        "chio.sockets",
    }  # fmt: skip
    through_the_door = importers("confine") - {"chio.kernel.__main__"}
    for name in through_the_door:
        assert not [used for used in MODULES[name].imports if used.startswith("confine.")], name


def test_host_and_kernel_meet_only_over_the_control_socket() -> None:
    """Beside it, rows are read by the commands that need no host: the readers and the backup."""
    assert importers("chio.kernel") == {"chio.cli", "chio.cli_keeping"}
    offline = {"chio.cli": "chio.kernel.reader", "chio.cli_keeping": "chio.kernel.backup"}
    for name, used in offline.items():
        assert {below_it for below_it in MODULES[name].imports if below(below_it, "chio.kernel")} == {used}
    host = ("chio.host", "chio.runner", "chio.plans", "chio.sockets", "chio.live", "chio.cli")
    for module in modules_of("chio.kernel"):
        assert not module.imports.intersection(host), module.name


# Everything that touches rows. A decision (admission, grants, budgets, calls) is not among them.
USES_THE_STORE = {
    "chio.kernel.__main__",  # opens it
    "chio.kernel.attest",
    "chio.kernel.backup",
    "chio.kernel.counters",
    "chio.kernel.initialize",
    "chio.kernel.invocations",
    "chio.kernel.ledger",
    "chio.kernel.mailboxes",
    "chio.kernel.process",
    "chio.kernel.recovery",
    "chio.kernel.state",
    "chio.kernel.tree",
    "chio.kernel.writer",
}


def test_the_store_is_used_by_what_reads_and_writes_rows_and_by_nothing_else() -> None:
    assert importers("chio.kernel.store") == USES_THE_STORE


PURE = {
    "chio.kernel.admission": {"chio.kernel.budgets", "chio.kernel.grants"},
    "chio.kernel.budgets": {"chio.errors", "chio.schema"},
    "chio.kernel.calls": set(),
    "chio.kernel.epoch": {"chio.kernel.log"},
    "chio.kernel.grants": {"chio.canonical", "chio.errors", "chio.schema", "chio.signing", "msgspec"},
}


@pytest.mark.parametrize(("name", "ours"), PURE.items(), ids=PURE)
def test_a_decision_is_pure(name: str, ours: set[str]) -> None:
    """It sees values; nothing that it imports could read a clock, a file or a row."""
    assert MODULES[name].imports - {"__future__", "collections.abc", "dataclasses", "enum", "typing"} == ours


# One place for each of these; who wants it goes through that place.
ONLY_IN = {
    "peewee": {"chio.kernel.database", "chio.kernel.reader", "chio.kernel.store"},
    "sqlite3": {
        "chio.kernel.__main__", "chio.kernel.database", "chio.kernel.store", "chio.kernel.vault", "chio.kernel.writer",
    },
    "cryptography": {"chio.kernel.sealed", "chio.signing"},
    "nacl": {"verify.keys"},
    "rfc8785": {"chio.canonical", "verify.canonical"},
    "uvloop": {"chio.kernel.__main__"},
    "rich": {"chio.live"},
    "click": {"chio.cli", "chio.cli_keeping", "chio.command", "confine.cli", "verify.cli"},
    "yaml": {"chio.schema", "confine.profile"},
    "asyncio": {
        "chio.kernel.__main__", "chio.kernel.connections", "chio.kernel.control", "chio.kernel.process",
        "chio.kernel.writer", "chio.tools.mcp", "chio.tools.router",
    },
}  # fmt: skip


@pytest.mark.parametrize(("library", "places"), ONLY_IN.items(), ids=ONLY_IN)
def test_a_library_is_used_in_its_one_place(library: str, places: set[str]) -> None:
    assert importers(library) == places


def test_the_kernel_can_start_nothing_and_reach_nothing() -> None:
    """No module of it imports what starts programs or opens connections to anywhere."""
    for module in modules_of("chio.kernel"):
        assert not module.imports.intersection({"subprocess", "multiprocessing", "urllib.request", "http.client"})


def test_no_import_runs_in_a_circle() -> None:
    """Over the imports that run when a module is loaded; a circle among them makes the order of loading matter."""
    edges = {}
    for module in MODULES.values():
        loaded: set[str] = set()
        for node in module.tree.body:
            if isinstance(node, ast.Import):
                loaded.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                loaded.update(f"{node.module}.{alias.name}" for alias in node.names)
                loaded.add(node.module)
        edges[module.name] = loaded & MODULES.keys() - {module.name}
    # A package's door is loaded before what is behind it, and names what it shows: that much of a circle is Python's.
    doors = {name for name, module in MODULES.items() if module.path.name == "__init__.py"}
    for name in MODULES.keys() - doors:
        edges[name] -= doors
    while ready := [name for name, needs in edges.items() if not needs]:
        for name in ready:
            del edges[name]
        for needs in edges.values():
            needs.difference_update(ready)
    assert not edges


def test_every_folder_with_modules_is_packaged() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {str(module.path.parent.relative_to(ROOT)).replace("/", ".") for module in MODULES.values()}
    assert folders <= set(packages)


def test_only_what_the_project_declares_is_imported() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^A-Za-z0-9_-]", text)[0].lower() for text in declared}
    imported_as = {"jsonschema-rs": "jsonschema_rs", "pynacl": "nacl", "pyyaml": "yaml", "python-prctl": "prctl"}
    known = {imported_as.get(name, name) for name in names} | {"chio", "confine", "verify", "policies"}
    for module in MODULES.values():
        used = {name.split(".")[0] for name in module.imports} - sys.stdlib_module_names
        assert used <= known, module.name


def test_the_public_door_of_chio_is_its_version() -> None:
    assert chio.__all__ == ["__version__"]
