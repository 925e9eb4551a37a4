"""One way to write and read snapshots with either client, on a worker of a real kernel."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from chio_process import ProcessClient, WorkerError
from chio_process.snapshot import JsonSnapshot, SnapshotError
from tests.clients.drive import ROOT, node
from tests.kernel.serving import Worker

_NODE_CLIENT = ROOT / "chio/clients/node"
DRIVERS = Path(__file__).parent

Meanwhile = Callable[[], object]


class Snapshots(Protocol):
    """`write` calls `meanwhile` after its first blob is stored. Both raise `SnapshotError` or another `WorkerError`."""

    def write(self, document: Any, meanwhile: Meanwhile | None = None) -> dict[str, Any]: ...

    def read(self, reference: Any) -> Any: ...


@contextmanager
def opened(client: str, worker: Worker) -> Iterator[Snapshots]:
    """A `JsonSnapshot` of that client's language, new: it has stored nothing yet."""
    if client == "python":
        with _PausingClient(worker.path, worker.credential) as pausing:
            yield _Python(pausing)
        return
    with subprocess.Popen(
        [node(), DRIVERS / "driver.mjs", _NODE_CLIENT, worker.path, worker.credential],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PATH": os.defpath},
    ) as process:  # fmt: skip
        try:
            yield NodeSnapshots(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


class _PausingClient(ProcessClient):
    meanwhile: Meanwhile | None = None

    def put_blob(self, data: bytes) -> dict[str, Any]:
        stored = super().put_blob(data)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return stored


class _Python:
    def __init__(self, client: _PausingClient) -> None:
        self._client = client
        self._snapshots = JsonSnapshot(client)

    def write(self, document: Any, meanwhile: Meanwhile | None = None) -> dict[str, Any]:
        self._client.meanwhile = meanwhile
        return self._snapshots.write(document)

    def read(self, reference: Any) -> Any:
        return self._snapshots.read(reference)


class NodeSnapshots:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def write(self, document: Any, meanwhile: Meanwhile | None = None) -> dict[str, Any]:
        return dict(self._step({"write": document, "pause": meanwhile is not None}, meanwhile))

    def evaluate(self, source: str) -> Any:
        """Writes what a JavaScript expression says, for what JSON cannot hold."""
        return self._step({"evaluate": source})

    def read(self, reference: Any) -> Any:
        return self._step({"read": reference})

    def _step(self, step: dict[str, Any], meanwhile: Meanwhile | None = None) -> Any:
        answer = self._exchange(json.dumps(step))
        if answer == "paused":
            assert meanwhile is not None
            meanwhile()
            answer = self._exchange("")
        if "code" in answer:
            kind = SnapshotError if answer["of_snapshots"] else WorkerError
            raise kind(answer["code"], answer["message"].removeprefix(f"{answer['code']}: "))
        return answer["result"]

    def _exchange(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())
