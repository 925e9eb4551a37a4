"""The program of a probe's attempt: prove the confinement, do the one act, print one JSON line.

Started as `python -I -c "… main()" NAME WORLD`. Exit 0 with {"result", "detail"}; exit 3, without having done
anything, when the proof of confinement does not hold.
"""

import errno
import json
import os
import sys
from typing import NoReturn

from confine.probes import Escaped, Skipped, World, load
from confine.probes.proof import unproved

NOT_CONFINED = 3


def main() -> NoReturn:
    world = World(**json.loads(sys.argv[2]))
    missing = unproved(world.hostname, world.seccomp)
    if missing:
        print(json.dumps({"refused_to_start": missing}), flush=True)
        sys.exit(NOT_CONFINED)
    probe, worker = load()[sys.argv[1]], os.getpid()
    try:
        detail = probe.act(world)
        result = "contained" if probe.expected == "contained" else "ESCAPED"
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        result, detail = "refused", f"{name}: {error.strerror}"
    except Escaped as escaped:
        result, detail = "ESCAPED", str(escaped)
    except Skipped as skipped:
        result, detail = "skipped", str(skipped)
    if os.getpid() == worker:  # a child that a probe forked has nothing to report
        print(json.dumps({"result": result, "detail": detail}), flush=True)
    os._exit(0)  # threads and children that a probe made are not waited for


if __name__ == "__main__":
    main()
