"""One case: a fresh copy, a run with one fault, the same commands again, and every check on what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.boundaries import Boundary
from tests.faults.scenario import Case, Check, History, Scenario
from tests.faults.supervise import HALVES, SCARCE, Fault, Supervisor

NO_FAULT = "none"
_RESUMPTIONS = 3  # what a fault of the machine ended may have to be resumed more than once


@dataclass(frozen=True, slots=True)
class Result:
    """`hit` names the boundary; empty when the run never came to it. `violations`: {invariant: what is wrong}."""

    scenario: str
    fault: str
    hit: str
    violations: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def record(scenario: Scenario, case: Case, *, data: bool = False) -> tuple[list[Boundary], History]:
    """A run without a fault: its boundaries. AssertionError when it does not succeed: there is nothing to compare
    with."""
    case.prepared(scenario)
    history = History()
    boundaries, _ = run_once(scenario, case, history, None, data=data)
    assert not any(history.exit_codes[-1]), f"{scenario.name}: the run without a fault failed; see {case.output}"
    return boundaries, history


def run_clean(scenario: Scenario, case: Case, *, resources: bool = False) -> tuple[list[Boundary], Result]:
    """A run without a fault and every check on it: what must hold anyway, and a control's fault that shows by
    itself."""
    begun = time.monotonic()
    case.prepared(scenario)
    history = History()
    boundaries, _ = run_once(scenario, case, history, None, resources=resources)
    if any(history.exit_codes[-1]):
        violations = {"resumes": [_why(case, 0)]}
    else:
        violations = _broken(scenario.checks, scenario, case, history)
    return boundaries, Result(scenario.name, NO_FAULT, NO_FAULT, violations, round(time.monotonic() - begun, 2))


def run_once(
    scenario: Scenario,
    case: Case,
    history: History,
    fault: Fault | None,
    *,
    data: bool = False,
    resources: bool = False,
) -> tuple[list[Boundary], Boundary | None]:
    """The commands, until one fails. (its boundaries, the one that the fault hit)"""
    roots = {name: case.folder / name for name in scenario.roots}
    # Half a write is made by us: then the bytes are needed.
    keep = data or (fault is not None and fault.action in HALVES)
    resources = resources or (fault is not None and fault.action in SCARCE)
    supervisor = Supervisor(roots, scenario.role, data=keep, resources=resources, timeout_s=scenario.timeout_s)
    found: list[Boundary] = []
    made: list[Boundary] = []
    stdout: list[bytes] = []
    codes: list[int] = []
    hit = None
    number = len(history.made)
    for position, command in enumerate(scenario.commands(case)):
        out, err = (case.output / f"{number}-{position}.{stream}" for stream in ("stdout", "stderr"))
        outcome = supervisor.run(
            command, fault if hit is None else None,
            cwd=case.folder, environment=scenario.environment(case), stdout=out, stderr=err,
        )  # fmt: skip
        found += outcome.boundaries
        made += outcome.made
        hit = hit or outcome.hit
        stdout.append(out.read_bytes())
        codes.append(outcome.exit_code)
        history.survivors += outcome.survivors
        if outcome.stuck:
            history.survivors.append(f"{command[0]} did not end by itself within {scenario.timeout_s:.0f} s")
        if outcome.exit_code:
            break
    history.made.append(made)
    history.stdout.append(stdout)
    history.exit_codes.append(codes)
    return found, hit


def run_case(scenario: Scenario, case: Case, fault: Fault) -> Result:
    begun = time.monotonic()
    case.prepared(scenario)
    history = History()
    _, hit = run_once(scenario, case, history, fault)
    if hit is None:
        return Result(scenario.name, fault.name, "", {}, time.monotonic() - begun)
    violations = _broken(scenario.after_fault, scenario, case, history)
    for _ in range(_RESUMPTIONS):
        run_once(scenario, case, history, None)
        if not any(history.exit_codes[-1]):
            break
    else:
        violations["resumes"] = [_why(case, len(history.made) - 1)]
    for name, wrong in _broken(scenario.checks, scenario, case, history).items():
        violations.setdefault(name, []).extend(wrong)
    return Result(scenario.name, fault.name, hit.place, violations, round(time.monotonic() - begun, 2))


def _broken(checks: dict[str, Check], scenario: Scenario, case: Case, history: History) -> dict[str, list[str]]:
    found = {name: check(scenario, case, history) for name, check in checks.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def _why(case: Case, number: int) -> str:
    said = [path.read_text(errors="replace").strip() for path in sorted(case.output.glob(f"{number}-*.stderr"))]
    return f"the same command did not come to its end: {' '.join(said)[-400:]}"


def folder_of(work: Path, scenario: Scenario, shard: int) -> Path:
    return work / scenario.name / str(shard) / "case"
