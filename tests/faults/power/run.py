"""Cuts the power of a scenario everywhere: records it once, then reopens every state that the model allows.

Every distinct state of the state directory is opened by the real kernel and recovered, in a process of ours (`reopen`).
Of the states of all recorded folders, an even sample is put where the scenario runs, and the scenario's own commands
resume it with everything that a kill test checks.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.faults.cases import run_once
from tests.faults.power.disk import write_out
from tests.faults.power.promises import Promises
from tests.faults.power.record import Recording, record
from tests.faults.power.reopen import check
from tests.faults.power.states import State, states
from tests.faults.scenario import Case, History, Scenario
from tests.faults.snapshot import Snapshot

SEED = 7
_STATE = "state/"
_RESUMPTIONS = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """A state that violates something: where the power was cut, what survived, {invariant: what is wrong}."""

    boundary: str
    survived: str
    violations: dict[str, list[str]]


@dataclass(slots=True)
class PowerResult:
    """`power_cuts`: distinct states that the kernel reopened; `resumed`: that the scenario was resumed from."""

    power_cuts: int = 0
    resumed: int = 0
    cuts: list[Cut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Job:
    recording: Recording
    states: list[State]
    promises: Promises
    initialised: bool
    key_file: Path | None
    wrapped: dict[str, bytes]
    scratch: Path


_job: _Job


def run_power(
    scenario: Scenario, case: Case, *, most: int | None = None, resumed: int = 0, only: str | None = None
) -> PowerResult:
    """All states, or `most` of them, evenly spread over the run; with `only`, those of one boundary (its place).

    In a process that has one thread and no children: the recorder's rule. The case's folder is used up.
    """
    if "most_cuts" in scenario.more:  # of a scenario whose states are large
        largest, resumes = scenario.more["most_cuts"]
        most, resumed = min(most or largest, largest), min(resumed, resumes)
    recording = record(scenario, case)
    promises = Promises.of(recording.boundaries)
    result = PowerResult()
    first = _first(scenario, promises)
    found = _chosen(recording, states(recording.disk(), recording.events, SEED, _of_the_state, first), only)
    initialised = any(path == f"{_STATE}authority.db" for path, _ in recording.before)
    key_file = scenario.more["key_file"](case) if "key_file" in scenario.more else None
    with tempfile.TemporaryDirectory(dir=case.folder.parent) as scratch:
        job = _Job(recording, _even(found, most), promises, initialised, key_file, _wrapped(case), Path(scratch))
        result.power_cuts = len(job.states)
        result.cuts += _reopened(job)
    if resumed:
        everything = _chosen(recording, states(recording.disk(), recording.events, SEED, lambda _: True, first), only)
        for state in _even(everything, resumed):
            result.resumed += 1
            result.cuts += _resumed(scenario, case, recording, state)
    return result


def _first(scenario: Scenario, promises: Promises) -> int:
    """From where on the power is cut: a scenario may name an operation, and how often it is answered before."""
    op, times = scenario.more.get("cuts_after", ("", 0))
    answered = [exchange.number for exchange in promises.exchanges if exchange.op == op]
    return answered[times - 1] if times else 0


def _wrapped(case: Case) -> dict[str, bytes]:
    """Of each process the data key as it lay in the state at first: in an encrypted one."""
    snapshot = Snapshot.of(case.template / "state")
    return {row["process"]: row["wrapped"] for row in snapshot["data_key"]} if snapshot is not None else {}


def _of_the_state(path: str) -> bool:
    return f"{path}/".startswith(_STATE)


def _chosen(recording: Recording, found: list[State], only: str | None) -> list[State]:
    return [state for state in found if only is None or recording.boundaries[state.boundary].place == only]


def _even(found: list[State], most: int | None) -> list[State]:
    """So many, evenly spread, but all of which nothing survived that was not synced: they break most."""
    if most is None or len(found) <= most:
        return found
    bare = [state for state in found if state.bare][-most:]
    rest = [state for state in found if not state.bare]
    left = most - len(bare)
    return sorted([*bare, *(rest[n * len(rest) // left] for n in range(left))], key=lambda state: state.boundary)


def _reopened(job: _Job) -> list[Cut]:
    global _job  # noqa: PLW0603  forked, not sent: the recording is large
    _job = job
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        return [cut for cut in pool.map(_check, range(len(job.states)), chunksize=8) if cut is not None]


def _check(number: int) -> Cut | None:
    state, recording = _job.states[number], _job.recording
    promises = _job.promises.until(state.boundary + 1)
    initialised = _job.initialised or any(entry.op == "init" and entry.ok for entry in promises.exchanges)
    files = [(path, data) for path, data in state.files() if _of_the_state(path)]
    with tempfile.TemporaryDirectory(dir=_job.scratch) as folder:
        write_out(files, Path(folder), recording.kept)
        wrong = check(Path(folder) / _STATE, promises, initialised, _job.key_file)
    deleted = [entry.request["process"] for entry in promises.exchanges if entry.op == "delete" and entry.ok]
    for process in deleted:
        found = [path for path, data in files if data is not None and _job.wrapped[process] in data]
        if found:
            wrong["destroyed"] = [f"the key of {process} is in {', '.join(found)} again"]
    return Cut(recording.boundaries[state.boundary].place, state.cut, wrong) if wrong else None


def _resumed(scenario: Scenario, case: Case, recording: Recording, state: State) -> Iterator[Cut]:
    """The scenario's commands on what is left, until they succeed; then every check of the scenario."""
    case.prepared(scenario)
    for root in recording.roots:
        shutil.rmtree(case.folder / root, ignore_errors=True)
    write_out(state.files(), case.folder, recording.kept)
    history = History(made=[recording.boundaries[: state.boundary + 1]], stdout=[[]], exit_codes=[[-9]])
    wrong = {name: found for name, judge in scenario.after_fault.items() if (found := judge(scenario, case, history))}
    for _ in range(_RESUMPTIONS):
        run_once(scenario, case, history, None)
        if not any(history.exit_codes[-1]):
            break
    else:
        wrong["resumes"] = ["the same commands did not come to their end"]
    for name, judge in scenario.checks.items():
        if found := judge(scenario, case, history):
            wrong.setdefault(name, []).extend(found)
    if wrong:
        yield Cut(recording.boundaries[state.boundary].place, state.cut, wrong)
