"""`receipt verify-process-response`: a response against the request and context that a reviewer kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.verify import observed
from tests.verify.observed import Parts, key_of, parts
from tests.verify.signed import commitment, jcs
from verify.cli import receipt_verify_process_response

CHECKS = [
    "signature", "signer_pin", "runtime_pin", "caller", "operation", "recovery_policy", "route", "arguments",
    "request_id", "binding", "verdict", "terminal_state", "output",
]  # fmt: skip
UNCHECKED = ["execution_nonce", "resource_ownership", "application_correctness", "receipt_log_inclusion"]
ANSWERED = [case for case in observed.CASES if case != "readback"]

Check = Callable[..., Result]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Runs the command on what a reviewer of `made` kept; `response` replaces the response's text."""

    def check(made: Parts, response: bytes | None = None, *, key: str = key_of(observed.KERNEL)) -> Result:
        text = response if response is not None else response_of(made)
        for name, content in (("response", text), ("request", jcs(made.request)), ("context", jcs(made.context))):
            (tmp_path / name).write_bytes(content)
        named = [word for name in ("response", "request", "context") for word in (f"--{name}", str(tmp_path / name))]
        return CliRunner().invoke(receipt_verify_process_response, [*named, "--trusted-kernel-pubkey", key])

    return check


def response_of(made: Parts) -> bytes:
    text = observed.observation_body(made)["response_json"]
    assert isinstance(text, str)
    return text.encode()


def failing(done: Result) -> list[str]:
    """The checks that failed, which stderr and stdout name alike."""
    assert done.exit_code == 1
    found = [entry["check"] for entry in json.loads(done.stdout)["failed"]]
    for name, line in zip(found, done.stderr.splitlines(), strict=True):
        assert f"check {name}" in line
    assert json.loads(done.stdout)["response_bound"] is False
    return found


@pytest.mark.parametrize("case", ANSWERED)
def test_a_response_is_bound_to_its_request_and_context(case: str, check: Check) -> None:
    made = parts(case)
    done = check(made)
    assert (done.exit_code, done.stderr) == (0, "")
    receipt = made.leaf("receipt")
    assert json.loads(done.stdout) == {
        "schema": "chio.process.response-verification.v1",
        "response_bound": True,
        "runtime_id": observed.RUNTIME_ID,
        "process_id": "producer",
        "request_id": receipt["call"]["request_id"],
        "receipt_id": observed.signed_id("receipt", receipt),
        "checks": CHECKS,
        "unchecked": ["reconciliation", *UNCHECKED] if case == "reconciled" else UNCHECKED,
    }


def test_a_response_that_its_client_wrote_anew_around_the_receipt_is_bound(check: Check) -> None:
    made = parts("completed")
    assert check(made, json.dumps(json.loads(response_of(made)), indent=2).encode()).exit_code == 0


@pytest.mark.parametrize(
    ("member", "value", "checks"),
    [
        ("request_id", "process:" + "0" * 64, ["request_id"]),
        ("verdict", "deny", ["verdict"]),
        ("reason", "because", ["verdict"]),
        ("terminal_state", {"state": "incomplete", "reason": "not_dispatched"}, ["terminal_state"]),
        ("output", None, ["output"]),
        ("output", {"kind": "value", "value": {}}, ["output"]),
        ("output", {"kind": "text", "text": "published"}, ["output"]),
        ("reconciliation", {"outcome": "applied", "by": "ada", "record": 3}, ["terminal_state"]),
    ],
)
def test_a_member_that_the_receipt_does_not_bear_out_is_named(
    member: str, value: Any, checks: list[str], check: Check
) -> None:
    made = parts("completed")
    assert made.response is not None
    made.response[member] = value
    assert failing(check(made)) == checks


@pytest.mark.parametrize("case", ["unknown", "compensated", "refused"])
def test_an_output_of_a_call_that_has_none_is_named(case: str, check: Check) -> None:
    made = parts(case)
    assert made.response is not None
    made.response["output"] = observed.OUTPUT
    assert failing(check(made)) == ["output"]


@pytest.mark.parametrize(
    ("name", "value", "checks"),
    [
        ("operation_key", "another", ["operation", "request_id", "binding"]),
        ("server_id", "elsewhere", ["route", "binding"]),
        ("tool_name", "retract", ["route", "binding"]),
        ("arguments", {}, ["arguments"]),
        ("known_outcome_only", ..., ["recovery_policy", "binding"]),
    ],
)
def test_a_response_to_another_request_is_not_bound(name: str, value: Any, checks: list[str], check: Check) -> None:
    made = parts("completed")
    response = response_of(made)
    made.request[name] = value
    if value is ...:
        del made.request[name]
    assert failing(check(made, response)) == checks


@pytest.mark.parametrize(
    ("name", "value", "checks"),
    [
        ("runtime_id", "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe816", ["runtime_pin", "request_id", "binding"]),
        ("process_id", "consumer", ["caller", "request_id", "binding"]),
        ("capability_id", "c" * 64, ["caller", "binding"]),
    ],
)
def test_a_response_in_another_context_is_not_bound(name: str, value: str, checks: list[str], check: Check) -> None:
    made = parts("completed")
    response = response_of(made)
    made.context[name] = value
    assert failing(check(made, response)) == checks


def test_a_receipt_of_another_call_in_the_response_is_named(check: Check) -> None:
    made = parts("completed")
    response = json.loads(response_of(made))
    response["receipt_json"] = json.loads(response_of(parts("built_in")))["receipt_json"]
    assert failing(check(made, jcs(response))) == ["operation", "route", "arguments", "request_id", "binding"]


def test_a_receipt_under_another_key_is_named_and_nothing_else_of_the_response_is_relied_on(check: Check) -> None:
    made = parts("completed")
    assert failing(check(made, key=key_of(observed.STRANGER))) == ["signer_pin"]
    made.keys["receipt"] = observed.STRANGER
    done = check(made)
    assert failing(done) == ["signature"]
    assert json.loads(done.stdout)["receipt_id"] is None


def test_a_receipt_that_was_spaced_anew_is_named(check: Check) -> None:
    made = parts("completed")
    response = json.loads(response_of(made))
    response["receipt_json"] += " "
    assert failing(check(made, jcs(response)))[0] in ("fields", "text")


@pytest.mark.parametrize(("salt", "left"), [("parameter_salt", "arguments"), ("output_salt", "output")])
def test_a_withheld_salt_leaves_a_check_unmade_and_the_exit_at_3(salt: str, left: str, check: Check) -> None:
    made = parts("completed")
    del made.disclosed[salt]
    done = check(made)
    assert done.exit_code == 3
    found = json.loads(done.stdout)
    assert (found["response_bound"], found["unchecked"][0]) == (False, left)
    assert left not in found["checks"]
    assert left in done.stderr


@pytest.mark.parametrize(
    "output",
    [
        {"kind": "text", "text": '{"n": 18446744073709551616}'},
        {"kind": "withheld", "reason": "too_large", "bytes": 9_000_000, "sha256": "9" * 64},
        {"kind": "value", "value": None},
    ],
)
def test_every_kind_of_output_is_held_against_its_commitment(output: dict[str, Any], check: Check) -> None:
    made = parts("completed")
    assert made.response is not None
    made.response["output"] = output
    salt = made.disclosed["output_salt"]
    made.leaf("receipt")["output"] = {"kind": output["kind"], "hash": commitment(salt, jcs(output))}
    assert check(made).exit_code == 0
    made.leaf("receipt")["output"]["kind"] = "withheld" if output["kind"] != "withheld" else "value"
    assert failing(check(made)) == ["output"]


@pytest.mark.parametrize(
    "decision",
    [
        {"verdict": "allow", "reason": "granted"},
        {"verdict": "deny"},
        {"verdict": "incomplete", "reason": "not_dispatched"},
    ],
)
def test_a_decision_that_does_not_go_with_its_terminal_state_is_named(decision: dict[str, str], check: Check) -> None:
    made = parts("completed")
    assert made.response is not None
    made.leaf("receipt")["decision"] = decision
    made.response["verdict"] = "allow" if decision["verdict"] == "allow" else "deny"
    made.response["reason"] = decision.get("reason")
    assert failing(check(made)) == ["terminal_state"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("response", b"{}", "`request_id` is missing"),
        ("response", b"not json", "not JSON"),
        ("request", b'{"operation_key":"a","operation_key":"b"}', "there twice"),
        ("request", b'{"operation_key":"a","server_id":"s","tool_name":"t","arguments":[]}', "`arguments` is not an"),
        (
            "request",
            b'{"operation_key":"a","server_id":"s","tool_name":"t","arguments":{},"known_outcome_only":false}',
            "`known_outcome_only` is there and not true",
        ),
        ("request", b'{"operation_key":"a","server_id":"s","tool_name":"t","arguments":{"n":1e999}}', "beyond"),
        ("context", b'{"runtime_id":"x","process_id":"p","capability_id":"c"}', "`runtime_id` is not"),
    ],
)
def test_a_document_that_is_none_is_refused_with_its_file_and_field(
    name: str, content: bytes, said: str, tmp_path: Path, check: Check
) -> None:
    made = parts("completed")
    check(made)
    (tmp_path / name).write_bytes(content)
    named = [word for each in ("response", "request", "context") for word in (f"--{each}", str(tmp_path / each))]
    done = CliRunner().invoke(
        receipt_verify_process_response, [*named, "--trusted-kernel-pubkey", key_of(observed.KERNEL)]
    )
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr
    assert str(tmp_path / name) in done.stderr
