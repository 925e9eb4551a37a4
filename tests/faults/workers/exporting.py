"""`exporting.py STATE EXPORTS KEPT -- CHIO…`: the run as files for an auditor, each under a name that is not taken.

EXPORTS gets `receipts-N.ndjson`, `leaves-N.ndjson` with `checkpoint-N.txt`, `call-N.json` about the call whose request
and context are in KEPT, and `bundle-N.chio`. An export that was cut off keeps its name; the next one takes another, as
the commands say to do.
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    state, exports, kept, _, *chio = sys.argv[1:]
    folder = Path(exports)
    number = 1 + len({path.stem.rpartition("-")[2] for path in folder.iterdir()})
    receipts, leaves, checkpoint, call, bundle = (
        str(folder / name.replace("-", f"-{number}"))
        for name in ("receipts-.ndjson", "leaves-.ndjson", "checkpoint-.txt", "call-.json", "bundle-.chio")
    )
    about = ["--request", f"{kept}/request.json", "--context", f"{kept}/context.json"]
    commands = (
        ["receipt", "export", "--state", state, "--out", receipts],
        ["process", "export-log", "--state", state, "--out", leaves, "--checkpoint", checkpoint],
        ["process", "attest-call", "--state", state, *about, "--out", call],
        ["process", "evidence", "--state", state, "--out", bundle],
    )
    return max(subprocess.run([*chio, *words], check=False).returncode for words in commands)


if __name__ == "__main__":
    sys.exit(main())
