"""Makes every change and prints what caught it. Exit status 1 if something that means something was not caught."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.verify.mutation import bundles, subjects
from tests.verify.mutation.matrix import tally


def main() -> int:
    wanted, uncaught = sys.argv[1:], 0
    with tempfile.TemporaryDirectory() as folder:
        made = {**subjects.subjects(Path(folder)), **bundles.subjects(Path(folder))}
        for name, subject in made.items():
            if not wanted or name in wanted:
                found = tally(subject, everything=True)
                print(found.text(), flush=True)
                uncaught += len(found.uncaught)
    return 1 if uncaught else 0


if __name__ == "__main__":
    sys.exit(main())
