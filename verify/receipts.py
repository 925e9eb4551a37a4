"""Signed receipts.

For each, in this order: strict canonical JSON (`text`, `canonical`), the exact members (`fields`), the pinned
key and, if one is pinned, the run (`signer_pin`, `runtime_pin`), the signature over the received body bytes
(`signature`), the salted commitment to the arguments where they are disclosed (`action_parameter_hash`).

A receipt shows what was decided and what was reported to the kernel. It does not show that no receipt is missing:
that is the log's part.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from verify import canonical, shape
from verify.keys import PublicKey
from verify.lines import MAX_LINE_BYTES
from verify.verdict import VerifyError

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
ATTEMPT = shape.nullable(shape.record({"number": shape.at_least(1), "launch_id": shape.nullable(shape.digest)}))
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
        "evidence": shape.array(shape.record({"guard": shape.text, "passed": shape.boolean}, {"detail": shape.text})),
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


def verify_receipt(line: bytes, kernel_key: PublicKey, runtime_id: str | None = None) -> Receipt:
    """Verifies one receipt text (no newline). The error it raises has no file."""
    if len(line) > MAX_LINE_BYTES:
        raise VerifyError(f"over {MAX_LINE_BYTES} bytes", check="text")
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


# The usual receipt: a plain body, then salts and arguments, then the signature.
_PLAIN_BEGINNING = re.compile(
    rb'\{"body":(?P<body>'
    + str(shape.plain_of(BODY)).encode()
    + rb'),"disclosed":\{"output_salt":(?:null|"[0-9a-f]{32}"),'
    rb'"parameter_salt":"(?P<salt>[0-9a-f]{32})","parameters":'
)
_PLAIN_END = re.compile(rb'\},"signature":"([0-9a-f]{128})"\}')
_PLAIN_END_BYTES = len('},"signature":""}') + 128


class LineChecker:
    """`verify_receipt` for very many lines, where only the id matters and whether the arguments are disclosed.

    Four fifths of the time should be the signature's, so the usual spelling is not read into values: what a regular
    expression matched has the shape and is canonical. Anything that is unusual or refused is left to `verify_receipt`.
    """

    def __init__(self, kernel_key: PublicKey, runtime_id: str | None) -> None:
        self._kernel_key = kernel_key
        self._runtime_id = runtime_id
        # A plain body has no quotation mark inside a string, so a member can be looked for in its text.
        self._signer = f'"kernel_key":"{kernel_key.hex}"'.encode()
        self._run = f'"runtime_id":"{runtime_id}"'.encode() if runtime_id is not None else b""

    def check(self, line: bytes) -> tuple[str, bool]:
        """The receipt's id, and whether its arguments are disclosed. Raises as `verify_receipt` does."""
        beginning = _PLAIN_BEGINNING.match(line)
        end = _PLAIN_END.fullmatch(line, len(line) - _PLAIN_END_BYTES)
        if beginning is not None and end is not None:
            body, salt = beginning.groups()
            parameters = line[beginning.end() : end.start()]
            if self._signer in body and self._run in body and canonical.is_canonical(parameters):
                commitment = hashlib.sha256(bytes.fromhex(salt.decode()) + parameters).hexdigest()
                if body.startswith(commitment.encode(), _PARAMETER_HASH_AT):
                    return self._kernel_key.verify_record("receipt", body, end[1].decode()), True
        receipt = verify_receipt(line, self._kernel_key, self._runtime_id)
        return receipt.id, receipt.arguments_disclosed


_PARAMETER_HASH_AT = len('{"action":{"parameter_hash":"')
