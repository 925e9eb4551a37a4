"""Documents to write, and what a process is charged for."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest

from chio_process.snapshot import SnapshotError
from tests.kernel.serving import Worker


def usage(worker: Worker) -> tuple[int, int]:
    """(bytes, blobs) that the process is charged for."""
    storage = worker.ask("inspect")["storage"]
    return storage["process_bytes"], storage["process_blobs"]


def read_index(worker: Worker, reference: dict[str, Any]) -> list[Any]:
    """The parts of a written document, as its index lists them."""
    answers = [worker.ask("blob_read", sha256=digest) for digest in reference["index"]["blobs"]]
    return list(json.loads(b"".join(base64.b64decode(answer["data_base64"]) for answer in answers)))


def refusal(call: Any, *arguments: Any) -> SnapshotError:
    with pytest.raises(SnapshotError) as refused:
        call(*arguments)
    return refused.value


def noise(seed: int, length: int) -> str:
    """Text of that length in which nothing repeats."""
    return random.Random(seed).randbytes((length + 1) // 2).hex()[:length]


def records(count: int) -> list[Any]:
    random_ = random.Random(1)
    return [
        {
            "id": n,
            "name": f"{random_.getrandbits(64):x}",
            "tags": [1, None, True],
            "score": random_.random(),
            "t": noise(n, 180),
        }
        for n in range(count)
    ]


def numbers(count: int) -> list[int]:
    random_ = random.Random(2)
    return [random_.randrange(1_000_000) for _ in range(count)]


def nested(levels: int, core: Any) -> Any:
    for level in range(levels):
        core = {"in": core, "level": level} if level % 2 else [core, level]
    return core
