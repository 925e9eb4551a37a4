"""A worker's own records: checkpoints by compare-and-swap, and blobs by content (contract section 7).

Both decide first and write after, inside the commit that the caller opens. Revisions are decimal strings without
limit; a blob belongs to one process, and its digest gives another process nothing.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from chio import canonical
from chio.kernel.store import Store
from chio.schema import StateLimits

MAX_VALUE_BYTES = 1024 * 1024
MAX_BLOB_BYTES = 1024 * 1024

_REVISION = re.compile(r"(?:0|[1-9][0-9]*)\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class StateRefused(Exception):
    """A save or read that is refused; `code` is the contract's, and nothing was written."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class BlobUsage:
    bytes: int = 0
    blobs: int = 0


class WorkerState:
    """Checkpoints and blobs of every process, with the tree's blob usage kept in memory."""

    def __init__(self, store: Store, limits: StateLimits) -> None:
        self._store = store
        self.limits = limits
        self.usage: dict[str, BlobUsage] = {}
        self.reload()

    def reload(self) -> None:
        self.usage = {process: BlobUsage(size, count) for process, size, count in self._store.blob_usage()}

    def total(self) -> BlobUsage:
        return BlobUsage(
            sum(used.bytes for used in self.usage.values()), sum(used.blobs for used in self.usage.values())
        )

    def next_checkpoint(self, process: str, operation: dict[str, Any], plain: bool) -> tuple[str, bytes]:
        """(new revision, value as JCS) of a save against the exact current revision."""
        if operation.keys() != {"op", "expected_revision", "value"}:
            raise StateRefused("invalid_request")
        expected = operation["expected_revision"]
        if type(expected) is not str or _REVISION.match(expected) is None:
            raise StateRefused("invalid_request")
        value = canonical.encode_scanned(operation["value"], plain)
        if len(value) > MAX_VALUE_BYTES:
            raise StateRefused("invalid_request")
        if self._store.revision(process) != expected:
            raise StateRefused("checkpoint_conflict")
        return _increment(expected), value

    def new_blob(self, process: str, operation: dict[str, Any]) -> tuple[str, bytes, bool]:
        """(digest, bytes, whether it is new): checked against its digest and the tree's budget."""
        if operation.keys() != {"op", "sha256", "data_base64"} or type(operation["data_base64"]) is not str:
            raise StateRefused("invalid_request")
        digest = _digest(operation)
        try:
            data = base64.b64decode(operation["data_base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise StateRefused("invalid_request") from error
        if len(data) > MAX_BLOB_BYTES or sha256(data).hexdigest() != digest:
            raise StateRefused("invalid_request")
        if self._store.has_blob(process, digest):
            return digest, data, False
        total = self.total()
        if total.bytes + len(data) > self.limits.max_bytes or total.blobs + 1 > self.limits.max_blobs:
            raise StateRefused("limit_reached")
        return digest, data, True

    def put_blob(self, process: str, digest: str, data: bytes) -> None:
        self._store.put_blob(process, digest, data)
        used = self.usage.setdefault(process, BlobUsage())
        used.bytes += len(data)
        used.blobs += 1

    def read_blob(self, process: str, operation: dict[str, Any]) -> tuple[str, bytes]:
        """(digest, bytes), verified. `blob_missing` whether it never existed or is another's."""
        if operation.keys() != {"op", "sha256"}:
            raise StateRefused("invalid_request")
        digest = _digest(operation)
        data = self._store.blob(process, digest)
        if data is None:
            raise StateRefused("blob_missing")
        if sha256(data).hexdigest() != digest:
            raise StateRefused("runtime_error")
        return digest, data


def _digest(operation: dict[str, Any]) -> str:
    digest = operation["sha256"]
    if type(digest) is not str or _DIGEST.match(digest) is None:
        raise StateRefused("invalid_request")
    return digest


def _increment(revision: str) -> str:
    """The next decimal, without turning an unbounded string into an integer (int() refuses above 4,300 digits)."""
    digits = list(revision)
    for position in range(len(digits) - 1, -1, -1):
        if digits[position] != "9":
            digits[position] = chr(ord(digits[position]) + 1)
            return "".join(digits)
        digits[position] = "0"
    return "1" + "".join(digits)
