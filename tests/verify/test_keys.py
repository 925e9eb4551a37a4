"""Keys, pins, and the Ed25519 cases on which libraries differ."""

import hashlib
import itertools
import json
from pathlib import Path

import nacl.bindings
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.verify import signed
from verify.keys import Pins, PublicKey
from verify.verdict import VerifyError

_ORDER = 2**252 + 27742317777372353535851937790883648493
_P = 2**255 - 19
# Every encoding of the eight points of low order, canonical and not (RFC 8032 takes the canonical ones only).
_LOW_ORDER = [
    y.to_bytes(32, "little")
    for low in (0, 1, _P - 1, _P, _P + 1)
    for y in (low, low | 1 << 255)
] + [
    bytes.fromhex(text)
    for text in (
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    )
]
_ORDER_EIGHT = _LOW_ORDER[-1]
_IDENTITY = _LOW_ORDER[2]


def _lax_verifier_takes(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _refused_as_signature(key: bytes, signature: bytes, message: bytes) -> bool:
    with pytest.raises(VerifyError) as refused:
        PublicKey(key.hex()).verify(message, signature)
    return refused.value.check == "signature"


@pytest.mark.parametrize("point", _LOW_ORDER, ids=bytes.hex)
def test_a_low_order_point_cannot_be_pinned(point: bytes) -> None:
    with pytest.raises(VerifyError) as refused:
        PublicKey.from_hex(point.hex())
    assert refused.value.check == "input"


@pytest.mark.parametrize("key", _LOW_ORDER, ids=bytes.hex)
def test_a_signature_of_low_order_points_is_refused_for_every_message(key: bytes) -> None:
    assert all(_refused_as_signature(key, commitment + bytes(32), b"any message") for commitment in _LOW_ORDER)


def test_a_lax_verifier_would_have_taken_a_low_order_signature_for_any_message() -> None:
    """The control of the test above: the trivial signature is one that a common library accepts."""
    assert all(_lax_verifier_takes(_IDENTITY, _IDENTITY + bytes(32), text) for text in (b"any message", b"another"))


def test_a_signature_with_its_scalar_shifted_by_the_group_order_is_refused() -> None:
    good = signed.KERNEL.sign(b"message").signature
    key = PublicKey.from_hex(signed.KERNEL_KEY)
    key.verify(b"message", good)
    shifted = good[:32] + (int.from_bytes(good[32:], "little") + _ORDER).to_bytes(32, "little")
    assert _refused_as_signature(bytes.fromhex(key.hex), shifted, b"message")


def test_a_key_with_a_low_order_component_cannot_be_pinned_although_its_signatures_verify() -> None:
    scalar, nonce = 7 * 8, 11
    base = nacl.bindings.crypto_scalarmult_ed25519_base_noclamp
    mixed = nacl.bindings.crypto_core_ed25519_add(base(scalar.to_bytes(32, "little")), _ORDER_EIGHT)
    commitment = base(nonce.to_bytes(32, "little"))
    for number in itertools.count():
        message = b"message %d" % number
        challenge = int.from_bytes(hashlib.sha512(commitment + mixed + message).digest(), "little") % _ORDER
        if challenge % 8 == 0:  # the low-order component vanishes, so every formula accepts
            break
    signature = commitment + ((nonce + challenge * scalar) % _ORDER).to_bytes(32, "little")
    assert _lax_verifier_takes(mixed, signature, message)
    with pytest.raises(VerifyError) as refused:
        PublicKey.from_hex(mixed.hex())
    assert refused.value.check == "input"


@pytest.mark.parametrize("text", [signed.KERNEL_KEY, signed.KERNEL_KEY + "\n"])
def test_a_key_is_given_as_hex_or_as_a_file_that_holds_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kernel.pub"
    path.write_text(text)
    assert PublicKey.from_option(str(path)) == PublicKey.from_option(signed.KERNEL_KEY)


def test_a_key_in_upper_case_is_the_same_key() -> None:
    assert PublicKey.from_option(signed.KERNEL_KEY.upper()).hex == signed.KERNEL_KEY


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"zz" * 32, b"00" * 31, signed.KERNEL_KEY.encode() + b"\n\n", b"\xff" * 64, b"a" * 100_000]
)
def test_a_file_that_holds_no_key_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kernel.pub"
    path.write_bytes(content)
    with pytest.raises(VerifyError) as refused:
        PublicKey.from_option(str(path))
    assert (refused.value.check, refused.value.file) == ("input", str(path))


def test_a_key_that_is_neither_hex_nor_a_file_is_refused() -> None:
    with pytest.raises(VerifyError) as refused:
        PublicKey.from_option("0154")
    assert refused.value.check == "input"


def test_pins_are_read_from_their_file(tmp_path: Path) -> None:
    pins = Pins.from_file(signed.pins(tmp_path))
    assert (pins.runtime_id, pins.kernel_key.hex) == (signed.RUNTIME_ID, signed.KERNEL_KEY)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"schema": "chio.pins.v2"}, "fields"),
        ({"surprise": "1"}, "fields"),
        ({"log_key": "short"}, "fields"),
        ({"runtime_id": "producer"}, "fields"),
        ({"kernel_key": "00" * 32}, "input"),
    ],
)
def test_pins_of_another_shape_are_refused(tmp_path: Path, changes: dict[str, str], check: str) -> None:
    path = signed.pins(tmp_path, **changes)
    with pytest.raises(VerifyError) as refused:
        Pins.from_file(path)
    assert (refused.value.check, refused.value.file) == (check, path)


def test_pins_with_a_member_twice_are_refused(tmp_path: Path) -> None:
    path = Path(signed.pins(tmp_path))
    text = path.read_text()
    path.write_text(text.replace("{", '{"kernel_key": ' + json.dumps(signed.OTHER_KEY) + ",", 1))
    with pytest.raises(VerifyError) as refused:
        Pins.from_file(str(path))
    assert refused.value.check == "text"
