"""Durable mailboxes, the built-in server `chio-ipc` (contract section 6).

`run` decides one call from rows and returns what the commit shall write; it writes nothing itself. The sender is the
kernel's own knowledge of the caller. Sequences are decimal strings from "1".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from chio import canonical
from chio.kernel.grants import MAILBOX_VERBS
from chio.kernel.store import Store
from chio.schema import MailboxLimits

MAX_WAIT_MS = 30_000
MAX_RECEIVE = 16

_SEQUENCE = re.compile(r"(?:0|[1-9][0-9]{0,18})\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Ran:
    """The tool ran: its output object as JCS, and its rows to write in the call's own commit."""

    output: bytes
    write: Callable[[], None] | None = None
    wakes: str | None = None  # mailbox whose waiting receives should look again


@dataclass(frozen=True, slots=True)
class Refused:
    """`reason` is `invalid_arguments` or `message_conflict`; `detail` names the argument."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A receive that found nothing and may wait."""

    mailbox: str
    wait_ms: int


def value(members: dict[str, Any]) -> bytes:
    """The output object `{"kind":"value","value":members}` as JCS; members are plain or `orjson.Fragment`."""
    return b'{"kind":"value","value":' + orjson.dumps(members, option=orjson.OPT_SORT_KEYS) + b"}"


class Mailboxes:
    """The declared mailboxes over the store's rows."""

    def __init__(self, store: Store, limits: dict[str, MailboxLimits]) -> None:
        self._store = store
        self._limits = limits

    def has(self, tool: str) -> bool:
        verb, _, mailbox = tool.partition("_")
        return verb in MAILBOX_VERBS and mailbox in self._limits

    def run(
        self, tool: str, arguments: dict[str, Any], sender: str, plain: bool, may_wait: bool
    ) -> Ran | Refused | Waiting:
        """One call of a tool that there is (`has`)."""
        verb, _, mailbox = tool.partition("_")
        if verb == "send":
            return self._send(mailbox, arguments, sender, plain)
        if verb == "receive":
            return self._receive(mailbox, arguments, may_wait)
        return self._acknowledge(mailbox, arguments)

    def _send(self, mailbox: str, arguments: dict[str, Any], sender: str, plain: bool) -> Ran | Refused:
        if arguments.keys() != {"message_key", "payload"}:
            return Refused("invalid_arguments", "send takes exactly message_key and payload")
        key = arguments["message_key"]
        if not is_name(key):
            return Refused("invalid_arguments", "message_key: 1-256 bytes, no edge white space or control characters")
        limits = self._limits[mailbox]
        payload = canonical.encode_scanned(arguments["payload"], plain)
        if len(payload) > limits.max_message_bytes:
            return Refused("invalid_arguments", f"payload: {len(payload)} bytes, at most {limits.max_message_bytes}")
        digest = self._store.payload_digest(sender, payload)
        last, acknowledged, pending, pending_bytes = self._store.mailbox(mailbox)
        known = self._store.message_by_key(mailbox, key)
        if known is not None:
            sequence, original_sender, original_digest = known
            if (original_sender, original_digest) != (sender, digest):
                return Refused("message_conflict", "message_key: taken by another message")
            status = "acknowledged" if sequence <= acknowledged else "sent"
            return Ran(value({"status": status, "sequence": str(sequence)}))
        if last >= limits.max_messages:
            return Ran(value({"status": "exhausted"}))
        if pending >= limits.max_pending_messages or pending_bytes + len(payload) > limits.max_pending_bytes:
            return Ran(value({"status": "full"}))
        sequence = last + 1
        return Ran(
            value({"status": "sent", "sequence": str(sequence)}),
            lambda: self._store.put_message(mailbox, sequence, key, sender, digest, payload),
            wakes=mailbox,
        )

    def _receive(self, mailbox: str, arguments: dict[str, Any], may_wait: bool) -> Ran | Refused | Waiting:
        if not {"after_sequence", "limit"} <= arguments.keys() <= {"after_sequence", "limit", "wait_ms"}:
            return Refused("invalid_arguments", "receive takes after_sequence, limit and, if wanted, wait_ms")
        after, limit, wait_ms = arguments["after_sequence"], arguments["limit"], arguments.get("wait_ms", 0)
        if not _is_sequence(after):
            return Refused("invalid_arguments", "after_sequence: a decimal string without leading zeros")
        if type(limit) is not int or not 1 <= limit <= MAX_RECEIVE:
            return Refused("invalid_arguments", f"limit: 1-{MAX_RECEIVE}")
        if type(wait_ms) is not int or not 0 <= wait_ms <= MAX_WAIT_MS:
            return Refused("invalid_arguments", f"wait_ms: 0-{MAX_WAIT_MS}")
        _, acknowledged, _, _ = self._store.mailbox(mailbox)
        if int(after) < acknowledged:
            return Ran(value({"status": "cursor_expired", "acknowledged_through": str(acknowledged)}))
        found = self._store.messages_after(mailbox, min(int(after), 2**63 - 1), limit)
        if not found and wait_ms and may_wait:
            return Waiting(mailbox, wait_ms)
        messages = [
            {"sequence": str(sequence), "payload": orjson.Fragment(payload), "sender": sender}
            for sequence, payload, sender in found
        ]
        following = str(found[-1][0]) if found else after
        return Ran(value({"status": "received", "messages": messages, "next_sequence": following}))

    def _acknowledge(self, mailbox: str, arguments: dict[str, Any]) -> Ran | Refused:
        if arguments.keys() != {"through_sequence"} or not _is_sequence(arguments["through_sequence"]):
            return Refused("invalid_arguments", "ack takes exactly through_sequence, a decimal string")
        through = int(arguments["through_sequence"])
        last, acknowledged, _, _ = self._store.mailbox(mailbox)
        if through > last:
            return Refused("invalid_arguments", f"through_sequence: beyond the newest message, {last}")
        if through <= acknowledged:
            return Ran(value({"status": "acknowledged", "through_sequence": str(acknowledged)}))
        return Ran(
            value({"status": "acknowledged", "through_sequence": str(through)}),
            lambda: self._store.acknowledge(mailbox, acknowledged, through),
        )


def is_name(text: object) -> bool:
    """Operation keys, server, tool and message keys: 1-256 bytes, no edge white space or control characters."""
    if type(text) is not str or not text or text[0].isspace() or text[-1].isspace():
        return False
    if text.isascii():
        return len(text) <= 256 and text.isprintable()
    return len(text.encode()) <= 256 and _CONTROL.search(text) is None


def _is_sequence(text: object) -> bool:
    return type(text) is str and _SEQUENCE.match(text) is not None
