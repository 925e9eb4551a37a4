"""`remake.py STATE CONFIG -- CHIO…`: `init`, unless there is a state that can be served; a half-made one is removed
first, as `init` says to do."""

import json
import shutil
import subprocess
import sys


def main() -> int:
    state, config, _, *chio = sys.argv[1:]
    status = subprocess.run([*chio, "process", "status", "--state", state], capture_output=True, text=True, check=False)
    if status.returncode == 0 and json.loads(status.stdout)["initialized"]:
        return 0
    shutil.rmtree(state, ignore_errors=True)
    return subprocess.run([*chio, "process", "init", "--config", config, "--state", state], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
