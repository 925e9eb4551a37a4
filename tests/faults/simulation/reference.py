"""What a history may look like, said a second time: it reads the log from its first leaf and decides every call itself.

Nothing here is the kernel's: the order of the checks, the table of moves and the mailbox are written down again from
the contract, as plainly as they can be. What is left at the end must be what stands in the rows.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from tests.faults.exchanges import Exchange
from tests.faults.simulation.world import (
    BOX,
    BOX_LIMITS,
    CHECKED_TTL_S,
    LIMITED,
    MAX_CALLS,
    MAX_CENTS,
    PARENTS,
    SERVER,
    SHARES,
    TOOLS,
)

MAILBOXES = "chio-ipc"
MAX_DISPATCHES = 3
_BLURRED_MS = 1000  # a call is decided a little before its record gets its time
CEILINGS = {"root": MAX_CALLS} | {name: MAX_CALLS * share // 10_000 for name, share in SHARES.items()}
Key = tuple[str, str]


def path(process: str) -> list[str]:
    """From a process up to root."""
    found = [process]
    while found[-1] in PARENTS:
        found.append(PARENTS[found[-1]])
    return found


@dataclass(slots=True)
class Call:
    server: str
    tool: str
    policy: str
    state: str
    dispatch: int
    parameters: Any = None
    late: bool = False


@dataclass(slots=True)
class Box:
    """(message key, sender, payload) in order; those up to `acknowledged` are gone."""

    messages: list[tuple[str, str, Any]] = field(default_factory=list)
    acknowledged: int = 0

    def run(self, verb: str, arguments: dict[str, Any], sender: str) -> dict[str, Any] | str:
        """The value it answers, or the reason why it refuses."""
        if verb == "send":
            for position, (key, by, payload) in enumerate(self.messages, 1):
                if key == arguments["message_key"]:
                    if (by, payload) != (sender, arguments["payload"]):
                        return "message_conflict"
                    return {
                        "status": "acknowledged" if position <= self.acknowledged else "sent",
                        "sequence": str(position),
                    }
            if len(self.messages) >= BOX_LIMITS["max_messages"]:
                return {"status": "exhausted"}
            if len(self.messages) - self.acknowledged >= BOX_LIMITS["max_pending_messages"]:
                return {"status": "full"}
            self.messages.append((arguments["message_key"], sender, arguments["payload"]))
            return {"status": "sent", "sequence": str(len(self.messages))}
        if verb == "ack":
            through = int(arguments["through_sequence"])
            if through > len(self.messages):
                return "invalid_arguments"
            self.acknowledged = max(self.acknowledged, through)
            return {"status": "acknowledged", "through_sequence": str(self.acknowledged)}
        after = int(arguments["after_sequence"])
        if after < self.acknowledged:
            return {"status": "cursor_expired", "acknowledged_through": str(self.acknowledged)}
        found = self.messages[after : after + arguments["limit"]]
        return {
            "status": "received",
            "messages": [
                {"sequence": str(after + n), "payload": payload, "sender": by}
                for n, (_, by, payload) in enumerate(found, 1)
            ],
            "next_sequence": str(after + len(found)),
        }


class Reference:
    """Fed the leaves in order; `wrong` says what no history may do."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.wrong: list[str] = []
        self.calls: dict[Key, Call] = {}
        self.counted = dict.fromkeys(CEILINGS, 0)
        self.used = dict.fromkeys(CEILINGS, 0)
        self.revoked: set[str] = set()
        self.cancelled: set[str] = set()
        self.box = Box()
        ((created_ms,),) = database.execute("SELECT created_ms FROM host").fetchall()
        self._expires_ms = created_ms + 1000 * CHECKED_TTL_S
        self._now_ms = created_ms  # as the newest record says
        self._due: Key | None = None  # the incident that must follow at once
        self._outputs: dict[Key, Any] = {
            (process, key): json.loads(output) if output else None
            for process, key, output in database.execute("SELECT process, operation_key, output FROM call")
        }

    def read_log(self) -> None:
        for position, (index, kind, body, disclosed) in enumerate(
            self._database.execute("SELECT idx, type, body, disclosed FROM leaf ORDER BY idx")
        ):
            if index != position:
                self.wrong.append(f"leaf {index} stands at {position}")
            self._leaf(kind, json.loads(body), json.loads(disclosed) if disclosed else {})

    def _leaf(self, kind: str, body: dict[str, Any], disclosed: dict[str, Any]) -> None:
        self._now_ms = max(self._now_ms, body.get("time_ms", 0))
        call = body.get("call")
        key = (call["process_id"], call["operation_key"]) if call else None
        if self._due is not None and (kind, key) != ("incident", self._due):
            self.wrong.append(f"{self._due}: unknown, and its incident does not follow")
        if kind == "incident" and key is not None:
            self._incident(key)
        self._due = None
        if kind == "intent" and key is not None:
            self._intent(key, body)
        elif kind == "receipt" and key is not None:
            self._receipt(key, body, disclosed)
        elif kind == "reconciliation" and key is not None:
            self._move(key, {"unknown"}, "reconciled")
        elif kind == "revocation":
            self.revoked.add(body["process_id"])
        elif kind == "cancellation":
            self.cancelled |= {name for name in CEILINGS if body["process_id"] in path(name)}

    def _move(self, key: Key, before: set[str], after: str) -> None:
        call = self.calls.get(key)
        if call is None or call.state not in before:
            self.wrong.append(f"{key}: {call and call.state} became {after}")
        if call is not None:
            call.state = after

    def _incident(self, key: Key) -> None:
        call = self.calls.get(key)
        late = self._due != key
        if late and (call is None or call.state not in ("unknown", "reconciled")):
            self.wrong.append(f"{key}: an incident in state {call and call.state}")

    # --- decisions -----------------------------------------------------------------------------------------------

    def _new(self, key: Key, server: str, tool: str, call: dict[str, Any]) -> None:
        process = key[0]
        if any(name in self.cancelled for name in path(process)):
            self.wrong.append(f"{key}: a new call of a cancelled process")
        for name in path(process):
            self.counted[name] += 1
            if self.counted[name] > CEILINGS[name]:
                self.wrong.append(f"{key}: call {self.counted[name]} of {name}, over its ceiling")
        self.calls[key] = Call(server, tool, call["recovery_policy"], "new", call["dispatch"])

    def _refusal(self, process: str, server: str, tool: str, arguments: dict[str, Any]) -> str | None:
        if any(name in self.revoked for name in path(process)):
            return "revoked"
        verb, _, box = tool.partition("_")
        known = (
            tool in TOOLS
            if server == SERVER
            else server == MAILBOXES and verb in ("send", "receive", "ack") and box == BOX
        )
        if not known:
            return "out_of_scope"
        if tool == "checked" and self._now_ms >= self._expires_ms:
            return "expired"
        if tool == "checked" and arguments["cents"] > MAX_CENTS:
            return "constraint_violated"
        if tool == "limited" and any(self.used[name] >= LIMITED for name in path(process)):
            return "invocations_exhausted"
        return None

    def _intent(self, key: Key, body: dict[str, Any]) -> None:
        server, tool, dispatch = body["server"], body["tool"], body["call"]["dispatch"]
        known = self.calls.get(key)
        if known is None:
            self._new(key, server, tool, body["call"])
            call, again = self.calls[key], 1
        else:
            call, again = known, known.dispatch + 1
            eligible = call.tool == "read" and call.policy == "default"
            if not (call.state == "compensated" or (call.state == "unknown" and eligible)) or again > MAX_DISPATCHES:
                self.wrong.append(f"{key}: {call.state}, and dispatched again as {dispatch}")
            if any(name in self.cancelled for name in path(key[0])):
                self.wrong.append(f"{key}: dispatched again in a cancelled process")
        if dispatch != again:
            self.wrong.append(f"{key}: dispatch {dispatch} follows {again - 1}")
        refusal = self._refusal(key[0], server, tool, {"cents": 0})
        if server != SERVER or refusal is not None:
            self.wrong.append(f"{key}: an intent for {server}/{tool}, to be refused: {refusal}")
        if tool == "limited":
            for name in path(key[0]):
                self.used[name] += 1
        call.state, call.dispatch = "dispatched", dispatch

    def _receipt(self, key: Key, body: dict[str, Any], disclosed: dict[str, Any]) -> None:
        decision, arguments = body["decision"], disclosed["parameters"]
        known = self.calls.get(key)
        if known is not None and known.state == "dispatched":
            self._settled(key, known, body, arguments)
            return
        if known is not None:
            self.wrong.append(f"{key}: a second receipt in state {known.state}")
            return
        self._new(key, body["tool_server"], body["tool_name"], body["call"])
        call = self.calls[key]
        call.parameters = arguments
        expected: dict[str, Any] | str | None = self._refusal(key[0], call.server, call.tool, arguments)
        if expected is None and call.server == MAILBOXES:
            expected = self.box.run(call.tool.partition("_")[0], arguments, key[0])
        call.state = "completed" if decision["verdict"] == "allow" else "refused"
        if call.state == "completed":
            told = self._outputs.get(key)
            if told != {"kind": "value", "value": expected}:
                self.wrong.append(f"{key}: {call.tool} answered {told}, not {expected}")
        elif decision.get("reason") != expected and abs(self._now_ms - self._expires_ms) > _BLURRED_MS:
            self.wrong.append(f"{key}: refused as {decision.get('reason')}, not {expected}")

    def _settled(self, key: Key, call: Call, body: dict[str, Any], arguments: dict[str, Any]) -> None:
        decision = body["decision"]
        outcomes = {
            ("allow", None): "completed",
            ("incomplete", "outcome_unknown_after_dispatch"): "unknown",
            ("incomplete", "not_dispatched"): "compensated",
        }
        call.state = outcomes.get((decision["verdict"], decision.get("reason")), "?")
        call.parameters = arguments
        if call.state == "?" or body["call"]["dispatch"] != call.dispatch:
            self.wrong.append(f"{key}: settled as {decision}, dispatch {body['call']['dispatch']}")
        if call.tool == "checked" and arguments["cents"] > MAX_CENTS:
            self.wrong.append(f"{key}: dispatched against its constraint")
        if call.state == "compensated" and call.tool == "limited":
            for name in path(key[0]):
                self.used[name] -= 1
        if call.state == "unknown":
            self._due = key

    # --- the end -------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """The rows say what the log does."""
        execute = self._database.execute
        rows = {
            (process, key): (state, dispatch)
            for process, key, state, dispatch in execute("SELECT process, operation_key, state, dispatch FROM call")
        }
        mine = {key: (call.state, call.dispatch) for key, call in self.calls.items()}
        self._same("call", mine, rows)
        self._same("usage", self.counted, dict(execute("SELECT process, calls FROM usage")))
        used = {name: count for name, count in self.used.items() if count}
        self._same("grant_usage", used, dict(execute("SELECT process, used FROM grant_usage WHERE used != 0")))
        states = {name for (name,) in execute("SELECT id FROM process WHERE state = 'cancelled'")}
        self._same("cancelled", self.cancelled, states)
        ((last, acknowledged, pending),) = execute(
            "SELECT last_sequence, acknowledged_through, pending_messages FROM mailbox"
        ).fetchall()
        size = len(self.box.messages)
        self._same(
            "mailbox", (size, self.box.acknowledged, size - self.box.acknowledged), (last, acknowledged, pending)
        )

    def _same(self, what: str, mine: object, rows: object) -> None:
        if mine != rows:
            self.wrong.append(f"{what}: the log makes it {mine}, the rows {rows}")

    def judge(self, exchanges: list[Exchange], process_of: dict[str, str]) -> None:
        """Answers without a receipt, and what a receipt was given for."""
        for exchange in exchanges:
            if exchange.op != "invoke" or exchange.digest not in process_of:
                continue
            key = (process_of[exchange.digest], exchange.request["operation_key"])
            call = self.calls.get(key)
            code = None if exchange.ok else exchange.answer["error"]["code"]
            same = call is not None and (call.server, call.tool, call.policy, call.parameters) == (
                exchange.request["server_id"], exchange.request["tool_name"],
                "known_outcome_only" if "known_outcome_only" in exchange.request else "default",
                exchange.request["arguments"],
            )  # fmt: skip
            if code is None and not same:
                self.wrong.append(f"{key}: answered for another call's receipt")
            if code == "conflict" and (call is None or same):
                self.wrong.append(f"{key}: a conflict with nothing")
            if code == "limit_reached" and all(self.counted[name] < CEILINGS[name] for name in path(key[0])):
                self.wrong.append(f"{key}: limit_reached with calls left")
            if code == "cancelled" and not any(name in self.cancelled for name in path(key[0])):
                self.wrong.append(f"{key}: cancelled, and nobody cancelled it")

    def effects(self, happened: dict[Key, int], sent: list[Key]) -> None:
        """The owner's own count: at most one for a key, unless its tool is a read; one where it was completed."""
        for key, times in happened.items():
            call = self.calls.get(key)
            if call is None:
                self.wrong.append(f"{key}: an effect without a call")
            elif call.tool != "read" and times > 1:
                self.wrong.append(f"{key}: {times} effects")
            elif call.state in ("compensated", "refused") and call.tool != "read":
                self.wrong.append(f"{key}: {call.state}, and an effect")
        for key, call in self.calls.items():
            if call.server == SERVER and call.state == "completed" and not happened.get(key):
                self.wrong.append(f"{key}: completed, and no effect")
            if sent.count(key) > call.dispatch:
                self.wrong.append(f"{key}: sent {sent.count(key)} times, {call.dispatch} dispatches")
