"""How the store keeps what a worker's data reaches: as it is, or sealed under keys that a key file wraps.

`chio.kernel.sealed` is the second; what it needs is loaded for an encrypted state alone.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Protocol

from chio.errors import StateError
from chio.keyfile import KEY_BYTES

HOST = ""  # the owner of what belongs to no process


class Unsealable(sqlite3.DatabaseError):
    """A sealed text that does not open under its owner's key, or whose owner's key was destroyed: a damaged row."""


class Vault(Protocol):
    """How the store keeps what a worker's data reaches. `place` names the row and column, and is authenticated."""

    def seal(self, owner: str, place: str, data: bytes) -> bytes: ...

    def open(self, owner: str, place: str, sealed: bytes) -> bytes: ...

    def digest(self, owner: str, kind: str, text: str) -> str:
        """What a text that would identify data (a digest, a message key) is looked up by: itself, or a keyed digest."""

    def destroy(self, owner: str) -> None:
        """Forget a key whose wrapped form was deleted."""


class OpenVault:
    """Of a state without a key file: everything is kept as it is."""

    def seal(self, owner: str, place: str, data: bytes) -> bytes:
        return data

    def open(self, owner: str, place: str, sealed: bytes) -> bytes:
        return sealed

    def digest(self, owner: str, kind: str, text: str) -> str:
        return text

    def destroy(self, owner: str) -> None:
        raise AssertionError("an open vault has no keys")


def read_key(fd: int, file: str) -> bytes:
    """The 32 bytes of a key file, 64 hex digits and perhaps a newline. Raises `StateError`."""
    text = os.pread(fd, 2 * KEY_BYTES + 2, 0).removesuffix(b"\n")
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StateError(
            "not a key file",
            file=file,
            field="--key-file",
            why=f"it does not hold {2 * KEY_BYTES} hex digits",
            fix="make one with `chio process key --out FILE`",
        )
    return key


def vault_of(key: bytes | None, runtime_id: str, wrapped: dict[str, bytes], path: str, file: str | None) -> Vault:
    """The vault of an opened state; `wrapped` is empty for one without a key file. Raises `StateError`."""
    if not wrapped:
        if key is None:
            return OpenVault()
        raise StateError(
            "the state is not encrypted",
            file=path,
            field="--key-file",
            why="it was made without a key file",
            fix="leave the option out",
        )
    if key is None:
        raise StateError(
            "the state is encrypted",
            file=path,
            field="--key-file",
            why="no key file was given",
            fix="name its key file",
        )
    from chio.kernel.sealed import SealedVault

    try:
        return SealedVault(key, runtime_id, wrapped)
    except Unsealable as error:
        raise StateError(
            "the key file is not this state's",
            file=file,
            field="--key-file",
            why=f"it does not open the data keys of {path}",
            fix="name the key file that `chio process init` was given",
        ) from error
