"""Keys, signing domains and signed texts.

A signature is Ed25519 over `"chio/<type>/v1\\0" + JCS(body)`: a signature made for one type of record can never be
shown as another's. What was signed also names the record: its id is the digest of those same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

RecordType = Literal["receipt", "launch", "exit", "bootstrap", "capability", "observation", "epoch"]

_DOMAINS: dict[str, bytes] = {
    name: f"chio/{name}/v1".encode() + b"\0"
    for name in ("receipt", "launch", "exit", "bootstrap", "capability", "observation", "epoch")
}


class SigningKey:
    """One Ed25519 key (RFC 8032). `public` is the 32 raw bytes in hex."""

    __slots__ = ("_sign", "public", "seed")

    def __init__(self, seed: bytes) -> None:
        key = Ed25519PrivateKey.from_private_bytes(seed)
        self._sign = key.sign
        self.seed = seed
        self.public = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(secrets.token_bytes(32))

    def sign(self, record: RecordType, body: bytes) -> tuple[str, str]:
        """(signature, id), both hex, for the canonical `body` of a record."""
        message = _DOMAINS[record] + body
        return self._sign(message).hex(), hashlib.sha256(message).hexdigest()

    def sign_note(self, name: str, text: bytes) -> bytes:
        """A C2SP signed note: `text` (ends in a newline), a blank line, one signature line under `name`."""
        key = bytes.fromhex(self.public)
        key_id = hashlib.sha256(name.encode() + b"\n\x01" + key).digest()[:4]
        signature = base64.b64encode(key_id + self._sign(text))
        return text + b"\n\xe2\x80\x94 " + name.encode() + b" " + signature + b"\n"


@dataclass(frozen=True, slots=True)
class Keyring:
    """The three keys of a host: the kernel's (receipts and records), the log's, the authority's (capabilities)."""

    kernel: SigningKey
    log: SigningKey
    authority: SigningKey

    @classmethod
    def generate(cls) -> Keyring:
        return cls(SigningKey.generate(), SigningKey.generate(), SigningKey.generate())


def holds(public: str, message: bytes, signature: bytes) -> bool:
    """Whether a key of ours made this signature. What an auditor checks is `verify`'s, and stricter."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def signed_text(body: bytes, signature: str) -> bytes:
    """`JCS({"body","signature"})` put together from texts that are already canonical."""
    return b'{"body":' + body + b',"signature":"' + signature.encode() + b'"}'
