"""`python -m chio_process.invocation`: one call against a real kernel, and the evidence that is left of it.

What a broken or hostile kernel answers comes from `tests.clients.peer`, which speaks the protocol byte by byte.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chio_process
from tests.clients.peer import CREDENTIAL, Peer, Stream, answering, error
from tests.kernel.serving import Serving, State, Worker

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
CLIENT = Path(chio_process.__file__).parents[1]
REQUEST = {
    "operation_key": "send-report-42",
    "server_id": "chio-ipc",
    "tool_name": "send_jobs",
    "arguments": {"message_key": "report-42", "payload": {"items": [2, 3, 5], "share": 0.5, "name": "é"}},
    "known_outcome_only": True,
}
WHOLE = {
    "request.json", "context.json", "kernel.pub", "response.json", "receipts.ndjson", "verification.json",
}  # fmt: skip
BEFORE_SENDING = {"request.json", "context.json", "kernel.pub"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with State.make(tmp_path_factory.mktemp("invocation") / "s").serve() as live:
        yield live


@pytest.fixture
def worker(serving: Serving) -> Worker:
    return serving.worker("a")


@pytest.fixture(scope="module")
def chio(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The `chio` command of this tree."""
    command = tmp_path_factory.mktemp("bin") / "chio"
    command.write_text(f'#!/bin/sh\ncd "{ROOT}" && exec "{sys.executable}" -m chio "$@"\n')
    command.chmod(0o755)
    return str(command)


def descriptor(worker: Worker, **changes: str) -> dict[str, Any]:
    """A connection descriptor as `chio process credential` writes it."""
    return {**worker.connection, "socket_path": worker.path, **changes}


def invoke(
    folder: Path, chio: str, connection: dict[str, Any], key: str, asked: Any = REQUEST, **options: str
) -> subprocess.CompletedProcess[str]:
    """Runs the helper as an operator does, with nothing of this tree but the client package."""
    (folder / "connection.json").write_text(json.dumps(connection))
    (folder / "request.json").write_text(asked if isinstance(asked, str) else json.dumps(asked, indent=2))
    named = {
        "chio": chio,
        "connection": str(folder / "connection.json"),
        "trusted-kernel-pubkey": key,
        "request": str(folder / "request.json"),
        "output": str(folder / "attempt-1"),
        **options,
    }
    command = [sys.executable, "-m", "chio_process.invocation"]
    for name, value in named.items():
        command += [f"--{name}", value]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CLIENT)},
    )  # fmt: skip


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "attempt-1").iterdir()}


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "attempt-1" / name).read_bytes())


def test_a_call_leaves_all_its_evidence_and_a_bound_response(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    key_file = serving.state.path / "kernel.pub"
    done = invoke(tmp_path, chio, descriptor(worker), str(key_file))
    assert (done.returncode, done.stderr) == (0, "")
    assert files(tmp_path) == WHOLE
    verdict = read(tmp_path, "verification.json")
    assert json.loads(done.stdout) == verdict
    assert (verdict["response_bound"], verdict["process_id"]) == (True, "a")
    kept = tmp_path / "attempt-1"
    assert (kept / "request.json").read_bytes() == (tmp_path / "request.json").read_bytes()
    assert read(tmp_path, "context.json") == {
        name: worker.connection[name] for name in ("runtime_id", "process_id", "capability_id")
    }
    assert (kept / "kernel.pub").read_bytes() == key_file.read_bytes()
    response = read(tmp_path, "response.json")
    assert response["verdict"] == "allow"
    assert (kept / "receipts.ndjson").read_text() == response["receipt_json"] + "\n"
    assert response["receipt_json"].encode() in serving.state.receipt_lines()


def test_what_is_kept_is_the_operators_alone_and_holds_no_credential(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    invoke(tmp_path, chio, descriptor(worker), serving.state.kernel_key.hex)
    kept = tmp_path / "attempt-1"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    for path in kept.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert worker.credential not in path.read_text()


def test_the_same_request_again_is_the_same_receipt_in_another_directory(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    for name in ("attempt-1", "attempt-2"):
        done = invoke(tmp_path, chio, descriptor(worker), serving.state.kernel_key.hex, output=str(tmp_path / name))
        assert done.returncode == 0
    first, second = ((tmp_path / name / "receipts.ndjson").read_bytes() for name in ("attempt-1", "attempt-2"))
    assert first == second


def test_a_refusal_is_a_response_and_is_bound(serving: Serving, worker: Worker, chio: str, tmp_path: Path) -> None:
    asked = {**REQUEST, "operation_key": "refused", "tool_name": "send_nothing"}
    done = invoke(tmp_path, chio, descriptor(worker), serving.state.kernel_key.hex, asked)
    assert done.returncode == 0
    assert read(tmp_path, "response.json")["verdict"] == "deny"
    assert read(tmp_path, "verification.json")["response_bound"] is True


def test_the_directory_must_be_new_and_nothing_is_sent_if_it_is_not(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    (tmp_path / "attempt-1").mkdir()
    asked = {**REQUEST, "operation_key": "never sent"}
    done = invoke(tmp_path, chio, descriptor(worker), serving.state.kernel_key.hex, asked)
    assert done.returncode == 1
    assert "new directory" in done.stderr
    assert files(tmp_path) == set()
    assert serving.state.rows("SELECT 1 FROM call WHERE operation_key = 'never sent'") == []


def test_a_check_that_fails_keeps_the_evidence_and_repeats_nothing(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    """A reviewer who trusts another key: the call was made, and its response proves nothing to him."""
    asked = {**REQUEST, "operation_key": "untrusted"}
    done = invoke(tmp_path, chio, descriptor(worker), "5" * 64, asked)
    assert done.returncode == 1
    assert files(tmp_path) == WHOLE
    assert read(tmp_path, "verification.json")["response_bound"] is False
    assert read(tmp_path, "response.json")["verdict"] == "allow"
    assert len(serving.state.rows("SELECT 1 FROM call WHERE operation_key = 'untrusted'")) == 1


def test_a_context_that_is_not_the_callers_is_caught(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    connection = descriptor(worker, capability_id="c" * 64)
    done = invoke(tmp_path, chio, connection, serving.state.kernel_key.hex, {**REQUEST, "operation_key": "context"})
    assert done.returncode == 1
    assert [entry["check"] for entry in read(tmp_path, "verification.json")["failed"]] == ["caller", "binding"]
    assert "check caller" in done.stderr


@pytest.mark.parametrize("command", ["/nowhere/chio", "/bin/true", "/bin/false"])
def test_a_verifier_that_says_nothing_binds_nothing(
    serving: Serving, worker: Worker, command: str, tmp_path: Path
) -> None:
    done = invoke(tmp_path, command, descriptor(worker), serving.state.kernel_key.hex)
    assert done.returncode == 1
    assert files(tmp_path) == WHOLE
    assert read(tmp_path, "verification.json")["response_bound"] is False


def test_a_kernel_that_is_not_there_leaves_the_call_unresolved(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    connection = descriptor(worker, socket_path=str(tmp_path / "nobody"))
    done = invoke(tmp_path, chio, connection, serving.state.kernel_key.hex)
    assert (done.returncode, done.stdout) == (1, "")
    assert files(tmp_path) == BEFORE_SENDING | {"unresolved.json"}
    unresolved = read(tmp_path, "unresolved.json")
    assert (unresolved["code"], unresolved["may_have_happened"]) == ("transport_error", True)
    assert "was not repeated" in done.stderr


def test_what_is_refused_without_a_receipt_never_happened(
    serving: Serving, worker: Worker, chio: str, tmp_path: Path
) -> None:
    connection = descriptor(worker, credential="0" * 64)
    invoke(tmp_path, chio, connection, serving.state.kernel_key.hex)
    assert files(tmp_path) == BEFORE_SENDING | {"unresolved.json"}
    assert read(tmp_path, "unresolved.json") == {
        "code": "unauthenticated", "message": "refused by the kernel", "may_have_happened": False,
    }  # fmt: skip


def test_everything_a_reviewer_needs_is_on_disk_before_the_first_byte_and_one_request_is_sent(
    peer: Peer, chio: str, tmp_path: Path
) -> None:
    seen: list[tuple[set[str], dict[str, Any]]] = []

    def hang_up(stream: Stream) -> None:
        asked = stream.read()
        assert asked is not None
        seen.append((files(tmp_path), asked["operation"]))

    peer.play(hang_up)
    connection = {
        "protocol": "chio.process.v1", "socket_path": str(peer.path), "credential": CREDENTIAL, "process_id": "a",
        "runtime_id": "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe815", "capability_id": "c" * 64,
    }  # fmt: skip
    done = invoke(tmp_path, chio, connection, "5" * 64)
    assert done.returncode == 1
    assert seen == [(BEFORE_SENDING, {"op": "invoke", **REQUEST})]
    assert read(tmp_path, "unresolved.json")["code"] == "transport_error"


@pytest.mark.parametrize(("code", "may"), [("runtime_error", True), ("cancelled", True), ("conflict", False)])
def test_an_error_says_whether_the_call_may_have_happened(
    peer: Peer, chio: str, tmp_path: Path, code: str, may: bool
) -> None:
    peer.play(answering(error(code)))
    connection = {
        "protocol": "chio.process.v1", "socket_path": str(peer.path), "credential": CREDENTIAL, "process_id": "a",
        "runtime_id": "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe815", "capability_id": "c" * 64,
    }  # fmt: skip
    assert invoke(tmp_path, chio, connection, "5" * 64).returncode == 1
    unresolved = read(tmp_path, "unresolved.json")
    assert (unresolved["code"], unresolved["may_have_happened"]) == (code, may)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("no json", "not one JSON object"),
        ('{"operation_key":"a","operation_key":"b"}', "duplicate"),
        ("[]", "not a JSON object"),
        ({**REQUEST, "arguments": []}, "`arguments`"),
        ({**REQUEST, "tool_name": None}, "`tool_name`"),
        ({**REQUEST, "known_outcome_only": False}, "`known_outcome_only`"),
        ({**REQUEST, "retry": True}, "`retry`"),
    ],
)
def test_a_request_that_is_none_is_refused_before_anything_is_made(
    worker: Worker, chio: str, tmp_path: Path, asked: Any, said: str
) -> None:
    done = invoke(tmp_path, chio, descriptor(worker), "5" * 64, asked)
    assert done.returncode == 1
    assert said in done.stderr
    assert "nothing was sent" in done.stderr
    assert not (tmp_path / "attempt-1").exists()


def test_a_connection_without_its_context_is_refused_without_showing_it(
    worker: Worker, chio: str, tmp_path: Path
) -> None:
    connection = descriptor(worker)
    del connection["capability_id"]
    done = invoke(tmp_path, chio, connection, "5" * 64)
    assert done.returncode == 1
    assert "`capability_id`" in done.stderr
    assert worker.credential not in done.stderr
    assert not (tmp_path / "attempt-1").exists()


def test_a_key_that_is_none_is_refused(worker: Worker, chio: str, tmp_path: Path) -> None:
    for key in ("5" * 63, str(tmp_path / "absent"), sys.executable):
        done = invoke(tmp_path, chio, descriptor(worker), key)
        assert done.returncode == 1
        assert "--trusted-kernel-pubkey" in done.stderr
        assert not (tmp_path / "attempt-1").exists()


def run(chio: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([chio, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def test_an_operator_calls_a_served_host_and_a_reviewer_verifies_what_it_attests(chio: str, tmp_path: Path) -> None:
    """Credential, serve, invocation, stop, attest-call, verify-call: each by its own command."""
    state = State.make(tmp_path / "s")
    descriptor_file, listening = tmp_path / "producer.json", str(tmp_path / "sock")
    place = ("--state", str(state.path))
    run(chio, "process", "credential", *place, "--process", "a", "--socket", listening, "--out", str(descriptor_file))
    served = subprocess.Popen([chio, "process", "serve", *place, "--socket", listening], stdout=subprocess.PIPE)
    try:
        assert served.stdout is not None
        assert json.loads(served.stdout.readline())["ready"] is True
        connection = json.loads(descriptor_file.read_text())
        done = invoke(tmp_path, chio, connection, str(state.path / "kernel.pub"))
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        served.terminate()
        served.wait(timeout=30)
    kept = tmp_path / "attempt-1"
    mine = ("--request", str(tmp_path / "request.json"), "--context", str(kept / "context.json"))
    artifact = str(tmp_path / "call.json")
    attested = run(
        chio, "process", "attest-call", *place, *mine, "--response", str(kept / "response.json"), "--out", artifact
    )
    verified = run(
        chio, "process", "verify-call", "--artifact", artifact, *mine,
        "--trusted-kernel-pubkey", str(kept / "kernel.pub"), "--runtime-id", connection["runtime_id"],
    )  # fmt: skip
    assert attested["observed_operation_state"] == verified["observed_operation_state"] == "completed"
    assert "worker_response" in verified["checks"]
    assert json.loads((kept / "receipts.ndjson").read_bytes())["body"]["attempt"] is None
