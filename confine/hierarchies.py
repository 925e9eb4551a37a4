"""Where cgroups may be made on this machine, by this user: which hierarchies are mounted, and what they hand down."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from confine.errors import LayerMissing

LAYER = "cgroup"
CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")  # v1's; v2 counts CPU time everywhere
UNIFIED = "unified"
_UNIFIED_CONTROLLERS = frozenset({"memory", "pids", "cpu"})


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of one hierarchy: its path, and its name in /proc/PID/cgroup as this process sees it."""

    path: str
    name: str

    def below(self, part: str) -> "Place":
        return Place(os.path.join(self.path, part), os.path.join(self.name, part))


@dataclass(frozen=True, slots=True)
class Layout:
    """version: v2 | hybrid | v1. `places` are where own cgroups may stand, by v1 controller and "unified"."""

    version: str
    places: Mapping[str, Place]


def find_layout() -> Layout:
    """How cgroups are mounted here, and where this user may make some. LayerMissing names what to do about it."""
    found = _hierarchies()
    if found.keys() >= set(CONTROLLERS):
        places = {name: found[name] for name in CONTROLLERS}
        for place in places.values():
            if not os.access(place.path, os.W_OK):
                raise LayerMissing(LAYER, "a cgroup hierarchy is not this user's to write", place.path, _fix())
        unified = found.get(UNIFIED)
        if unified is not None and os.access(unified.path, os.W_OK):
            return Layout("hybrid", {UNIFIED: unified} | places)
        return Layout("v1", places)
    if UNIFIED in found:
        return Layout("v2", {UNIFIED: _delegated(found[UNIFIED])})
    fix = "mount it: mount -t cgroup2 cgroup2 /sys/fs/cgroup"
    raise LayerMissing(LAYER, "no cgroup file system with memory, pids and cpu is mounted", "/sys/fs/cgroup", fix)


def _hierarchies() -> dict[str, Place]:
    """The top of every mounted hierarchy, by v1 controller and "unified". A later mount hides an earlier one."""
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.rstrip("\n").partition(" - ")
            root, path = before.split(" ")[3:5]
            kind, _, options = after.split(" ", 2)
            if kind == "cgroup2":
                found[UNIFIED] = Place(path, root)
            elif kind == "cgroup":
                found |= {name: Place(path, root) for name in options.split(",") if name in CONTROLLERS}
    return found


def _delegated(top: Place) -> Place:
    """The v2 folder to use: the top for root, else the nearest one above us that is ours and hands controllers down.

    Controllers are not enabled for cgroups that the machine came with: that is the operator's to do.
    """
    own = _own_unified()
    inside = os.path.relpath(own, top.name) if own.startswith(top.name) else "."
    above = [top.path]
    for part in [] if inside == "." else inside.split("/"):
        above.append(os.path.join(above[-1], part))
    candidates = [above[0], *above[:0:-1]] if os.geteuid() == 0 else above[::-1]
    for path in candidates:
        writable = os.access(path, os.W_OK) and os.access(f"{path}/cgroup.procs", os.W_OK)
        if writable and _words(f"{path}/cgroup.subtree_control") >= _UNIFIED_CONTROLLERS:
            return Place(path, os.path.normpath(os.path.join(top.name, os.path.relpath(path, top.path))))
    missing = sorted(_UNIFIED_CONTROLLERS - _words(f"{top.path}/cgroup.controllers"))
    if missing:
        what = f"this Linux kernel, or this container, has no {' and no '.join(missing)} controller"
        raise LayerMissing(LAYER, what, f"{top.path}/cgroup.controllers", "see cgroup_disable= on its command line")
    what = "no cgroup that this user may write hands memory, pids and cpu down"
    raise LayerMissing(LAYER, what, f"{top.path}/cgroup.subtree_control", _fix(f"{top.path}/cgroup.subtree_control"))


def _fix(subtree_control: str | None = None) -> str:
    if os.geteuid() == 0:
        enable = f"echo '+cpu +memory +pids' > {subtree_control}" if subtree_control else "remount it writable"
        return f"{enable}, or give the limits up by name: --without {LAYER}"
    return (
        "start it with systemd-run --user --scope -p Delegate=yes where cgroups are v2, or give the limits up by name: "
        f"--without {LAYER}"
    )


def _own_unified() -> str:
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        return next((line[3:].rstrip("\n") for line in file if line.startswith("0::")), "/")


def _words(path: str) -> frozenset[str]:
    with open(path, encoding="ascii") as file:
        return frozenset(file.read().split())
