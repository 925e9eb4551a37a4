"""The tree as text: which files it has, which modules, and who imports whom."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("chio", "confine", "verify")


def files(*endings: str) -> list[Path]:
    """Every file that is or could be committed, by its ending; all of them without one."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    found = [ROOT / name for name in listed if name and name.endswith(endings or ("",))]
    return [path for path in found if path.is_file() and not path.is_symlink()]


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the three packages. `imports` are modules, ours or others', wherever in the file they stand."""

    name: str
    path: Path
    tree: ast.Module
    imports: frozenset[str]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def modules() -> dict[str, Module]:
    """Every module of the packages, by its name. The clients are distributions of their own."""
    paths = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "clients" not in path.relative_to(ROOT).parts:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                paths[name.removesuffix(".__init__")] = path
    found = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[name] = Module(name, path, tree, frozenset(_imports(tree, paths)))
    return found


def _imports(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import is written out"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
