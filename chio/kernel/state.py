"""A worker's own records: checkpoints by compare-and-swap, and blobs by content (contract section 7).

Both decide first and write after, inside the commit that the caller opens. Revisions are decimal strings without
limit; a blob belongs to one process, and its digest gives another process nothing.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from chio import canonical
from chio.kernel.blobs import BlobFiles, NotBase64, decode
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

    def __init__(self, store: Store, files: BlobFiles, limits: StateLimits) -> None:
        self._store = store
        self.files = files
        self.limits = limits
        files.sweep(store.blob_files())
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

    def blob_fields(self, operation: dict[str, Any]) -> tuple[str, str]:
        """(digest, base64) of a put."""
        if operation.keys() != {"op", "sha256", "data_base64"} or type(operation["data_base64"]) is not str:
            raise StateRefused("invalid_request")
        return _digest(operation), operation["data_base64"]

    def small_blob(self, digest: str, text: str) -> bytes:
        """The bytes of a put that is decoded at once, held against their digest."""
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise StateRefused("invalid_request") from error
        if sha256(data).hexdigest() != digest:
            raise StateRefused("invalid_request")
        return data

    async def large_blob(self, digest: str, text: str) -> bytes:
        """`small_blob`, giving way to other requests."""
        try:
            data, found = await decode(text)
        except NotBase64 as error:
            raise StateRefused("invalid_request") from error
        if len(data) > MAX_BLOB_BYTES or found != digest:
            raise StateRefused("invalid_request")
        return data

    def is_new_blob(self, process: str, digest: str, size: int) -> bool:
        """Whether a blob is still to be stored; one that the tree has no room for is refused."""
        if self._store.has_blob(process, digest):
            return False
        total = self.total()
        if total.bytes + size > self.limits.max_bytes or total.blobs + 1 > self.limits.max_blobs:
            raise StateRefused("limit_reached")
        return True

    def put_blob(self, process: str, digest: str, size: int, held: bytes | str) -> None:
        self._store.put_blob(process, digest, size, held)
        used = self.usage.setdefault(process, BlobUsage())
        used.bytes += size
        used.blobs += 1

    def read_blob(self, process: str, operation: dict[str, Any]) -> tuple[str, bytes]:
        """(digest, bytes), verified. `blob_missing` whether it never existed or is another's."""
        if operation.keys() != {"op", "sha256"}:
            raise StateRefused("invalid_request")
        digest = _digest(operation)
        found = self._store.blob(process, digest)
        if found is None:
            raise StateRefused("blob_missing")
        sealed, file = found
        if file is not None:
            sealed = self.files.read(file)
        data = self._store.vault.open(process, f"blob/{digest}", sealed) if sealed is not None else None
        if data is None or sha256(data).hexdigest() != digest:
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
