"""`python -m tests.faults.power [--scenario S] [--quick] [--only BOUNDARY] [--controls]`: power cuts alone.

JSON on stdout, one line for each violation on stderr; exit 1 on a violation or an uncaught control.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.faults.power.controls import catch_all
from tests.faults.power.shards import QUICK, SCENARIOS, WHOLE, sweep_power

_PRODUCT = (sys.executable, "-m", "chio")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.power", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="some states of each scenario instead of all")
    parser.add_argument("--only", metavar="BOUNDARY", help="only cuts right after this boundary")
    parser.add_argument("--controls", action="store_true", help="the broken variants, instead of the scenarios")
    parser.add_argument("--work", default="build/faults", help="where cases run, on a disk")
    options = parser.parse_args()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if options.controls:
        caught = catch_all(work)
        print(json.dumps(caught, indent=1))
        return int(not all(caught.values()))
    found, wrong = [], 0
    for name in options.scenario or SCENARIOS:
        begun = time.monotonic()
        result = sweep_power(SCENARIOS[name], work, _PRODUCT, *(QUICK if options.quick else WHOLE), only=options.only)
        for cut in result.cuts:
            print(f"{name} {cut.boundary}, {cut.survived}: {cut.violations}", file=sys.stderr)
            again = f"python -m tests.faults.power --scenario {name} --only '{cut.boundary}'"
            print(f"  again: {again}", file=sys.stderr)
        wrong += len(result.cuts)
        seconds = round(time.monotonic() - begun, 1)
        found.append({"name": name, **asdict(result), "seconds": seconds})
    print(json.dumps({"scenarios": found, "violations": wrong}, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
