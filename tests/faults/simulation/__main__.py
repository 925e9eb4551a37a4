"""`python -m tests.faults.simulation [--histories N] [--seconds S] [--from SEED] [--seed SEED] [--defect NAME]`.

Plays histories until one limit is reached, over all cores, and prints one JSON document: how many, how fast, and those
that may not be. `--seed` plays one again and tells its steps. Exit 1 when a history may not be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict

from tests.faults.simulation.broken import DEFECTS, applied
from tests.faults.simulation.history import History, Told
from tests.faults.simulation.world import template
from verify.keys import Pins

_BATCH = 50
_SHOWN = 10


def play(seeds: range, defect: str | None = None) -> list[Told]:
    """The histories of some seeds, one after the other in this process, over a state of their own."""
    with contextlib.closing(_histories(seeds, defect)) as histories:
        return [history.run() for history in histories]


def _histories(seeds: range, defect: str | None) -> Generator[History, None, None]:
    with contextlib.ExitStack() as held:
        if defect is not None:
            held.enter_context(applied(DEFECTS[defect]))
        made = held.enter_context(template())
        pins = Pins.from_file(f"{made.path}/pins.json")
        for seed in seeds:
            yield History(made, pins, seed)


def _again(seed: int, defect: str | None) -> int:
    with contextlib.closing(_histories(range(seed, seed + 1), defect)) as histories:
        history = next(histories)
        told = history.run()
    print(*history.trail, sep="\n", file=sys.stderr)
    print(json.dumps(asdict(told), indent=2))
    return int(bool(told.wrong))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.simulation", description=__doc__)
    parser.add_argument("--histories", type=int, default=1_000_000_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--seed", type=int, help="play this one and tell its steps")
    parser.add_argument("--defect", choices=sorted(DEFECTS), help="with a kernel that is broken in this way")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _again(arguments.seed, arguments.defect)
    begun = time.monotonic()
    last = arguments.first + arguments.histories
    batches = ((range(at, min(at + _BATCH, last)), arguments.defect) for at in range(arguments.first, last, _BATCH))
    played, crashes, calls, bad = 0, 0, 0, list[Told]()
    cores = os.cpu_count() or 1
    ahead = threading.Semaphore(2 * cores)
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        for told in pool.imap_unordered(_play, _until(batches, begun + arguments.seconds, ahead)):
            ahead.release()
            played += len(told)
            crashes += sum(entry.crashes for entry in told)
            calls += sum(entry.calls for entry in told)
            bad += [entry for entry in told if entry.wrong]
    seconds = time.monotonic() - begun
    again = f"python -m tests.faults.simulation --seed {bad[0].seed}" if bad else None
    if again and arguments.defect:
        again += f' --defect "{arguments.defect}"'
    document = {
        "histories": played, "seconds": round(seconds, 1), "histories_per_second": round(played / seconds, 1),
        "crashes": crashes, "calls": calls, "violations": len(bad), "again": again,
        "shown": [asdict(entry) for entry in sorted(bad, key=lambda entry: entry.seed)[:_SHOWN]],
    }  # fmt: skip
    print(json.dumps(document, indent=2))
    return int(bool(bad))


def _play(job: tuple[range, str | None]) -> list[Told]:
    return play(*job)


def _until(
    batches: Iterator[tuple[range, str | None]], end: float, ahead: threading.Semaphore
) -> Iterator[tuple[range, str | None]]:
    """The pool takes all that it is given at once: it is given no more than the next few."""
    for batch in batches:
        ahead.acquire()
        if time.monotonic() >= end:
            return
        yield batch


if __name__ == "__main__":
    sys.exit(main())
