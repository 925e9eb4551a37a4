"""The leaves of an attested call: each is in the log, and together they are the life of one call."""

from __future__ import annotations

import pytest

from tests.verify import observed
from tests.verify.judging import Judge, another, failed, outcome
from tests.verify.observed import Parts, parts


def test_leaves_out_of_order_or_twice_are_refused(judge: Judge) -> None:
    made = parts("reconciled")
    for own in (made.own[::-1], made.own[:1] * 2 + made.own[1:], made.own[:1], [], made.own + made.own[-1:]):
        changed = parts("reconciled")
        changed.own = own
        found = outcome(lambda changed=changed: judge(changed))
        assert found == ["fields"] or "continuation_custody" in found, own


@pytest.mark.parametrize("case", ["completed", "redispatched"])
def test_a_claim_of_original_custody_without_its_intent_is_given_away(case: str, judge: Judge) -> None:
    made = parts(case)
    del made.own[0]
    assert failed(judge(made)) == ["continuation_custody"]


def test_a_refusal_that_claims_custody_or_an_operation_is_given_away(judge: Judge) -> None:
    made = parts("refused")
    made.observation["custody_binding"] = observed.ORIGINAL
    assert failed(judge(made)) == ["continuation_custody"]
    made = parts("refused")
    made.observation["operation"] = {"state": "completed"}
    assert failed(judge(made)) == ["retained_operation"]


def test_a_reconciliation_that_is_claimed_and_not_in_the_log_is_given_away(judge: Judge) -> None:
    made = parts("reconciled")
    made.own.pop()
    assert failed(judge(made)) == ["worker_response", "retained_operation"]


def test_a_leaf_that_the_checkpoint_does_not_cover_is_given_away(judge: Judge) -> None:
    made = parts("completed")
    body = observed.observation_body(made)
    made.log[1][1]["event"] = "ended"  # the log is another one, and so is its root
    body["checkpoint"] = observed.observation_body(made)["checkpoint"]
    found = failed(judge(made, observed.signed_text("observation", body, observed.KERNEL).encode()))
    assert found == ["retained_operation", "continuation_custody"]


@pytest.mark.parametrize(
    ("position", "check"), [(0, "continuation_custody"), (1, "retained_operation"), (2, "retained_operation")]
)
def test_a_leaf_whose_proof_does_not_lead_to_the_checkpoint_is_given_away(
    position: int, check: str, judge: Judge
) -> None:
    made = parts("reconciled")
    body = observed.observation_body(made)
    proof = body["leaves"][position]["proof"]
    proof[0] = another(proof[0])
    assert failed(judge(made, observed.signed_text("observation", body, observed.KERNEL).encode())) == [check]


def unanswered(case: str) -> Parts:
    return parts(case, answered=False)


def test_a_reconciliation_of_a_known_outcome_is_given_away(judge: Judge) -> None:
    made = unanswered("completed")
    record = unanswered("reconciled").leaf("reconciliation")
    made.own.append(len(made.log))
    made.log.append(("reconciliation", {**record, "call": made.observation["call"]}))
    made.observation["operation"] = {"state": "reconciled"}
    assert failed(judge(made)) == ["retained_operation"]


def test_a_reconciliation_that_stands_before_its_receipt_is_given_away(judge: Judge) -> None:
    made = unanswered("reconciled")
    intent, receipt, record = made.own
    made.log[receipt], made.log[record] = made.log[record], made.log[receipt]
    made.leaf("receipt")["log_index"] = record
    made.own = [intent, record, receipt]
    assert failed(judge(made)) == ["retained_operation"]


def test_a_reconciliation_older_than_its_receipt_is_given_away(judge: Judge) -> None:
    made = unanswered("reconciled")
    made.leaf("reconciliation")["time_ms"] = observed.T0
    assert failed(judge(made)) == ["retained_operation"]


def test_an_intent_that_stands_after_the_receipt_is_given_away(judge: Judge) -> None:
    made = unanswered("completed")
    intent, receipt = made.own
    made.log[intent], made.log[receipt] = made.log[receipt], made.log[intent]
    made.leaf("receipt")["log_index"] = intent
    made.own = [receipt, intent]
    assert failed(judge(made)) == ["continuation_custody"]


def test_a_refusal_that_has_an_intent_is_given_away(judge: Judge) -> None:
    made = unanswered("refused")
    receipt = made.leaf("receipt")
    intent = unanswered("completed").leaf("intent")
    changes = {
        "call": receipt["call"], "attempt": receipt["attempt"], "tool": receipt["tool_name"],
        "parameter_hash": receipt["action"]["parameter_hash"],
    }  # fmt: skip
    made.log[2] = ("intent", {**intent, **changes})
    made.own.insert(0, 2)
    assert failed(judge(made)) == ["continuation_custody"]


def test_a_built_in_call_of_unknown_outcome_is_given_away(judge: Judge) -> None:
    made = unanswered("built_in")
    receipt = made.leaf("receipt")
    receipt["decision"] = {"verdict": "incomplete", "reason": observed.UNKNOWN}
    receipt["terminal_state"] = {"state": "incomplete", "reason": observed.UNKNOWN}
    receipt["output"] = None
    made.observation["operation"] = {"state": "unknown"}
    assert failed(judge(made)) == ["continuation_custody"]
