"""Receipts as a kernel would sign them, made here without any code of the project.

`json.dumps` with sorted keys writes RFC 8785 for what is used here: ASCII names, small integers, no floats. Tests that
need more write the canonical text by hand.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey

KERNEL = SigningKey(bytes(range(32)))
KERNEL_KEY = KERNEL.verify_key.encode().hex()
OTHER = SigningKey(bytes(range(1, 33)))
OTHER_KEY = OTHER.verify_key.encode().hex()
RUNTIME_ID = "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe815"

PARAMETERS: dict[str, Any] = {"message_key": "order", "payload": {"items": [2, 3, 5], "note": 'é "quoted"\n'}}
PARAMETER_SALT = "00112233445566778899aabbccddeeff"
OUTPUT_SALT = "ffeeddccbbaa99887766554433221100"


def jcs(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def commitment(salt: str, text: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + text).hexdigest()


def a_body(index: int = 3) -> dict[str, Any]:
    """A completed send. Every optional member that a receipt can have is there."""
    return {
        "schema": "chio.receipt.v1",
        "runtime_id": RUNTIME_ID,
        "log_index": index,
        "time_ms": 1764450000000 + index,
        "capability_id": "c" * 64,
        "tool_server": "chio-ipc",
        "tool_name": "send_jobs",
        "action": {"parameter_hash": commitment(PARAMETER_SALT, jcs(PARAMETERS))},
        "decision": {"verdict": "allow", "reason": "granted", "guard": "grant"},
        "terminal_state": {"state": "completed", "reason": "answered"},
        "output": {"kind": "value", "hash": "d" * 64},
        "policy_hash": "e" * 64,
        "call": {
            "process_id": "producer",
            "operation_key": f"send-order-{index}",
            "request_id": "process:" + "f" * 64,
            "binding": "a" * 64,
            "dispatch": 1,
            "recovery_policy": "default",
        },
        "attempt": {"number": 1, "launch_id": "b" * 64},
        "evidence": [{"guard": "grant", "passed": True, "detail": "chio-ipc"}],
        "kernel_key": KERNEL_KEY,
    }


def disclosed() -> dict[str, Any]:
    return {"parameters": PARAMETERS, "parameter_salt": PARAMETER_SALT, "output_salt": OUTPUT_SALT}


def sign(body_text: bytes, key: SigningKey = KERNEL, domain: bytes = b"chio/receipt/v1\0") -> str:
    return key.sign(domain + body_text).signature.hex()


def line_of(body_text: bytes, disclosed_text: bytes, signature: str) -> bytes:
    return b'{"body":' + body_text + b',"disclosed":' + disclosed_text + b',"signature":"' + signature.encode() + b'"}'


def receipt(body: dict[str, Any] | None = None, shown: dict[str, Any] | None = None) -> bytes:
    """A receipt line, signed over exactly the body given, however wrong that is."""
    body_text = jcs(a_body() if body is None else body)
    return line_of(body_text, jcs(disclosed() if shown is None else shown), sign(body_text))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The usual body with the member at a dotted path replaced, added, or (for `...`) removed."""
    body = copy.deepcopy(a_body())
    *parents, last = path.split(".")
    place: Any = body
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return body


def write(folder: Path, *lines: bytes) -> str:
    path = folder / "receipts.ndjson"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def pins(folder: Path, **changes: str) -> str:
    document = {
        "schema": "chio.pins.v1",
        "runtime_id": RUNTIME_ID,
        "kernel_key": KERNEL_KEY,
        "log_key": OTHER_KEY,
        "authority_key": OTHER_KEY,
        "config_digest": "1" * 64,
        "policy_digest": "2" * 64,
        **changes,
    }
    path = folder / "pins.json"
    path.write_text(json.dumps(document, indent=2))
    return str(path)
