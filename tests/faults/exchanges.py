"""What the Chio kernel was asked and what it answered, read from the calls that carried it.

An answer counts as given from the moment its first byte was let go. That is the earliest moment at which anybody can
hold the kernel to it, so what is checked here is more than what clients have read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tests.faults.boundaries import Boundary

_OWN = frozenset({"kernel", "host", "host's child", "launcher", "init", "child"})
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer, in the order of the answers. `number` is the answer's boundary.

    `digest` names the credential of a worker's request (hex SHA-256, as the state keeps it); it is empty for what the
    host asked. `answer` is a worker's whole frame, or the host's.
    """

    number: int
    digest: str
    request: dict[str, Any]
    answer: dict[str, Any]
    raw: bytes

    @property
    def ok(self) -> bool:
        return bool(self.answer.get("ok"))

    @property
    def result(self) -> dict[str, Any]:
        """What a worker was told when it was not an error."""
        return dict(self.answer["result"]) if self.ok else {}

    @property
    def op(self) -> str:
        return str(self.request.get("op", ""))


def exchanges(made: Iterable[Boundary]) -> list[Exchange]:
    """Every answer among boundaries that were let through, a worker's and the host's. Requests that got none are not
    in it; an answer whose request is not known has an empty one."""
    found: list[Exchange] = []
    asked: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    told: dict[int, dict[str, Any]] = {}
    parts: dict[tuple[int, int], bytes] = {}
    hosts = set()
    for boundary in made:
        data = boundary.data
        if boundary.kind != "socket" or not data:
            continue
        base = boundary.role.partition(".")[0]
        where = (boundary.pid, boundary.fd)
        if (before := parts.get(where, b"")) and before.endswith(data) and len(data) < len(before):
            continue  # the rest of what could not be sent at once
        parts[where] = data
        if base == "host":
            hosts.add(boundary.pid)
            for message in _control(data):
                if "op" in message:
                    told[message["id"]] = message
        elif base == "kernel" and boundary.peer in hosts:
            for message in _control(data):
                if "re" in message:
                    found.append(Exchange(boundary.number, "", told.pop(message["re"], {}), message, data))
        elif base == "kernel":
            for line in data.splitlines(keepends=True):
                digest, operation = (asked.get(boundary.peer) or [("", {})]).pop(0)
                found.append(Exchange(boundary.number, digest, operation, json.loads(line), line))
        elif base not in _OWN:
            for digest, operation in _requests(data):
                asked.setdefault(boundary.pid, []).append((digest, operation))
    return found


def _control(data: bytes) -> list[dict[str, Any]]:
    """The frames of the control socket; of another's (the launcher's), none."""
    messages = []
    while len(data) > _LENGTH.size:
        (size,) = _LENGTH.unpack_from(data)
        if len(data) < _LENGTH.size + size:
            break
        try:
            message = json.loads(data[_LENGTH.size : _LENGTH.size + size])
        except ValueError:
            break
        messages.append(message)
        data = data[_LENGTH.size + size :]
    return messages


def _requests(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for line in data.splitlines():
        try:
            frame = json.loads(line)
            found.append((sha256(frame["credential"].encode()).hexdigest(), frame["operation"]))
        except (ValueError, KeyError, TypeError):
            pass  # not a request of the worker protocol
    return found
