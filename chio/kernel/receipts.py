"""Receipt texts (contract section 5): a signed body, and beside it what may later be withheld or deleted.

`parameters` and outputs enter the body only as salted commitments, `sha256(salt || bytes)`, so that losing them
breaks neither a signature nor the log.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from chio import canonical

SCHEMA = "chio.receipt.v1"
SALT_BYTES = 16


def commitment(salt: bytes, data: bytes) -> str:
    return sha256(salt + data).hexdigest()


def request_id(runtime_id: str, process: str, key: str, dispatch: int) -> str:
    named: list[Any] = [runtime_id, process, key]
    if dispatch >= 2:
        named.append(dispatch)
    return "process:" + sha256(canonical.encode_plain(named)).hexdigest()


def binding(
    runtime_id: str,
    process: str,
    key: str,
    capability_id: str,
    server: str,
    tool: str,
    parameter_hash: str,
    recovery_policy: str,
) -> str:
    return sha256(
        canonical.encode_plain([runtime_id, process, key, capability_id, server, tool, parameter_hash, recovery_policy])
    ).hexdigest()


def disclosed(parameters: bytes, parameter_salt: bytes, output_salt: bytes | None) -> bytes:
    """JCS of `{"output_salt","parameter_salt","parameters"}` around a text that is already canonical."""
    salt = b'"' + output_salt.hex().encode() + b'"' if output_salt is not None else b"null"
    return (
        b'{"output_salt":'
        + salt
        + b',"parameter_salt":"'
        + parameter_salt.hex().encode()
        + b'","parameters":'
        + parameters
        + b"}"
    )


def withheld(receipt: bytes) -> bytes:
    """The same receipt without its arguments and salts. No member of a body is called `disclosed`: the first is it."""
    body = receipt[len(b'{"body":') : receipt.index(b',"disclosed":{')]
    return text(body, b"{}", receipt[-130:-2])


def text(body: bytes, disclosed_text: bytes, signature: bytes) -> bytes:
    """The receipt line, put together from its stored parts; never parsed and rebuilt."""
    return b'{"body":' + body + b',"disclosed":' + disclosed_text + b',"signature":"' + signature + b'"}'
