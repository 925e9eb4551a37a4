"""The chain of capability tokens in an attested call: no token is wider than the one it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.verify import observed
from tests.verify.judging import Judge, failed, put
from tests.verify.observed import Parts, parts


def rechained(change: Callable[[dict[str, Any], dict[str, Any]], None], case: str = "completed") -> Parts:
    """A call whose chain was issued as changed: ids, bootstrap and context follow, so only the rule is broken."""
    own, root = observed.tokens()
    change(own, root)
    own["parent_capability_id"] = observed.signed_id("capability", root)
    return observed.parts(case, chain=[own, root])


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("grants", 0, "server"), "elsewhere"),
        (("grants", 0, "tool"), "*"),
        (("grants", 0, "expires_ms"), observed.T0 + 3_600_001),
        (("grants", 0, "max_invocations"), None),
        (("grants", 0, "max_invocations"), 101),
        (("grants", 0, "constraints"), []),
        (("grants", 0, "parent_grant"), None),
        (("grants", 0, "parent_grant"), 1),
        (("grants", 0, "parent_grant"), 2),
        (("expires_ms",), observed.T0 + 3_600_001),
        (("depth",), 2),
        (("runtime_id",), "7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe816"),
    ],
)
def test_a_token_wider_than_its_parents_is_refused(where: tuple[Any, ...], value: Any, judge: Judge) -> None:
    assert failed(judge(rechained(lambda own, _: put(own, where, value)))) == ["issued_capability"]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("grants", 0, "operations"), ["invoke"]),
        (("grants", 0, "tool"), "retract"),
        (("grants", 0, "parent_grant"), 0),
        (("budget_share_bps",), 4_999),
        (("expires_ms",), observed.T0 - 2_000),
    ],
)
def test_a_root_that_could_not_delegate_the_call_is_refused(where: tuple[Any, ...], value: Any, judge: Judge) -> None:
    assert failed(judge(rechained(lambda _, root: put(root, where, value)))) == ["issued_capability"]


def test_a_built_in_call_admitted_after_its_grant_had_ended_is_refused(judge: Judge) -> None:
    def ended(own: dict[str, Any], _: dict[str, Any]) -> None:
        own["grants"][1]["expires_ms"] = observed.T0 - 1_500

    assert failed(judge(rechained(ended, "built_in"))) == ["issued_capability"]


def test_an_external_call_may_be_answered_after_its_grant_had_ended(judge: Judge) -> None:
    def ended(own: dict[str, Any], _: dict[str, Any]) -> None:
        own["grants"][0]["expires_ms"] = observed.T0 + 1

    assert failed(judge(rechained(ended))) == []


def test_a_call_that_no_grant_covers_is_refused(judge: Judge) -> None:
    assert failed(judge(rechained(lambda own, _: own["grants"].pop(0)))) == ["issued_capability"]


def test_a_token_that_does_not_name_the_one_above_it_is_refused(judge: Judge) -> None:
    own, root = observed.tokens()
    own["parent_capability_id"] = "0" * 64
    assert failed(judge(observed.parts("completed", chain=[own, root]))) == ["issued_capability"]


def test_a_chain_of_no_tokens_is_refused(judge: Judge) -> None:
    made = parts("completed")
    made.tokens = []
    assert failed(judge(made)) == ["issued_capability"]


def test_a_root_that_may_invoke_and_not_delegate_is_refused(judge: Judge) -> None:
    def kept_for_itself(own: dict[str, Any], root: dict[str, Any]) -> None:
        own["grants"][0]["operations"] = root["grants"][0]["operations"] = ["invoke"]

    assert failed(judge(rechained(kept_for_itself))) == ["issued_capability"]
