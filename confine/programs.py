"""What a command needs to run: its links, its interpreter, that interpreter's own folder.

A worker's files name these things (a pyvenv.cfg, a #! line, a link), so they do not decide: anything not visible
already must lie under an allowed root, or be what a bare command resolved to, and look like what it is taken for.
"""

import glob
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from confine.errors import ConfineError

_MAX_LINKS = 40  # as the Linux kernel (path_resolution(7))
_MAX_SCRIPTS = 4  # a script may be another's interpreter; the Linux kernel stops at 4 too (execve(2))
_MAX_LINE = 255
_MAX_CFG_BYTES = 65_536
_PT_INTERP = 3


EVERYTHING = ("/",)  # what an unconfined worker sees


@dataclass(frozen=True, slots=True)
class Program:
    """executable: the path for execve, its folder resolved. image: the file the Linux kernel will run, resolved.

    needs are files and folders to bind, links the symbolic links met on the way, by place.
    """

    executable: str
    image: str
    needs: tuple[str, ...]
    links: dict[str, str]


@dataclass(slots=True)
class _Search:
    visible: tuple[str, ...]
    roots: tuple[str, ...]
    needs: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)


def find_program(executable: str, *, visible: Sequence[str], roots: Sequence[str], bare: bool) -> Program:
    """`visible` are the folders bound already, `roots` where to look for what is not. ConfineError with the fix."""
    search = _Search(tuple(visible), tuple(os.path.realpath(root) for root in roots))
    folder, name = os.path.split(executable)
    executable = os.path.join(os.path.realpath(folder), name)
    image = _follow(search, executable, bare, 0)
    return Program(executable, image, tuple(dict.fromkeys(search.needs)), search.links)


def _follow(search: _Search, path: str, bare: bool, depth: int) -> str:
    links, real = _trace(path)
    if not os.path.isfile(real) or not os.stat(real).st_mode & stat.S_IXUSR:
        raise ConfineError("not a file that can be executed", path=path, fix="correct the command, or chmod +x it")
    if os.path.basename(os.path.dirname(path)) == "shims" and search.visible != EVERYTHING:
        fix = "name the interpreter itself (pyenv which python3)"
        raise ConfineError("a shim, which chooses an interpreter when it runs", path=path, fix=fix)
    _virtual_environment(search, path, real, bare)
    _show(search, real, bare, "the command" if depth == 0 else "the interpreter")
    _show_links(search, links)
    with open(real, "rb") as file:
        start = file.read(_MAX_LINE + 2)
    if start.startswith(b"#!"):
        return _follow(search, _script_interpreter(start, real, depth), False, depth + 1)
    _check_loader(search, real)
    return real


def _trace(path: str) -> tuple[dict[str, str], str]:
    """Every symbolic link on the way from / to the end of `path`, by its place, and where the way ends."""
    links: dict[str, str] = {}
    done, pending = "/", path.split("/")
    while pending:
        part = pending.pop(0)
        if part in {"", "."}:
            continue
        if part == "..":
            done = os.path.dirname(done)
            continue
        here = os.path.join(done, part)
        if not os.path.islink(here):
            done = here
            continue
        if len(links) == _MAX_LINKS:
            raise ConfineError("too many links", path=path, fix="name what they lead to")
        links[here] = os.readlink(here)
        pending = links[here].split("/") + pending
        if links[here].startswith("/"):
            done = "/"
    return links, done


def _virtual_environment(search: _Search, path: str, real: str, bare: bool) -> None:
    """A pyvenv.cfg beside bin/ makes `path` a virtual environment's Python (PEP 405): it needs both prefixes."""
    top = os.path.dirname(os.path.dirname(path))
    cfg = os.path.join(top, "pyvenv.cfg")
    if not os.path.isfile(cfg):
        return
    with open(cfg, encoding="utf-8", errors="replace") as file:
        lines = [line.partition("=") for line in file.read(_MAX_CFG_BYTES).splitlines()]
    home = next((value.strip() for key, _, value in lines if key.strip().lower() == "home"), "")
    links, folder = _trace(home) if home.startswith("/") else ({}, "")
    prefix = os.path.dirname(folder)
    if not folder or not _python_home(folder):
        raise ConfineError(f"the home {home!r} holds no Python", path=cfg, fix="make the virtual environment anew")
    _show(search, top, bare, "the virtual environment")
    _show(search, prefix, bare, "the virtual environment's Python")
    _show_links(search, links)


def _python_home(folder: str) -> bool:
    """A folder with a Python in it, beside the library that Python needs."""
    pythons = glob.glob(os.path.join(glob.escape(folder), "python3*"))
    library = glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), "lib/python3*/os.py"))
    return bool(library) and any(os.path.isfile(python) and os.access(python, os.X_OK) for python in pythons)


def _show(search: _Search, path: str, bare: bool, what: str) -> None:
    """Makes `path` visible, if it may be: by the root it lies under, or alone for what a bare command resolved to."""
    if any(_beneath(path, top) for top in (*search.visible, *search.needs)):
        return
    for root in search.roots:
        if _beneath(path, root):
            # /opt holds one folder per product; every other root is one product, or what the operator named.
            product = "/".join(path.split("/")[:3]) if root == "/opt" else root
            search.needs.append(product)
            return
    folder = os.path.dirname(path)
    prefix = os.path.dirname(folder) if _python_home(folder) else None
    if bare:
        search.needs.append(prefix or path)
        return
    fix = f"give --runtime-root {prefix or folder}"
    raise ConfineError(f"{what} is not in a folder that the worker sees", path=path, fix=fix)


def _show_links(search: _Search, links: dict[str, str]) -> None:
    """A link inside a bound folder is there; any other is made anew, as long as it stands under an allowed root."""
    for place, target in links.items():
        if not any(_beneath(place, top) for top in (*search.visible, *search.needs)):
            search.links[place] = target


def _script_interpreter(start: bytes, path: str, depth: int) -> str:
    line = start[2:].split(b"\n", 1)[0].strip()
    words = os.fsdecode(line).split(None, 1)
    if not words or not words[0].startswith("/"):
        raise ConfineError("its #! line names no absolute path", path=path, fix="write #!/usr/bin/env and a name")
    if depth == _MAX_SCRIPTS:
        raise ConfineError(
            "too many scripts interpret each other", path=path, fix="name the interpreter as the command"
        )
    if not os.path.isfile(words[0]):
        raise ConfineError(f"its interpreter {words[0]} is not there", path=path, fix="correct its #! line")
    return words[0]


def _check_loader(search: _Search, path: str) -> None:
    """The dynamic loader an ELF file names (PT_INTERP) must be visible, or exec says ENOENT of a file that is there."""
    loader = elf_loader(path)
    if loader is None:
        return
    real = os.path.realpath(loader)
    if not os.path.isfile(real) or not any(_beneath(real, top) for top in (*search.visible, *search.needs)):
        fix = f"give --runtime-root {os.path.dirname(real)}"
        raise ConfineError(f"its loader {loader} is not in a folder that the worker sees", path=path, fix=fix)


def elf_loader(path: str) -> str | None:
    """The PT_INTERP of a 64-bit little-endian ELF file (elf(5)); None for a static one or any other file."""
    with open(path, "rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
            return None
        (table,) = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for index in range(count):
            file.seek(table + index * size)
            entry = file.read(56)
            if len(entry) == 56 and struct.unpack_from("<I", entry)[0] == _PT_INTERP:
                offset, length = struct.unpack_from("<Q", entry, 8)[0], struct.unpack_from("<Q", entry, 32)[0]
                file.seek(offset)
                return os.fsdecode(file.read(min(length, 4_096)).rstrip(b"\0"))
    return None


def _beneath(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")
