"""`python -m tests.bench NAME`: run one benchmark and print its table."""

from __future__ import annotations

import argparse

from tests.bench import calls, launch, mailbox, recovery, state, verify

_BENCHES = {
    "calls": calls.run,
    "launch": launch.run,
    "mailbox": mailbox.run,
    "recovery": recovery.run,
    "state": state.run,
    "verify": verify.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", choices=sorted(_BENCHES))
    parser.add_argument("--directory", help="where the files lie (default: TMPDIR); must be a real disk")
    arguments = parser.parse_args()
    _BENCHES[arguments.name](arguments.directory)


if __name__ == "__main__":
    main()
