"""One signed file for a whole run (contract section 9, `chio.bundle.v1`): what an auditor needs beside the pins.

The Chio kernel writes it into a descriptor that the host passes; it opens nothing. The content is gone through twice,
once for the lengths and digests that the signed manifest holds, once to write it, so that memory does not grow with the
run. Nothing is written to the state: the checkpoint that the manifest stands on was committed before.

What an operator withholds is left out of the two sections that hold arguments and outputs, and the manifest says by
which rule. Leaves hold salted commitments alone, so they and every signature stay as they are.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import orjson

from chio import cbor, statedir
from chio.errors import StateError
from chio.kernel.log import leaf_bytes

if TYPE_CHECKING:
    from chio.kernel.process import Kernel

SCHEMA = "chio.bundle.v1"
_CHUNK_BYTES = 256 * 1024

Items = Callable[[], Iterator[bytes]]
"""One section's items, each encoded. Called twice, and the same both times."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """What the operator leaves out: `arguments` or `outputs`, of all calls or of those whose process or
    `server/tool` the pattern matches (`*`, `?`, `[…]`)."""

    what: str
    pattern: str | None

    @classmethod
    def read(cls, selector: str) -> Withheld:
        what, _, pattern = selector.partition(":")
        return cls(what, pattern or None)

    def covers(self, what: str, receipt: dict[str, Any]) -> bool:
        if what != self.what:
            return False
        if self.pattern is None:
            return True
        route = f"{receipt['tool_server']}/{receipt['tool_name']}"
        name = route if "/" in self.pattern else receipt["call"]["process_id"]
        return fnmatch.fnmatchcase(name, self.pattern)


def write_bundle(kernel: Kernel, fd: int, withhold: list[str]) -> dict[str, Any]:
    """Sign and write the bundle to `fd`, and sync it; what the command prints. Raises `StateError`."""
    newest = kernel.store.last_checkpoint()
    if newest is None or newest[0] != kernel.log.size:
        raise StateError("the log has no checkpoint of its size", file=kernel.path, fix="run the same command again")
    rules = [Withheld.read(selector) for selector in withhold]
    sections: dict[str, Items] = {
        "documents": lambda: _documents(kernel),
        "capabilities": lambda: (cbor.encode(node.capability.text) for node in kernel.tree.nodes.values()),
        "leaves": lambda: _leaves(kernel),
        "arguments": lambda: _arguments(kernel, rules),
        "outputs": lambda: _outputs(kernel, rules),
    }
    entries = {name: _entry(name, items) for name, items in sections.items()}
    manifest = cbor.encode(
        {
            "schema": SCHEMA,
            "runtime_id": kernel.runtime_id,
            "kernel_key": bytes.fromhex(kernel.kernel_key),
            "time_ms": kernel.clock.now_ms(),
            "log": {"size": kernel.log.size, "root": kernel.log.root()},
            "checkpoint": newest[2],
            "withheld": list(withhold),
            "sections": list(entries.values()),
        }
    )
    written = _write(fd, [kernel.ledger.sign_bundle(manifest)], sections)
    return {
        "runtime_id": kernel.runtime_id,
        "leaves": kernel.log.size,
        "bytes": written,
        "withheld": list(withhold),
        "sections": {name: entry["items"] for name, entry in entries.items()},
    }


def _entry(name: str, items: Items) -> dict[str, cbor.Value]:
    """What the manifest says of a section."""
    count = size = 0
    digest = sha256()
    for item in items():
        count += 1
        size += len(item)
        digest.update(item)
    return {"name": name, "items": count, "bytes": size, "sha256": digest.digest()}


def _write(fd: int, held: list[bytes], sections: dict[str, Items]) -> int:
    """Everything in order, synced; how many bytes. `held` comes first."""
    written, size = 0, sum(map(len, held))
    with os.fdopen(fd, "wb", buffering=0, closefd=False) as file:

        def flush() -> None:
            nonlocal written, size
            data = memoryview(b"".join(held))
            written += len(data)
            held.clear()
            size = 0
            while data:
                data = data[file.write(data) :]

        for items in sections.values():
            for item in items():
                held.append(item)
                size += len(item)
                if size >= _CHUNK_BYTES:
                    flush()
        flush()
        os.fsync(fd)
    return written


# --- sections --------------------------------------------------------------------------------------------------------


def _documents(kernel: Kernel) -> Iterator[bytes]:
    """[kind, text]: what was pinned at init, the frozen plan, and the texts that launch records name by digest.

    The plan is as it is stored: the inputs of its workers are their processes' data, and not in it.
    """
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the kernel works in its state directory
    try:
        policy = statedir.read(directory, statedir.POLICY)
    finally:
        os.close(directory)
    yield cbor.encode(["config", kernel.config_text.encode()])
    yield cbor.encode(["policy", policy])
    if kernel.host["plan"] is not None:
        yield cbor.encode(["plan", kernel.host["plan"].encode()])
    for kind, text in kernel.store.texts():
        yield cbor.encode([kind, text.encode()])


def _leaves(kernel: Kernel) -> Iterator[bytes]:
    for index in range(kernel.log.size):
        kind, body, signature = kernel.store.leaf(index)
        yield cbor.encode(leaf_bytes(kind, body.encode(), signature))


def _receipts(kernel: Kernel) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """(leaf index, body, disclosed) of every receipt whose disclosed part is still there."""
    for index in range(kernel.log.size):
        kind, body, _ = kernel.store.leaf(index)
        if kind == "receipt":
            receipt = orjson.loads(body)
            disclosed = kernel.store.disclosed(index, receipt["call"]["process_id"])
            if disclosed is not None:
                yield index, receipt, disclosed


def _arguments(kernel: Kernel, rules: list[Withheld]) -> Iterator[bytes]:
    """[leaf index, salt, JCS of the arguments], in log order."""
    for index, receipt, disclosed in _receipts(kernel):
        if not any(rule.covers("arguments", receipt) for rule in rules):
            salt = bytes.fromhex(orjson.loads(disclosed)["parameter_salt"])
            # The last member of a text that is never rebuilt (`receipts.disclosed`).
            yield cbor.encode([index, salt, disclosed.partition(b'"parameters":')[2][:-1]])


def _outputs(kernel: Kernel, rules: list[Withheld]) -> Iterator[bytes]:
    """[leaf index, salt, JCS of the whole output object], in log order."""
    for index, receipt, disclosed in _receipts(kernel):
        if receipt["output"] is None or any(rule.covers("outputs", receipt) for rule in rules):
            continue
        call = kernel.store.find_call(receipt["call"]["process_id"], receipt["call"]["operation_key"])
        if call is not None and call.receipt == index and call.output is not None:
            yield cbor.encode([index, bytes.fromhex(orjson.loads(disclosed)["output_salt"]), call.output])
