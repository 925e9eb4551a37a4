"""Each recipe on a real host, confined, in each language: what it comes to, and what is kept of it afterwards."""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from typing import Any

import pytest

from tests.report.walkthrough import Project, decisions
from tests.state.recipes import LANGUAGES, RESULT, came_to, checkpoint, confined, mailboxes

pytestmark = [pytest.mark.timeout(120), confined]

BODY = b"Retained report body"
REQUEST = {
    "key": "publish-report-42", "server": "chio-ipc", "tool": "send_reports", "known_outcome_only": True,
    "arguments": {"message_key": "report-42", "payload": {"report": "Three inputs total ten."}},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(project: Project) -> dict[str, str]:
    """A complete run of each language's plan: its state."""
    states = {}
    for language in LANGUAGES:
        states[language] = f".chio-{language}"
        project.run(f"chio process init --config host.json --state .chio-{language}")
        report = project.json(f"chio process run --state .chio-{language} --plan process-{language}.json")
        assert report["complete"] is True
        assert all(worker["confined"] for worker in report["workers"])
    return states


@pytest.fixture
def state(runs: dict[str, str], language: str) -> str:
    return runs[language]


@pytest.fixture
def consumer(project: Project, state: str) -> dict[str, Any]:
    return came_to(project, state, "consumer", 1)


def test_progress_is_retained_in_its_slot(consumer: dict[str, Any]) -> None:
    assert consumer["retain-progress"] == {
        "revision": "1", "value": {"report.v1": {"version": 1, "completed": ["report-42"]}},
    }  # fmt: skip


def test_a_blob_comes_back_and_a_reader_without_a_credential_finds_the_same_bytes(
    project: Project, state: str, consumer: dict[str, Any]
) -> None:
    assert consumer["round-trip-blob"] == {"sha256": sha256(BODY).hexdigest(), "bytes": len(BODY)}
    kept = project.json(
        f"chio process state --state {state} --process consumer --blob {consumer['round-trip-blob']['sha256']}"
    )
    assert base64.b64decode(kept["data"]["blob"]["data_base64"]) == BODY


def test_the_digest_of_it_gives_another_process_nothing_in_another_language_either(
    project: Project, state: str
) -> None:
    answers = came_to(project, state, "sibling", 1)["read-foreign-blob"]
    assert answers == {"stored_by_another": "blob_missing", "stored_by_nobody": "blob_missing"}


def test_a_request_is_frozen_before_it_is_sent_and_kept_with_its_phase(
    project: Project, state: str, consumer: dict[str, Any]
) -> None:
    published = consumer["publish"]["checkpoint"]
    assert published["revision"] == "3"  # prepared, then completed
    assert published["value"]["report.v1"] == {
        "version": 1, "completed": ["report-42", "publish"], "phase": "completed", "request": REQUEST,
    }  # fmt: skip
    assert consumer["publish"]["receipt"] in project.receipts(state)
    assert mailboxes(project, state)["reports"]["last_sequence"] == 1


def test_of_two_writers_on_one_revision_the_second_is_refused_and_the_first_intact(
    project: Project, state: str, consumer: dict[str, Any]
) -> None:
    met = consumer["two-writers"]
    assert met["refusal"] == "checkpoint_conflict"
    assert (met["checkpoint"]["revision"], met["checkpoint"]["value"]["writer.v1"]) == ("4", "A")
    # Unrelated slots were carried along, then and by everything that saved after it.
    assert met["checkpoint"]["value"]["report.v1"] == consumer["publish"]["checkpoint"]["value"]["report.v1"]
    assert checkpoint(project, state)["value"]["writer.v1"] == "A"


def test_a_snapshot_stores_what_an_edit_touched_and_the_rest_once(consumer: dict[str, Any]) -> None:
    kept = consumer["keep-document"]
    first, edited, unchanged = kept["stored"]
    assert kept["document_bytes"] > 1024 * 1024  # no checkpoint could hold it
    assert 0 < first["bytes"] <= kept["document_bytes"] * 1.1
    # One field of it changed: what is new is a small part of what is kept already.
    assert 0 < edited["bytes"] < first["bytes"] / 4
    assert 0 < edited["blobs"] <= first["blobs"]
    assert unchanged == {"bytes": 0, "blobs": 0}


def test_an_order_is_consumed_once_with_its_result_on_record(
    project: Project, state: str, consumer: dict[str, Any]
) -> None:
    assert consumer["consume-order"]["result"] == RESULT
    kept = checkpoint(project, state)
    assert kept == consumer["consume-order"]["checkpoint"]
    assert kept["value"]["report.v1"]["completed"] == ["report-42", "publish", "order"]
    assert mailboxes(project, state)["jobs"]["acknowledged_through"] == 1
    assert decisions(project.receipts(state)) == [
        ("send_jobs", "allow"), ("send_reports", "allow"), ("receive_jobs", "allow"), ("ack_jobs", "allow"),
    ]  # fmt: skip
    assert project.verify(state) == 4


def test_each_language_leaves_the_same_checkpoint_byte_for_byte(project: Project, runs: dict[str, str]) -> None:
    assert len({json.dumps(checkpoint(project, state), sort_keys=True) for state in runs.values()}) == 1
    assert len(runs) >= 2
