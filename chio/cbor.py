"""Deterministic CBOR (RFC 8949, section 4.2.1) of the few types that a bundle is made of.

Unsigned integers, bytes, text, arrays, and maps whose keys are text; every length in its shortest form, every map in
the bytewise order of its encoded keys. Whoever reads it checks that again by other code (`verify.cbor`).
"""

from __future__ import annotations

UNSIGNED, BYTES, TEXT, ARRAY, MAP = 0, 2, 3, 4, 5

Value = int | bytes | str | list["Value"] | dict[str, "Value"]


def encode(value: Value) -> bytes:
    """Raises `TypeError` for what has no place in a bundle, a negative integer or a boolean among it."""
    if type(value) is int and value >= 0:
        return head(UNSIGNED, value)
    if isinstance(value, bytes):
        return head(BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return head(TEXT, len(text)) + text
    if isinstance(value, list):
        return head(ARRAY, len(value)) + b"".join(map(encode, value))
    if isinstance(value, dict):
        members = sorted((encode(name), encode(member)) for name, member in value.items())
        return head(MAP, len(members)) + b"".join(name + member for name, member in members)
    raise TypeError(f"{value!r} has no place in a bundle")


def head(major: int, argument: int) -> bytes:
    """The head of a data item: its major type and its argument, in as few bytes as can be (RFC 8949, section 3)."""
    if argument < 24:
        return bytes([major << 5 | argument])
    for information, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * width:
            return bytes([major << 5 | information]) + argument.to_bytes(width, "big")
    raise TypeError(f"{argument} is beyond 64 bits")
