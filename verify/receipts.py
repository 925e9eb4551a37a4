"""Signed receipts, one per line.

For each line, in this order: strict canonical JSON (`text`, `canonical`), the exact members (`fields`), the pinned
key and, if one is pinned, the run (`signer_pin`, `runtime_pin`), the signature over the received body bytes
(`signature`), the salted commitment to the arguments where they are disclosed (`action_parameter_hash`).

A receipt shows what was decided and what was reported to the kernel. It does not show that no receipt is missing:
that is the log's part.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from verify import canonical, shape
from verify.distinct import DistinctIds
from verify.keys import PublicKey
from verify.verdict import VerifyError, unreadable

# A reply holds a receipt and is at most this long (contract, section 3), so no line can be longer.
MAX_LINE_BYTES = 8 * 1024 * 1024

CALL = shape.record(
    {
        "process_id": shape.process_id,
        "operation_key": shape.name,
        "request_id": shape.request_id,
        "binding": shape.digest,
        "dispatch": shape.at_least(1),
        "recovery_policy": shape.one_of("default", "known_outcome_only"),
    }
)
ATTEMPT = shape.nullable(
    shape.record({"number": shape.at_least(1), "launch_id": shape.nullable(shape.digest)})
)
BODY = shape.record(
    {
        "schema": shape.one_of("chio.receipt.v1"),
        "runtime_id": shape.runtime_id,
        "log_index": shape.at_least(0),
        "time_ms": shape.at_least(0),
        "capability_id": shape.digest,
        "tool_server": shape.name,
        "tool_name": shape.name,
        "action": shape.record({"parameter_hash": shape.digest}),
        "decision": shape.record(
            {"verdict": shape.one_of("allow", "deny", "incomplete")}, {"reason": shape.text, "guard": shape.text}
        ),
        "terminal_state": shape.record({"state": shape.one_of("completed", "incomplete")}, {"reason": shape.text}),
        "output": shape.nullable(
            shape.record({"kind": shape.one_of("value", "text", "withheld"), "hash": shape.digest})
        ),
        "policy_hash": shape.digest,
        "call": CALL,
        "attempt": ATTEMPT,
        "evidence": shape.array(
            shape.record({"guard": shape.text, "passed": shape.boolean}, {"detail": shape.text})
        ),
        "kernel_key": shape.digest,
    }
)

_DISCLOSED = shape.record(
    {},
    {
        "parameters": shape.anything,
        "parameter_salt": shape.salt,
        "output_salt": shape.nullable(shape.salt),
    },
)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt whose signature holds. `text` members are the bytes that were received."""

    id: str
    body: dict[str, Any]
    body_text: bytes
    signature: str
    disclosed: dict[str, Any]

    @property
    def arguments_disclosed(self) -> bool:
        return "parameters" in self.disclosed and "parameter_salt" in self.disclosed


@dataclass(frozen=True, slots=True)
class ReceiptsVerdict:
    """What holds of one file. `withheld_line` is the first whose arguments could not be checked."""

    trusted_kernel_key: str
    lines: int
    distinct: int
    withheld: int
    withheld_line: int | None

    def document(self) -> dict[str, Any]:
        """`chio.receipt.signatures.v1`."""
        checks = ["signature", "signer_pin", "action_parameter_hash"]
        return {
            "schema": "chio.receipt.signatures.v1",
            "receipts_verified": self.distinct,
            "trusted_kernel_key": self.trusted_kernel_key,
            "checks": checks[:2] if self.withheld else checks,
        }


def verify_receipts(path: str, kernel_key: str) -> dict[str, Any]:
    """`check_receipts` for a key in hex, as a `chio.receipt.signatures.v1` document."""
    return check_receipts(path, PublicKey.from_hex(kernel_key)).document()


def check_receipts(path: str, kernel_key: PublicKey, runtime_id: str | None = None) -> ReceiptsVerdict:
    """Verifies every line of a file. Raises `VerifyError` at the first that is refused, or when there is none.

    Memory does not grow with the file.
    """
    lines = withheld = 0
    withheld_line = None
    with closing(DistinctIds()) as distinct:
        for line in _lines(path):
            lines += 1
            try:
                receipt = verify_receipt(line, kernel_key, runtime_id)
            except VerifyError as error:
                raise error.located(path, f"line {lines}") from error
            distinct.add(bytes.fromhex(receipt.id))
            if not receipt.arguments_disclosed:
                withheld += 1
                withheld_line = withheld_line or lines
        if lines == 0:
            raise VerifyError("no receipt, so nothing was verified", check="input", file=path, fix="name another file")
        return ReceiptsVerdict(kernel_key.hex, lines, distinct.count(), withheld, withheld_line)


def verify_receipt(line: bytes, kernel_key: PublicKey, runtime_id: str | None = None) -> Receipt:
    """Verifies one receipt text (no newline). The error it raises has no file."""
    members = canonical.split(line, ("body", "disclosed", "signature"))
    body, disclosed, signature = (members[name].value for name in ("body", "disclosed", "signature"))
    BODY(body, "body")
    _DISCLOSED(disclosed, "disclosed")
    shape.signature(signature, "signature")
    if body["kernel_key"] != kernel_key.hex:
        raise VerifyError(f"signed for the key {body['kernel_key']}, which is not the pinned one", check="signer_pin")
    if runtime_id is not None and body["runtime_id"] != runtime_id:
        raise VerifyError(f"of the run {body['runtime_id']}, which is not the pinned one", check="runtime_pin")
    body_text = members["body"].received
    receipt_id = kernel_key.verify_record("receipt", body_text, signature)
    receipt = Receipt(receipt_id, body, body_text, signature, disclosed)
    if receipt.arguments_disclosed:
        _check_parameter_hash(receipt)
    return receipt


def _check_parameter_hash(receipt: Receipt) -> None:
    salt = bytes.fromhex(receipt.disclosed["parameter_salt"])
    commitment = hashlib.sha256(salt + canonical.encode(receipt.disclosed["parameters"])).hexdigest()
    if commitment != receipt.body["action"]["parameter_hash"]:
        raise VerifyError("the disclosed arguments are not the ones that were signed", check="action_parameter_hash")


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a file without their newlines; the last may lack its own."""
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise VerifyError(
                        f"over {MAX_LINE_BYTES} bytes", check="text", file=path, place=f"line {number}"
                    )
                yield line.removesuffix(b"\n")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
