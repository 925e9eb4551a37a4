"""One call: decided in order, committed with its receipt, and the same answer for ever."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from chio.canonical import MAX_SAFE_INTEGER
from chio.kernel import receipts
from tests.kernel.serving import (
    Serving,
    State,
    Worker,
    all_of,
    child,
    code_of,
    config,
    grant,
    policy,
    result_of,
)
from verify.canonical import encode
from verify.receipts import Receipt, verify_receipt

pytestmark = pytest.mark.timeout(60)

MakeState = Callable[..., State]


def receipt_of(serving: Serving, result: dict[str, Any]) -> Receipt:
    """The receipt of a reply, verified under the pinned key."""
    pins = serving.state.pins
    return verify_receipt(result["receipt_json"].encode(), pins.kernel_key, pins.runtime_id)


def send(
    worker: Worker, key: str = "send", message: str = "m", payload: Any = 1, box: str = "jobs", **more: Any
) -> bytes:
    return worker.call(key, f"send_{box}", {"message_key": message, "payload": payload}, **more)


# --- what an answer says ---------------------------------------------------------------------------------------------


def test_an_allowed_call_returns_its_output_and_a_receipt_that_commits_to_everything(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        payload = {"items": [2, 3, 5], "é": 1.5, "😀": None}
        result = result_of(worker.line(send(worker, "key one", "first", payload)))
        receipt = receipt_of(serving, result)
        runtime_id, capability = serving.host.runtime_id, worker.connection["capability_id"]
    parameters = {"message_key": "first", "payload": payload}
    output = {"kind": "value", "value": {"status": "sent", "sequence": "1"}}
    assert result == {
        "request_id": receipts.request_id(runtime_id, "a", "key one", 1),
        "verdict": "allow",
        "output": output,
        "reason": None,
        "terminal_state": {"state": "completed"},
        "receipt_json": result["receipt_json"],
        "execution_nonce_json": None,
    }
    body, disclosed = receipt.body, receipt.disclosed
    parameter_hash = receipts.commitment(bytes.fromhex(disclosed["parameter_salt"]), encode(parameters))
    assert disclosed["parameters"] == parameters
    assert body == {
        "schema": "chio.receipt.v1",
        "runtime_id": runtime_id,
        "log_index": body["log_index"],
        "time_ms": body["time_ms"],
        "capability_id": capability,
        "tool_server": "chio-ipc",
        "tool_name": "send_jobs",
        "action": {"parameter_hash": parameter_hash},
        "decision": {"verdict": "allow"},
        "terminal_state": {"state": "completed"},
        "output": {
            "kind": "value",
            "hash": receipts.commitment(bytes.fromhex(disclosed["output_salt"]), encode(output)),
        },
        "policy_hash": state.pins.policy_digest,
        "call": {
            "process_id": "a",
            "operation_key": "key one",
            "request_id": result["request_id"],
            "binding": receipts.binding(
                runtime_id, "a", "key one", capability, "chio-ipc", "send_jobs", parameter_hash, "default"
            ),
            "dispatch": 1,
            "recovery_policy": "default",
        },
        "attempt": {"number": 1, "launch_id": None},
        "evidence": [
            {"guard": guard, "passed": True}
            for guard in ("budget", "revocation", "expiry", "grant", "constraints", "invocations")
        ],
        "kernel_key": state.pins.kernel_key.hex,
    }
    assert abs(body["time_ms"] - time.time() * 1000) < 60_000


def test_salts_are_drawn_for_each_key_so_that_equal_arguments_do_not_show(make_state: MakeState) -> None:
    with make_state().serve() as serving:
        worker = serving.worker("a")
        bodies = [
            receipt_of(serving, worker.invoke(f"key {n}", "receive_jobs", {"after_sequence": "0", "limit": 1})).body
            for n in range(2)
        ]
    assert bodies[0]["action"] != bodies[1]["action"]
    assert bodies[0]["output"]["hash"] != bodies[1]["output"]["hash"]


# --- replay and conflict ---------------------------------------------------------------------------------------------


def test_a_repeat_is_the_first_answer_byte_for_byte_and_costs_nothing(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        frames = [
            send(worker, "allowed", payload={"z": 1, "a": [1e-7, 0.1, "é"]}),
            worker.call("empty", "receive_jobs", {"after_sequence": "1", "limit": 1}),
            worker.call("out of scope", "transfer", {"amount": MAX_SAFE_INTEGER}),
            worker.call("invalid", "send_jobs", {"payload": 1}),
            send(worker, "message conflict", payload="another"),
        ]
        first = [worker.line(frame) for frame in frames]
        calls = worker.ask("inspect")["tree_calls"]
        assert [worker.line(frame) for frame in frames] == first
        again = serving.worker("a")
        moved = [frame.replace(worker.credential.encode(), again.credential.encode()) for frame in frames]
        assert [again.line(frame) for frame in moved] == first
        assert worker.ask("inspect")["tree_calls"] == calls == 5
    with state.serve() as serving:
        later = serving.worker("a")
        moved = [frame.replace(worker.credential.encode(), later.credential.encode()) for frame in frames]
        assert [later.line(frame) for frame in moved] == first
    lines = state.receipt_lines()
    assert lines == [state.shown(result_of(line)["receipt_json"].encode()) for line in first] * 4
    assert len(state.log().receipts) == 5


def test_arguments_in_another_spelling_are_the_same_call(make_state: MakeState) -> None:
    with make_state().serve() as serving:
        worker = serving.worker("a")
        text = send(worker, payload={"a": 1, "b": "é"})
        first = worker.line(text)
        assert worker.line(text.replace(b'"a": 1, "b": "\\u00e9"', '  "b": "é",   "a": 1.0 '.encode())) == first


CHANGES: dict[str, tuple[str, str]] = {
    "another tool": ("send_jobs", "receive_jobs"),
    "another server": ("chio-ipc", "billing"),
    "another payload": ('"payload": 1', '"payload": 2'),
    "one argument more": ('"payload": 1', '"payload": 1, "more": 1'),
    "known_outcome_only": ('"operation_key"', '"known_outcome_only": true, "operation_key"'),
}


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_a_key_that_is_used_for_something_else_is_a_conflict_and_the_original_stays(
    worker: Worker, old: str, new: str
) -> None:
    frame = send(worker, "key", f"by {worker.process}", 1, "m0").replace(b"send_m0", b"send_jobs")
    first = worker.line(frame)
    calls = worker.ask("inspect")["tree_calls"]
    changed = frame.replace(old.encode(), new.encode())
    assert changed != frame
    assert code_of(worker.line(changed)) == "conflict"
    assert worker.ask("inspect")["tree_calls"] == calls
    assert worker.line(frame) == first


def test_a_call_under_known_outcome_only_conflicts_with_the_same_call_without_it(make_state: MakeState) -> None:
    with make_state().serve() as serving:
        worker = serving.worker("a")
        plain, only = send(worker), send(worker, known_outcome_only=True)
        first = worker.line(only)
        assert receipt_of(serving, result_of(first)).body["call"]["recovery_policy"] == "known_outcome_only"
        assert code_of(worker.line(plain)) == "conflict"
        assert worker.line(only) == first


def test_one_key_belongs_to_each_process_and_not_to_the_tree(make_state: MakeState) -> None:
    with make_state().serve() as serving:
        a, b = serving.worker("a"), serving.worker("b")
        first, second = a.invoke("key", "transfer", {}), b.invoke("key", "transfer", {"amount": 2})
        assert first["request_id"] != second["request_id"]
        assert (first["reason"], second["reason"]) == ("out_of_scope", "out_of_scope")


def test_the_same_key_from_many_connections_at_once_has_one_effect(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        frame = send(worker)
        lines = [worker.connect() for _ in range(32)]
        for line in lines:
            line.send(frame)
        answers = {line.read() for line in lines}
        for line in lines:
            line.close()
        assert len(answers) == 1
        assert result_of(answers.pop())["output"]["value"] == {"status": "sent", "sequence": "1"}
        assert worker.ask("inspect")["tree_calls"] == 1
        received = serving.worker("b").receive("all", "jobs", "0")
        assert [message["payload"] for message in received["messages"]] == [1]


def test_two_different_calls_under_one_key_at_once_are_one_effect_and_a_conflict(make_state: MakeState) -> None:
    with make_state().serve() as serving:
        worker = serving.worker("a")
        frames = [send(worker, payload=n) for n in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(worker.line, frames))
        allowed = [line for line in answers if json.loads(line)["ok"]]
        assert len(allowed) == 1
        assert {code_of(line) for line in answers if line not in allowed} == {"conflict"}
        assert worker.ask("inspect")["tree_calls"] == 1


# --- refusals --------------------------------------------------------------------------------------------------------


def refusal(serving: Serving, result: dict[str, Any]) -> tuple[str, str, list[str]]:
    """(reason, guard, the checks that passed) of a signed refusal."""
    assert (result["verdict"], result["output"], result["terminal_state"]) == ("deny", None, {"state": "completed"})
    body = receipt_of(serving, result).body
    assert body["decision"] == {"verdict": "deny", "reason": result["reason"], "guard": body["decision"]["guard"]}
    assert body["output"] is None
    *before, last = body["evidence"]
    assert (last["guard"], last["passed"]) == (body["decision"]["guard"], False)
    assert all(check["passed"] for check in before)
    return result["reason"], last["guard"], [check["guard"] for check in before]


OUTSIDE = {
    "a tool of another server": ("billing", "send_jobs"), "an unknown tool": ("chio-ipc", "transfer"),
    "a tool that others have": ("chio-ipc", "ack_jobs"), "a mailbox that does not exist": ("chio-ipc", "send_nothing"),
    "the tool in other letters": ("chio-ipc", "SEND_JOBS"), "a wildcard": ("chio-ipc", "*"),
    "the reserved process server": ("chio-process", "cancel"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("asker", "server", "tool"),
    [
        pytest.param(asker, server, tool, id=f"{name} for {asker}")
        for name, (server, tool) in OUTSIDE.items()
        for asker in ("a", "root")
        if (asker, tool) != ("root", "ack_jobs")
    ],
)
def test_what_no_grant_covers_is_out_of_scope_with_a_retained_receipt(
    make_state: MakeState, asker: str, server: str, tool: str
) -> None:
    """Root's own grant is `*`: every tool there is, and no tool that there is not."""
    state = make_state(config(child("a", "send_jobs"), child("b", "ack_jobs")))
    with state.serve() as serving:
        worker = serving.worker(asker)
        frame = worker.call("key", tool, {"message_key": "m", "payload": 1}, server)
        first = worker.line(frame)
        assert refusal(serving, result_of(first)) == ("out_of_scope", "grant", ["budget", "revocation", "expiry"])
        assert worker.line(frame) == first
        assert worker.ask("inspect")["tree_calls"] == 1
    assert [receipt.body["tool_name"] for receipt in state.log().receipts] == [tool]


def test_a_grant_to_delegate_is_no_grant_to_invoke(make_state: MakeState) -> None:
    rules = policy(grant("send_jobs", operations=["delegate"]), grant("ack_jobs"))
    state = make_state(config(child("a", "ack_jobs")), rules)
    with state.serve() as serving:
        root = serving.worker("root")
        assert refusal(serving, root.invoke("k", "send_jobs", {}))[0] == "out_of_scope"


def until_expired(state: State, worker: Worker, tool: str) -> dict[str, Any]:
    """Calls of this tool until one is refused; each takes a commit and the whole of it at most the grant's second."""
    for n in range(100_000):
        result = worker.invoke(f"at {n}", tool, {"after_sequence": "0", "limit": 1})
        if result["verdict"] == "deny":
            return dict(result)
    raise AssertionError("the grant does not expire")


def test_an_expired_grant_is_a_signed_refusal_for_a_credential_that_still_lives(make_state: MakeState) -> None:
    rules = policy(grant("receive_jobs", ttl=4), grant("send_jobs", ttl=3600))
    state = make_state(config(child("a", "receive_jobs"), child("b", "send_jobs"), max_calls=1_000_000), rules)
    with state.serve() as serving:
        root = serving.worker("root")
        worker = serving.worker("a")
        early = worker.invoke("early", "receive_jobs", {"after_sequence": "0", "limit": 1})
        late = until_expired(state, worker, "receive_jobs")
        assert refusal(serving, late)[:2] == ("expired", "expiry")
        created = state.rows("SELECT created_ms FROM host")[0][0]
        assert early["verdict"] == "allow"
        assert receipt_of(serving, early).body["time_ms"] < created + 4000 <= receipt_of(serving, late).body["time_ms"]
        # What was decided before stays, what lives longer still works, and a new attempt is not begun.
        assert worker.invoke("early", "receive_jobs", {"after_sequence": "0", "limit": 1}) == early
        assert root.send("longer", "jobs", "m", 1)["status"] == "sent"
        with pytest.raises(Exception, match="start a new state"):
            serving.worker("a")


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_ceiling_is_limit_reached_without_receipt_and_what_is_known_still_replays(make_state: MakeState) -> None:
    state = make_state(config(child("a", *all_of("jobs"), share=5000), max_calls=8))
    with state.serve() as serving:
        worker = serving.worker("a")
        frames = [send(worker, f"key {n}", f"m{n}") for n in range(3)] + [worker.call("key 3", "transfer", {})]
        first = [worker.line(frame) for frame in frames]
        for refused in (send(worker, "one more", "m9"), worker.call("one more", "transfer", {})):
            assert code_of(worker.line(refused)) == "limit_reached"
        assert [worker.line(frame) for frame in frames] == first
        assert code_of(worker.line(send(worker, "key 0", "another"))) == "conflict"
        # It is not held against the key that was refused: it was never taken.
        assert worker.ask("inspect")["tree_calls"] == 4
    log = state.log()
    assert len(log.receipts) == 4
    assert "one more" not in {key for (key,) in state.rows("SELECT operation_key FROM call")}


def test_shares_are_floors_of_the_roots_calls_and_every_ancestor_is_debited(make_state: MakeState) -> None:
    """7 calls at 50 % are 3; a grandchild of 2900 bps has floor(7 * 0.29) = 2 of them."""
    host = config(
        child("a", *all_of("jobs"), share=5000),
        child("aa", *all_of("jobs"), parent="a", share=2900),
        child("ab", *all_of("jobs"), parent="a", share=2100),
        child("b", *all_of("jobs"), share=5000),
        max_calls=7,
    )
    state = make_state(host)
    with state.serve() as serving:
        root, a, aa, ab, b = (serving.worker(name) for name in ("root", "a", "aa", "ab", "b"))

        def calls(worker: Worker) -> int:
            """How many new calls it can make now."""
            for n in range(100):
                line = worker.line(worker.call(f"{time.monotonic_ns()} {n}", "transfer", {}))
                if not json.loads(line)["ok"]:
                    assert code_of(line) == "limit_reached"
                    return n
            raise AssertionError

        assert calls(aa) == 2
        assert calls(a) == 1  # its ceiling is 3, and its child took two of them
        assert calls(ab) == 0  # its own ceiling is 1, its parent's is used up
        assert calls(b) == 3
        assert calls(root) == 1  # 7 in all
        assert calls(b) == 0
        assert root.ask("inspect")["tree_calls"] == 7
    assert state.rows("SELECT id, ceiling, calls FROM process JOIN usage ON process = id ORDER BY position") == [
        ("root", 7, 7), ("a", 3, 3), ("aa", 2, 2), ("ab", 1, 0), ("b", 3, 3),
    ]  # fmt: skip


def test_the_ceiling_holds_for_calls_that_arrive_at_once(make_state: MakeState) -> None:
    state = make_state(config(child("a", *all_of("jobs"), share=5000), max_calls=20))
    with state.serve() as serving:
        worker = serving.worker("a")
        lines = [worker.connect() for _ in range(40)]
        for n, line in enumerate(lines):
            line.send(send(worker, f"key {n}", f"m{n}"))
        answers = [json.loads(line.read()) for line in lines]
        for line in lines:
            line.close()
    assert sum(answer["ok"] for answer in answers) == 10
    assert {answer["error"]["code"] for answer in answers if not answer["ok"]} == {"limit_reached"}
    assert len(state.log().receipts) == 10
    assert state.rows("SELECT last_sequence FROM mailbox") == [(10,)]


def test_max_invocations_is_debited_along_the_whole_chain(make_state: MakeState) -> None:
    """Root may send five times; both children and root itself draw on the same five."""
    host = config(
        child("a", "send_jobs", "receive_jobs"),
        child("aa", "send_jobs", parent="a", share=500),
        child("b", "send_jobs"),
    )
    state = make_state(host, policy(grant("send_jobs", max_invocations=5), grant("receive_jobs")))
    with state.serve() as serving:
        root, a, aa, b = (serving.worker(name) for name in ("root", "a", "aa", "b"))
        for n, worker in enumerate((aa, aa, a, b)):
            assert worker.send(f"key {n}", "jobs", f"m{n}", n)["status"] == "sent"
        # A repeat, a call that the mailbox refuses and a refusal for its scope draw on nothing.
        assert aa.send("key 0", "jobs", "m0", 0)["sequence"] == "1"
        assert a.invoke("bad", "send_jobs", {"payload": 1})["reason"] == "invalid_arguments"
        assert b.invoke("far", "receive_jobs", {})["reason"] == "out_of_scope"
        assert root.send("key 5", "jobs", "m5", 5)["status"] == "sent"
        for worker in (root, a, aa, b):
            result = worker.invoke("over", "send_jobs", {"message_key": "over", "payload": 0})
            passed = ["budget", "revocation", "expiry", "grant", "constraints"]
            assert refusal(serving, result) == ("invocations_exhausted", "invocations", passed)
        assert a.receive("other grants", "jobs", "0")["next_sequence"] == "5"
    assert dict(state.rows("SELECT process, used FROM grant_usage")) == {"root": 5, "a": 3, "aa": 2, "b": 1}


def test_a_second_grant_of_the_same_tool_is_used_when_the_first_has_run_out(make_state: MakeState) -> None:
    rules = policy(grant("send_jobs", max_invocations=1), grant("send_jobs", max_invocations=2))
    with make_state(config(child("a", "send_jobs")), rules).serve() as serving:
        worker = serving.worker("a")
        for n in range(3):
            assert worker.send(f"key {n}", "jobs", f"m{n}", n)["status"] == "sent"
        over = worker.invoke("over", "send_jobs", {"message_key": "over", "payload": 0})
        assert over["reason"] == "invocations_exhausted"


# --- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_ends_the_subtree_for_good_and_nothing_else(make_state: MakeState) -> None:
    host = config(
        child("a", *all_of("jobs")),
        child("aa", *all_of("jobs"), parent="a", share=500),
        child("aaa", *all_of("jobs"), parent="aa", share=100),
        child("b", *all_of("jobs")),
    )
    state = make_state(host)

    def stays_cancelled(serving: Serving) -> None:
        for name in ("a", "aa", "aaa"):
            worker = serving.worker(name)
            assert code_of(worker.line(send(worker))) == "cancelled"
            assert worker.refused("checkpoint", expected_revision="0", value=1) == "cancelled"
            assert worker.refused("blob_put", sha256="0" * 64, data_base64="") == "cancelled"
            assert worker.refused("cancel") == "cancelled"
            assert worker.ask("inspect")["state"] == "cancelled"
        for name in ("root", "b"):
            assert serving.worker(name).ask("inspect")["state"] == "running"

    with state.serve() as serving:
        worker = serving.worker("aaa")
        before = worker.line(send(worker))
        assert result_of(before)["verdict"] == "allow"
        assert serving.worker("aa").ask("cancel") == {"cancelled_processes": 2}
        assert code_of(worker.line(send(worker))) == "cancelled"  # what it knows already is withheld too
        assert serving.worker("a").ask("cancel") == {"cancelled_processes": 1}
        stays_cancelled(serving)
        assert serving.host.kernel.call("progress")["cancelled"] == ["a", "aa", "aaa"]
    with state.serve() as serving:
        stays_cancelled(serving)
    log = state.log()
    assert [body["processes"] for body in log.bodies("cancellation")] == [["aa", "aaa"], ["a"]]
    assert len(log.receipts) == 1


def test_the_host_is_told_who_was_cancelled(make_state: MakeState) -> None:
    with make_state(config(child("a"), child("aa", parent="a", share=10), child("b"))).serve() as serving:
        serving.worker("a").ask("cancel")
        assert serving.host.kernel.call("progress")["cancelled"] == ["a", "aa"]
        assert serving.host.kernel.events() == [({"event": "cancelled", "processes": ["a", "aa"]}, [])]


# --- receipts and log ------------------------------------------------------------------------------------------------


def test_every_leaf_is_in_the_log_once_and_every_checkpoint_holds_after_thousands_of_calls(
    make_state: MakeState,
) -> None:
    """The verifier's own functions recompute it; a checkpoint is made at least every 1,000 leaves."""
    state = make_state(config(*(child(f"p{n}", *all_of("jobs")) for n in range(8)), max_calls=100_000))
    with state.serve() as serving:
        workers = [serving.worker(f"p{n}") for n in range(8)]
        lines = [worker.connect() for worker in workers]
        for at in range(0, 320, 40):
            for line, worker in zip(lines, workers, strict=True):
                line.send(b"".join(worker.call(f"key {at + n}", "transfer", {"n": n}) for n in range(40)))
            for line in lines:
                for _ in range(40):
                    assert result_of(line.read())["reason"] == "out_of_scope"
        for line in lines:
            line.close()
    log = state.log()
    assert len(log.receipts) == len({receipt.id for receipt in log.receipts}) == 8 * 320
    assert [kind for kind, _ in log.leaves[:9]] == ["bootstrap"] + ["attempt"] * 8
    times = [body["time_ms"] for _, body in log.leaves]
    assert times == sorted(times)
    sizes = [checkpoint.size for checkpoint in log.checkpoints]
    assert sizes[0] == 1
    assert sizes[-1] == len(log.leaves)
    assert all(later - earlier <= 1000 + 8 * 40 for earlier, later in itertools.pairwise(sizes))
    assert len(state.receipt_lines()) == 8 * 320


def test_a_replay_and_a_read_write_nothing_into_the_database(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        frame = send(worker)
        worker.line(frame)
        before = (state.path / "authority.db-wal").read_bytes(), (state.path / "authority.db").read_bytes()
        for _ in range(3):
            worker.line(frame)
            worker.ask("inspect")
            assert worker.refused("blob_read", sha256="0" * 64) == "blob_missing"
        assert ((state.path / "authority.db-wal").read_bytes(), (state.path / "authority.db").read_bytes()) == before
    assert len(state.receipt_lines()) == 4


def test_an_attempt_is_named_in_its_receipts_and_its_number_never_comes_again(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        for n in (1, 2):
            worker = serving.worker("a")
            body = receipt_of(serving, worker.invoke(f"key {n}", "transfer", {})).body
            assert body["attempt"] == {"number": n, "launch_id": None}
            serving.end(worker)
    with state.serve() as serving:
        assert serving.worker("a").number == 3


def test_no_credential_is_kept_anywhere_in_the_state(make_state: MakeState) -> None:
    state = make_state()
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.line(send(worker))
        worker.ask("checkpoint", expected_revision="0", value={"a": 1})
    for file in (found for found in state.path.rglob("*") if found.is_file()):
        content = file.read_bytes()
        assert worker.credential.encode() not in content
        assert bytes.fromhex(worker.credential) not in content


def test_a_kernel_key_signs_nothing_that_a_socket_can_choose(worker: Worker) -> None:
    """Other domains' names in a worker's texts stay data: the receipt's signature is under its own domain only."""
    result = worker.invoke("chio/launch/v1", "chio/exit/v1", {"schema": "chio.launch.v1"})
    assert json.loads(result["receipt_json"])["body"]["schema"] == "chio.receipt.v1"


def test_the_socket_of_one_attempt_does_not_serve_another(shared: Serving, worker: Worker, bystander: Worker) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(bystander.path)
        other.sendall(worker.frame("inspect"))
        assert code_of(other.makefile("rb").readline()) == "unauthenticated"
