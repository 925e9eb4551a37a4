"""Control groups: where an attempt's memory, processes and CPU are limited, counted and, at the end, killed.

Three layouts, found once (cgroups(7); the Linux kernel's admin-guide/cgroup-v1 and cgroup-v2):

v2       one hierarchy does it all. Init is born into the attempt's cgroup (clone3(2), CLONE_INTO_CGROUP), so it counts
hybrid   the v1 controllers limit, v2 tracks and kills: init is born into the v2 cgroup, the worker joins the v1 ones
v1       as hybrid; what is to be killed is read from cgroup.procs

A v1 cgroup is joined by writing 0 to `tasks`, from inside and before exec. A process that moves itself alone needs no
lock over the whole machine; moving another by its pid does, and costs an RCU grace period (measured: 13 ms, so 0.1).
"""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from confine.errors import LayerMissing, LimitRefused, StepFailed
from confine.hierarchies import CONTROLLERS, LAYER, UNIFIED, Place, find_layout
from confine.limits import CGROUP_LIMITS
from confine.spec import JSON, Field, Limits

_PERIOD_US = 100_000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BUSY_SECONDS = 2.0
_PROCESSORS = os.cpu_count() or 1
_LEAST_PATIENCE = 0.01


@dataclass(frozen=True, slots=True)
class Spent:
    """What a group used since start_counting(); None where this Linux kernel does not count it."""

    cpu_ms: int
    memory_peak_bytes: int | None
    process_peak: int | None
    oom_kills: int
    limits_hit: tuple[str, ...]


def wanted(mode: str, without: Sequence[str]) -> bool:
    """Whether a launch is to have its cgroups; mode is required or best-effort."""
    if LAYER in without:
        return False
    if mode == "required":
        return True
    try:
        find_layout()
    except LayerMissing:
        return False
    return True


def require_cgroups(mode: str, asked: Iterable[str], without: Sequence[str] = ()) -> None:
    """Whether the layer where it is required, and the limits asked for by name, can be had. LayerMissing or
    LimitRefused with the fix, before anything starts."""
    named = [name for name in asked if name in CGROUP_LIMITS]
    if LAYER in without:
        if named:
            raise LimitRefused(named[0], f"its layer was given up with --without {LAYER}", "leave one of the two out")
        return
    try:
        find_layout()
    except LayerMissing as missing:
        if named:
            raise LimitRefused(named[0], missing.what, missing.fix or "leave it out") from None
        if mode == "required":
            raise


class Group:
    """The cgroups of one attempt: made, limited and open on construction; gone after bury(), or on the list `left`.

    into    descriptor of the v2 cgroup that init is to be born in, or -1
    tasks   descriptors of v1 files that the worker writes itself into
    ooms    an eventfd that is readable when the group ran out of memory (v1 only), or -1
    """

    def __init__(self, version: str, places: Mapping[str, Place], limits: Limits, left: list[str]) -> None:
        self.version = version
        self._left = left
        self._places = places
        self._limits = limits
        self._made: list[str] = []
        self._cpu_before_us = 0
        self.into = self.ooms = -1
        self.tasks: tuple[int, ...] = ()
        try:
            self._make()
        except OSError as error:
            self.bury()
            path = os.fsdecode(error.filename) if error.filename else None
            raise StepFailed(LAYER, error.errno or 0, path, f"see chio-confine doctor, or --without {LAYER}") from None

    def _make(self) -> None:
        paths = dict.fromkeys(place.path for place in self._places.values())  # v1 may mount cpu and cpuacct as one
        for path in paths:
            os.mkdir(path, 0o755)
            self._made.append(path)
        limit = self._limit_unified if self.version == "v2" else self._limit_v1
        limit()
        if UNIFIED in self._places:
            self.into = os.open(self._places[UNIFIED].path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self.version == "v2":
            return
        for path in dict.fromkeys(self._places[name].path for name in CONTROLLERS):
            self.tasks = (*self.tasks, os.open(f"{path}/tasks", os.O_WRONLY | os.O_CLOEXEC))
        self.ooms = self._oom_events()

    def _limit_unified(self) -> None:
        limits = self._limits
        self._write(UNIFIED, "memory.max", limits.memory_bytes)
        with suppress(FileNotFoundError):  # a Linux kernel without swap
            self._write(UNIFIED, "memory.swap.max", 0)
        self._write(UNIFIED, "memory.oom.group", 1)
        self._write(UNIFIED, "pids.max", limits.pids + 1)  # init's own
        self._write(UNIFIED, "cpu.max", f"{limits.cpu_quota_percent * _PERIOD_US // 100} {_PERIOD_US}")

    def _limit_v1(self) -> None:
        limits = self._limits
        self._write("memory", "memory.limit_in_bytes", limits.memory_bytes)
        try:
            self._write("memory", "memory.memsw.limit_in_bytes", limits.memory_bytes)
        except FileNotFoundError:  # swap is not accounted for (swapaccount=0)
            self._write("memory", "memory.swappiness", 0)
        self._write("pids", "pids.max", limits.pids)
        self._write("cpu", "cpu.cfs_period_us", _PERIOD_US)
        self._write("cpu", "cpu.cfs_quota_us", limits.cpu_quota_percent * _PERIOD_US // 100)

    def _oom_events(self) -> int:
        """v1 kills one process of a group that is out of memory; this tells, so that the rest can follow."""
        events = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        control = os.open(f"{self._places['memory'].path}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._write("memory", "cgroup.event_control", f"{events} {control}")
        except OSError:
            os.close(events)
            raise
        finally:
            os.close(control)
        return events

    # --- at the exec stop

    def start_counting(self) -> None:
        """From here on it is the program's own: what launching it took is left out where the Linux kernel lets us."""
        self._cpu_before_us = self._cpu_us()
        if self.version != "v2":
            self._write("memory", "memory.max_usage_in_bytes", 0)

    def fields(self, pid: int) -> list[Field]:
        """Where the process is, and the limits as they are read back. OSError if it is gone."""
        asked, value = self._limits_asked(), self._limits_read()
        return [
            Field("cgroup", self._names(), self._names_of(pid), "observed", self.version),
            Field("cgroup_limits", asked, value, "observed", "init counts too" if self.version == "v2" else None),
            self._swap(),
            Field(
                "cpu_seconds", self._limits.cpu_seconds, self._limits.cpu_seconds, "installed", "kept by the launcher"
            ),
        ]

    def _names(self) -> dict[str, JSON]:
        return {name: place.name for name, place in sorted(self._places.items())}

    def _names_of(self, pid: int) -> dict[str, JSON]:
        found: dict[str, str] = {}
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            for line in file:
                number, controllers, name = line.rstrip("\n").split(":", 2)
                found |= dict.fromkeys(controllers.split(",") if number != "0" else [UNIFIED], name)
        return {name: found.get(name) for name in sorted(self._places)}

    def _limits_asked(self) -> dict[str, JSON]:
        limits = self._limits
        return {
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "cpu_quota_percent": limits.cpu_quota_percent,
        }

    def _limits_read(self) -> dict[str, JSON]:
        if self.version == "v2":
            memory, pids = self._number(UNIFIED, "memory.max"), self._number(UNIFIED, "pids.max") - 1
            quota, period = (_number(part) for part in self._text(UNIFIED, "cpu.max").split())
        else:
            memory, pids = self._number("memory", "memory.limit_in_bytes"), self._number("pids", "pids.max")
            quota, period = self._number("cpu", "cpu.cfs_quota_us"), self._number("cpu", "cpu.cfs_period_us")
        # The Linux kernel counts whole pages, and rounds down.
        held = memory == self._limits.memory_bytes // _PAGE * _PAGE
        return {
            "memory_bytes": self._limits.memory_bytes if held else memory,
            "pids": pids,
            "cpu_quota_percent": quota * 100 // period,
        }

    def _swap(self) -> Field:
        try:
            if self.version == "v2":
                value = self._number(UNIFIED, "memory.swap.max")
            else:
                both = self._number("memory", "memory.memsw.limit_in_bytes")
                value = both - self._number("memory", "memory.limit_in_bytes")
        except FileNotFoundError:
            last = "" if self.version == "v2" else ": swappiness is 0, so that it swaps last"
            detail = f"this Linux kernel does not account for swap{last}"
            return Field("swap_bytes", 0, None, "unobservable", detail)
        return Field("swap_bytes", 0, value, "observed")

    # --- while it runs

    def cpu_patience(self) -> float:
        """Seconds in which the CPU limit cannot be passed, however many processors are used; 0 when it is passed."""
        left_us = self._limits.cpu_seconds * 1_000_000 - (self._cpu_us() - self._cpu_before_us)
        if left_us <= 0:
            return 0.0
        at_once = min(_PROCESSORS, self._limits.cpu_quota_percent / 100)
        return max(_LEAST_PATIENCE, left_us / 1_000_000 / at_once)

    # --- the end

    def bury(self) -> Spent | None:
        """Kills what is left, reads what was used, removes the cgroups. None when there was nothing to read.

        Waits for nobody: a cgroup that something dying (or frozen) is still in goes on the list, to be tried again.
        """
        spent = None
        if self._made:
            kill_members(self._made[0])  # v2's if there is one: it holds init too
        with suppress(OSError):  # a group that was never whole
            spent = self._read()
        self._left += [path for path in reversed(self._made) if not try_to_remove(path)]
        self._made.clear()
        for fd in (self.into, self.ooms, *self.tasks):
            if fd >= 0:
                os.close(fd)
        self.into = self.ooms = -1
        self.tasks = ()
        return spent

    def _read(self) -> Spent:
        v2 = self.version == "v2"
        memory, pids, cpu = (UNIFIED,) * 3 if v2 else ("memory", "pids", "cpu")
        oom_kills = self._counter(memory, "memory.events" if v2 else "memory.oom_control", "oom_kill")
        hit = {
            "memory_bytes": oom_kills,
            "pids": self._counter(pids, "pids.events", "max"),
            "cpu_quota_percent": self._counter(cpu, "cpu.stat", "nr_throttled"),
        }
        processes = self._optional(pids, "pids.peak")
        return Spent(
            cpu_ms=round((self._cpu_us() - self._cpu_before_us) / 1000),
            memory_peak_bytes=self._optional(memory, "memory.peak" if v2 else "memory.max_usage_in_bytes"),
            process_peak=processes - 1 if v2 and processes is not None else processes,
            oom_kills=oom_kills,
            limits_hit=tuple(name for name, times in hit.items() if times),
        )

    def _cpu_us(self) -> int:
        if self.version == "v2":
            return self._counter(UNIFIED, "cpu.stat", "usage_usec")
        return self._number("cpuacct", "cpuacct.usage") // 1000

    def _text(self, hierarchy: str, file: str) -> str:
        with open(f"{self._places[hierarchy].path}/{file}", encoding="ascii") as opened:
            return opened.read()

    def _number(self, hierarchy: str, file: str) -> int:
        return _number(self._text(hierarchy, file))

    def _optional(self, hierarchy: str, file: str) -> int | None:
        try:
            return self._number(hierarchy, file)
        except FileNotFoundError:
            return None

    def _counter(self, hierarchy: str, file: str, name: str) -> int:
        """One line of a flat keyed file; 0 where this Linux kernel has no such line."""
        lines = (line.split(" ") for line in self._text(hierarchy, file).splitlines())
        return next((int(value) for key, value in lines if key == name), 0)

    def _write(self, hierarchy: str, file: str, value: int | str) -> None:
        write_setting(f"{self._places[hierarchy].path}/{file}", value)


def _number(text: str) -> int:
    """-1 for no limit, as v1 has it."""
    return -1 if text.strip() == "max" else int(text)


def write_setting(path: str, value: int | str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def kill_members(path: str) -> None:
    """SIGKILL for everything in the cgroup `path` and below it. Never raises: remove() says whether it is empty."""
    try:
        write_setting(f"{path}/cgroup.kill", 1)
        return
    except OSError:
        pass  # v1, a Linux kernel before 5.14, or gone: one by one
    for folder, _, _ in os.walk(path):
        for pid in _members(folder):
            with suppress(OSError):
                pidfd = os.pidfd_open(pid)
                try:
                    # Listed again, now that the number cannot pass to another process unseen.
                    if pid in _members(folder):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)


def _members(folder: str) -> list[int]:
    try:
        with open(f"{folder}/cgroup.procs", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []  # removed meanwhile: ENOENT before the open, ENODEV after it


def try_to_remove(path: str) -> bool:
    """Removes a cgroup and those below it, killing what is in them. Whether it is gone by now; waits for nothing."""
    if _removed(path):
        return True
    kill_members(path)
    for folder, _, _ in os.walk(path, topdown=False):
        if folder != path:
            _removed(folder)  # what was killed may be there for a moment still
    return _removed(path)


def remove_all(paths: Iterable[str]) -> bool:
    """The same for all of them, with a bounded patience. Whether every one is gone."""
    give_up = time.monotonic() + _BUSY_SECONDS
    left = list(paths)
    while left := [path for path in left if not try_to_remove(path)]:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.001)
    return True


def _removed(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
