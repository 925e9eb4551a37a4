"""Which process of Chio's a process is, told from outside."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.faults.boundaries import Boundary, Process


def chio(caller: Process, look: Callable[[int], Process | None]) -> str:
    """`host kernel launcher init child`, and for a worker, a tool server or a driver the name of its script.

    `child` is a process that the launcher's init has made and that has not executed its program yet.
    """
    words = caller.command
    if "chio.kernel" in words:
        return "kernel"
    if any("confine.launcher" in word for word in words):
        if len(caller.inside) == 1:
            return "launcher"
        return "init" if caller.inside[-1] == 1 else "child"
    if "chio_process.checkpoints" in words:
        return "migration"
    if "chio" in {os.path.basename(word) for word in words[:3]} and {"process", "receipt"} & set(words):
        parent = look(caller.parent)
        return "host's child" if parent is not None and parent.command == words else "host"
    return by_script(caller, look)


def by_script(caller: Process, look: Callable[[int], Process | None]) -> str:
    """The name of the first argument that looks like a program's file, without its suffix: for any command."""
    scripts = [word for word in caller.command[1:] if word.endswith((".py", ".mjs", ".js", ".sh"))]
    name = os.path.basename((scripts or [*caller.command, "?"])[0])
    return os.path.splitext(name)[0]


def not_of_a_launch(boundary: Boundary) -> bool:
    """The steps of a launch are the same everywhere: the scenario `launch` cuts at each of them."""
    return boundary.role.partition(".")[0] not in ("launcher", "init", "child")
