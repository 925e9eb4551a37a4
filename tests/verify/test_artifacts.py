"""The artifacts in `fixtures/artifacts`, as files, through the command that a reviewer types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.verify import artifacts
from tests.verify.artifacts import FOLDER
from verify.cli import process_verify_call

INDEX: dict[str, Any] = json.loads((FOLDER / "calls.json").read_text(encoding="utf-8"))
BAD = [(kind, entry["name"], entry["fails"]) for kind in ("tampered", "lying") for entry in INDEX[kind]]


def verify_call(folder: Path, **changes: str) -> Result:
    options = {
        "artifact": str(folder / "call.json"),
        "request": str(folder / "request.json"),
        "context": str(folder / "context.json"),
        "trusted-kernel-pubkey": INDEX["kernel_key"],
        "runtime-id": INDEX["runtime_id"],
        **changes,
    }
    named = [word for name, value in options.items() for word in (f"--{name}", value)]
    return CliRunner().invoke(process_verify_call, named)


def test_the_files_are_what_the_generator_makes() -> None:
    made = artifacts.files()
    for name, content in made.items():
        assert (FOLDER / name).read_bytes() == content, f"{name}: run `python -m tests.verify.artifacts`"
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/calls/*/*")} | {"calls.json"}
    assert there == set(made)


def test_every_way_that_a_call_can_end_has_an_artifact() -> None:
    ends = {(entry["observed_operation_state"], entry["custody_binding"]) for entry in INDEX["valid"]}
    assert {state for state, _ in ends} == {"completed", "unknown", "compensated", "reconciled", None}
    assert len({custody for _, custody in ends}) == 3


@pytest.mark.parametrize("entry", INDEX["valid"], ids=lambda entry: entry["name"])
def test_a_valid_artifact_is_accepted(entry: dict[str, Any]) -> None:
    done = verify_call(FOLDER / "valid" / "calls" / entry["name"])
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {name: found[name] for name in entry if name != "name"} | {"name": entry["name"]} == entry
    assert "worker_response" in found["checks"]


@pytest.mark.parametrize(("kind", "name", "fails"), BAD, ids=[f"{kind}-{name}" for kind, name, _ in BAD])
def test_a_bad_artifact_is_refused_by_the_checks_that_are_named(kind: str, name: str, fails: list[str]) -> None:
    done = verify_call(FOLDER / kind / "calls" / name)
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert len(lines) == len(fails)
    for line, check in zip(lines, fails, strict=True):
        assert line.startswith("chio: ")
        assert f"check {check}" in line
    if done.stdout:  # nothing is printed of what could not even be read
        assert [entry["check"] for entry in json.loads(done.stdout)["failed"]] == fails


def test_the_key_may_be_a_file_and_the_wrong_one_is_refused(tmp_path: Path) -> None:
    folder = FOLDER / "valid" / "calls" / "completed"
    key = tmp_path / "kernel.pub"
    key.write_text(INDEX["kernel_key"] + "\n")
    assert verify_call(folder, **{"trusted-kernel-pubkey": str(key)}).exit_code == 0
    done = verify_call(folder, **{"trusted-kernel-pubkey": artifacts.key_of(artifacts.observed.STRANGER)})
    assert done.exit_code == 1
    assert "check signer_pin" in done.stderr


@pytest.mark.parametrize(
    ("option", "other", "check"),
    [
        ("request", "unknown/request.json", "original_request"),
        ("artifact", "unknown/call.json", "original_request"),
        ("context", "absent/context.json", "input"),
        ("artifact", "completed/request.json", "fields"),
    ],
)
def test_a_document_of_another_call_or_none_is_refused_with_its_name(option: str, other: str, check: str) -> None:
    calls = FOLDER / "valid" / "calls"
    done = verify_call(calls / "completed", **{option: str(calls / other)})
    assert done.exit_code == 1
    assert f"check {check}" in done.stderr
    assert str(calls / other) in done.stderr or option == "request"
