"""Every call of a log, in log order, against the one table of what may become of a call.

    a call is new        a receipt that refuses it; a built-in tool's receipt; or an external tool's intent
    it was dispatched    a receipt settles it: answered, provably not sent, or of unknown outcome (with an incident)
    it is settled        for good, but what was not sent, and an unknown outcome of a pure read, may be dispatched again
                         (at most three times in all), and an unknown outcome may be reconciled, once

What a leaf means is decided here and handed on as an `Occurrence`, so that budgets and admissions are judged from the
same reading. Memory does not grow with the log: what is known of a call is kept in a private database without a name.
"""

import hashlib
import json
import sqlite3
from dataclasses import dataclass
from enum import Enum
from typing import Any

from verify.authority import BUILT_IN_SERVERS, MAILBOX_SERVER, Authority, Process
from verify.findings import Findings
from verify.responses import NOT_DISPATCHED, require_state
from verify.verdict import VerifyError

MAX_DISPATCHES = 3
LATE = "an answer came late"
QUARANTINED = "quarantined: "

_REFUSED, _COMPLETED, _DISPATCHED, _COMPENSATED, _UNKNOWN, _RECONCILED, _GIVEN_UP = (
    "refused", "completed", "dispatched", "compensated", "unknown", "reconciled", "quarantined",
)  # fmt: skip
# Which check refuses for which reason (docs/formats.md, "Receipt").
_GUARD_OF = {
    "revoked": "revocation",
    "expired": "expiry",
    "out_of_scope": "grant",
    "constraint_violated": "constraints",
    "invocations_exhausted": "invocations",
    "invalid_arguments": "mailbox",
    "message_conflict": "mailbox",
}
_GUARDS = ("budget", "revocation", "expiry", "grant", "constraints", "invocations")


class Event(Enum):
    """What one leaf is in the life of a call."""

    REFUSED = "refused"
    RAN = "a built-in tool ran"
    ADMITTED = "dispatched"
    REPEATED = "dispatched again, since it had not been sent"
    REPEATED_READ = "a pure read dispatched again"
    ANSWERED = "answered"
    NOT_SENT = "provably not sent"
    LOST = "outcome unknown"


NEW = frozenset({Event.REFUSED, Event.RAN, Event.ADMITTED})
ADMISSIONS = frozenset({Event.RAN, Event.ADMITTED, Event.REPEATED, Event.REPEATED_READ})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf in its place. `since_ms` is the newest time before it: what it records was decided no earlier."""

    index: int
    kind: str
    body: dict[str, Any]
    since_ms: int
    text: bytes
    id: str | None = None  # of a signed record

    @property
    def place(self) -> str:
        return f"leaf {self.index}"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One event of one call, and what its leaf says of it."""

    event: Event
    leaf: Leaf
    process: Process
    key: bytes
    call: dict[str, Any]
    server: str
    tool: str
    capability_id: str
    attempt: dict[str, Any] | None


class CallTable:
    """What is known of each call: a state and what later leaves must agree with.

    An SQLite database without a name is a temporary file that nobody else can open, behind a small cache.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._run("PRAGMA journal_mode = off")
        self._run("PRAGMA cache_size = -16000")
        self._run("CREATE TABLE call (key BLOB PRIMARY KEY, state TEXT, row TEXT) WITHOUT ROWID")

    def get(self, key: bytes) -> dict[str, Any] | None:
        found = self._run("SELECT row FROM call WHERE key = ?", key)
        row: dict[str, Any] | None = json.loads(found[0][0]) if found else None
        return row

    def put(self, key: bytes, row: dict[str, Any]) -> None:
        self._run("INSERT OR REPLACE INTO call VALUES (?, ?, ?)", key, row["state"], json.dumps(row))

    def open_calls(self) -> list[dict[str, Any]]:
        """A few of the calls that were dispatched and never settled."""
        return [json.loads(row[0]) for row in self._run("SELECT row FROM call WHERE state = ? LIMIT 10", _DISPATCHED)]

    def count(self, state: str) -> int:
        """How many calls are in a state."""
        return int(self._run("SELECT count(*) FROM call WHERE state = ?", state)[0][0])

    def close(self) -> None:
        self._database.close()

    def _run(self, statement: str, *values: bytes | str) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            fix = "make room in the folder for temporary files, or name another with TMPDIR"
            raise VerifyError(f"what was read cannot be kept: {error}", check="input", fix=fix) from error


class History:
    """Reads the leaves of calls one after the other. Contradictions go to `findings`."""

    CHECKS = ("bindings", "dispatches", "decisions", "statements")

    def __init__(self, authority: Authority, findings: Findings) -> None:
        self._authority = authority
        self._findings = findings
        self.table = CallTable()
        self._owed: str | None = None  # request id of an unknown outcome whose incident has to be the next leaf
        self.reconciled = 0
        self.unknown = 0  # calls whose outcome nobody knows or has stated, at the log's end

    def read(self, leaf: Leaf) -> Occurrence | None:
        """The leaf as an event of a call; None for any other leaf, and for one that makes no sense."""
        owed, self._owed = self._owed, None
        said = leaf.body["call"]["request_id"] if leaf.kind == "incident" and "call" in leaf.body else None
        if owed is not None and said != owed:
            self._findings.fail("statements", "no incident follows the receipt of an unknown outcome", leaf.place)
        match leaf.kind:
            case "intent" | "receipt":
                return self._event(leaf)
            case "incident" if "call" in leaf.body:
                self._incident(leaf, said == owed)
            case "reconciliation":
                self._reconciliation(leaf)
        return None

    def close(self, size: int) -> None:
        """At the log's end nothing may be on its way: whoever wrote the bundle had settled it."""
        if self._owed is not None:
            self._findings.fail("statements", "no incident follows the receipt of an unknown outcome", f"leaf {size}")
        for row in self.table.open_calls():
            named = f"`{row['call']['operation_key']}` of {row['call']['process_id']}"
            why = f"{named} was dispatched, and no outcome of it is in the log"
            self._findings.fail("dispatches", why, f"leaf {row['at']}")
        self.unknown = self.table.count(_UNKNOWN)
        self.table.close()

    # --- one call's leaves ---------------------------------------------------------------------------------------

    def _event(self, leaf: Leaf) -> Occurrence | None:
        body, call = leaf.body, leaf.body["call"]
        process = self._authority.processes.get(call["process_id"])
        if process is None:
            self._findings.fail("bindings", f"a call of `{call['process_id']}`, which is no process here", leaf.place)
            return None
        intent = leaf.kind == "intent"
        server, tool = (body["server"], body["tool"]) if intent else (body["tool_server"], body["tool_name"])
        parameter_hash = body["parameter_hash"] if intent else body["action"]["parameter_hash"]
        key = call_key(call)
        row = self.table.get(key)
        terms = [call["binding"], body["capability_id"], server, tool, parameter_hash, call["recovery_policy"]]
        self._bind(leaf, process, terms, row)
        event = self._intended(leaf, row, server, tool, process) if intent else self._settled(leaf, row, server)
        if event is None:
            return None
        known = {
            "call": call, "terms": terms, "state": _STATES[event], "attempt": body["attempt"], "at": leaf.index,
            "grant": row["grant"] if row else None,
        }  # fmt: skip
        self.table.put(key, known)
        return Occurrence(event, leaf, process, key, call, server, tool, body["capability_id"], body["attempt"])

    def _bind(self, leaf: Leaf, process: Process, terms: list[str], row: dict[str, Any] | None) -> None:
        """Ids recomputed from what they stand for; a leaf of a known call is of the same binding, caller and route."""
        call, runtime_id = leaf.body["call"], self._authority.bootstrap["runtime_id"]
        binding, capability_id, server, tool, parameter_hash, policy = terms
        named: list[Any] = [runtime_id, process.id, call["operation_key"]]
        bound = [*named, capability_id, server, tool, parameter_hash, policy]
        if call["dispatch"] >= 2:
            named.append(call["dispatch"])
        if call["request_id"] != "process:" + _digest(named):
            self._findings.fail("bindings", "the request id is not this call's", leaf.place)
        if binding != _digest(bound):
            self._findings.fail("bindings", "the binding is not this call's", leaf.place)
        if capability_id != process.capability.id:
            self._findings.fail("bindings", f"made with a capability that is not that of `{process.id}`", leaf.place)
        if row is not None and row["terms"] != terms:
            self._findings.fail("bindings", "another binding, caller, route or arguments under a known key", leaf.place)

    def _intended(
        self, leaf: Leaf, row: dict[str, Any] | None, server: str, tool: str, process: Process
    ) -> Event | None:
        dispatch = leaf.body["call"]["dispatch"]
        if server in BUILT_IN_SERVERS:
            return self._refuse(leaf, "an intent of a built-in tool")
        if row is None:
            return Event.ADMITTED if dispatch == 1 else self._refuse(leaf, f"dispatch {dispatch} of an unknown call")
        if dispatch != row["call"]["dispatch"] + 1 or dispatch > MAX_DISPATCHES:
            return self._refuse(leaf, f"dispatch {dispatch} after dispatch {row['call']['dispatch']}")
        if row["state"] == _COMPENSATED:
            return Event.REPEATED
        if row["state"] == _UNKNOWN and self._is_eligible_read(leaf, server, tool, process):
            return Event.REPEATED_READ
        return self._refuse(leaf, f"a second dispatch of a call that is {row['state']}")

    def _is_eligible_read(self, leaf: Leaf, server: str, tool: str, process: Process) -> bool:
        grants = [process.grants[position] for position in process.covering(server, tool)]
        return (
            leaf.body["call"]["recovery_policy"] == "default"
            and self._authority.is_read(server, tool)
            and all(grant["max_invocations"] is None and not grant["constraints"] for grant in grants)
        )

    def _settled(self, leaf: Leaf, row: dict[str, Any] | None, server: str) -> Event | None:
        body, dispatch = leaf.body, leaf.body["call"]["dispatch"]
        verdict = body["decision"]["verdict"]
        sent = verdict != "deny" and server not in BUILT_IN_SERVERS
        self._decided(leaf, sent)
        if not sent:
            if row is not None:
                return self._refuse(leaf, f"a second receipt of a call that is {row['state']}")
            if verdict == "incomplete" or dispatch != 1:
                return self._refuse(leaf, "a built-in tool or a refusal is never dispatched")
            return Event.REFUSED if verdict == "deny" else Event.RAN
        if row is None or row["state"] != _DISPATCHED or row["call"]["dispatch"] != dispatch:
            return self._refuse(leaf, "an outcome of a call that was not on its way")
        if row["attempt"] != body["attempt"]:
            self._findings.fail("bindings", "the receipt names another attempt than the intent", leaf.place)
        if verdict == "allow":
            return Event.ANSWERED
        if body["decision"].get("reason") == NOT_DISPATCHED:
            return Event.NOT_SENT
        self._owed = body["call"]["request_id"]
        return Event.LOST

    def _decided(self, leaf: Leaf, sent: bool) -> None:
        """Terminal state, reasons, output and evidence are those of the decision."""
        body = leaf.body
        try:
            require_state(body)
        except VerifyError as error:
            self._findings.refused("decisions", error, leaf.place)
            return
        guard = body["decision"].get("guard")
        passed = [(at["guard"], at["passed"]) for at in body["evidence"]]
        expected = [(name, True) for name in _GUARDS]
        if guard in _GUARDS:
            expected = [*expected[: _GUARDS.index(guard)], (guard, False)]
        elif guard == "mailbox":
            expected.append((guard, False))
        if sent:
            expected.append(("dispatch", body["decision"]["verdict"] == "allow"))
        denied = body["decision"]["verdict"] == "deny"
        known = _GUARD_OF.get(body["decision"].get("reason", "")) == guard if denied else guard is None
        if guard == "mailbox" and body["tool_server"] != MAILBOX_SERVER:
            self._findings.fail("decisions", "a mailbox refused a call of another server", leaf.place)
        if body["policy_hash"] != self._authority.bootstrap["policy_digest"]:
            self._findings.fail("decisions", "decided under another policy than the pinned one", leaf.place)
        if not known or passed != expected:
            self._findings.fail("decisions", "the evidence is not that of the decision", leaf.place)

    # --- what is said beside it ----------------------------------------------------------------------------------

    def _incident(self, leaf: Leaf, owed: bool) -> None:
        call, detail = leaf.body["call"], leaf.body["detail"]
        row = self.table.get(call_key(call))
        if row is None or row["call"] != call:
            self._findings.fail("statements", "an incident of a call that is not in the log", leaf.place)
            return
        if detail.startswith(QUARANTINED):
            fits = row["state"] == _DISPATCHED
            self.table.put(call_key(call), {**row, "state": _GIVEN_UP})
        else:
            late = detail == LATE
            answered = {"answer_bytes", "answer_sha256"} & set(leaf.body)
            fits = row["state"] in (_UNKNOWN, _RECONCILED) and (late if answered else owed) and len(answered) != 1
        if not fits:
            self._findings.fail("statements", f"an incident that a {row['state']} call cannot have", leaf.place)

    def _reconciliation(self, leaf: Leaf) -> None:
        call = leaf.body["call"]
        row = self.table.get(call_key(call))
        if row is None or row["call"] != call:
            self._findings.fail("statements", "a reconciliation of a call that is not in the log", leaf.place)
            return
        if row["state"] != _UNKNOWN:
            self._findings.fail("statements", f"a reconciliation of a call that is {row['state']}", leaf.place)
        self.table.put(call_key(call), {**row, "state": _RECONCILED})
        self.reconciled += 1

    def _refuse(self, leaf: Leaf, why: str) -> Event | None:
        self._findings.fail("dispatches", why, leaf.place)
        return None


_STATES = {
    Event.REFUSED: _REFUSED,
    Event.RAN: _COMPLETED,
    Event.ADMITTED: _DISPATCHED,
    Event.REPEATED: _DISPATCHED,
    Event.REPEATED_READ: _DISPATCHED,
    Event.ANSWERED: _COMPLETED,
    Event.NOT_SENT: _COMPENSATED,
    Event.LOST: _UNKNOWN,
}


def call_key(call: dict[str, Any]) -> bytes:
    """One call, whatever its dispatch: its process and operation key."""
    return hashlib.sha256(f"{call['process_id']}\0{call['operation_key']}".encode()).digest()


def _digest(named: list[Any]) -> str:
    """sha256 of the JCS of an array of texts and small whole numbers, which json writes as RFC 8785 does."""
    return hashlib.sha256(json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
