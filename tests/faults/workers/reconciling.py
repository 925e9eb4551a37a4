"""`reconciling.py CHIO… process reconcile …`: the operator's statement, unless it has been made already."""

import subprocess
import sys


def main() -> int:
    words = sys.argv[1:]
    state = words[words.index("--state") + 1]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return 0
    chio = words[: words.index("process")]
    status = subprocess.run([*chio, "process", "status", "--state", state], capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    return 0 if '"reconciled": 1' in status.stdout else done.returncode


if __name__ == "__main__":
    sys.exit(main())
