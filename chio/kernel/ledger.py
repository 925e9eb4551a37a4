"""What one commit writes about calls: the decision, its rows, its receipt and its leaves.

`invoke` runs inside the writer's commit and is the only way a call comes into being or is replayed; `settle` moves a
call that was dispatched, for the normal path and for recovery alike. Both look every move up in the one table
(`chio.kernel.calls`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any, Protocol

import orjson

from chio import canonical
from chio.errors import StateError
from chio.kernel import receipts
from chio.kernel.admission import EVIDENCE, GUARD_OF, Facts, Verdict, decide
from chio.kernel.calls import MAX_DISPATCHES, OUTCOMES, TRANSITIONS, Counts, Event, State, transition
from chio.kernel.clock import Clock
from chio.kernel.constraints import Constraints
from chio.kernel.counters import AMBIGUOUS, Counters
from chio.kernel.grants import MAILBOX_SERVER, covering
from chio.kernel.invocations import (
    Answer,
    Caller,
    CallError,
    Dispatch,
    Down,
    Live,
    Request,
    attempt_members,
    call_members,
    debited,
    intent_body,
    result_text,
    terminal_state,
)
from chio.kernel.log import Log, leaf_hash
from chio.kernel.mailboxes import Mailboxes, Refused, Waiting
from chio.kernel.store import CallRow, Store
from chio.kernel.tree import Node, Tree
from chio.signing import RecordType, SigningKey, signed_text


class Servers(Protocol):
    """What the decision knows of tool servers: `chio.tools.router.Router`."""

    def has(self, server: str, tool: str) -> bool: ...

    def is_read(self, server: str, tool: str) -> bool: ...

    def is_up(self, server: str) -> bool: ...


class Ledger:
    """Appends to the log and writes calls, always inside a commit that the writer has opened or opens on demand.

    `open_commit` is called before the first write of an item: reads and replays never start a transaction.
    """

    def __init__(
        self,
        store: Store,
        log: Log,
        tree: Tree,
        mailboxes: Mailboxes,
        clock: Clock,
        key: SigningKey,
        *,
        runtime_id: str,
        policy_hash: str,
        servers: Servers,
        counters: Counters,
        replay_only: bool,
        open_commit: Callable[[], None],
        has_room: Callable[[], bool],
    ) -> None:
        self._store = store
        self._log = log
        self._tree = tree
        self._mailboxes = mailboxes
        self._clock = clock
        self._key = key
        self._runtime_id = runtime_id
        self._policy_hash = policy_hash
        self._servers = servers
        self._counters = counters
        self.replay_only = replay_only  # restored from a backup, and the operator has not accepted it yet
        self._open_commit = open_commit
        self._has_room = has_room
        self._constraints = Constraints()
        self._quarantined = store.quarantined()

    # --- the log -------------------------------------------------------------------------------------------------

    def append(
        self, kind: str, body: bytes, signature: str | None = None, disclosed: tuple[str, bytes] | None = None
    ) -> int:
        """One typed leaf; its index. `disclosed`: whose it is, and the text."""
        self._open_commit()
        hashed = leaf_hash(kind, body, signature)
        index = self._log.append(hashed)
        self._store.put_leaf(index, kind, body, signature, hashed, disclosed)
        return index

    def record(self, kind: str, members: dict[str, Any]) -> int:
        """An unsigned leaf of ours: schema, runtime and time are added."""
        body = {"schema": f"chio.{kind}.v1", "runtime_id": self._runtime_id, "time_ms": self._clock.now_ms(), **members}
        return self.append(kind, canonical.encode(body))

    def signed_record(self, kind: RecordType, members: dict[str, Any]) -> tuple[str, bytes]:
        """A signed leaf (launch, exit); its id and its signed text."""
        body = canonical.encode(
            {"schema": f"chio.{kind}.v1", "runtime_id": self._runtime_id, "time_ms": self._clock.now_ms(), **members}
        )
        signature, identity = self._key.sign(kind, body)
        self.append(kind, body, signature)
        return identity, signed_text(body, signature)

    def sign_observation(self, body: bytes) -> str:
        """The signature of an observation, which stands alone: it is no leaf."""
        signature, _ = self._key.sign("observation", body)
        return signature

    # --- a call --------------------------------------------------------------------------------------------------

    def invoke(self, caller: Caller, request: Request, *, may_wait: bool) -> Answer | Waiting | Dispatch | Live | Down:
        """Decide one call: replay it, refuse it, run a built-in tool, write the intent of an external one.

        `Waiting`, `Live` and `Down` wrote nothing: the caller comes again when there is something new. `CallError`.
        """
        node = caller.node
        if self._quarantined and (node.id, request.key) in self._quarantined:
            raise CallError("runtime_error")
        known = self._store.find_call(node.id, request.key)
        if known is not None and not known.parameter_salt:  # its row does not open
            raise CallError("runtime_error")
        salt = known.parameter_salt if known else secrets.token_bytes(receipts.SALT_BYTES)
        parameter_hash = receipts.commitment(salt, request.parameters)
        binding = receipts.binding(
            self._runtime_id,
            node.id,
            request.key,
            node.capability.id,
            request.server,
            request.tool,
            parameter_hash,
            request.recovery_policy,
        )
        facts = self._facts(node, request, known, binding)
        decision = decide(facts)
        if decision.verdict is Verdict.REPLAY and known is not None:
            return self._repeat(known, caller, request, facts)
        if decision.verdict in (Verdict.CANCELLED, Verdict.CONFLICT, Verdict.LIMIT_REACHED):
            raise CallError(decision.verdict.value)
        if self.replay_only:
            raise CallError("runtime_error")
        call = self._new_call(caller, request, salt, parameter_hash, binding)
        checks = EVIDENCE[decision.verdict]
        if decision.grant is None:
            call.reason = decision.verdict.value
            return self._enter(call, node, Event.REFUSED, request.parameters, checks, GUARD_OF[decision.verdict])
        if request.server == MAILBOX_SERVER:
            return self._built_in(call, node, request, decision.grant, checks, may_wait)
        if not self._servers.is_up(request.server):
            return Down(request.server)
        self._require_room()
        self._dispatch(call, None, Event.ADMITTED, node, request.parameters, decision.grant)
        return Dispatch(call)

    def _facts(self, node: Node, request: Request, known: CallRow | None, binding: str) -> Facts:
        return Facts(
            running=all(above.running for above in node.path),
            known_binding=known.binding if known else None,
            binding=binding,
            budget=node.budget(),
            chain=node.chain,
            revoked=self._tree.revoked,
            now_ms=self._clock.now_ms(),
            server=request.server,
            tool=request.tool,
            tool_exists=self._tool_exists(request),
            constraints_hold=lambda position: self._constraints.hold(node.capability, position, request.arguments),
            invocations_left=lambda position: self._invocations_left(node, position),
        )

    def _new_call(self, caller: Caller, request: Request, salt: bytes, parameter_hash: str, binding: str) -> CallRow:
        node = caller.node
        return CallRow(
            process=node.id,
            operation_key=request.key,
            state=State.REFUSED,
            server=request.server,
            tool=request.tool,
            recovery_policy=request.recovery_policy,
            binding=binding,
            parameter_salt=salt,
            parameter_hash=parameter_hash,
            parameters=None,
            dispatch=1,
            request_id=receipts.request_id(self._runtime_id, node.id, request.key, 1),
            attempt=caller.attempt,
            launch_id=caller.launch_id,
            debited=None,
            reason=None,
            output=None,
            receipt=None,
        )

    def _tool_exists(self, request: Request) -> bool:
        if request.server == MAILBOX_SERVER:
            return self._mailboxes.has(request.tool)
        return self._servers.has(request.server, request.tool)

    def _repeat(self, call: CallRow, caller: Caller, request: Request, facts: Facts) -> Answer | Dispatch | Live | Down:
        """A known key with the same binding: its outcome again, or where the table allows it another dispatch."""
        if call.state is State.DISPATCHED:
            return Live(call)
        event = self._repeat_event(call, caller.node)
        if event is None or self.replay_only:
            return self._replay(call)
        # Every check but counting is made again; a repeat that one refuses replays what is retained.
        decision = decide(replace(facts, known_binding=None, budget=[]))
        if decision.grant is None:
            transition(call.state, Event.REPEAT_REFUSED)
            return self._replay(call)
        if not self._servers.is_up(call.server):
            return Down(call.server)
        self._require_room()
        call.dispatch += 1
        call.request_id = receipts.request_id(self._runtime_id, call.process, call.operation_key, call.dispatch)
        call.attempt, call.launch_id = caller.attempt, caller.launch_id
        self._dispatch(call, call.state, event, caller.node, request.parameters, decision.grant)
        return Dispatch(call)

    def _repeat_event(self, call: CallRow, node: Node) -> Event | None:
        """What a repeat of a settled call is: another dispatch, or (None) only its retained outcome."""
        if call.dispatch >= MAX_DISPATCHES:
            return None
        if call.state is State.COMPENSATED:
            return Event.REPEATED
        if call.state is not State.UNKNOWN or call.recovery_policy != "default":
            return None
        if not self._servers.is_read(call.server, call.tool):
            return None
        grants = [
            node.capability.body.grants[position] for position in covering(node.capability, call.server, call.tool)
        ]
        stateless = all(grant.max_invocations is None and not grant.constraints for grant in grants)
        return Event.REPEATED_READ if stateless else None

    def _dispatch(
        self, call: CallRow, before: State | None, event: Event, node: Node, parameters: bytes, grant: int
    ) -> None:
        """The intent and its debits, in the commit that must be on disk before the first byte is sent."""
        self._open_commit()
        move = transition(before, event)
        call.state, call.parameters, call.receipt, call.output, call.reason = move.to, parameters, None, None, None
        debits = node.debit_path(grant) if Counts.GRANTS in move.counts else []
        call.debited = debited(debits)
        for leaf in move.leaves:
            self.append(leaf, canonical.encode_plain(intent_body(call, node)))
        self._count(move.counts, node, debits)
        if before is None:
            self._store.put_call(call)
        else:
            self._store.move_call(call, before)

    def _require_room(self) -> None:
        """Room for outcomes is kept: when the disk is nearly full, new intents are the first thing that is refused."""
        if not self._has_room():
            raise CallError("runtime_error")

    def _built_in(
        self,
        call: CallRow,
        node: Node,
        request: Request,
        grant: int,
        checks: tuple[dict[str, object], ...],
        may_wait: bool,
    ) -> Answer | Waiting:
        ran = self._mailboxes.run(request.tool, request.arguments, node.id, request.plain, may_wait)
        if isinstance(ran, Waiting):
            return ran
        if isinstance(ran, Refused):
            call.reason = ran.reason
            checks = (*checks, {"guard": "mailbox", "passed": False, "detail": ran.detail})
            return self._enter(call, node, Event.REFUSED, request.parameters, checks, "mailbox")
        self._open_commit()
        if ran.write is not None:
            ran.write()
        call.output = ran.output
        debits = node.debit_path(grant)
        call.debited = debited(debits)
        answer = self._enter(call, node, Event.BUILT_IN_RAN, request.parameters, checks, None, debits)
        return Answer(answer.result, answer.receipt, ran.wakes)

    def _enter(
        self,
        call: CallRow,
        node: Node,
        event: Event,
        parameters: bytes,
        checks: tuple[dict[str, object], ...],
        guard: str | None,
        debits: list[tuple[Node, int, int]] | None = None,
    ) -> Answer:
        """Write a call that is decided at once: its row, its debits, its receipt."""
        self._open_commit()
        move = transition(None, event)
        call.state = move.to
        receipt = self._receipt(call, node, parameters, checks, guard)
        self._count(move.counts, node, debits or [])
        self._store.put_call(call)
        return Answer(result_text(call, receipt), receipt)

    def _count(self, counts: Counts, node: Node, debits: list[tuple[Node, int, int]]) -> None:
        if Counts.CALL in counts:
            self._store.debit_calls(above.id for above in node.path)
            for above in node.path:
                above.calls += 1
        if Counts.GRANTS in counts:
            for at, position, _ in debits:
                self._store.debit_grant(at.id, position, 1)

    def settle(self, call: CallRow, event: Event, detail: str, output: bytes | None = None) -> Answer:
        """Move a dispatched call: its row, its refund, its receipt, its incident. What its repeats are answered."""
        before = call.state
        move = transition(before, event)
        node = self._tree[call.process]
        parameters = call.parameters
        if parameters is None:
            raise CallError("runtime_error")
        self._open_commit()
        call.state, call.parameters, call.output = move.to, None, output
        call.reason = OUTCOMES[move.to].terminal_reason
        checks = (
            *EVIDENCE[Verdict.ADMITTED],
            {"guard": "dispatch", "passed": move.to is State.COMPLETED, "detail": detail},
        )
        receipt = b""
        for leaf in move.leaves:
            if leaf == "receipt":
                receipt = self._receipt(call, node, parameters, checks, None)
            else:
                self.incident(call, detail)
        if Counts.REFUND in move.counts:
            for name, position in orjson.loads(call.debited or "[]"):
                self._store.debit_grant(name, position, -1)
        if event is Event.FOUND_AT_START:
            self._counters.add(call.process, AMBIGUOUS)
        self._store.move_call(call, before)
        return Answer(result_text(call, receipt), receipt)

    def incident(self, call: CallRow, detail: str, **members: Any) -> None:
        """Something that a reviewer of this call should know, beside its receipt."""
        self.record("incident", {"call": call_members(call), "detail": detail, **members})

    def damage(self, call: CallRow) -> str | None:
        """Why a dispatched row cannot be believed, held against what its intent was made of; None if it can."""
        node = self._tree.nodes.get(call.process)
        if node is None:
            return "its process is none of this host's"
        if call.parameters is None or receipts.commitment(call.parameter_salt, call.parameters) != call.parameter_hash:
            return "its parameters are not those that were committed to"
        binding = receipts.binding(
            self._runtime_id,
            call.process,
            call.operation_key,
            node.capability.id,
            call.server,
            call.tool,
            call.parameter_hash,
            call.recovery_policy,
        )
        named = receipts.request_id(self._runtime_id, call.process, call.operation_key, call.dispatch)
        if (binding, named) != (call.binding, call.request_id):
            return "its binding or its request id is another call's"
        try:
            debits = orjson.loads(call.debited or "[]")
        except orjson.JSONDecodeError:
            return "its debits cannot be read"
        known = type(debits) is list and all(
            type(debit) is list and len(debit) == 2 and debit[0] in self._tree.nodes and type(debit[1]) is int
            for debit in debits
        )
        return None if known else "its debits are none of this host's"

    def quarantine(self, call: CallRow, why: str) -> None:
        """Leave a damaged row as it is, for good: said once in the log, and a `runtime_error` to whoever repeats it."""
        self._open_commit()
        self._store.quarantine(call.process, call.operation_key, why)
        self._quarantined.add((call.process, call.operation_key))
        self.incident(call, f"quarantined: {why}")

    def reconcile(self, process: str, key: str, outcome: str, by: str, evidence_sha256: str) -> dict[str, Any]:
        """Record what the operator says became of an unknown call. Raises `StateError` for any other call."""
        call = self._store.find_call(process, key)
        if call is None or (call.state, Event.RECONCILED) not in TRANSITIONS:
            raise StateError(
                "only a call whose outcome is unknown can be reconciled",
                field="--key",
                why=f"`{key}` of {process} is {call.state.value if call else 'no call of that process'}",
                fix="see `chio process status`",
            )
        before, move = call.state, transition(call.state, Event.RECONCILED)
        self._open_commit()
        record = {"call": call_members(call), "outcome": outcome, "by": by, "evidence_sha256": evidence_sha256}
        indexes = [self.record(leaf, record) for leaf in move.leaves]
        call.state = move.to
        call.reconciliation = canonical.encode({"outcome": outcome, "by": by, "record": indexes[0]}).decode()
        self._store.move_call(call, before)
        return {"reconciliation": record, "log_index": indexes[0]}

    def late_answer(self, process: str, key: str, dispatch: int, result: bytes) -> None:
        """An answer after the call was given up: recorded, and the outcome stays what it is."""
        call = self._store.find_call(process, key)
        if call is None or call.dispatch != dispatch or (call.state, Event.LATE_ANSWER) not in TRANSITIONS:
            return
        for _leaf in transition(call.state, Event.LATE_ANSWER).leaves:
            self.incident(
                call, "an answer came late", answer_bytes=len(result), answer_sha256=sha256(result).hexdigest()
            )

    def _invocations_left(self, node: Node, grant: int) -> bool:
        return all(self._store.grant_used(at.id, position) < most for at, position, most in node.debit_path(grant))

    def retained(self, call: CallRow) -> Answer:
        """What every repeat of a settled call is answered."""
        return self._replay(call)

    def _replay(self, call: CallRow) -> Answer:
        if call.receipt is None:
            raise CallError("runtime_error")
        kind, body, signature = self._store.leaf(call.receipt)
        disclosed = self._store.disclosed(call.receipt, call.process)
        if kind != "receipt" or disclosed is None or not _answers(call, body, disclosed):
            raise CallError("runtime_error")
        receipt = receipts.text(body.encode(), disclosed, (signature or "").encode())
        return Answer(result_text(call, receipt), receipt)

    def _receipt(
        self, call: CallRow, node: Node, parameters: bytes, checks: tuple[dict[str, object], ...], guard: str | None
    ) -> bytes:
        """Sign and append the receipt of a call in its new state; its text. Sets `call.receipt`."""
        outcome = OUTCOMES[call.state]
        decision: dict[str, Any] = {"verdict": outcome.decision}
        if call.reason is not None:
            decision["reason"] = call.reason
        if guard is not None:
            decision["guard"] = guard
        output_salt = secrets.token_bytes(receipts.SALT_BYTES) if call.output is not None else None
        output = None
        if call.output is not None and output_salt is not None:
            kind = orjson.loads(call.output)["kind"] if not call.output.startswith(b'{"kind":"value"') else "value"
            output = {"kind": kind, "hash": receipts.commitment(output_salt, call.output)}
        body = canonical.encode_plain(
            {
                "schema": receipts.SCHEMA,
                "runtime_id": self._runtime_id,
                "log_index": self._log.size,
                "time_ms": self._clock.now_ms(),
                "capability_id": node.capability.id,
                "tool_server": call.server,
                "tool_name": call.tool,
                "action": {"parameter_hash": call.parameter_hash},
                "decision": decision,
                "terminal_state": terminal_state(call),
                "output": output,
                "policy_hash": self._policy_hash,
                "call": call_members(call),
                "attempt": attempt_members(call),
                "evidence": checks,
                "kernel_key": self._key.public,
            }
        )
        disclosed = receipts.disclosed(parameters, call.parameter_salt, output_salt)
        signature, _ = self._key.sign("receipt", body)
        call.receipt = self.append("receipt", body, signature, (call.process, disclosed))
        return receipts.text(body, disclosed, signature.encode())


def _answers(call: CallRow, body: str, disclosed: bytes) -> bool:
    """Whether a receipt is this call's, and its output the one that the receipt commits to."""
    try:
        receipt = orjson.loads(body)
        salt = orjson.loads(disclosed).get("output_salt")
    except orjson.JSONDecodeError:
        return False
    if receipt["call"] != call_members(call) or receipt["decision"]["verdict"] != OUTCOMES[call.state].decision:
        return False
    if call.output is None or receipt["output"] is None or salt is None:
        return (call.output is None) == (receipt["output"] is None)
    return bool(receipt["output"]["hash"] == receipts.commitment(bytes.fromhex(salt), call.output))
