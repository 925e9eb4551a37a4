"""Clocks that jump between two starts.

The wall clock is the machine's, and everybody else's: what is moved here is what one copy of the product is told, by a
module in its own environment that a .pth file names (Python's `site` runs it before anything else), read at each start.
What cannot be had this way, and is not claimed: a step of CLOCK_BOOTTIME while a host runs. It has no namespace that
can be moved under a running process, and the calls that read it do not pass the filter (vdso(7)).
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults import controls
from tests.faults.cases import Result, run_once
from tests.faults.scenario import Case, History, Scenario
from tests.faults.snapshot import Snapshot
from tests.faults.supervise import BEFORE, Fault

_OFFSET = "clock_offset_s"
_SHIFTS = """
import os, time
_read, _file = time.time_ns, os.path.join(os.path.dirname(__file__), "clock_offset_s")
time.time_ns = lambda: _read() + int(open(_file).read()) * 10**9
"""
_HALFWAY = Fault("kernel/fdatasync:state/authority.db-wal#5", BEFORE)


@dataclass(frozen=True, slots=True)
class Jump:
    """A step of the wall clock between a host that was killed and the next one. `refused`: a part of what the next
    start must say; empty when it must go on."""

    name: str
    seconds: int
    refused: str


JUMPS = (
    Jump("half a minute back", -30, ""),
    Jump("two hours back", -7200, "the clock of this machine is implausible"),
    Jump("an hour ahead", 3600, ""),
    Jump("two days ahead, past every grant", 2 * 86_400, "no grant is still valid"),
    Jump("ten years ahead", 10 * 366 * 86_400, "the clock of this machine is implausible"),
)


def shifted(folder: Path) -> tuple[str, ...]:
    """The command `chio` of a copy whose wall clock can be set off."""
    chio = controls.copy_of_the_product(folder)
    site = controls.site_of(folder)
    (site / "clock_shift.py").write_text(_SHIFTS)
    (site / "clock_shift.pth").write_text("import clock_shift\n")
    (site / _OFFSET).write_text("0")
    return chio


def set_off(folder: Path, seconds: int) -> None:
    (controls.site_of(folder) / _OFFSET).write_text(str(seconds))


def jump(scenario: Scenario, case: Case, copy: Path, step: Jump) -> Result:
    """A host killed half way, the step, the same command; then, if that was refused, the right time and the command
    once more. What is refused changes nothing that was kept; times in the log never go back."""
    begun = time.monotonic()
    set_off(copy, 0)
    case.prepared(scenario)
    history = History()
    _, hit = run_once(scenario, case, history, _HALFWAY)
    assert hit is not None, "the run never came to its fifth commit"
    set_off(copy, step.seconds)
    wrong = []
    run_once(scenario, case, history, None)
    said = "".join(path.read_text() for path in sorted(case.output.glob("1-*.stderr")))
    failed = any(history.exit_codes[-1])
    if failed != bool(step.refused) or step.refused not in said:
        wrong.append(f"exit {history.exit_codes[-1]}, and it said: {said.strip()[-300:]}")
    if step.refused:
        set_off(copy, 0)
        run_once(scenario, case, history, None)
    violations = {"clock": wrong + _order_of_times(case)} if wrong + _order_of_times(case) else {}
    # A host that went on in a shifted time leaves a log that the machine's own time may not open again.
    if not any(history.exit_codes[-1]):
        for name in ("acknowledged", "replies", "budgets", "log", "attempts", "calls_settled", "verify"):
            if found := scenario.checks[name](scenario, case, history):
                violations[name] = found
    elif step.refused != "no grant is still valid":
        violations["resumes"] = [f"with the right time again: exit {history.exit_codes[-1]}"]
    return Result(scenario.name, step.name, hit.place, violations, round(time.monotonic() - begun, 2))


def _order_of_times(case: Case) -> list[str]:
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    times = [json.loads(leaf["body"]).get("time_ms", 0) for leaf in snapshot["leaf"]]
    later = [time_ms for time_ms in times if time_ms]
    return [] if later == sorted(later) else ["the log's times go back"]


def jumps(name: str, work: Path) -> list[Result]:
    """Every step, with the scenario of that name, in a process of its own."""
    from tests.faults.scenarios import ALL

    folder = work / "clock"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = Case(folder / "run" / "case", shifted(folder / "copy"))
    found = [jump(ALL[name], case, folder / "copy", step) for step in JUMPS]
    shutil.rmtree(folder)
    return found
