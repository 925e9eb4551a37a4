"""The tool on a program of forty lines: what it does to a call, and that it sees what is wrong."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import example, sweep
from tests.faults.boundaries import Boundary
from tests.faults.cases import Result, run_case, run_clean
from tests.faults.scenario import Case, History, Scenario
from tests.faults.supervise import Fault, Supervisor

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a filter that asks needs root"),
    pytest.mark.timeout(300),
]
WRITE = "journal/write:state/book"
PROGRAM = example.PROGRAM.read_text()


def clean(folder: str) -> tuple[list[Boundary], Result]:
    return run_clean(example.SCENARIO, Case(Path(folder) / "case", ()))


def test_two_runs_have_the_same_boundaries_by_the_same_names(tmp_path: Path) -> None:
    first, second = (sweep.alone(clean, str(tmp_path)) for _ in range(2))
    names = [boundary.place for boundary in first[0]]
    assert names == [boundary.place for boundary in second[0]]
    assert len(set(names)) == len(names)
    one = ["journal/write:state/book#1", "journal/fsync:state/book#1", "journal/write:stdout#1"]
    assert [name for name in names if name.endswith("#1")][-3:] == one
    assert first[1].violations == {}


def book_after(folder: str, fault: str) -> bytes:
    """The book once the fault has happened, before anything is run again."""
    scenario, case = example.SCENARIO, Case(Path(folder) / "case", ())
    found: list[bytes] = []

    def look(_: Scenario, case: Case, __: History) -> list[str]:
        found.append((case.state / "book").read_bytes())
        return []

    assert run_case(replace(scenario, after_fault={"look": look}), case, Fault.parse(fault)).violations == {}
    return found[0]


@pytest.mark.parametrize(
    ("fault", "book"),
    [
        ("#2=before", b"one\n"),
        ("#2=after", b"one\ntwo\n"),
        ("#2=EIO", b"one\n"),
        ("#2=torn", b"one\ntw"),
        ("#2=late", b"one\ntwo\n"),
        ("#2=short", b"one\ntwo\nthree\n"),  # the program writes the other half, and goes on
    ],
)
def test_a_call_is_kept_back_let_through_refused_or_shortened(tmp_path: Path, fault: str, book: bytes) -> None:
    assert sweep.alone(book_after, str(tmp_path), WRITE + fault) == book


def hit_of(folder: str, fault: str) -> str:
    return run_case(example.SCENARIO, Case(Path(folder) / "case", ()), Fault.parse(fault)).hit


def test_a_fault_that_never_happened_is_not_told_as_one(tmp_path: Path) -> None:
    assert sweep.alone(hit_of, str(tmp_path), f"{WRITE}#9=before") == ""
    assert sweep.alone(hit_of, str(tmp_path), f"{WRITE}#1=after:nobody") == ""
    assert sweep.alone(hit_of, str(tmp_path), f"{WRITE}#1=after:journal") == f"{WRITE}#1"


def test_every_boundary_of_a_sound_program_can_be_cut(tmp_path: Path) -> None:
    boundaries, _ = sweep.alone(clean, str(tmp_path))
    faults = sweep.kills(boundaries) + sweep.failures(boundaries)
    results = sweep.sweep(example.SCENARIO, faults, tmp_path, (), 1, lambda _: None)
    assert len(results) == len(faults) > 40
    assert [result for result in results if result.violations or not result.hit] == []


BROKEN = {
    "acknowledged before it is written": (
        '            line = f"{order}\\n".encode()\n',
        '            print(f"booked {order}", flush=True)\n            line = f"{order}\\n".encode()\n',
        "booked",
    ),
    "never synced": ("            os.fsync(book)\n        print", "        print", "synced"),
    "its name never synced": ("    os.fsync(above)\n", "", "synced"),
    "half a line is taken for a whole one": ("    if whole != text:\n", "    if False:\n", "complete"),
    "does not look what is there": ("        if order not in there:\n", "        if True:\n", "booked"),
}


def caught(folder: str, program: str) -> set[str]:
    """The checks that break at some boundary of a changed program."""
    where = Path(folder) / "journal.py"
    where.write_text(program)
    scenario = replace(
        example.SCENARIO,
        commands=lambda case: [[sys.executable, str(where), str(case.state), *example.ORDERS]],
    )
    case = Case(Path(folder) / "case", ())
    boundaries, result = run_clean(scenario, case)
    found = set(result.violations)
    for fault in sweep.kills(boundaries):
        found |= set(run_case(scenario, case, fault).violations)
    return found


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_program_is_caught_by_the_check_that_it_breaks(tmp_path: Path, how: str) -> None:
    old, new, check = BROKEN[how]
    assert PROGRAM.count(old) == 1
    assert check in sweep.alone(caught, str(tmp_path), PROGRAM.replace(old, new))


def leftovers(folder: str) -> list[str]:
    """Of a command that ends and leaves a process of its own session behind."""
    from tests.faults import supervise

    supervise.ALONE_S = 0.5
    command = ["/bin/sh", "-c", "setsid sleep 1000 & exit 0"]
    out = Path(folder) / "out"
    outcome = Supervisor({}, lambda *_: "sh").run(
        command, None, cwd=Path(folder), environment=dict(os.environ), stdout=out, stderr=out
    )
    return outcome.survivors


def test_what_outlives_its_command_is_seen_and_ended(tmp_path: Path) -> None:
    assert sweep.alone(leftovers, str(tmp_path)) == ["sleep 1000"]


def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    faults = [Fault(f"{WRITE}#1", "before"), Fault(f"{WRITE}#2", "before")]
    told: list[Result] = []
    for some in (faults[:1], faults):
        sweep.sweep(example.SCENARIO, some, tmp_path, (), 1, told.append)
    assert [result.fault for result in told] == [fault.name for fault in faults]
