"""What had been promised at each boundary: answers that were given, calls that a tool server was asked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tests.faults.boundaries import Boundary
from tests.faults.exchanges import Exchange, exchanges


@dataclass(frozen=True, slots=True)
class Asked:
    """The kernel let the first byte of a worker's call go to its tool server, at boundary `number`.

    `digest` is the credential's. A frame to a server names no operation key, so the call is found by its tool and its
    arguments: calls of one scenario differ in them.
    """

    number: int
    digest: str
    request: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Promises:
    exchanges: list[Exchange]
    asked: list[Asked]

    @classmethod
    def of(cls, boundaries: list[Boundary]) -> Promises:
        return cls(exchanges(boundaries), _asked(boundaries))

    def until(self, number: int) -> Promises:
        """Those of boundaries before `number`."""
        return Promises(
            [exchange for exchange in self.exchanges if exchange.number < number],
            [asked for asked in self.asked if asked.number < number],
        )


def _asked(boundaries: Iterable[Boundary]) -> list[Asked]:
    wanted: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    found = []
    for boundary in boundaries:
        for message in _lines(boundary):
            operation = message.get("operation")
            if type(operation) is dict and operation.get("op") == "invoke":
                digest = sha256(str(message["credential"]).encode()).hexdigest()
                wanted[_what(operation["tool_name"], operation["arguments"])] = digest, operation
            elif message.get("method") == "tools/call" and boundary.role.startswith("kernel"):
                called = message["params"]
                known = wanted.get(_what(called["name"], called["arguments"]))
                if known is not None:
                    found.append(Asked(boundary.number, *known))
    return found


def _what(tool: str, arguments: Any) -> tuple[str, str]:
    return tool, json.dumps(arguments, sort_keys=True)


def _lines(boundary: Boundary) -> list[dict[str, Any]]:
    if boundary.kind not in ("socket", "pipe") or not boundary.data:
        return []
    found = []
    for line in boundary.data.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue  # no whole JSON text: another protocol's
        if type(message) is dict:
            found.append(message)
    return found
