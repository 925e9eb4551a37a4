"""What the rules allow is verified, what cannot be judged is said to be, and nothing signed makes it stumble."""

from __future__ import annotations

import json
import random
import tracemalloc
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.bundled import Run, good, written
from tests.verify.judging import another, at, places, put
from tests.verify.leaf_changes import intent_of, not_sent, renamed
from verify import canonical
from verify.audit import audit
from verify.foundation import Trust
from verify.history import _digest
from verify.keys import Pins
from verify.verdict import Exit, Verdict, VerifyError


def judged(run: Run, folder: Path) -> Verdict:
    bundle, pins = written(run, folder)
    return audit(bundle, Trust.of_pins(Pins.from_file(pins)))


def states(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.state.value for check in verdict.checks}


# --- what the rules allow --------------------------------------------------------------------------------------------


def test_what_was_not_sent_gives_its_invocation_back_and_takes_it_again(tmp_path: Path) -> None:
    run = good()
    first = run.one("receipt", operation_key="pay-1")
    again = renamed(run, first, dispatch=2)
    not_sent(first)
    run.insert(run.index(first) + 1, intent_of(again), again)
    verdict = judged(run, tmp_path)
    assert verdict.exit is Exit.VERIFIED
    assert verdict.figures["calls"] == judged(good(), tmp_path).figures["calls"]


def test_what_was_never_sent_leaves_its_invocation_to_another_call(tmp_path: Path) -> None:
    run = good()
    not_sent(run.one("receipt", operation_key="pay-1"))
    refused = run.one("receipt", operation_key="p-2")
    allowed = renamed(run, run.one("receipt", operation_key="p-1"), "p-2")
    run.insert(run.index(refused), intent_of(allowed), allowed)
    run.leaves.remove(refused)
    assert judged(run, tmp_path).exit is Exit.VERIFIED


def test_an_unknown_outcome_keeps_its_invocation_though_it_was_stated_as_not_applied(tmp_path: Path) -> None:
    run = good()
    run.one("reconciliation").body["outcome"] = "not_applied"
    verdict = judged(run, tmp_path)
    assert verdict.exit is Exit.VERIFIED
    assert verdict.figures["reconciled"] == 1


def test_an_answer_that_comes_after_the_worker_ended_is_settled_in_its_name(tmp_path: Path) -> None:
    run = good()
    exit_ = run.one("exit", process_id="courier")
    receipt = run.one("receipt", operation_key="p-1")
    run.leaves.remove(receipt)
    run.insert(run.index(exit_) + 1, receipt)
    assert judged(run, tmp_path).exit is Exit.VERIFIED


def test_an_end_that_nobody_saw_is_told_and_no_contradiction(tmp_path: Path) -> None:
    run = good()
    exit_ = run.one("exit", process_id="packer")
    index = run.index(exit_)
    ended = {
        "schema": "chio.attempt.v1", "runtime_id": run.runtime_id, "time_ms": 0, "process_id": "packer", "attempt": 1,
        "event": "ended", "outcome": "host_interrupted",
    }  # fmt: skip
    run.leaves.remove(exit_)
    run.insert(index, type(exit_)("attempt", ended))
    verdict = judged(run, tmp_path)
    assert verdict.exit is Exit.VERIFIED
    assert {one.name: one.holds for one in verdict.observed}["exits_observed"] is False


def test_a_call_of_a_worker_that_somebody_else_launched_is_not_confined(tmp_path: Path) -> None:
    run = good()
    for leaf in (run.one("receipt", operation_key="ack-1"), run.one("receipt", operation_key="take-1")):
        leaf.body["attempt"] = None
    verdict = judged(run, tmp_path)
    assert verdict.exit is Exit.VERIFIED
    (confined,) = (one for one in verdict.observed if one.name == "confined")
    assert (confined.holds, "2 calls of workers that somebody else launched" in confined.reason) == (False, True)


# --- what cannot be judged -------------------------------------------------------------------------------------------


def constrained(run: Run) -> None:
    """Two grants of `pay` for everyone, one of them with a constraint."""

    def grant_twice(token: dict[str, Any]) -> None:
        pays = [grant for grant in token["grants"] if grant["tool"] == "pay"]
        limit = {"type": "object", "properties": {"amount": {"maximum": 1}}}
        for pay in pays:
            twice = {**pay, "constraints": [limit], "max_invocations": 100}
            if pay["parent_grant"] is not None:
                twice["parent_grant"] = parents[token["process_id"]]
            token["grants"].append(twice)

    parents: dict[str, int] = {}
    for process, above in (("root", None), ("clerk", "root"), ("courier", "clerk")):
        if above is not None:
            parents[process] = len(run.token(above)["grants"]) - 1
        run.retoken(process, grant_twice)


def test_where_constraints_decide_between_two_grants_the_count_is_left_unchecked(tmp_path: Path) -> None:
    run = good()
    constrained(run)
    verdict = judged(run, tmp_path)
    assert verdict.exit is Exit.VERIFIED
    assert (states(verdict)["invocations"], states(verdict)["constraints"]) == ("unchecked", "unchecked")
    reason = next(check.reason for check in verdict.checks if check.name == "invocations")
    assert reason.startswith("3 calls are covered by several grants")


# --- whatever is signed ----------------------------------------------------------------------------------------------

ODD: list[Any] = [None, True, -1, 0, 2**53 - 1, 1.5, "", "x", [], {}, [{}], {"a": 1}, "0" * 64, [[1]], ["ro"]]


@pytest.mark.parametrize("seed", range(4))
def test_no_value_in_a_signed_leaf_is_more_than_a_finding(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed)
    for _ in range(12):
        run = good()
        leaf = chosen.choice(run.leaves)
        document = {"body": leaf.body}
        path = chosen.choice(list(places(document)))
        path = path[: chosen.randrange(min(2, len(path)), len(path) + 1)]
        old = at(document, path)
        plain = isinstance(old, bool | int | str) and chosen.random() < 0.5
        put(document, path, another(old) if plain else chosen.choice(ODD))
        try:
            bundle, pins = written(run, tmp_path)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            continue  # these tests' own builder cannot make that
        with suppress(VerifyError):
            audit(bundle, Trust.of_pins(Pins.from_file(pins)))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(0, 3), max_size=8))
def test_an_array_of_names_is_hashed_as_its_canonical_text(named: list[Any]) -> None:
    """The verifier's usual encoder is slow for what every leaf has two of."""
    assert _digest(named) == sha256(canonical.encode(named)).hexdigest()


# --- memory ----------------------------------------------------------------------------------------------------------


def many(calls: int) -> Run:
    """The good run with so many more refusals of the courier, and a config that allows them."""
    run = good()
    document = run.document("config")
    document[1] = document[1].replace(b'"max_calls": 40', b'"max_calls": 4000000')
    for entry in run.bootstrap["processes"]:
        entry["ceiling"] *= 100_000
    run.bootstrap["config_digest"] = sha256(document[1]).hexdigest()
    last = run.one("receipt", operation_key="p-4")
    more = [renamed(run, last, f"more-{number}") for number in range(calls)]
    for leaf in more:
        leaf.arguments = None
    run.leaves[run.index(last) + 1 : run.index(last) + 1] = more
    run.withheld = ["arguments"]
    return run


def peak_bytes(run: Run, folder: Path) -> int:
    bundle, pins = written(run, folder)
    document = {**json.loads(Path(pins).read_text()), "config_digest": run.bootstrap["config_digest"]}
    Path(pins).write_text(json.dumps(document))
    trust = Trust.of_pins(Pins.from_file(pins))
    tracemalloc.start()
    try:
        assert audit(bundle, trust).exit is Exit.VERIFIED
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_calls(tmp_path: Path) -> None:
    judged(good(), tmp_path)  # what is loaded once is loaded
    few, more = (peak_bytes(many(calls), tmp_path) for calls in (500, 3000))
    assert more - few < 256 * 1024, (few, more)
