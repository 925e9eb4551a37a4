"""Blobs of over 64 KiB: their bytes are files beside the database, so that a large write holds up no small commit.

Decoding and hashing let other requests pass between slices; sealing, writing and syncing are a thread's. A file is
whole and synced before the commit that names it. One that no row names was left by a stop: the next start removes it.
"""

from __future__ import annotations

import asyncio
import binascii
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

from chio import statedir

if TYPE_CHECKING:
    from chio.kernel.vault import Vault

INLINE_TEXT = (64 * 1024 + 2) // 3 * 4  # characters of base64: at most so many stand in the row itself
_SLICE = 128 * 1024  # characters of base64: a multiple of 4
_THREADS = 2


class NotBase64(ValueError):
    """Text that is not canonical base64 (RFC 4648 section 4)."""


class BlobFiles:
    """The folder of large blobs of one state."""

    def __init__(self, directory: int) -> None:
        self._directory = directory  # the state's: this holds no descriptor of its own
        self._threads = ThreadPoolExecutor(_THREADS, "blobs")

    def close(self) -> None:
        self._threads.shutdown()

    async def write(self, vault: Vault, process: str, digest: str, data: bytes) -> str:
        """Seal and write a new file, in a thread; synced, and its name too, which is returned. Raises `OSError`."""
        name = secrets.token_hex(16)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._write, vault, process, digest, name, data)
        return name

    def _write(self, vault: Vault, process: str, digest: str, name: str, data: bytes) -> None:
        try:
            statedir.write_new(self._directory, _path(name), vault.seal(process, f"blob/{digest}", data))
            with self._opened() as folder:
                os.fsync(folder)
        except OSError:
            self.remove(name)
            raise

    def read(self, name: str) -> bytes | None:
        """None when it is gone."""
        try:
            return statedir.read(self._directory, _path(name))
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        try:
            os.unlink(_path(name), dir_fd=self._directory)
        except FileNotFoundError:
            pass

    def sweep(self, known: set[str]) -> None:
        """Remove what no row names. Only at start, when nothing is on its way."""
        with self._opened() as folder:
            found = set(os.listdir(folder))
        for name in found - known:
            self.remove(name)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        folder = os.open(
            statedir.BLOBS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory
        )
        try:
            yield folder
        finally:
            os.close(folder)


def _path(name: str) -> str:
    return f"{statedir.BLOBS}/{name}"


async def decode(text: str) -> tuple[bytes, str]:
    """(bytes, their SHA-256) of base64, letting other work pass between slices. Raises `NotBase64`."""
    if len(text) % 4 or "=" in text[:-2]:
        raise NotBase64("padding")
    hashed, parts = sha256(), []
    for at in range(0, len(text), _SLICE):
        try:
            part = binascii.a2b_base64(text[at : at + _SLICE], strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise NotBase64(str(error)) from error
        hashed.update(part)
        parts.append(part)
        await asyncio.sleep(0)
    return b"".join(parts), hashed.hexdigest()
