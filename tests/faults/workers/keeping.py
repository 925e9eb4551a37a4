"""`keeping.py ORIGINAL BACKUP STATE -- CHIO…`: a backup of ORIGINAL, a state restored from it, and that one accepted.

What is there and whole is left; what was cut off half way is removed first, as the commands say to do.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

BY = ("--by", "the operator")


def main() -> int:
    original, backup, state, _, *chio = sys.argv[1:]
    process = [*chio, "process"]
    if not Path(backup, "backup.json").exists():
        shutil.rmtree(backup, ignore_errors=True)
        subprocess.run([*process, "backup", "--state", original, "--out", backup, "--with-signing-key"], check=True)
    status = subprocess.run([*process, "status", "--state", state], capture_output=True, text=True, check=False)
    if status.returncode or not json.loads(status.stdout)["initialized"]:
        shutil.rmtree(state, ignore_errors=True)
        subprocess.run([*process, "restore", "--backup", backup, "--state", state, *BY], check=True)
    accept = [*process, "accept", "--state", state, *BY]
    accepted = subprocess.run(accept, capture_output=True, text=True, check=False)
    sys.stderr.write(accepted.stderr)
    return 0 if "there is nothing to accept" in accepted.stderr else accepted.returncode


if __name__ == "__main__":
    sys.exit(main())
