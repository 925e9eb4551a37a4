"""What no file of the tree may be or hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.source import ROOT, files, modules

CODE = (".py", ".mjs", ".js", ".ts", ".sql", ".sh")
MAX_LINES = 600
MAX_FUNCTION_LINES = 70

# One flat sequence each, in the order in which it runs; the docstring says why it is not cut.
LONG: set[str] = set()


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert {"pyproject.toml", "chio/cli.py", "chio/kernel/schema.sql"} <= {relative(path) for path in files()}


def test_no_source_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {relative(path): path.read_text(encoding="utf-8").count("\n") for path in files(*CODE)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_function_is_longer_than_a_screen_unless_it_is_named_here() -> None:
    long = set()
    for module in modules().values():
        for function in module.functions():
            assert function.end_lineno is not None
            if function.end_lineno - function.lineno + 1 > MAX_FUNCTION_LINES:
                long.add(f"{module.name}.{function.name}")
    assert long == LONG


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert [relative(path) for path in files(*CODE) if path.stem in drawers] == []


def test_no_error_is_swallowed_whole() -> None:
    """`except Exception` would take our own defects for an answer."""
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{module.name}:{node.lineno}"
                assert not (isinstance(node.type, ast.Name) and node.type.id == "Exception"), module.name


# asyncio calls these by name (asyncio.Protocol).
CALLED_FROM_OUTSIDE = {"connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"}


def test_every_function_of_the_host_and_the_kernel_is_used() -> None:
    ours = {name: module for name, module in modules().items() if name.split(".")[0] == "chio"}
    text = "\n".join(module.path.read_text(encoding="utf-8") for module in ours.values())
    unused = {
        f"{module.name}.{function.name}"
        for module in ours.values()
        for function in module.functions()
        if not function.name.startswith("__")
        and not function.decorator_list
        and function.name not in CALLED_FROM_OUTSIDE
        and len(re.findall(rf"\b{function.name}\b", text)) < 2
    }
    assert unused == set()


def texts() -> list[tuple[str, str]]:
    found = []
    for path in files():
        try:
            found.append((relative(path), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # no text
    return found


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    """The folder of this checkout, and homes; `/root` and `/home` themselves are places that any machine has."""
    home = re.compile(r"(?<![\w.$}])/(?:home|Users)/[a-z][\w-]*/|" + re.escape(str(ROOT)) + r"(?![\w-])")
    if len(ROOT.parts) < 3:
        pytest.skip("this checkout's own folder has too short a name to look for")
    found = [f"{name}: {hit.group()}" for name, text in texts() for hit in home.finditer(text)]
    assert found == []


def test_no_lock_file_names_a_host() -> None:
    locks = [path for path in files() if re.search(r"(?:^requirements.*\.txt|lock\.json|lockb?|\.lock)$", path.name)]
    assert ROOT / "requirements.txt" in locks
    for path in locks:
        assert not re.search(r"https?://", path.read_text(encoding="utf-8")), relative(path)
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert "--hash=sha256:" in pinned
    assert "--index-url" not in pinned


def test_no_file_names_a_package_registry() -> None:
    names = ("pypi" + r"\.org", "registry" + r"\.npmjs", "pythonhosted" + r"\.org", "crates" + r"\.io")
    registries = re.compile("|".join(names))
    assert [name for name, text in texts() if registries.search(text)] == []


def test_the_schema_says_what_every_column_may_hold() -> None:
    schema = (ROOT / "chio/kernel/schema.sql").read_text(encoding="utf-8")
    tables = re.findall(r"CREATE TABLE (\w+) \((.*?)\n\) (STRICT[^;]*);", schema, re.DOTALL)
    assert len(tables) == schema.count("CREATE TABLE"), "a table that is not STRICT"
    assert "REAL" not in schema
