"""The texts in a bundle: their order, their form, and that what they say twice is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verify.bundled import Run, good, written
from tests.verify.signed import jcs
from verify.audit import audit
from verify.foundation import Trust
from verify.keys import Pins
from verify.verdict import VerifyError


def failed(run: Run, folder: Path) -> set[str]:
    bundle, pins = written(run, folder)
    try:
        return {check.name for check in audit(bundle, Trust.of_pins(Pins.from_file(pins))).failed}
    except VerifyError as error:
        return {error.check}


def plan(change: Callable[[Any], None]) -> Run:
    """The run with another plan."""
    run = good()
    document = run.document("plan")
    value = json.loads(document[1])
    change(value)
    document[1] = jcs(value)
    return run


def test_a_document_out_of_order_or_twice_is_refused(tmp_path: Path) -> None:
    for change in (
        lambda documents: documents.reverse(),
        lambda documents: documents.insert(1, documents[0]),
        lambda documents: documents.append(documents[-1]),
        lambda documents: documents.insert(0, documents.pop(3)),
        lambda documents: documents.insert(0, documents.pop(2)),
    ):
        run = good()
        change(run.documents)
        assert failed(run, tmp_path) == {"documents"}


def test_texts_that_are_found_by_their_digest_may_stand_in_any_order(tmp_path: Path) -> None:
    run = good()
    run.documents[3:] = reversed(run.documents[3:])
    assert failed(run, tmp_path) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan["resolved"][0].pop("executable_sha256"),
        lambda plan: plan["resolved"][0].update(more=1),
        lambda plan: plan["resolved"][0]["files"].update(more="no digest"),
        lambda plan: plan["resolved"][0].update(binds=None),
        lambda plan: plan["resolved"].reverse(),
        lambda plan: plan["resolved"].pop(),
        lambda plan: plan["plan"]["workers"][0].update(input={"secret": 1}),
    ],
)
def test_a_plan_that_did_not_resolve_as_plans_do_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    assert "documents" in failed(plan(change), tmp_path)


@pytest.mark.parametrize("confinement", [None, [], {"write": None}, {"write": "bank"}, {"profile": 1}, {"more": []}])
def test_a_config_whose_servers_are_of_another_form_is_refused_without_a_crash(
    confinement: Any, tmp_path: Path
) -> None:
    run = good()
    document = run.document("config")
    value = json.loads(document[1])
    value["servers"][0]["confinement"] = confinement
    document[1] = json.dumps(value).encode()
    assert "documents" in failed(run, tmp_path)
