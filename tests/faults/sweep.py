"""Which faults to inflict, spread over processes, kept as they come so that an interrupted sweep goes on."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.faults.boundaries import Boundary
from tests.faults.cases import Result, folder_of, run_case, run_clean
from tests.faults.notify import EXECS, OPENS, SYNCS, WRITES
from tests.faults.order import TELLING
from tests.faults.scenario import Case, Scenario
from tests.faults.supervise import AFTER, BEFORE, LATE, SHORT, TORN, Fault

ROOT = Path(__file__).resolve().parents[2]
_SET_PDEATHSIG = 1
_CHUNK = 8
_LAST_OF_MEMORY = 30
_MAKES_PROCESS = ("clone", "clone3", "fork", "vfork")
_TRIES = 3  # a boundary that a run did not come to: which process is faster is not ours to say


def kills(boundaries: list[Boundary]) -> list[Fault]:
    """Before and after each boundary, in the middle of each write to a file, and late where the Chio kernel has told
    somebody something. After a write that the same process
    follows with another to the same file is the same as before that one: nobody else can tell the difference, and it is
    not done twice."""
    following: dict[int, Boundary] = {}
    faults: list[Fault] = []
    for boundary in reversed(boundaries):
        after = following.get(boundary.pid)
        same = after is not None and after.path == boundary.path and boundary.kind == after.kind == "file"
        if not (same and boundary.call in WRITES):
            faults.append(Fault(boundary.place, AFTER))
        if boundary.kind in TELLING and boundary.role.startswith("kernel"):
            faults.append(Fault(boundary.place, LATE))
        if boundary.kind == "file" and boundary.call in WRITES and boundary.length > 1:
            faults.append(Fault(boundary.place, TORN))
        faults.append(Fault(boundary.place, BEFORE))
        following[boundary.pid] = boundary
    return faults[::-1]


def host_kills(boundaries: list[Boundary]) -> list[Fault]:
    """The host, while another stands at a sync or has just said something: everything is cut at once."""
    return [
        Fault(boundary.place, AFTER, "host") for boundary in boundaries
        if boundary.role.startswith("kernel") and (boundary.call in SYNCS or boundary.kind in TELLING)
    ]  # fmt: skip


def failures(boundaries: list[Boundary]) -> list[Fault]:
    """The machine's answers instead of a kill: no space, a disk that fails, a full pipe, half a write."""
    faults = []
    for boundary in boundaries:
        for action in _failures_of(boundary):
            faults.append(Fault(boundary.place, action))
    return faults


def _failures_of(boundary: Boundary) -> tuple[str, ...]:
    if boundary.kind == "file" and boundary.call in WRITES:
        return ("ENOSPC", "EIO", SHORT) if boundary.length > 1 else ("ENOSPC", "EIO")
    if boundary.call in SYNCS:
        return ("EIO",)
    if boundary.kind == "pipe" and boundary.call in WRITES:
        return ("EAGAIN", "EPIPE")
    if boundary.kind in ("socket", "said"):
        return ("EPIPE",)
    if boundary.call in OPENS:
        return ("ENOSPC",)
    if boundary.call in EXECS:
        return ("ENOMEM",)
    return ("EIO",) if boundary.kind in ("cgroup", "proc", "file") else ("ENOMEM",)


def scarcities(boundaries: list[Boundary]) -> list[Fault]:
    """No descriptor, no process, no memory, at each call that takes one; `boundaries` of a run with resources. Of the
    kernel's memory only what it takes once it has started: before, it is as good as killed."""
    found = []
    memory = [boundary for boundary in boundaries if boundary.path == "memory"]
    for boundary in boundaries:
        if boundary.kind != "resource" or (boundary.path == "memory" and boundary not in memory[-_LAST_OF_MEMORY:]):
            continue
        takes_memory = boundary.path == "memory" or boundary.call in _MAKES_PROCESS
        found.append(Fault(boundary.place, "ENOMEM" if takes_memory else "EMFILE"))
    return found


def sample(faults: Iterable[Fault], boundaries: list[Boundary], most: int) -> list[Fault]:
    """At most so many: of each sort of boundary (role, call, target) and each action first one, then further ones, the
    same every time."""
    sorts = {boundary.place: boundary.sort for boundary in boundaries}
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(f"{sorts[fault.place]}:{fault.action}:{fault.victim}", []).append(fault)
    for group in groups.values():
        group.sort(key=lambda fault: sha256(fault.name.encode()).digest())
    order = sorted(groups, key=lambda name: sha256(name.encode()).digest())
    chosen: list[Fault] = []
    while len(chosen) < most and order:
        for name in order:
            chosen.append(groups[name].pop(0))
        order = [name for name in order if groups[name]]
    return chosen[:most]


def never(_: Result) -> bool:
    return False


@cache
def sources() -> str:
    """A digest of the product and of this tool: results of other ones are none."""
    digest = sha256()
    for folder in ("chio", "confine", "verify", "policies", "tests/faults"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


class Kept:
    """The results of a sweep, one JSON line each; what is there is not done again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines: dict[str, Result] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                try:
                    result = Result(**json.loads(line))
                except ValueError:
                    continue  # torn
                self._lines[result.fault] = result

    def __contains__(self, fault: Fault) -> bool:
        return fault.name in self._lines

    def add(self, result: Result) -> None:
        self._lines[result.fault] = result
        with open(self._file, "a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def results(self, faults: Iterable[Fault]) -> list[Result]:
        return [self._lines[fault.name] for fault in faults if fault.name in self._lines]


def clean(
    scenario: Scenario, work: Path, chio: tuple[str, ...], *, resources: bool = False
) -> tuple[list[Boundary], Result]:
    """A run without a fault, in a process of its own: its boundaries, and what is wrong with it already."""
    found: tuple[list[Boundary], Result] = alone(_clean, (scenario.home, scenario.name), str(work), chio, resources)
    return found


def sweep(
    scenario: Scenario, faults: list[Fault], work: Path, chio: tuple[str, ...], jobs: int,
    told: Callable[[Result], None], *, until: Callable[[Result], bool] = never,
) -> list[Result]:  # fmt: skip
    """Every fault, `jobs` at a time; the results so far are kept in `work`. Ends early when one satisfies `until`."""
    kept = Kept(work / f"{scenario.name}-{sources()}.ndjson")
    left = [fault for fault in faults if fault not in kept]
    with _pool(jobs) as pool:
        size = 1 if until is not never else _CHUNK
        chunks = [left[at : at + size] for at in range(0, len(left), size)]
        named = (scenario.home, scenario.name)
        pending = [pool.submit(_run, named, str(work), chio, [fault.name for fault in chunk]) for chunk in chunks]
        for future in as_completed(pending):
            for result in future.result():
                kept.add(result)
                told(result)
                if until(result):
                    pool.shutdown(cancel_futures=True)
                    return kept.results(faults)
    return kept.results(faults)


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of its own: a supervisor may have no other children."""
    with _pool(1) as pool:
        return pool.submit(work, *arguments).result()


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_us)


def _end_with_us() -> None:
    """No case goes on when the sweep is ended (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


Named = tuple[str, str]
"""A scenario for another process: its home, its name."""


def _of(named: Named) -> Scenario:
    found: Scenario = import_module(named[0]).ALL[named[1]]
    return found


def _case(scenario: Scenario, work: Path, chio: tuple[str, ...]) -> Case:
    """The place of this process alone."""
    folder = folder_of(work, scenario, os.getpid())
    return Case(folder, chio)


def _clean(named: Named, work: str, chio: tuple[str, ...], resources: bool) -> tuple[list[Boundary], Result]:
    scenario = _of(named)
    boundaries, result = run_clean(scenario, _case(scenario, Path(work), chio), resources=resources)
    return [replace(boundary, data=None) for boundary in boundaries], result


def _run(named: Named, work: str, chio: tuple[str, ...], faults: list[str]) -> list[Result]:
    scenario = _of(named)
    case = _case(scenario, Path(work), chio)
    return [_until_hit(scenario, case, Fault.parse(fault)) for fault in faults]


def _until_hit(scenario: Scenario, case: Case, fault: Fault) -> Result:
    result = run_case(scenario, case, fault)
    for _ in range(_TRIES - 1):
        if result.hit:
            break
        result = run_case(scenario, case, fault)
    return result
