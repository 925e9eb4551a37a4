"""One call of a run, asked after by who kept its request, its context and its response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verify.bundled import Leaf, Run, good, written
from tests.verify.observed import KERNEL, sign
from tests.verify.signed import jcs
from verify.audit import audit
from verify.foundation import Trust
from verify.inquiry import Kept
from verify.keys import Pins
from verify.requests import Context, Request
from verify.verdict import Exit, Verdict


def request_of(receipt: Leaf) -> dict[str, Any]:
    """What the worker asked, as it was kept before it was sent."""
    assert receipt.arguments is not None
    return {
        "operation_key": receipt.call["operation_key"],
        "server_id": receipt.body["tool_server"],
        "tool_name": receipt.body["tool_name"],
        "arguments": json.loads(receipt.arguments[1]),
    }


def context_of(run: Run, receipt: Leaf) -> dict[str, Any]:
    return {
        "runtime_id": run.runtime_id,
        "process_id": receipt.call["process_id"],
        "capability_id": receipt.body["capability_id"],
    }


def response_of(run: Run, receipt: Leaf) -> dict[str, Any]:
    """What the worker was answered."""
    body = {**receipt.body, "log_index": run.index(receipt), "kernel_key": KERNEL.verify_key.encode().hex()}
    assert receipt.arguments is not None
    disclosed = {
        "parameters": json.loads(receipt.arguments[1]),
        "parameter_salt": receipt.arguments[0].hex(),
        "output_salt": receipt.output[0].hex() if receipt.output else None,
    }
    text = jcs({"body": body, "disclosed": disclosed, "signature": sign("receipt", body, KERNEL)})
    decision = body["decision"]
    return {
        "request_id": receipt.call["request_id"],
        "verdict": "allow" if decision["verdict"] == "allow" else "deny",
        "output": json.loads(receipt.output[1]) if receipt.output else None,
        "reason": decision.get("reason"),
        "terminal_state": body["terminal_state"],
        "receipt_json": text.decode(),
        "execution_nonce_json": None,
    }


def asked(
    run: Run, folder: Path, request: dict[str, Any], context: dict[str, Any], response: dict[str, Any] | None = None
) -> Verdict:
    bundle, pins = written(run, folder)
    for name, document in (("request", request), ("context", context)):
        (folder / f"{name}.json").write_bytes(jcs(document))
    kept = Kept(
        Request.from_file(str(folder / "request.json")),
        Context.from_file(str(folder / "context.json")),
        ("response.json", jcs(response)) if response is not None else None,
    )
    return audit(bundle, Trust.of_pins(Pins.from_file(pins)), "custody", kept)


def states(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.state.value for check in verdict.checks}


@pytest.mark.parametrize(
    ("key", "state", "dispatches", "binding"),
    [
        ("pay-1", "completed", 1, "original_call_commitment_and_signed_store_readback"),
        ("send-1", "completed", 1, "original_call_commitment_and_signed_store_readback"),
        ("look-1", "unknown", 3, "original_call_commitment_and_signed_store_readback"),
        ("bad", None, 1, "no_custody_claim"),
    ],
)
def test_a_call_is_found_with_what_became_of_it(
    key: str, state: str | None, dispatches: int, binding: str, tmp_path: Path
) -> None:
    run = good()
    receipt = run.all("receipt", operation_key=key)[-1]
    verdict = asked(run, tmp_path, request_of(receipt), context_of(run, receipt), response_of(run, receipt))
    assert verdict.exit is Exit.VERIFIED
    assert (states(verdict)["original_request"], states(verdict)["worker_response"]) == ("passed", "passed")
    found = verdict.figures["call"]
    assert (found["state"], found["custody_binding"]) == (state, binding)
    assert found["dispatches"] == (0 if state is None else dispatches)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("operation_key", "pay-9"),
        ("server_id", "rogue"),
        ("tool_name", "balance"),
        ("arguments", {"amount": 2, "to": "ada"}),
        ("known_outcome_only", True),
    ],
)
def test_another_request_is_not_this_call(member: str, value: Any, tmp_path: Path) -> None:
    run = good()
    receipt = run.one("receipt", operation_key="pay-1")
    verdict = asked(run, tmp_path, {**request_of(receipt), member: value}, context_of(run, receipt))
    assert [check.name for check in verdict.failed] == ["original_request"]


@pytest.mark.parametrize(("member", "value"), [("process_id", "courier"), ("capability_id", "0" * 64)])
def test_another_context_is_not_this_call(member: str, value: str, tmp_path: Path) -> None:
    run = good()
    receipt = run.one("receipt", operation_key="pay-1")
    verdict = asked(run, tmp_path, request_of(receipt), {**context_of(run, receipt), member: value})
    assert [check.name for check in verdict.failed] == ["original_request"]


def test_a_response_of_another_call_is_refused(tmp_path: Path) -> None:
    run = good()
    receipt, other = run.one("receipt", operation_key="pay-1"), run.one("receipt", operation_key="pay-2")
    verdict = asked(run, tmp_path, request_of(receipt), context_of(run, receipt), response_of(run, other))
    assert [check.name for check in verdict.failed] == ["worker_response"]


def test_a_response_that_tells_of_no_reconciliation_that_there_is_one_of_is_an_older_one(tmp_path: Path) -> None:
    run = good()
    receipt = run.one("receipt", operation_key="look-1")
    verdict = asked(run, tmp_path, request_of(receipt), context_of(run, receipt), response_of(run, receipt))
    assert states(verdict)["worker_response"] == "passed"  # the first of three answers


def test_a_response_whose_receipt_is_not_in_the_log_is_refused(tmp_path: Path) -> None:
    run = good()
    receipt = run.one("receipt", operation_key="pay-1")
    response = response_of(run, receipt)
    receipt.body["time_ms"] += 1
    verdict = asked(run, tmp_path, request_of(receipt), context_of(run, receipt), response)
    assert [check.name for check in verdict.failed] == ["worker_response"]


def test_withheld_arguments_are_opened_by_the_response_or_left_unchecked(tmp_path: Path) -> None:
    run = good()
    receipt = run.one("receipt", operation_key="pay-1")
    request, context, response = request_of(receipt), context_of(run, receipt), response_of(run, receipt)
    for leaf in run.all("receipt"):
        leaf.arguments = None
    run.withheld = ["arguments"]
    verdict = asked(run, tmp_path, request, context)
    assert (states(verdict)["original_request"], verdict.exit) == ("unchecked", Exit.UNCHECKED)
    verdict = asked(run, tmp_path, request, context, response)
    assert (states(verdict)["original_request"], verdict.exit) == ("passed", Exit.VERIFIED)
