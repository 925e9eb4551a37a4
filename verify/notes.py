"""C2SP signed notes: a text, and who signed it.

`c2sp.org/signed-note` is the form, `c2sp.org/tlog-cosignature` what a witness adds: that it saw this checkpoint, at a
time, and that it only appended to every one that it had seen before. A signature line is judged only if its name and
key id are those of a key that was named; every other line is left alone, as the specification says.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import NoReturn, Self

from verify.keys import PublicKey
from verify.verdict import VerifyError

MAX_NOTE_BYTES = 1024 * 1024
ED25519 = 0x01  # c2sp.org/signed-note, "Signature types"
COSIGNATURE = 0x04  # c2sp.org/tlog-cosignature, Ed25519
_KEY_ID_BYTES = 4
_TIMESTAMP_BYTES = 8
_MAX_TIMESTAMP = 2**63 - 1
_SIGNATURE_LINE = re.compile(r"— (?P<name>[^\s+]+) (?P<signature>[A-Za-z0-9+/]+={0,2})")
_KEY_NAME = re.compile(r"[^\s+]+")


@dataclass(frozen=True, slots=True)
class Note:
    """A note as it was received: its text, ending in a newline, and (name, key id and signature) of each line."""

    text: bytes
    signatures: tuple[tuple[str, bytes], ...]

    def of(self, name: str, key_id: bytes) -> list[bytes]:
        """What signatures there are under this name and key id."""
        return [
            signature[_KEY_ID_BYTES:]
            for signer, signature in self.signatures
            if signer == name and signature[:_KEY_ID_BYTES] == key_id
        ]


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A named key in the form of c2sp.org/signed-note, "Verifier keys": `name+hash+base64(type, key)`."""

    name: str
    kind: int
    key: PublicKey

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises `VerifyError` (check `input`): also where the hash is not the one of the name and key."""
        name, _, rest = text.partition("+")
        key_id, _, encoded = rest.partition("+")
        material = _base64(encoded)
        if _KEY_NAME.fullmatch(name) is None or material is None or len(material) != 1 + 32:
            _refuse_key("not of the form NAME+HASH+KEY")
        if material[0] not in (ED25519, COSIGNATURE):
            _refuse_key(f"of type {material[0]}; 1 (Ed25519) and 4 (Ed25519 cosignatures) are known here")
        key = cls(name, material[0], PublicKey.from_hex(material[1:].hex()))
        if key.key_id.hex() != key_id.lower():
            _refuse_key("its hash is not the one of its name and key")
        return key

    @property
    def key_id(self) -> bytes:
        named = self.name.encode() + b"\n" + bytes([self.kind]) + bytes.fromhex(self.key.hex)
        return hashlib.sha256(named).digest()[:_KEY_ID_BYTES]

    def verify(self, note: Note) -> int | None:
        """Checks every signature of this key on a note; a cosignature's time in seconds since the epoch.

        Raises `VerifyError` (check `checkpoint`) if one does not hold, or if there is none.
        """
        signatures = note.of(self.name, self.key_id)
        if not signatures:
            raise VerifyError(f"no signature of {self.name} under the key that was named", check="checkpoint")
        times = [self._verify_one(note.text, signature) for signature in signatures]
        return times[-1]

    def _verify_one(self, text: bytes, signature: bytes) -> int | None:
        if self.kind == ED25519:
            self._verify_signature(text, signature)
            return None
        time = int.from_bytes(signature[:_TIMESTAMP_BYTES], "big")
        if len(signature) != _TIMESTAMP_BYTES + 64 or time > _MAX_TIMESTAMP:
            raise VerifyError(f"the cosignature of {self.name} is malformed", check="checkpoint")
        self._verify_signature(b"cosignature/v1\ntime %d\n%s" % (time, text), signature[_TIMESTAMP_BYTES:])
        return time

    def _verify_signature(self, message: bytes, signature: bytes) -> None:
        try:
            self.key.verify(message, signature)
        except VerifyError as error:
            raise VerifyError(f"the signature of {self.name} does not hold", check="checkpoint") from error


def read_note(note: bytes) -> Note:
    """Raises `VerifyError` (check `checkpoint`) for what is no signed note. No signature is verified."""
    if len(note) > MAX_NOTE_BYTES:
        refuse_note(f"over {MAX_NOTE_BYTES} bytes")
    try:
        decoded = note.decode("utf-8")
    except UnicodeDecodeError as error:
        raise VerifyError("not UTF-8", check="checkpoint") from error
    if any(character < " " and character != "\n" for character in decoded):
        refuse_note("a control character")
    text, blank, lines = decoded.rpartition("\n\n")
    if not blank or not lines.endswith("\n"):
        refuse_note("not a signed note: text, a blank line, signature lines")
    signatures = []
    for line in lines.removesuffix("\n").split("\n"):
        found = _SIGNATURE_LINE.fullmatch(line)
        if found is None:
            refuse_note("a signature line is malformed")
        signatures.append((found["name"], note_base64(found["signature"])))
    return Note(text.encode() + b"\n", tuple(signatures))


def note_base64(text: str) -> bytes:
    """Standard base64 with padding, in its only canonical spelling (RFC 4648, section 3.5)."""
    decoded = _base64(text)
    if decoded is None:
        refuse_note("not canonical base64")
    return decoded


def _base64(text: str) -> bytes | None:
    try:
        decoded = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if base64.b64encode(decoded).decode() == text else None


def refuse_note(why: str) -> NoReturn:
    raise VerifyError(why, check="checkpoint")


def _refuse_key(why: str) -> NoReturn:
    fix = "give the key as its owner publishes it: NAME+HASH+KEY"
    raise VerifyError(f"not a verifier key: {why}", check="input", fix=fix)
