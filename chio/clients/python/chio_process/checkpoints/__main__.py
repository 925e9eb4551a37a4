"""`python -m chio_process.checkpoints migrate`: the checkpoints of a SQLite file, from one schema version to another.

No program may be at work on the file: one that is gets a conflict, or reads a version that it does not know. Prints
one JSON document. Exit status: 0 done, 1 refused and the file unchanged, 2 wrong usage.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.migrations import migrate_file

_ADVICE = {
    CheckpointErrorKind.MIGRATION_MISSING: "choose another version with --to, or other checkpoints with --kind",
    CheckpointErrorKind.CONFLICT: "stop what is at work on the file and migrate again",
    CheckpointErrorKind.AMBIGUOUS: "the disk failed at the commit: look at the file with --dry-run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chio_process.checkpoints", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("migrate", allow_abbrev=False, help="change the schema version of a file's payloads")
    command.add_argument("--file", type=Path, required=True, help="a SQLite file of chio_process.checkpoints")
    command.add_argument("--to", type=int, required=True, help="the schema version to reach, up or down")
    command.add_argument("--kind", help="only the checkpoints of this kind, such as chio.agent")
    command.add_argument("--dry-run", action="store_true", help="convert everything, and store nothing")
    given = parser.parse_args(arguments)
    try:
        before, after = migrate_file(given.file, given.to, kind=given.kind, dry_run=given.dry_run)
    except CheckpointError as error:
        advice = _ADVICE.get(error.kind, "the file is as it was")
        print(f"chio: nothing was migrated ({given.file}, {error.kind}: {error.message}; {advice})", file=sys.stderr)
        return 1
    changes = [
        {
            "id": new.id, "kind": new.kind, "from_version": old.schema_version, "to_version": new.schema_version,
            "revision": new.revision,
        }
        for old, new in zip(before, after, strict=True)
    ]  # fmt: skip
    print(json.dumps({"dry_run": given.dry_run, "migrated": changes}, indent=2 if sys.stdout.isatty() else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
