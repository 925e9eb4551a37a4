"""What a worker's data is sealed under at rest, when the state was made with a key file.

Each process has a data key of its own, and the host one (its name is empty) for what belongs to no process; all are
wrapped under the key file, which never lies in the state. Sealing is AES-256-GCM (NIST SP 800-38D) with a random
96-bit nonce; what a text is and whose it is are authenticated with it, so that no row can take another's place.
Destroying a process's wrapped key makes everything sealed under it unreadable for good.

Not sealed, since the log and its signatures are made of them: operation keys, tool names, times, sizes, digests that
are salted.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from chio.kernel.vault import Unsealable
from chio.keyfile import KEY_BYTES

_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class _Owner:
    cipher: AESGCM
    lookup: bytes  # the key of its digests


class SealedVault:
    """Of a state with a key file. Holds the unwrapped keys of all processes whose data was not deleted."""

    def __init__(self, key_file: bytes, runtime_id: str, wrapped: dict[str, bytes]) -> None:
        """Raises `Unsealable` when the key file is not the one that these keys were wrapped under."""
        wrapping = AESGCM(key_file)
        self._owners: dict[str, _Owner] = {}
        for owner, text in wrapped.items():
            key = _unseal(wrapping, _wrap_place(runtime_id, owner), text)
            self._owners[owner] = _Owner(AESGCM(key), hmac.digest(key, b"chio/lookup/v1", "sha256"))

    def seal(self, owner: str, place: str, data: bytes) -> bytes:
        return _seal(self._of(owner).cipher, _place(owner, place), data)

    def open(self, owner: str, place: str, sealed: bytes) -> bytes:
        return _unseal(self._of(owner).cipher, _place(owner, place), sealed)

    def digest(self, owner: str, kind: str, text: str) -> str:
        return hmac.digest(self._of(owner).lookup, f"{kind}\0{text}".encode(), "sha256").hex()

    def destroy(self, owner: str) -> None:
        """Forget a key whose wrapped form was deleted."""
        self._owners.pop(owner, None)

    def _of(self, owner: str) -> _Owner:
        found = self._owners.get(owner)
        if found is None:
            raise Unsealable(f"the data key of {owner or 'the host'} was destroyed")
        return found


def new_keys(key_file: bytes, runtime_id: str, owners: list[str]) -> dict[str, bytes]:
    """A fresh data key for each owner, wrapped under the key file."""
    wrapping = AESGCM(key_file)
    return {owner: _seal(wrapping, _wrap_place(runtime_id, owner), secrets.token_bytes(KEY_BYTES)) for owner in owners}


def _place(owner: str, place: str) -> bytes:
    return f"chio/sealed/v1\0{owner}\0{place}".encode()


def _wrap_place(runtime_id: str, owner: str) -> bytes:
    return f"chio/data-key/v1\0{runtime_id}\0{owner}".encode()


def _seal(cipher: AESGCM, place: bytes, data: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, data, place)


def _unseal(cipher: AESGCM, place: bytes, sealed: bytes) -> bytes:
    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], place)
    except (InvalidTag, ValueError) as error:
        raise Unsealable("it does not open under this key") from error
