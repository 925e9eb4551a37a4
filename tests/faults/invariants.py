"""What must hold of a Chio state whatever was cut off: one function per invariant, used by every scenario of Chio's.

The checks of rows (`ROWS`) need only a snapshot and the exchanges; a power cut's states are judged by the same ones.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tests.faults.exchanges import Exchange
from tests.faults.snapshot import Row, Snapshot
from verify.keys import Pins
from verify.log import leaf_hash, root_of, verify_checkpoint
from verify.verdict import VerifyError

MAX_DISPATCHES = 3
MAILBOXES = "chio-ipc"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the checks of rows judge. `exchanges` in the order of the answers over all runs; `notes`: every log
    checkpoint that was ever seen, in the state or outside; `reads`: (server, tool) of the tools pinned as free of side
    effects."""

    snapshot: Snapshot
    pins: Pins
    exchanges: list[Exchange]
    notes: frozenset[str] = frozenset()
    reads: frozenset[tuple[str, str]] = frozenset()

    @property
    def sealed(self) -> bool:
        """Whether what workers stored is encrypted: then its rows are counted, and not read."""
        return bool(self.snapshot["data_key"])


def processes(snapshot: Snapshot) -> dict[str, str]:
    """The process of each credential's digest (hex)."""
    found = {row["credential"].hex(): row["process"] for row in snapshot["attempt"]}
    return found | {row["digest"].hex(): row["process"] for row in snapshot["credential"]}


def answered_text(text: str, facts: Facts) -> str:
    """The part of a receipt's text that the log keeps for ever: all of it, unless what it discloses is encrypted."""
    return text if not facts.sealed else text.partition(',"disclosed":')[0] + text[text.rindex(',"signature":') :]


def receipt_text(leaf: Row, facts: Facts) -> str:
    disclosed = "" if facts.sealed else f',"disclosed":{leaf["disclosed"].decode()}'
    return f'{{"body":{leaf["body"]}{disclosed},"signature":"{leaf["signature"]}"}}'


# --- acknowledged ----------------------------------------------------------------------------------------------------


def acknowledged(facts: Facts) -> list[str]:
    """Everything that was answered is there."""
    snapshot, names = facts.snapshot, processes(facts.snapshot)
    receipts = {receipt_text(leaf, facts) for leaf in snapshot["leaf"] if leaf["type"] == "receipt"}
    wrong = []
    for exchange in facts.exchanges:
        if not exchange.ok:
            continue
        if not exchange.digest:
            wrong += _host_was_told(exchange, snapshot)
        elif exchange.digest not in names:
            wrong.append(f"{exchange.op}: answered to a credential that the state does not know")
        else:
            wrong += _worker_was_told(exchange, facts, names[exchange.digest], receipts)
    return wrong


def _worker_was_told(exchange: Exchange, facts: Facts, name: str, receipts: set[str]) -> list[str]:
    result, request, snapshot = exchange.result, exchange.request, facts.snapshot
    if exchange.op == "invoke":
        there = answered_text(result["receipt_json"], facts) in receipts
        return [] if there else [f"invoke {name}/{request['operation_key']}: its receipt is not in the log"]
    if exchange.op in ("checkpoint", "inspect"):
        told = result if exchange.op == "checkpoint" else result["checkpoint"]
        kept = {row["process"]: row for row in snapshot["worker_checkpoint"]}.get(name)
        revision = int(kept["revision"]) if kept else 0
        same = revision == int(told["revision"]) and (not kept or json.loads(kept["value"]) == told["value"])
        if revision > int(told["revision"]) or same:
            return []
        return [f"{exchange.op} {name}: revision {told['revision']} was answered, {revision} is there"]
    if exchange.op == "blob_put":
        digest = request["sha256"]
        data = [row["data"] for row in snapshot["blob"] if (row["process"], row["sha256"]) == (name, digest)]
        sound = bool(data) and sha256(data[0]).hexdigest() == digest
        return [] if sound else [f"blob_put {name}: {request['sha256'][:12]} is missing or other bytes"]
    if exchange.op == "blob_read":
        sound = sha256(b64decode(result["data_base64"])).hexdigest() == request["sha256"]
        return [] if sound else [f"blob_read {name}: other bytes than {request['sha256'][:12]}"]
    if exchange.op == "cancel":
        return _cancelled(snapshot, name)
    return [f"{exchange.op}: nothing is known of what it promises"]


def _cancelled(snapshot: Snapshot, name: str) -> list[str]:
    states = {row["id"]: row["state"] for row in snapshot["process"]}
    return [] if states[name] == "cancelled" else [f"cancel {name}: it is {states[name]}"]


def _host_was_told(exchange: Exchange, snapshot: Snapshot) -> list[str]:
    request, answer, op = exchange.request, exchange.answer, exchange.op
    name = request.get("process", "")
    rows = {(row["process"], row["number"]): row for row in snapshot["attempt"]}
    attempt = rows.get((name, request.get("number", answer.get("number", 0))))
    wrong: dict[str, bool] = {
        "reserve": attempt is None,
        "launched": attempt is None or attempt["launch_id"] != answer.get("launch_id"),
        "ended": attempt is None or attempt["outcome"] != request.get("outcome"),
        "settled": attempt is None or attempt["exports"] is not None,
        "restore": not snapshot.usable,
        "accept": bool(snapshot["host"]) and bool(snapshot["host"][0].get("replay_only")),
        "delete": not any(row["process"] == name and row["wrapped"] is None for row in snapshot["data_key"]),
        "freeze": request.get("plan") is not None and not snapshot["host"][0]["plan"],
        "init": not snapshot.usable,
        "reconcile": not any(
            row["reconciliation"] for row in snapshot["call"]
            if (row["process"], row["operation_key"]) == (name, request.get("key"))
        ),
        "cancel": bool(name) and op == "cancel" and bool(_cancelled(snapshot, name)),
        "revoke_capability": answer.get("capability_id") not in {r["capability_id"] for r in snapshot["revocation"]},
        "revoke": any(row["process"] == name and not row["revoked"] for row in snapshot["credential"]),
        "credential": not any(row["process"] == name for row in snapshot["credential"]),
    }  # fmt: skip
    return [f"{op} {name}: answered to the host, and not in the state"] if wrong.get(op, False) else []


# --- replies ---------------------------------------------------------------------------------------------------------


def replies(facts: Facts) -> list[str]:
    """The answers for one key are the same bytes for ever, but for what the table lets be added."""
    names = processes(facts.snapshot)
    last: dict[tuple[str, str], bytes] = {}
    wrong = []
    for exchange in facts.exchanges:
        if exchange.op != "invoke" or not exchange.ok or not exchange.digest:
            continue
        key = (names.get(exchange.digest, "?"), exchange.request["operation_key"])
        before = last.get(key)
        if before is not None and before != exchange.raw:
            old, new = (json.loads(raw)["result"] for raw in (before, exchange.raw))
            if not _may_follow(old, new, facts.reads):
                wrong.append(f"{key[0]}/{key[1]}: {_told(old)}, then {_told(new)}")
        last[key] = exchange.raw
    return wrong


def _told(result: Row) -> str:
    body = json.loads(result["receipt_json"])["body"]
    return f"{result['verdict']} {result['reason']} (dispatch {body['call']['dispatch']}, leaf {body['log_index']})"


def _may_follow(old: Row, new: Row, reads: frozenset[tuple[str, str]]) -> bool:
    if {**new, "reconciliation": None} == {**old, "reconciliation": None}:
        return old.get("reconciliation") is None  # a statement may be added, never changed
    before, after = (json.loads(result["receipt_json"])["body"] for result in (old, new))
    again: bool = before["call"]["dispatch"] < after["call"]["dispatch"] <= MAX_DISPATCHES
    if old["reason"] == "not_dispatched":
        return again
    route = (before["tool_server"], before["tool_name"])
    return again and old["reason"] == "outcome_unknown_after_dispatch" and route in reads


# --- budgets ---------------------------------------------------------------------------------------------------------


def budgets(facts: Facts) -> list[str]:
    """What is debited is what was called, at every ancestor; a refund is given once."""
    snapshot = facts.snapshot
    parents = {row["id"]: row["parent"] for row in snapshot["process"]}
    calls = dict.fromkeys(parents, 0)
    used: dict[tuple[str, int], int] = {}
    for call in snapshot["call"]:
        name = call["process"]
        while name is not None:
            calls[name] += 1
            name = parents[name]
        if call["state"] != "compensated":
            for at, position in json.loads(call["debited"] or "[]"):
                used[at, position] = used.get((at, position), 0) + 1
    wrong = []
    for row in snapshot["usage"]:
        if row["calls"] != calls[row["process"]]:
            wrong.append(f"{row['process']}: {calls[row['process']]} calls, {row['calls']} are counted")
    ceilings = {row["id"]: row["ceiling"] for row in snapshot["process"]}
    wrong += [f"{name}: {count} calls, over its {ceilings[name]}" for name, count in calls.items()
              if count > ceilings[name]]  # fmt: skip
    kept = {(row["process"], row["position"]): row["used"] for row in snapshot["grant_usage"]}
    for grant in sorted({*kept, *used}):
        if kept.get(grant, 0) != used.get(grant, 0):
            wrong.append(f"grant {grant[1]} of {grant[0]}: {used.get(grant, 0)} debits, {kept.get(grant, 0)} kept")
    return wrong


# --- log -------------------------------------------------------------------------------------------------------------


def log(facts: Facts) -> list[str]:
    """Append-only, without a gap, consistent with every checkpoint ever seen, and complete: a leaf for each
    decision."""
    leaves = facts.snapshot["leaf"]
    if [leaf["idx"] for leaf in leaves] != list(range(len(leaves))):
        return ["the log has a gap"]
    wrong, hashes = [], []
    for leaf in leaves:
        hashes.append(_hash_of(leaf, facts.pins))
        if hashes[-1] != leaf["hash"]:
            wrong.append(f"leaf {leaf['idx']}: its hash is another's")
    origin = f"chio.invalid/{facts.pins.runtime_id}"
    notes = {row["note"] for row in facts.snapshot["log_checkpoint"]} | facts.notes
    for note in notes:
        checkpoint = verify_checkpoint(note.encode(), facts.pins.log_key, origin)
        if checkpoint.size > len(hashes):
            wrong.append(f"a checkpoint over {checkpoint.size} leaves was seen, {len(hashes)} are there")
        elif root_of(hashes[: checkpoint.size]) != (checkpoint.size, checkpoint.root):
            wrong.append(f"the first {checkpoint.size} leaves are not those of a checkpoint that was seen")
    return wrong + _incomplete(facts.snapshot)


def _hash_of(leaf: Row, pins: Pins) -> bytes:
    """Of the leaf's own text, whose signature is checked; what a receipt discloses is no part of it."""
    kind, body, signature = leaf["type"], leaf["body"], leaf["signature"]
    if signature is not None:
        pins.kernel_key.verify_record(kind, body.encode(), signature)
    return leaf_hash(f'{{"body":{body},"signature":{json.dumps(signature)},"type":"{kind}"}}'.encode())


def _incomplete(snapshot: Snapshot) -> list[str]:
    """Calls, attempts and statements that the log does not tell of, each exactly as often as it must."""
    bodies = [(leaf["type"], json.loads(leaf["body"])) for leaf in snapshot["leaf"]]
    counted: dict[tuple[str, str, str], int] = {}
    for kind, body in bodies:
        if "call" in body:
            key = (kind, body["call"]["process_id"], body["call"]["operation_key"])
            counted[key] = counted.get(key, 0) + 1
    wrong = []
    for call in snapshot["call"]:
        name, key, state, n = call["process"], call["operation_key"], call["state"], call["dispatch"]
        external = call["server"] != MAILBOXES and state != "refused"
        expected = {
            "intent": n if external else 0,
            "receipt": n - (state == "dispatched"),
            "reconciliation": int(state == "reconciled"),
        }
        for kind, times in expected.items():
            if (found := counted.pop((kind, name, key), 0)) != times:
                wrong.append(f"call {name}/{key} ({state}): {found} {kind} leaves, not {times}")
        if state in ("unknown", "reconciled") and not counted.get(("incident", name, key)):
            wrong.append(f"call {name}/{key} ({state}): no incident")
    wrong += [f"a {kind} leaf of {name}/{key}, which has no call" for kind, name, key in counted if kind != "incident"]
    return wrong + _attempts_untold(snapshot, bodies)


def _attempts_untold(snapshot: Snapshot, bodies: list[tuple[str, Row]]) -> list[str]:
    told: dict[tuple[str, str, int], int] = {}
    for kind, body in bodies:
        if "process_id" in body and "attempt" in body:
            event = body.get("event", kind)
            told[event, body["process_id"], body["attempt"]] = (
                told.get((event, body["process_id"], body["attempt"]), 0) + 1
            )
    wrong = []
    for attempt in snapshot["attempt"]:
        who = (attempt["process"], attempt["number"])
        ends = told.get(("ended", *who), 0) + told.get(("exit", *who), 0)
        if ends != (attempt["state"] == "ended"):
            wrong.append(f"attempt {who} is {attempt['state']}: {ends} leaves tell its end")
        if told.get(("launch", *who), 0) != (attempt["launch_id"] is not None):
            wrong.append(f"attempt {who}: its launch is told {told.get(('launch', *who), 0)} times")
    return wrong


# --- checkpoint history, attempts ------------------------------------------------------------------------------------


def checkpoint_history(facts: Facts) -> list[str]:
    """A worker's checkpoints form one line: each revision once, each from the one before, in the order of the
    answers."""
    names, wrong = processes(facts.snapshot), []
    newest: dict[str, int] = {}
    for exchange in facts.exchanges:
        if exchange.op != "checkpoint" or not exchange.ok or not exchange.digest:
            continue
        name, revision = names.get(exchange.digest, "?"), int(exchange.result["revision"])
        if revision != int(exchange.request["expected_revision"]) + 1:
            wrong.append(f"{name}: {exchange.request['expected_revision']} was expected, {revision} made")
        if exchange.result["value"] != exchange.request["value"]:
            wrong.append(f"{name}: revision {revision} was answered with another value than it was given")
        if revision <= newest.get(name, 0):
            wrong.append(f"{name}: revision {revision} was made after {newest[name]}")
        newest[name] = max(revision, newest.get(name, 0))
    return wrong


def attempts(facts: Facts) -> list[str]:
    """Every attempt is accounted for: numbered without a gap, ended, its exports settled."""
    wrong, next_number = [], dict[str, int]()
    for row in sorted(facts.snapshot["attempt"], key=lambda row: (row["process"], row["number"])):
        expected = next_number.get(row["process"], 1)
        if row["number"] != expected:
            wrong.append(f"{row['process']}: attempt {row['number']} follows {expected - 1}")
        next_number[row["process"]] = row["number"] + 1
        if row["state"] != "ended":
            wrong.append(f"{row['process']}: attempt {row['number']} is {row['state']}")
        if row["exports"] is not None:
            wrong.append(f"{row['process']}: the exports of attempt {row['number']} are not settled")
    return wrong


def calls_settled(facts: Facts) -> list[str]:
    """Nothing stays on its way once no host lives, unless it is quarantined and reported."""
    quarantined = {(row["process"], row["operation_key"]) for row in facts.snapshot["quarantine"]}
    return [
        f"{row['process']}/{row['operation_key']} is still dispatched" for row in facts.snapshot["call"]
        if row["state"] == "dispatched" and (row["process"], row["operation_key"]) not in quarantined
    ]  # fmt: skip


def effects(facts: Facts, done: Iterable[tuple[str, str]]) -> list[str]:
    """Held against the owner's own record, a list of (process, key) of the effects that happened: at most one for a
    key, one where the call is told as completed, none where it is told as never sent."""
    happened: dict[tuple[str, str], int] = {}
    for key in done:
        happened[key] = happened.get(key, 0) + 1
    wrong = [f"{name}/{key}: {times} effects" for (name, key), times in happened.items() if times > 1]
    calls = {(row["process"], row["operation_key"]): row for row in facts.snapshot["call"]}
    wrong += [f"{name}/{key}: an effect, and no call" for name, key in happened if (name, key) not in calls]
    for key, call in calls.items():
        if call["server"] == MAILBOXES or (call["server"], call["tool"]) in facts.reads:
            continue
        if call["state"] == "completed" and not happened.get(key):
            wrong.append(f"{key[0]}/{key[1]}: told as completed, and no effect")
        if call["state"] in ("refused", "compensated") and happened.get(key):
            wrong.append(f"{key[0]}/{key[1]}: told as {call['state']}, and an effect")
    return wrong


def mailboxes(facts: Facts) -> list[str]:
    """A mailbox counts what it holds; each message, and each acknowledgement, is a call's own."""
    wrong: list[str] = []
    if facts.sealed:
        return wrong  # which message a call sent is not to be read
    calls = [row for row in facts.snapshot["call"] if row["server"] == MAILBOXES and row["state"] == "completed"]
    outputs = [(row["tool"], row["process"], json.loads(row["output"])["value"]) for row in calls]
    sent = {(tool, sender, value.get("sequence")) for tool, sender, value in outputs}
    through = {(tool, value.get("acknowledged_through", value.get("through_sequence"))) for tool, _, value in outputs}
    for box in facts.snapshot["mailbox"]:
        mine = [row for row in facts.snapshot["message"] if row["mailbox"] == box["id"]]
        pending = [row for row in mine if row["payload"] is not None]
        if [row["sequence"] for row in mine] != list(range(1, box["last_sequence"] + 1)):
            wrong.append(f"{box['id']}: its sequences have a gap")
        if box["pending_messages"] != len(pending):
            wrong.append(f"{box['id']}: {box['pending_messages']} are counted, {len(pending)} pend")
        if any((row["sequence"] <= box["acknowledged_through"]) != (row["payload"] is None) for row in mine):
            wrong.append(f"{box['id']}: an acknowledged message keeps its payload, or one that is not lost it")
        for row in mine:
            if (f"send_{box['id']}", row["sender"], str(row["sequence"])) not in sent:
                wrong.append(f"{box['id']}: message {row['sequence']} is there, and no call that sent it")
        acknowledged_through = box["acknowledged_through"]
        if acknowledged_through and (f"ack_{box['id']}", str(acknowledged_through)) not in through:
            wrong.append(f"{box['id']}: acknowledged through {acknowledged_through}, and no call that did it")
    return wrong


ROWS: dict[str, Callable[[Facts], list[str]]] = {
    "acknowledged": acknowledged,
    "replies": replies,
    "budgets": budgets,
    "log": log,
    "checkpoint_history": checkpoint_history,
    "mailboxes": mailboxes,
}
"""Hold at every moment."""

SETTLED: dict[str, Callable[[Facts], list[str]]] = {"attempts": attempts, "calls_settled": calls_settled}
"""Hold whenever a recovery is over and no host lives."""


def broken(facts: Facts, checks: dict[str, Callable[[Facts], list[str]]]) -> dict[str, list[str]]:
    """{invariant: what is wrong}, for those that do not hold."""
    if facts.snapshot.damage:
        return {"database": [facts.snapshot.damage]}
    found: dict[str, list[str]] = {}
    for name, check in checks.items():
        try:
            wrong = check(facts)
        except (ValueError, KeyError, VerifyError) as error:  # what the verifier raises, and a row that another needs
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            found[name] = wrong
    return found


def note_of(answer: dict[str, Any]) -> str | None:
    """A log checkpoint in what the host was told."""
    note = answer.get("checkpoint")
    return note if isinstance(note, str) and note.startswith("chio.invalid/") else None
