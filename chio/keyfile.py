"""The key file of an encrypted state: made once, kept outside the state, handed to the kernel as a descriptor.

Losing it loses what every worker of that state has stored; a copy of the state without it shows none of that.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Any

from chio import statedir
from chio.errors import InputError

KEY_BYTES = 32


def make(out: Path) -> dict[str, Any]:
    """A new random key in a new file of mode 0600: 64 hex digits and a newline. It is never printed."""
    folder = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if out.parent.is_dir() else -1
    if folder < 0 or os.path.lexists(out):
        raise InputError(
            "the key file cannot be written",
            file=str(out),
            field="--out",
            why="its folder does not exist" if folder < 0 else "it exists",
            fix="name a new file in a folder that exists",
        )
    try:
        statedir.write_new(folder, out.name, secrets.token_hex(KEY_BYTES).encode() + b"\n")
        os.fsync(folder)
    finally:
        os.close(folder)
    return {"key_file": str(out)}


def open_for(file: Path, state: Path) -> int:
    """Its descriptor. Raises `InputError` where others can read it, or it lies in the state that it shall protect."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(file, os.strerror(error.errno or 0), "name a readable file") from error
    held = os.fstat(fd)
    inside = Path(os.path.realpath(state)) in Path(os.path.realpath(file)).parents
    problem = None
    if not stat.S_ISREG(held.st_mode):
        problem = ("it is no regular file", "make one with `chio process key --out FILE`")
    elif held.st_uid != os.geteuid() or stat.S_IMODE(held.st_mode) & 0o077:
        problem = ("others can read it", f"chmod 600 {file}, as the user that owns it")
    elif inside:
        problem = ("it lies in the state that it protects", "keep it elsewhere")
    if problem:
        os.close(fd)
        raise _refused(file, *problem)
    return fd


def _refused(file: Path, why: str, fix: str) -> InputError:
    return InputError("the key file cannot be used", file=str(file), field="--key-file", why=why, fix=fix)
