"""`python -m tests.faults`: every boundary of every scenario, and the controls. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from tests.faults import clock, controls, sweep
from tests.faults.boundaries import Boundary
from tests.faults.cases import NO_FAULT, Result
from tests.faults.power import controls as power_controls
from tests.faults.power import shards
from tests.faults.scenario import Scenario
from tests.faults.supervise import AFTER, BEFORE, KILLS, Fault

DEFAULT_HOME = "tests.faults.scenarios"
QUICK = 14
"""How many kills, and half as many failures, `--quick` takes of each scenario."""
_PRODUCT = (sys.executable, "-m", "chio")


@dataclass(slots=True)
class Row:
    """One line of the table."""

    name: str
    boundaries: int = 0
    kills: int = 0
    power_cuts: int = 0
    failures: int = 0
    violations: int = 0
    not_reached: int = 0
    seconds: float = 0.0
    by_role: dict[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def main(words: list[str] | None = None) -> int:
    options = _options().parse_args(words)
    home = import_module(options.home)
    ours = home.__name__ == DEFAULT_HOME
    if os.geteuid() != 0:
        print(
            "faults: a filter over other users' processes, and confinement, need root; run it with sudo",
            file=sys.stderr,
        )
        return 2
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if unknown := set(options.scenario or ()) - set(home.ALL):
        print(f"faults: no such scenario: {', '.join(sorted(unknown))}; {', '.join(home.ALL)}", file=sys.stderr)
        return 2
    chosen: list[Scenario] = [home.ALL[name] for name in options.scenario or home.ALL]
    if options.list:
        return _list(chosen, work)
    if options.boundary:
        return _one(chosen[0], options.boundary, work)
    sample = options.sample or options.quick * QUICK
    rows = [_scenario(scenario, work, sample, options.jobs, power=ours) for scenario in chosen]
    caught: dict[str, str] = {}
    if ours and not options.scenario:
        rows.append(_clock(work))
        caught = {**controls.catch_all(work, options.jobs), **power_controls.catch_all(work)}
    report = {
        "scenarios": [row.document() for row in rows],
        "controls": {"total": len(caught), "caught": sum(map(bool, caught.values())), "by": caught},
        "violations": sum(row.violations for row in rows),
    }
    print(json.dumps(report, indent=1 if sys.stdout.isatty() else None))
    _table(rows, caught)
    return int(bool(report["violations"]) or not all(caught.values()))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Kill, cut and fail at every boundary.")
    parser.add_argument(
        "--from", dest="home", default=DEFAULT_HOME, metavar="MODULE", help="whose `ALL` are the scenarios"
    )
    parser.add_argument("--scenario", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="some boundaries of each sort instead of all")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help=f"N kills of each scenario; quick: {QUICK}")
    parser.add_argument("--boundary", metavar="PLACE[=ACTION[:VICTIM]]", help="one fault, and everything about it")
    parser.add_argument("--list", action="store_true", help="record and print the boundaries of each scenario")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--work", default="build/faults", help="where cases run and results are kept, on a disk")
    return parser


def _list(chosen: list[Scenario], work: Path) -> int:
    for scenario in chosen:
        for boundary in sweep.clean(scenario, work, _PRODUCT)[0]:
            print(f"{scenario.name} {boundary.place}")
    return 0


def _one(scenario: Scenario, place: str, work: Path) -> int:
    """Each action at one boundary, or the one that is named; results that are kept do not count."""
    no_fault = place == NO_FAULT
    results = [sweep.clean(scenario, work, _PRODUCT)[1]] if no_fault else _inflicted(scenario, place, work)
    for result in results:
        print(json.dumps({"fault": result.fault, "hit": result.hit, "violations": result.violations}, indent=1))
    return int(any(result.violations or not result.hit for result in results))


def _inflicted(scenario: Scenario, place: str, work: Path) -> list[Result]:
    faults = [Fault.parse(place)] if "=" in place else [Fault(place, kill) for kill in (BEFORE, AFTER)]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        return sweep.sweep(scenario, faults, Path(folder), _PRODUCT, 1, lambda _: None)


def _scenario(scenario: Scenario, work: Path, sample: int, jobs: int, *, power: bool) -> Row:
    begun = time.monotonic()
    boundaries, result = sweep.clean(scenario, work, _PRODUCT)
    _told(result)
    row = Row(scenario.name, len(boundaries), by_role=dict(Counter(b.role.partition(".")[0] for b in boundaries)))
    taking, _ = sweep.clean(scenario, work, _PRODUCT, resources=True)
    faults = faults_of(scenario, boundaries, sample) + scarce(scenario, taking, sample)
    for one in sweep.sweep(scenario, faults, work, _PRODUCT, jobs, _told):
        _count(row, one)
    row.violations += bool(result.violations)
    if power:
        _cut_power(scenario, work, row, quick=bool(sample))
    shutil.rmtree(work / scenario.name, ignore_errors=True)
    row.seconds = round(time.monotonic() - begun, 1)
    return row


def _cut_power(scenario: Scenario, work: Path, row: Row, *, quick: bool) -> None:
    cuts = shards.sweep_power(scenario, work, _PRODUCT, *(shards.QUICK if quick else shards.WHOLE))
    for cut in cuts.cuts:
        print(f"{scenario.name} power cut after {cut.boundary}, {cut.survived}: {cut.violations}", file=sys.stderr)
    row.power_cuts, row.violations = cuts.power_cuts, row.violations + len(cuts.cuts)


def _clock(work: Path) -> Row:
    begun, row = time.monotonic(), Row("clock")
    for result in sweep.alone(clock.jumps, "effect", work):
        _told(result)
        _count(row, result)
    row.seconds = round(time.monotonic() - begun, 1)
    return row


def faults_of(scenario: Scenario, found: list[Boundary], sample: int) -> list[Fault]:
    """Every fault at every boundary that the scenario cuts at; with a `sample`, so many kills and half as many
    others."""
    boundaries = [boundary for boundary in found if scenario.cut(boundary)]
    kills = sweep.kills(boundaries) + sweep.host_kills(boundaries)
    failures = sweep.failures(boundaries)
    if sample:
        return sweep.sample(kills, boundaries, sample) + sweep.sample(failures, boundaries, sample // 2)
    return kills + failures


def scarce(scenario: Scenario, found: list[Boundary], sample: int) -> list[Fault]:
    boundaries = [boundary for boundary in found if scenario.cut(boundary)]
    faults = sweep.scarcities(boundaries)
    return sweep.sample(faults, boundaries, sample // 4) if sample else faults


def _count(row: Row, result: Result) -> None:
    if not result.hit:
        row.not_reached += 1
    elif "=" in result.fault and Fault.parse(result.fault).action in KILLS:
        row.kills += 1
    else:
        row.failures += 1
    row.violations += bool(result.violations)


def _told(result: Result) -> None:
    for name, wrong in result.violations.items():
        for what in wrong:
            print(f"{result.scenario} {result.fault}: {name}: {what}", file=sys.stderr)
    if result.violations:
        again = f"python -m tests.faults --scenario {result.scenario} --boundary '{result.fault}'"
        print(f"  again: {again}", file=sys.stderr, flush=True)


def _table(rows: list[Row], caught: dict[str, str]) -> None:
    heads = ("scenario", "boundaries", "kills", "power cuts", "failures", "violations", "not reached", "seconds")
    lines = [heads] + [
        (row.name, *map(str, (row.boundaries, row.kills, row.power_cuts, row.failures, row.violations, row.not_reached,
                              row.seconds))) for row in rows
    ]  # fmt: skip
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), file=sys.stderr)
    for name, by in caught.items():
        print(f"control: {name}: {'caught by ' + by if by else 'NOT CAUGHT'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
