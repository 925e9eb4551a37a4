"""`verify-call` against attested calls: each good one is accepted, each change of it is refused by the check it names.

Two kinds of change. A *forgery* is made by somebody without the keys: any changed byte breaks a signature. A *lie* is
signed again by the right keys, proofs and checkpoint included, as a dishonest host would: what the reviewer kept, or
another part of the artifact, must give it away. What nothing can give away is listed here by name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verify import observed
from tests.verify.judging import UNREADABLE, Judge, another, at, failed, outcome, places, put
from tests.verify.observed import Parts, assemble, key_of, parts, sign
from tests.verify.signed import jcs
from verify.requests import Request
from verify.verdict import VerifyError

CHECKS = [
    "signer_pin", "runtime_pin", "original_request", "issued_capability", "worker_response", "retained_operation",
    "continuation_custody",
]  # fmt: skip
UNCHECKED = ["physical_effects", "aggregate_usage", "confinement"]

# --- what is accepted ------------------------------------------------------------------------------------------------

STATES = {"refused": None, "built_in": "completed", "redispatched": "completed", "readback": "completed"}


@pytest.mark.parametrize("case", observed.CASES)
def test_a_good_artifact_is_accepted_and_says_what_became_of_the_call(case: str, judge: Judge) -> None:
    made = parts(case)
    claims_nothing = case == "refused"
    assert judge(made).document() == {
        "schema": "chio.process.call-verification.v1",
        "runtime_id": observed.RUNTIME_ID,
        "process_id": "producer",
        "request_id": made.observation["call"]["request_id"],
        "observed_operation_state": STATES.get(case, case),
        "custody_binding": {
            "refused": "no_custody_claim", "readback": "signed_store_readback",
        }.get(case, "original_call_commitment_and_signed_store_readback"),
        "artifact_schema": "chio.process.call-observation.v2",
        "checks": CHECKS[:-1] if claims_nothing else CHECKS,
        "unchecked": ["continuation_custody", *UNCHECKED] if claims_nothing else UNCHECKED,
    }  # fmt: skip


@pytest.mark.parametrize("case", observed.CASES)
def test_without_a_response_worker_response_is_unchecked(case: str, judge: Judge) -> None:
    found = judge(parts(case, answered=False)).document()
    assert "failed" not in found
    assert "worker_response" not in found["checks"]
    assert found["unchecked"][0] == "worker_response"


def test_a_response_from_before_the_reconciliation_is_still_the_workers(judge: Judge) -> None:
    made = parts("reconciled")
    assert made.response is not None
    del made.response["reconciliation"]
    assert failed(judge(made)) == []


def test_spacing_and_order_of_the_reviewers_own_documents_mean_nothing(tmp_path: Path) -> None:
    made = parts("completed")
    (tmp_path / "request.json").write_text(json.dumps(dict(reversed(made.request.items())), indent=3))
    asked = Request.from_file(str(tmp_path / "request.json"))
    assert asked.digest == made.observation["request_sha256"]


# --- forgeries: no key -----------------------------------------------------------------------------------------------


def a_forgery(case: str, path: tuple[Any, ...]) -> bytes:
    artifact = json.loads(assemble(parts(case)))
    put(artifact, path, another(at(artifact, path)))
    return jcs(artifact)


def every_member(case: str) -> list[tuple[Any, ...]]:
    return list(places(json.loads(assemble(parts(case)))))


@pytest.mark.parametrize("case", ["completed", "reconciled"])
def test_a_forged_member_never_passes_and_the_signature_is_what_names_it(case: str, judge: Judge) -> None:
    made = parts(case)
    for path in every_member(case):
        found = outcome(lambda path=path: judge(made, a_forgery(case, path)))
        assert "signer_pin" in found or set(found) & UNREADABLE, path


@pytest.mark.parametrize("case", observed.CASES)
def test_a_missing_member_is_named(case: str, judge: Judge) -> None:
    made = parts(case)
    whole = json.loads(assemble(made))
    for path in [("body",), ("signature",), *(("body", name) for name in whole["body"])]:
        artifact = copy.deepcopy(whole)
        del at(artifact, path[:-1])[path[-1]]
        with pytest.raises(VerifyError) as refused:
            judge(made, jcs(artifact))
        assert refused.value.check == "fields"
        assert path[-1] in refused.value.what


def test_an_artifact_that_was_written_anew_is_refused(judge: Judge) -> None:
    made = parts("completed")
    anew = json.dumps(json.loads(assemble(made))).encode()
    assert set(outcome(lambda: judge(made, anew))) & UNREADABLE


def test_an_unknown_member_is_refused(judge: Judge) -> None:
    made = parts("completed")
    made.observation["note"] = "trust me"
    with pytest.raises(VerifyError, match="note"):
        judge(made)


# --- what the reviewer holds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", observed.CASES)
def test_another_key_is_refused_by_the_signer_pin(case: str, judge: Judge) -> None:
    assert "signer_pin" in failed(judge(parts(case), key=key_of(observed.STRANGER)))


@pytest.mark.parametrize("case", observed.CASES)
def test_another_run_is_refused_by_the_runtime_pin(case: str, judge: Judge) -> None:
    assert failed(judge(parts(case), runtime_id="7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe816")) == ["runtime_pin"]


@pytest.mark.parametrize("case", observed.CASES)
@pytest.mark.parametrize("name", ["operation_key", "server_id", "tool_name", "arguments", "known_outcome_only"])
def test_another_request_is_refused_by_original_request(case: str, name: str, judge: Judge) -> None:
    made, artifact = parts(case), assemble(parts(case))
    if name == "known_outcome_only":
        if made.request.pop(name, None) is None:
            made.request[name] = True
    elif name == "arguments":
        made.request[name] = {**made.request[name], "more": None}
    else:
        made.request[name] += "x"
    assert "original_request" in failed(judge(made, artifact))


@pytest.mark.parametrize("case", observed.CASES)
@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("runtime_id", "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe816", "runtime_pin"),
        ("process_id", "consumer", "original_request"),
        ("process_id", "consumer", "issued_capability"),
        ("capability_id", "c" * 64, "issued_capability"),
    ],
)
def test_another_context_is_refused(case: str, name: str, value: str, check: str, judge: Judge) -> None:
    made, artifact = parts(case), assemble(parts(case))
    made.context[name] = value
    found = failed(judge(made, artifact))
    assert check in found
    assert "original_request" in found


# --- lies: every key --------------------------------------------------------------------------------------------------

# Which check gives a changed member away, by the beginning of its path.
GIVEN_AWAY = {
    "observation.schema": "fields",
    "observation.runtime_id": "runtime_pin",
    "observation.kernel_key": "signer_pin",
    "observation.request_sha256": "original_request",
    "observation.context_sha256": "original_request",
    "observation.call": "original_request",
    "observation.parameter_salt": "original_request",
    "observation.operation": "retained_operation",
    "observation.custody_binding": "continuation_custody",
    "bootstrap.schema": "fields",
    "bootstrap.runtime_id": "runtime_pin",
    "bootstrap.kernel_key": "signer_pin",
    "bootstrap.log_key": "retained_operation",
    "bootstrap.authority_key": "issued_capability",
    "bootstrap.log_origin": "runtime_pin",
    "bootstrap.policy_digest": "retained_operation",
    "bootstrap.processes.0.process_id": "issued_capability",
    "bootstrap.processes.0.parent_id": "fields",
    "bootstrap.processes.0.capability_id": "issued_capability",
    "bootstrap.processes.1.process_id": "issued_capability",
    "bootstrap.processes.1.parent_id": "issued_capability",
    "bootstrap.processes.1.capability_id": "issued_capability",
    "bootstrap.storage.journal_mode": "fields",
    "bootstrap.storage.synchronous": "fields",
    "tokens": "issued_capability",
    "intent.call": "continuation_custody",
    "intent.attempt": "continuation_custody",
    "intent.capability_id": "continuation_custody",
    "intent.server": "continuation_custody",
    "intent.tool": "continuation_custody",
    "intent.parameter_hash": "continuation_custody",
    "receipt.schema": "fields",
    "receipt.runtime_id": "runtime_pin",
    "receipt.log_index": "retained_operation",
    "receipt.capability_id": "issued_capability",
    "receipt.tool_server": "original_request",
    "receipt.tool_name": "original_request",
    "receipt.action": "original_request",
    "receipt.decision.verdict": "retained_operation",
    "receipt.decision.reason": "retained_operation",
    "receipt.terminal_state": "retained_operation",
    "receipt.output": "worker_response",
    "receipt.policy_hash": "retained_operation",
    "receipt.call": "retained_operation",
    "receipt.kernel_key": "retained_operation",
    "reconciliation.schema": "fields",
    "reconciliation.runtime_id": "runtime_pin",
    "reconciliation.call": "retained_operation",
    "reconciliation.outcome": "worker_response",
    "reconciliation.by": "worker_response",
    "response": "worker_response",
    "disclosed": "worker_response",
}

# What a host with its own keys can say as it likes of one call: nothing else here speaks of it.
ITS_WORD_ALONE = (
    "observation.time_ms",
    "bootstrap.created_ms",
    "bootstrap.time_ms",
    "bootstrap.config_digest",
    "bootstrap.storage.filesystem",
    "bootstrap.storage.volatile",
    "bootstrap.processes.0.ceiling",
    "bootstrap.processes.1.ceiling",
    "bootstrap.servers",
    "receipt.time_ms",
    "receipt.attempt",
    "receipt.evidence",
    "receipt.decision.guard",
    "reconciliation.time_ms",
    "reconciliation.evidence_sha256",
    "response.execution_nonce_json",
)


def documents(made: Parts) -> dict[str, Any]:
    """The documents of a call by name, to be changed in place."""
    shown = {made.log[index][0]: made.log[index][1] for index in made.own}
    return {
        "observation": made.observation,
        "bootstrap": made.bootstrap,
        "tokens": made.tokens,
        "response": made.response,
        "disclosed": made.disclosed,
        **shown,
    }


# Where it depends on the call: a refusal's reason is only told, and only an intent repeats the attempt.
BY_CASE = {("refused", "receipt.decision.reason"): "worker_response"} | {
    (case, f"receipt.attempt.{name}"): "continuation_custody"
    for case in observed.CASES
    if case not in ("refused", "built_in", "readback")
    for name in ("number", "launch_id")
}


def expected_check(case: str, path: tuple[Any, ...]) -> str | None:
    """The longest entry of either table that the path begins with."""
    name = ".".join(str(part) for part in path)
    if (case, name) in BY_CASE:
        return BY_CASE[case, name]
    entries: dict[str, str | None] = {**GIVEN_AWAY, **dict.fromkeys(ITS_WORD_ALONE)}
    known = [entry for entry in entries if name == entry or name.startswith(f"{entry}.")]
    assert known, f"{name} is in neither table"
    return entries[max(known, key=len)]


def a_lie(case: str, path: tuple[Any, ...], change: Callable[[Any], Any] = another) -> Parts:
    # Bodies that are equal share no object, so that one place changes and not its twin elsewhere.
    made = parts(case)
    made.log = [(kind, copy.deepcopy(body)) for kind, body in made.log]
    for name in ("observation", "bootstrap", "tokens", "response", "disclosed"):
        setattr(made, name, copy.deepcopy(getattr(made, name)))
    made.request, made.context = copy.deepcopy(made.request), copy.deepcopy(made.context)
    here = documents(made)
    put(here, path, change(at(here, path)))
    return made


@pytest.mark.parametrize("case", observed.CASES)
def test_each_changed_member_is_given_away_by_its_check_or_is_listed_as_the_hosts_word_alone(
    case: str, judge: Judge
) -> None:
    for path in places(documents(parts(case))):
        check = expected_check(case, path)
        found = outcome(lambda path=path: judge(a_lie(case, path)))
        if check is None:
            assert found == [], path
        else:
            assert check in found or found == ["fields"], (path, found)


@pytest.mark.parametrize("case", observed.CASES)
def test_each_removed_member_is_refused(case: str, judge: Judge) -> None:
    for path in places(documents(parts(case))):
        made = a_lie(case, path, lambda value: value)
        place = at(documents(made), path[:-1])
        if isinstance(place, list):
            place.pop(path[-1])
        else:
            del place[path[-1]]
        optional = expected_check(case, path) is None
        found = outcome(lambda made=made: judge(made))
        assert found or optional or path[0] == "disclosed", path


def test_a_withheld_salt_leaves_the_response_unchecked_and_not_verified(judge: Judge) -> None:
    for name in ("parameter_salt", "output_salt"):
        made = parts("completed")
        del made.disclosed[name]
        verdict = judge(made)
        assert failed(verdict) == []
        assert [check.name for check in verdict.findings.missing] == ["worker_response"]
        assert "worker_response" not in verdict.document()["checks"]


# --- lies: parts of another call -------------------------------------------------------------------------------------

SWAPPED = {
    "request_sha256": "original_request",
    "call": "original_request",
    "parameter_salt": "original_request",
    "response_json": "worker_response",
    "operation": "retained_operation",
    "custody_binding": "continuation_custody",
    "leaves": "retained_operation",
    "checkpoint": "retained_operation",
}


@pytest.mark.parametrize(
    ("mine", "theirs"), [("completed", "unknown"), ("unknown", "refused"), ("built_in", "refused")]
)
def test_a_member_of_another_calls_artifact_is_given_away(mine: str, theirs: str, judge: Judge) -> None:
    made = parts(mine)
    own, other = observed.observation_body(made), observed.observation_body(parts(theirs))
    differing = {name for name in own if own[name] != other[name]}
    assert differing >= {"request_sha256", "call", "parameter_salt", "response_json", "operation", "leaves"}
    for name in differing:
        body = {**own, name: other[name]}
        artifact = observed.signed_text("observation", body, observed.KERNEL).encode()
        assert SWAPPED[name] in failed(judge(made, artifact)), name


def test_a_whole_artifact_of_another_call_is_given_away(judge: Judge) -> None:
    for mine in observed.CASES:
        for theirs in observed.CASES:
            if mine != theirs:
                assert "original_request" in failed(judge(parts(mine), assemble(parts(theirs)))), (mine, theirs)


# --- lies: a wrong key ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signs", "check"),
    [
        ("observation", "signer_pin"),
        ("bootstrap", "signer_pin"),
        ("capability", "issued_capability"),
        ("receipt", "retained_operation"),
        ("log", "retained_operation"),
    ],
)
@pytest.mark.parametrize("case", observed.CASES)
def test_a_part_that_a_stranger_signed_is_given_away(case: str, signs: str, check: str, judge: Judge) -> None:
    made = parts(case)
    made.keys[signs] = observed.STRANGER
    assert check in failed(judge(made))


def test_a_signature_made_for_another_type_is_no_observation(judge: Judge) -> None:
    made = parts("completed")
    body = observed.observation_body(made)
    artifact = jcs({"body": body, "signature": sign("receipt", body, observed.KERNEL)})
    assert failed(judge(made, artifact)) == ["signer_pin"]
