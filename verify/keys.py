"""Public keys, pins, and strict Ed25519.

Verification is libsodium's through PyNaCl: it refuses low-order and non-canonical points and scalars that other
libraries take, so that one signature cannot be valid for some readers only (Chalkias, Garillot, Nikolaenko,
"Taming the many EdDSAs", 2020).
"""

import hashlib
import re
from dataclasses import dataclass
from io import BufferedReader
from typing import Literal, Self

import nacl.bindings
import nacl.exceptions

from verify import canonical, shape
from verify.files import open_file
from verify.verdict import VerifyError, unreadable

RecordType = Literal["receipt", "launch", "exit", "bootstrap", "capability", "observation", "epoch"]

_MAX_FILE_BYTES = 64 * 1024
_HEX_KEY = re.compile("[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One Ed25519 public key; `hex` is its 32 bytes in lower-case hex."""

    hex: str

    @classmethod
    def from_hex(cls, text: str) -> Self:
        if _HEX_KEY.fullmatch(text) is None:
            raise VerifyError("a key is 64 hex digits", check="input", fix="give the key or a file that holds it")
        if not nacl.bindings.crypto_core_ed25519_is_valid_point(bytes.fromhex(text)):
            raise VerifyError("not a point that an Ed25519 key can be", check="input", fix="get the key again")
        return cls(text.lower())

    @classmethod
    def from_option(cls, given: str) -> Self:
        """A key as a person gives it: hex, or the name of a file that holds hex and at most a newline."""
        if _HEX_KEY.fullmatch(given):
            return cls.from_hex(given)
        fix = "give the key as 64 hex digits, or a file that holds them, such as kernel.pub"
        try:
            return cls.from_hex(read_small(given).decode("ascii").removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise VerifyError("not a key file", check="input", file=given, fix=fix) from error
        except VerifyError as error:
            raise VerifyError(error.what, check="input", file=given, fix=fix) from error

    def verify(self, message: bytes, signature: bytes) -> None:
        try:
            nacl.bindings.crypto_sign_open(signature + message, bytes.fromhex(self.hex))
        except nacl.exceptions.BadSignatureError as error:
            raise VerifyError("the signature does not hold under the pinned key", check="signature") from error

    def verify_record(self, record: RecordType, body: bytes, signature: str) -> str:
        """Checks the signature (hex) of a record over its received body bytes. Returns the record's id."""
        message = f"chio/{record}/v1".encode() + b"\0" + body
        self.verify(message, bytes.fromhex(signature))
        return hashlib.sha256(message).hexdigest()


@dataclass(frozen=True, slots=True)
class Pins:
    """`pins.json`: what an auditor holds before seeing any artifact."""

    runtime_id: str
    kernel_key: PublicKey
    log_key: PublicKey
    authority_key: PublicKey
    config_digest: str
    policy_digest: str

    @classmethod
    def from_file(cls, path: str) -> Self:
        try:
            value = canonical.parse(read_small(path), canonical=False)
            _PINS(value, "")
            keys = {name: PublicKey.from_hex(value[name]) for name in ("kernel_key", "log_key", "authority_key")}
        except VerifyError as error:
            raise error.located(path) from error
        return cls(
            runtime_id=value["runtime_id"],
            config_digest=value["config_digest"],
            policy_digest=value["policy_digest"],
            **keys,
        )


_PINS = shape.record(
    {
        "schema": shape.one_of("chio.pins.v1"),
        "runtime_id": shape.runtime_id,
        "kernel_key": shape.digest,
        "log_key": shape.digest,
        "authority_key": shape.digest,
        "config_digest": shape.digest,
        "policy_digest": shape.digest,
    }
)


def read_small(path: str, limit: int = _MAX_FILE_BYTES) -> bytes:
    """A whole file of at most `limit` bytes: by default one that cannot be large, as a key, pins, a checkpoint."""
    try:
        with BufferedReader(open_file(path, pipe=True)) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > limit:
        raise VerifyError(f"over {limit} bytes", check="input", file=path)
    return content
