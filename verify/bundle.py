"""One file for a whole run: a signed manifest, and the content behind it in sections that stream.

The file begins with a COSE_Sign1 (RFC 9052) under the Chio kernel's key whose payload is the manifest, a map in
deterministic CBOR. It says of each section how many items and bytes it has and their digest. The sections follow as one
CBOR sequence (RFC 8742), up to the last byte of the file. So the one signature covers every byte, and a reader needs
memory for one item at a time; sections that belong together are read side by side.

Nothing here says that a bundle is true. It says that these are the bytes that the kernel signed; `verify.audit` judges
what they say.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from verify import cbor, shape
from verify.files import open_file
from verify.keys import PublicKey
from verify.verdict import VerifyError, unreadable

SCHEMA = "chio.bundle.v1"
SECTIONS = ("documents", "capabilities", "leaves", "arguments", "outputs")
KINDS = ("config", "policy", "plan", "profile", "resolved-profile", "seccomp-list")
MAX_ITEM_BYTES = 16 * 1024 * 1024
MAX_LOADED_BYTES = 64 * 1024 * 1024  # of a section that is held in memory: documents, capabilities
_MAX_MANIFEST_BYTES = 1024 * 1024
_CHUNK_BYTES = 256 * 1024

_COSE_SIGN1 = 18  # RFC 9052, section 2
_PROTECTED = bytes.fromhex("a10127")  # {1: -8}: alg EdDSA, and nothing else
_PURPOSE = b"chio/bundle/v1"  # external_aad: a signature made for anything else cannot pass for this
_SIGNATURE_BYTES = 64


def _octets(count: int) -> shape.Shape:
    def check(value: Any, path: str) -> None:
        if type(value) is not bytes or len(value) != count:
            raise VerifyError(f"`{path}` is not {count} bytes", check="fields")

    return check


_MANIFEST = shape.record(
    {
        "schema": shape.one_of(SCHEMA),
        "runtime_id": shape.runtime_id,
        "kernel_key": _octets(32),
        "time_ms": shape.at_least(0),
        "log": shape.record({"size": shape.at_least(1), "root": _octets(32)}),
        "checkpoint": shape.text,
        "withheld": shape.array(shape.text),
        "sections": shape.array(
            shape.record(
                {
                    "name": shape.one_of(*SECTIONS),
                    "items": shape.at_least(0),
                    "bytes": shape.at_least(0),
                    "sha256": _octets(32),
                }
            )
        ),
    }
)


class Section:
    """One section, to be read once and to its end: only there is it known that its digest is the manifest's."""

    def __init__(self, path: str, entry: dict[str, Any], offset: int) -> None:
        self.name: str = entry["name"]
        self.items: int = entry["items"]
        self.size: int = entry["bytes"]
        self._digest: bytes = entry["sha256"]
        self._path, self._offset = path, offset

    def __iter__(self) -> Iterator[Any]:
        """Each item. Raises `VerifyError` (`encoding`, `sections`) with the item's number as its place."""
        with open(self._path, "rb") as file:
            source = _Stream(file.fileno(), self._offset, self.size)
            for number in range(self.items):
                try:
                    item = cbor.read(source.take)
                except VerifyError as error:
                    raise error.located(self._path, f"{self.name}[{number}]") from error
                yield item
            if source.left:
                self._refuse(f"{source.left} bytes more than its {self.items} items")
            if source.digest() != self._digest:
                self._refuse("its digest is not the one in the manifest")

    def load(self) -> list[Any]:
        """All of it, for a section that cannot be large."""
        if self.size > MAX_LOADED_BYTES:
            self._refuse(f"over {MAX_LOADED_BYTES} bytes")
        return list(self)

    def _refuse(self, why: str) -> NoReturn:
        raise VerifyError(why, check="sections", file=self._path, place=f"section {self.name}")


class _Stream:
    """The bytes of one section, read a chunk at a time and hashed as they come."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd = fd
        self._offset = offset
        self._unread = size
        self._chunk = b""
        self._at = 0
        self._hash = hashlib.sha256()

    @property
    def left(self) -> int:
        return len(self._chunk) - self._at + self._unread

    def digest(self) -> bytes:
        return self._hash.digest()

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._chunk):
            self._fill(count)
            end = count
        taken = self._chunk[self._at : end]
        self._at = end
        return taken

    def _fill(self, count: int) -> None:
        if count > MAX_ITEM_BYTES or count > self.left:
            raise VerifyError("an item that is longer than its section, or than any can be", check="encoding")
        held = [self._chunk[self._at :]]
        have = len(held[0])
        while have < count:
            part = os.pread(self._fd, min(_CHUNK_BYTES, self._unread), self._offset)
            if not part:
                raise VerifyError("the file ends inside it", check="encoding")
            self._hash.update(part)
            self._offset += len(part)
            self._unread -= len(part)
            have += len(part)
            held.append(part)
        self._chunk, self._at = b"".join(held), 0


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose envelope is well formed. Nothing is believed before `verify_signature`."""

    path: str
    manifest: dict[str, Any]
    sections: dict[str, Section]
    _payload: bytes
    _signature: bytes

    @classmethod
    def open(cls, path: str) -> Self:
        """Reads envelope and manifest, and that the sections fill the file exactly."""
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                source = cbor.Bytes(os.pread(file.fileno(), _MAX_MANIFEST_BYTES + 256, 0))
            payload, signature = _envelope(source)
            manifest = _manifest(payload)
            return cls(path, manifest, _lay_out(path, manifest, source.at, size), payload, signature)
        except OSError as error:
            raise unreadable(path, error) from error
        except VerifyError as error:
            raise error.located(path) from error

    def verify_signature(self, kernel_key: PublicKey) -> None:
        """The manifest's signature (RFC 9052, section 4.4: `Sig_structure`)."""
        signed = b"".join(
            [b"\x84\x6aSignature1", *(_byte_string(part) for part in (_PROTECTED, _PURPOSE, self._payload))]
        )
        kernel_key.verify(signed, self._signature)


def _manifest(payload: bytes) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = cbor.whole(payload)
        _MANIFEST(manifest, "manifest")
    except VerifyError as error:
        raise VerifyError(error.what, check=error.check, place="manifest") from error
    return manifest


def _envelope(source: cbor.Bytes) -> tuple[bytes, bytes]:
    """(payload, signature) of the COSE_Sign1 that the file begins with, in the one form that is written."""
    take = source.take
    try:
        tagged = cbor.head(take) == (cbor.TAG, _COSE_SIGN1) and cbor.head(take) == (cbor.ARRAY, 4)
        if not tagged:
            raise VerifyError("it does not begin with a COSE_Sign1", check="encoding")
        protected, unprotected, payload, signature = (cbor.read(take) for _ in range(4))
    except VerifyError as error:
        raise VerifyError(error.what, check=error.check, place="COSE_Sign1") from error
    if protected != _PROTECTED or unprotected != {}:
        raise VerifyError("headers other than the algorithm EdDSA", check="encoding", place="COSE_Sign1")
    if type(payload) is not bytes or type(signature) is not bytes or len(signature) != _SIGNATURE_BYTES:
        raise VerifyError("no payload, or no signature of 64 bytes", check="encoding", place="COSE_Sign1")
    return payload, signature


def _lay_out(path: str, manifest: dict[str, Any], start: int, size: int) -> dict[str, Section]:
    entries = manifest["sections"]
    if tuple(entry["name"] for entry in entries) != SECTIONS:
        raise VerifyError(f"the sections are not {', '.join(SECTIONS)}", check="sections", place="manifest")
    sections: dict[str, Section] = {}
    for entry in entries:
        sections[entry["name"]] = Section(path, entry, start)
        start += entry["bytes"]
    if start != size:
        why = f"the file has {size} bytes, and its manifest accounts for {start}"
        raise VerifyError(why, check="sections", place="manifest")
    return sections


def _byte_string(data: bytes) -> bytes:
    """`data` as a CBOR byte string."""
    size = len(data)
    if size < 24:
        return bytes([0x40 | size]) + data
    width = 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4
    return bytes([0x40 | (23 + width.bit_length())]) + size.to_bytes(width, "big") + data
