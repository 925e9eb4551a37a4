"""`attest-call` on real states: what a kernel signs of a call is what `verify-call` accepts; nothing else is signed.

The calls are made through a kernel and tool servers that are real; the two commands run as an operator and a reviewer
run them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.external import Gate, ToolServing, ToolState, child, host_config, mailbox_routes, server, tool
from tests.kernel.serving import State, Worker, grant, policy, result_of
from tests.kernel.test_state import plant

pytestmark = pytest.mark.timeout(120)

CHECKS = [
    "signer_pin", "runtime_pin", "original_request", "issued_capability", "worker_response", "retained_operation",
    "continuation_custody",
]  # fmt: skip
UNCHECKED = ["physical_effects", "aggregate_usage", "confinement"]
ORIGINAL = "original_call_commitment_and_signed_store_readback"


def chio(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chio", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a reviewer kept of one call: request, context, response as files."""

    folder: Path
    state: Path
    runtime_id: str

    def attest(self, *, response: bool = True) -> subprocess.CompletedProcess[str]:
        named = {name: str(self.folder / f"{name}.json") for name in ("request", "context", "response")}
        if not response:
            del named["response"]
        out = str(self.folder / "call.json")
        return chio("process", "attest-call", "--state", str(self.state), *words(named), "--out", out)

    def verify(self) -> subprocess.CompletedProcess[str]:
        options = {
            "artifact": str(self.folder / "call.json"),
            "request": str(self.folder / "request.json"),
            "context": str(self.folder / "context.json"),
            "trusted-kernel-pubkey": str(self.state / "kernel.pub"),
            "runtime-id": self.runtime_id,
        }
        return chio("process", "verify-call", *words(options))


Keep = Callable[..., Kept]


@dataclass(slots=True)
class Calls:
    """A stopped state with one call for each way that it can end, by key, and what was kept of each."""

    state: ToolState
    folder: Path
    context: dict[str, str]
    requests: dict[str, dict[str, Any]]
    responses: dict[str, dict[str, Any]]

    def keep(self, key: str, folder: Path) -> Kept:
        folder.mkdir(exist_ok=True)
        for name, value in (
            ("request", self.requests[key]), ("context", self.context), ("response", self.responses[key]),
        ):  # fmt: skip
            (folder / f"{name}.json").write_text(json.dumps(value, indent=1))
        return Kept(folder, self.state.path, self.state.pins.runtime_id)


REQUESTS = {
    "completed": ("bank", "pay", {"to": "ada", "cents": 7}, True),
    "unknown": ("rogue", "do", {"how": "exit"}, False),
    "reconciled": ("rogue", "do", {"how": "exit", "n": 2}, False),
    "compensated": ("rogue", "do", {"mine": "x"}, False),
    "refused": ("rogue", "look", {"n": 1.5}, False),
    "built-in": ("chio-ipc", "send_jobs", {"message_key": "é", "payload": {"items": [2, 3, 5]}}, True),
    "redispatched": ("bank", "balance", {"to": "ada"}, False),
    "text": ("rogue", "do", {"how": "raw", "result": '{"n":18446744073709551616}'}, False),
    "large": ("rogue", "do", {"how": "large"}, False),
}


def make_calls(folder: Path) -> Calls:
    servers = [server("bank", "resource.py", folder / "bank"), server("rogue", "rogue.py", folder / "rogue")]
    routes = ["bank/pay", "bank/balance", "rogue/do", *mailbox_routes("jobs")]
    state = ToolState.make(
        folder / "state", host_config(servers, child("a", *routes), child("b", *routes)),
        policy(tool("bank"), tool("rogue"), grant()),
    )  # fmt: skip
    with state.serve() as serving:
        worker = serving.worker("a")
        context = {name: worker.connection[name] for name in ("runtime_id", "process_id", "capability_id")}
        calls = Calls(state, folder, context, {}, {})
        for key, (server_id, tool_name, arguments, known_only) in REQUESTS.items():
            more = {"known_outcome_only": True} if known_only else {}
            calls.requests[key] = {
                "operation_key": key, "server_id": server_id, "tool_name": tool_name, "arguments": arguments, **more,
            }  # fmt: skip
            frame = worker.call(key, tool_name, arguments, server_id, **more)
            if key == "compensated":
                os.mkfifo(folder / "rogue" / "shut.go")  # it lives on, and nobody can write to it any more
                assert worker.invoke("shut", "do", {"how": "shut_stdin"}, "rogue")["verdict"] == "allow"
            if key == "redispatched":
                interrupt(serving, worker, frame, folder / "bank")
            calls.responses[key] = result_of(worker.line(frame))
        said = {"outcome": "applied", "by": "ada", "evidence_sha256": "0" * 64}
        serving.kernel.call("reconcile", process="a", key="reconciled", **said)
        frame = worker.call("reconciled", "do", {"how": "exit", "n": 2}, "rogue")
        calls.responses["before"] = calls.responses["reconciled"]
        calls.responses["reconciled"] = result_of(worker.line(frame))
    return calls


def interrupt(serving: ToolServing, worker: Worker, frame: bytes, folder: Path) -> None:
    """The first dispatch of a read ends with its server."""
    gate = Gate(folder, "before_answer")
    with worker.connect() as line:
        line.send(frame)
        gate.reached()
        gate.disarm()
        serving.kill_server("bank")
        assert result_of(line.read())["verdict"] == "deny"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    return make_calls(tmp_path_factory.mktemp("attested"))


@pytest.fixture
def keep(calls: Calls, tmp_path: Path) -> Keep:
    return lambda key: calls.keep(key, tmp_path)


STATES = {
    "completed": "completed", "unknown": "unknown", "compensated": "compensated", "reconciled": "reconciled",
    "refused": None, "built-in": "completed", "redispatched": "completed", "text": "completed", "large": "completed",
}  # fmt: skip


@pytest.mark.parametrize("key", REQUESTS)
def test_what_a_kernel_attests_of_a_call_is_verified_against_what_a_reviewer_kept(
    key: str, calls: Calls, keep: Keep
) -> None:
    kept = keep(key)
    state, refused = STATES[key], key == "refused"
    custody = "no_custody_claim" if refused else ORIGINAL
    attested = kept.attest()
    assert (attested.returncode, attested.stderr) == (0, "")
    assert json.loads(attested.stdout) == {
        "schema": "chio.process.call-attestation.v1",
        "file": str(kept.folder / "call.json"),
        "runtime_id": kept.runtime_id,
        "request_id": calls.responses[key]["request_id"],
        "observed_operation_state": state,
        "custody_binding": custody,
    }
    verified = kept.verify()
    assert (verified.returncode, verified.stderr) == (0, "")
    assert json.loads(verified.stdout) == {
        "schema": "chio.process.call-verification.v1",
        "runtime_id": kept.runtime_id,
        "process_id": "a",
        "request_id": calls.responses[key]["request_id"],
        "observed_operation_state": state,
        "custody_binding": custody,
        "artifact_schema": "chio.process.call-observation.v2",
        "checks": CHECKS[:-1] if refused else CHECKS,
        "unchecked": ["continuation_custody", *UNCHECKED] if refused else UNCHECKED,
    }
    files = {name: str(kept.folder / f"{name}.json") for name in ("response", "request", "context")}
    key_file = {"trusted-kernel-pubkey": str(kept.state / "kernel.pub")}
    response = chio("receipt", "verify-process-response", *words(files | key_file))
    assert (response.returncode, response.stderr) == (0, "")
    assert json.loads(response.stdout)["response_bound"] is True


def test_a_call_is_attested_without_its_response_and_worker_response_stays_unchecked(keep: Keep) -> None:
    kept = keep("completed")
    assert kept.attest(response=False).returncode == 0
    found = json.loads(kept.verify().stdout)
    assert found["checks"] == [name for name in CHECKS if name != "worker_response"]
    assert found["unchecked"] == ["worker_response", *UNCHECKED]


def test_the_answer_from_before_the_reconciliation_is_attested_as_the_workers(calls: Calls, keep: Keep) -> None:
    kept = keep("reconciled")
    (kept.folder / "response.json").write_text(json.dumps(calls.responses["before"]))
    assert kept.attest().returncode == 0
    found = kept.verify()
    assert (found.returncode, json.loads(found.stdout)["observed_operation_state"]) == (0, "reconciled")


def refused(kept: Kept, done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("chio: ")
    assert done.stderr.count("\n") == 1
    for part in said:
        assert part in done.stderr
    assert not (kept.folder / "call.json").exists()


def test_a_response_that_is_not_the_retained_one_is_not_attested(calls: Calls, keep: Keep) -> None:
    kept = keep("completed")
    for change in ({"verdict": "deny"}, {"output": None}, {"reconciliation": {}}, {"receipt_json": "{}"}):
        (kept.folder / "response.json").write_text(json.dumps({**calls.responses["completed"], **change}))
        refused(kept, kept.attest(), "the response is not the one that is retained", "response.json")
    (kept.folder / "response.json").write_text(json.dumps(calls.responses["built-in"]))
    refused(kept, kept.attest(), "the response is not the one that is retained")
    (kept.folder / "response.json").write_text("no json")
    refused(kept, kept.attest(), "not a response")


@pytest.mark.parametrize(
    ("document", "changes", "said"),
    [
        ("request", {"operation_key": "never used"}, "no call is retained under this key"),
        ("request", {"tool_name": "balance"}, "tool_name"),
        ("request", {"server_id": "rogue"}, "server_id"),
        ("request", {"arguments": {"to": "ada", "cents": 8}}, "arguments"),
        ("request", {"known_outcome_only": False}, "known_outcome_only"),
        ("request", {"more": 1}, "more"),
        ("request", {"operation_key": 7}, "operation_key"),
        ("context", {"process_id": "b"}, "capability_id"),
        ("context", {"process_id": "nobody"}, "there is no process `nobody`"),
        ("context", {"capability_id": "c" * 64}, "capability_id"),
        ("context", {"runtime_id": "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe815"}, "runtime_id"),
    ],
)
def test_a_request_or_context_that_is_not_the_retained_one_is_refused_with_its_field(
    document: str, changes: dict[str, Any], said: str, keep: Keep
) -> None:
    kept = keep("completed")
    file = kept.folder / f"{document}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    refused(kept, kept.attest(), said, str(file))


def test_a_request_without_its_recovery_policy_is_another_one(keep: Keep) -> None:
    kept = keep("completed")
    request = json.loads((kept.folder / "request.json").read_text())
    del request["known_outcome_only"]
    (kept.folder / "request.json").write_text(json.dumps(request))
    refused(kept, kept.attest(), "known_outcome_only")


def test_an_artifact_is_never_overwritten(keep: Keep) -> None:
    kept = keep("completed")
    (kept.folder / "call.json").write_text("mine")
    done = kept.attest()
    assert done.returncode == 1
    assert "--out" in done.stderr
    assert (kept.folder / "call.json").read_text() == "mine"


def test_a_call_is_not_attested_while_its_host_is_live_and_what_it_found_dispatched_is_unknown(tmp_path: Path) -> None:
    """A host that is killed with a call in flight: attesting recovers the state first."""
    servers = [server("bank", "resource.py", tmp_path / "bank")]
    state = ToolState.make(tmp_path / "s", host_config(servers, child("a", "bank/pay")), policy(tool("bank")))
    serving = state.serve()
    worker = serving.worker("a")
    context = {name: worker.connection[name] for name in ("runtime_id", "process_id", "capability_id")}
    request = {"operation_key": "cut", "server_id": "bank", "tool_name": "pay", "arguments": {"to": "x"}}
    calls = Calls(state, tmp_path, context, {"cut": request}, {"cut": {}})
    kept = calls.keep("cut", tmp_path / "kept")
    gate = Gate(tmp_path / "bank", "after_effect")
    with worker.connect() as line:
        line.send(worker.call("cut", "pay", {"to": "x"}, "bank"))
        gate.reached()
        refused(kept, kept.attest(response=False), "the state is locked")
        gate.disarm()
        serving.kill()
    assert kept.attest(response=False).returncode == 0
    found = json.loads(kept.verify().stdout)
    assert (found["observed_operation_state"], found["custody_binding"]) == ("unknown", ORIGINAL)


def test_the_checkpoint_of_an_observation_covers_the_whole_log(calls: Calls, keep: Keep) -> None:
    kept = keep("built-in")
    assert kept.attest().returncode == 0
    body = json.loads((kept.folder / "call.json").read_text())["body"]
    log = calls.state.log()
    assert int(body["checkpoint"].split("\n")[1]) == len(log.leaves)
    assert body["leaves"][-1]["index"] < len(log.leaves)


@pytest.mark.parametrize("column", ["output", "binding", "receipt"])
def test_a_call_that_cannot_be_read_back_is_not_attested(column: str, tmp_path: Path) -> None:
    state = State.make(tmp_path / "s")
    with state.serve() as serving:
        worker = serving.worker("a")
        context = {name: worker.connection[name] for name in ("runtime_id", "process_id", "capability_id")}
        worker.send("key", "jobs", "m", 1)
    value = {"output": "x'6e756c6c'", "binding": "'x'", "receipt": "0"}[column]
    plant(state, f"UPDATE call SET {column} = {value} WHERE operation_key = 'key'")
    arguments = {"message_key": "m", "payload": 1}
    request = {"operation_key": "key", "server_id": "chio-ipc", "tool_name": "send_jobs", "arguments": arguments}
    for name, document in (("request", request), ("context", context)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    kept = Kept(tmp_path, state.path, state.pins.runtime_id)
    refused(kept, kept.attest(response=False), "the call cannot be read back")
