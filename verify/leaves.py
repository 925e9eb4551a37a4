"""The typed leaves of the log: `JCS({"body","signature","type"})`, one shape for each type.

Each body but an intent's names its schema, its run and its time. The signature is null where the log's checkpoints do
the signing. Whether a signature holds, and whether what a leaf says goes with the rest of the log, is judged elsewhere.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from verify import canonical, shape
from verify.keys import PublicKey, RecordType
from verify.receipts import ATTEMPT, CALL
from verify.receipts import BODY as RECEIPT
from verify.verdict import VerifyError

_HEAD = {"runtime_id": shape.runtime_id, "time_ms": shape.at_least(0)}


def _statement(
    kind: str, members: dict[str, shape.Shape], optional: dict[str, shape.Shape] | None = None
) -> shape.Shape:
    return shape.record({"schema": shape.one_of(f"chio.{kind}.v1"), **_HEAD, **members}, optional)


def _status(value: Any, path: str) -> None:
    """`{"exit":N}` or `{"signal":N}`."""
    shape.record({}, {"exit": shape.at_least(0), "signal": shape.at_least(1)})(value, path)
    if len(value) != 1:
        raise VerifyError(f"`{path}` is not one of exit and signal", check="fields")


BOOTSTRAP = _statement(
    "bootstrap",
    {
        "created_ms": shape.at_least(0),
        "kernel_key": shape.digest,
        "log_key": shape.digest,
        "authority_key": shape.digest,
        "log_origin": shape.text,
        "config_digest": shape.digest,
        "policy_digest": shape.digest,
        "storage": shape.record(
            {
                "filesystem": shape.text,
                "journal_mode": shape.one_of("wal"),
                "synchronous": shape.one_of("full"),
                "volatile": shape.boolean,
            }
        ),
        "processes": shape.array(
            shape.record(
                {
                    "process_id": shape.process_id,
                    "parent_id": shape.nullable(shape.process_id),
                    "capability_id": shape.digest,
                    "ceiling": shape.at_least(1),
                }
            )
        ),
        "servers": shape.array(shape.object_of_anything),
    },
)
INTENT = shape.record(  # it has no run and no time of its own: the binding holds the run, its index the order
    {
        "call": CALL,
        "attempt": ATTEMPT,
        "capability_id": shape.digest,
        "server": shape.name,
        "tool": shape.name,
        "parameter_hash": shape.digest,
    }
)
RECONCILIATION = _statement(
    "reconciliation",
    {
        "call": CALL,
        "outcome": shape.one_of("applied", "not_applied"),
        "by": shape.text,
        "evidence_sha256": shape.digest,
    },
)
_LAUNCH = _statement(
    "launch",
    {
        "process_id": shape.nullable(shape.process_id),
        "attempt": shape.at_least(1),
        "observer": shape.one_of("host"),
        "confined": shape.boolean,
        "asked": shape.object_of_anything,
        "executable_sha256": shape.matching("(?:[0-9a-f]{64})?", "a digest, or empty"),
        "fields": shape.array(
            shape.record(
                {
                    "name": shape.text,
                    "asked": shape.anything,
                    "value": shape.anything,
                    "source": shape.one_of("observed", "installed", "unobservable", "absent"),
                },
                {"detail": shape.string},
            )
        ),
    },
    {"server": shape.text},
)
_EXIT = _statement(
    "exit",
    {
        "process_id": shape.process_id,
        "attempt": shape.at_least(1),
        "launch_id": shape.digest,
        "observer": shape.one_of("host"),
        "outcome": shape.text,
        "status": _status,
        "usage": shape.object_of_anything,
        "output": shape.record({"stdout_bytes": shape.at_least(0), "stderr_bytes": shape.at_least(0)}),
        "limits_hit": shape.array(shape.text),
        "exports": shape.array(shape.record({"file": shape.text, "bytes": shape.at_least(0), "sha256": shape.digest})),
    },
)
BODIES: dict[str, shape.Shape] = {
    "bootstrap": BOOTSTRAP,
    "attempt": _statement(
        "attempt",
        {
            "process_id": shape.process_id,
            "attempt": shape.at_least(1),
            "event": shape.one_of("reserved", "ended"),
        },
        {"outcome": shape.text},
    ),
    "launch": _LAUNCH,
    "intent": INTENT,
    "receipt": RECEIPT,
    "exit": _EXIT,
    "incident": _statement(
        "incident",
        {"detail": shape.text},
        {
            "call": CALL,
            "answer_bytes": shape.at_least(0),
            "answer_sha256": shape.digest,
            "server": shape.text,
            "start": shape.at_least(1),
        },
    ),
    "revocation": _statement(
        "revocation",
        {"process_id": shape.process_id, "what": shape.one_of("credentials", "capability")},
        {"count": shape.at_least(0), "capability_id": shape.digest},
    ),
    "cancellation": _statement(
        "cancellation",
        {
            "process_id": shape.process_id,
            "by": shape.one_of("worker", "operator"),
            "processes": shape.array(shape.process_id),
        },
    ),
    "reconciliation": RECONCILIATION,
    "tombstone": _statement("tombstone", {"process_id": shape.process_id, "by": shape.text}),
    "epoch": _statement(
        "epoch",
        {
            "epoch": shape.at_least(1),
            "event": shape.one_of("restored", "accepted"),
            "by": shape.text,
            "size": shape.at_least(0),
            "root": shape.digest,
        },
    ),
}
SIGNED: dict[str, RecordType] = {
    "bootstrap": "bootstrap",
    "launch": "launch",
    "receipt": "receipt",
    "exit": "exit",
    "epoch": "epoch",
}


@dataclass(frozen=True, slots=True)
class LogLeaf:
    """One leaf, read strictly and not yet believed. `body_text` and `text` are the bytes that were received."""

    kind: str
    body: dict[str, Any]
    body_text: bytes
    signature: str | None
    text: bytes

    def verify(self, kernel_key: PublicKey) -> str | None:
        """Checks the signature of a type that has one. The record's id, or None."""
        if self.kind not in SIGNED:
            return None
        return kernel_key.verify_record(SIGNED[self.kind], self.body_text, str(self.signature))


def read_leaf_text(text: bytes) -> LogLeaf:
    """The leaf in these bytes. Raises `VerifyError` (`text`, `canonical`, `fields`)."""
    end = _END.search(text, max(0, len(text) - _END_BYTES))
    plain = _PLAIN.get(end["type"].decode()) if end is not None and text.startswith(_BEGINNING) else None
    if end is not None and plain is not None and plain.fullmatch(text, len(_BEGINNING), end.start()):
        kind, signature = end["type"].decode(), end["signature"].decode() if end["signature"] is not None else None
        if (signature is not None) == (kind in SIGNED):
            body = text[len(_BEGINNING) : end.start()]
            return LogLeaf(kind, json.loads(body), body, signature, text)
    members = canonical.split(text, ("body", "signature", "type"))
    kind, signature = members["type"].value, members["signature"].value
    if type(kind) is not str or kind not in BODIES:
        raise VerifyError("its type is none that the log has", check="fields", place="type")
    BODIES[kind](members["body"].value, "body")
    (shape.signature if kind in SIGNED else shape.null)(signature, "signature")
    return LogLeaf(kind, members["body"].value, members["body"].received, signature, text)


# The usual spelling (verify.shape): a body of a type whose members all have one, between what all leaves have.
_BEGINNING = b'{"body":'
_END = re.compile(rb',"signature":(?:null|"(?P<signature>[0-9a-f]{128})"),"type":"(?P<type>[a-z]{1,16})"\}\Z')
_END_BYTES = len(',"signature":"","type":""}') + 128 + 16
_PLAIN = {
    kind: re.compile(spelling.encode())
    for kind, spelling in ((kind, shape.plain_of(body)) for kind, body in BODIES.items())
    if spelling is not None
}
