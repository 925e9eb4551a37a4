"""`migrating.py fill ENVELOPES CONNECTION` stores the checkpoints of a file of JSON lines in a worker's process state.

`migrating.py VERSION NODE SCRIPT ENVELOPES CONNECTION` migrates each of them to VERSION, while a worker in Node saves
another member of the same value.
"""

import json
import subprocess
import sys
from pathlib import Path

from chio_process import ProcessClient
from chio_process.checkpoints import Checkpoint, ProcessStateStore, migrate


def main() -> int:
    *words, envelopes, connection = sys.argv[1:]
    found = [Checkpoint.from_document(json.loads(line)) for line in Path(envelopes).read_text().splitlines()]
    described = json.loads(Path(connection).read_text())
    with ProcessClient(described["socket_path"], described["credential"]) as client:
        store = ProcessStateStore(client)
        if words == ["fill"]:
            for checkpoint in found:
                store.compare_and_swap(checkpoint, None)
            return 0
        version, *noting = words
        with subprocess.Popen([*noting, connection]) as worker:
            for checkpoint in found:
                migrate(store, checkpoint.id, int(version))
        return worker.returncode


if __name__ == "__main__":
    sys.exit(main())
