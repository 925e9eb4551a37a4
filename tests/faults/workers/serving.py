"""`serving.py STATE SOCKET CHIO… -- CLIENT…`: `chio process serve`, and once it is ready the client, with the
connection descriptor's path as its last argument; then SIGTERM. Exit 0 when both ended well.

The connection is made first, anew each time: a credential is never shown twice.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    state, process, socket, *rest = sys.argv[1:]
    at = rest.index("--")
    chio, client = rest[:at], rest[at + 1 :]
    connection = Path(socket).with_suffix(".json")
    for stale in (connection, Path(socket)):
        stale.unlink(missing_ok=True)
    given = ["--state", state, "--process", process, "--socket", socket, "--out", str(connection)]
    subprocess.run([*chio, "process", "credential", *given], check=True, stdout=subprocess.DEVNULL)
    serve = [*chio, "process", "serve", "--state", state, "--socket", socket]
    with subprocess.Popen(serve, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        if not host.stdout.readline():
            return host.wait() or 1
        client_code = subprocess.run([*client, str(connection)], check=False).returncode
        host.send_signal(signal.SIGTERM)
        host.stdout.read()
    return int(bool(client_code or host.returncode))


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    sys.exit(main())
