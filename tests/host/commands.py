"""The command line as its users meet it, and what a folder looked like before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from chio.cli import main

DEADLINE_S = 60
CHIO = str(Path(sys.executable).with_name("chio"))


def chio(*arguments: object) -> Result:
    """One command, its parser and output in this process; whatever it starts is started for real."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def accepted(*arguments: object) -> Any:
    result = chio(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    """The one line of a refused command: what, and in brackets where and why, a semicolon, the fix."""
    result = chio(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    line = result.stderr
    assert line.startswith("chio: "), line
    assert line.endswith(")\n"), line
    assert line.count("\n") == 1, line
    assert line[:-1].isprintable(), line
    assert "; " in line, line
    return line[:-1]


def run_chio(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The installed command, as a process of its own."""
    return subprocess.run(
        [CHIO, *map(str, arguments)],
        cwd=cwd, text=True, capture_output=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, modification time and bytes of everything below a folder, the folder itself included."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        about = path.lstat()
        data = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_mtime_ns, data)
    return found
