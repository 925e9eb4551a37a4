"""`chio process evidence`: one signed file that an auditor verifies with the pins alone, and nothing changed by it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chio import statedir
from tests.host import orders
from tests.host.commands import CHIO, accepted, contents, refused
from verify.audit import audit
from verify.bundle import Bundle
from verify.cli import main
from verify.foundation import Trust
from verify.keys import Pins
from verify.verdict import Exit, Verdict

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="confining a server that writes needs root in this version"),
]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return orders.run(tmp_path_factory.mktemp("orders"))


def evidence(state: Path, out: Path, *options: str) -> Any:
    return accepted("process", "evidence", "--state", state, "--out", out, *options)


def verdict(state: Path, bundle: Path) -> Verdict:
    return audit(str(bundle), Trust.of_pins(Pins.from_file(str(state / "pins.json"))))


def verdict_of_a_new_bundle(state: Path, folder: Path) -> Verdict:
    evidence(state, folder / "again.chio")
    return verdict(state, folder / "again.chio")


def states(told: Verdict) -> dict[str, str]:
    return {check.name: check.state.value for check in told.checks}


def test_a_whole_run_is_verified_from_one_file_and_the_pins(state: Path, tmp_path: Path) -> None:
    said = evidence(state, tmp_path / "run.chio")
    told = verdict(state, tmp_path / "run.chio")
    assert told.exit is Exit.VERIFIED
    assert [name for name, found in states(told).items() if found == "unchecked"] == [
        "kept_checkpoints", "policy", "profile_texts", "physical_effects",
    ]  # fmt: skip
    assert {condition.name: condition.holds for condition in told.observed} == {
        "confined": True, "durable": True, "exits_observed": True, "outcomes_known": False,
    }  # fmt: skip
    assert said["sections"] == told.figures["sections"]
    assert said["bytes"] == (tmp_path / "run.chio").stat().st_size
    assert told.figures["reconciled"] == 1
    assert stat.S_IMODE((tmp_path / "run.chio").stat().st_mode) == 0o600


def test_the_leaves_are_those_of_the_state_and_the_receipts_those_of_the_export(state: Path, tmp_path: Path) -> None:
    evidence(state, tmp_path / "run.chio")
    accepted("receipt", "export", "--state", state, "--out", tmp_path / "receipts.ndjson")
    lines = [json.loads(line) for line in (tmp_path / "receipts.ndjson").read_bytes().splitlines()]
    bundle = Bundle.open(str(tmp_path / "run.chio"))
    leaves = [json.loads(leaf) for leaf in bundle.sections["leaves"]]
    assert [leaf["body"] for leaf in leaves if leaf["type"] == "receipt"] == [line["body"] for line in lines]
    opened = {index: json.loads(text) for index, _, text in bundle.sections["arguments"]}
    assert opened == {line["body"]["log_index"]: line["disclosed"]["parameters"] for line in lines}


def test_every_launch_has_its_profile_and_its_list_in_the_bundle(state: Path, tmp_path: Path) -> None:
    evidence(state, tmp_path / "run.chio")
    kinds = [kind for kind, _ in Bundle.open(str(tmp_path / "run.chio")).sections["documents"]]
    assert kinds[:3] == ["config", "policy", "plan"]
    assert {kinds.count(kind) for kind in ("profile", "resolved-profile")} == {2}  # worker and tool-server
    assert "seccomp-list" in kinds


def test_two_bundles_of_one_state_hold_the_same_leaves(state: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        evidence(state, tmp_path / name)
    digests = [
        [entry["sha256"] for entry in Bundle.open(str(tmp_path / name)).manifest["sections"]] for name in ("one", "two")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("rules", "hidden"),
    [
        (["arguments"], {"arguments": 18, "outputs": 0}),
        (["outputs"], {"arguments": 0, "outputs": 9}),
        (["outputs:bank/*"], {"arguments": 0, "outputs": 4}),
        (["arguments:packer", "outputs:packer"], {"arguments": 2, "outputs": 2}),
        (["arguments:*/pay"], {"arguments": 6, "outputs": 0}),
        (["outputs:nobody"], {"arguments": 0, "outputs": 0}),
    ],
)
def test_what_is_withheld_is_named_and_the_rest_still_verifies(
    rules: list[str], hidden: dict[str, int], state: Path, tmp_path: Path
) -> None:
    options = [part for rule in rules for part in ("--withhold", rule)]
    evidence(state, tmp_path / "run.chio", *options)
    told = verdict(state, tmp_path / "run.chio")
    assert told.exit is Exit.VERIFIED
    assert told.figures["withheld"] == rules
    assert told.figures["hidden"] == hidden
    for what, count in hidden.items():
        assert states(told)[what] == ("unchecked" if count else "passed")


def test_withheld_texts_and_their_salts_are_nowhere_in_the_file(state: Path, tmp_path: Path) -> None:
    evidence(state, tmp_path / "all.chio")
    evidence(state, tmp_path / "less.chio", "--withhold", "arguments", "--withhold", "outputs")
    sections = Bundle.open(str(tmp_path / "all.chio")).sections
    less = (tmp_path / "less.chio").read_bytes()
    opened = [(salt, text) for name in ("arguments", "outputs") for _, salt, text in sections[name]]
    assert len(opened) == 27
    assert not [salt for salt, _ in opened if salt in less]
    assert b'"messages":[' in b"".join(text for _, text in opened)
    assert b'"messages":[' not in less


@pytest.mark.parametrize("rule", ["inputs", "arguments:", "", "outputs" + ":x" * 600])
def test_a_rule_that_is_not_understood_is_refused_before_anything_is_made(
    rule: str, state: Path, tmp_path: Path
) -> None:
    said = refused("process", "evidence", "--state", state, "--out", tmp_path / "run.chio", "--withhold", rule)
    assert "--withhold" in said
    assert not (tmp_path / "run.chio").exists()


def test_a_file_that_is_there_is_never_written_over(state: Path, tmp_path: Path) -> None:
    (tmp_path / "run.chio").write_text("mine")
    said = refused("process", "evidence", "--state", state, "--out", tmp_path / "run.chio")
    assert "--out" in said
    assert (tmp_path / "run.chio").read_text() == "mine"
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")
    refused("process", "evidence", "--state", state, "--out", tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_live_host_is_left_alone_and_nothing_is_left_behind(state: Path, tmp_path: Path) -> None:
    directory = statedir.open_existing(state)
    lock = statedir.lock(directory, state)
    try:
        refused("process", "evidence", "--state", state, "--out", tmp_path / "run.chio")
    finally:
        os.close(lock)
        os.close(directory)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_leaves_no_half_of_a_bundle(state: Path, tmp_path: Path) -> None:
    """On a small file system of the test's own, in a mount namespace of its own."""
    script = 'mount -t tmpfs -o size=64k none "$1" && "$2" process evidence --state "$3" --out "$1/run.chio"; ls "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", tmp_path, CHIO, state],
        text=True, capture_output=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout == ""
    assert done.stderr.startswith("chio: the bundle cannot be written (--out, No space left on device; "), done.stderr
    assert verdict_of_a_new_bundle(state, tmp_path).exit is Exit.VERIFIED


def test_nothing_is_written_to_the_state_but_the_checkpoint(state: Path, tmp_path: Path) -> None:
    evidence(state, tmp_path / "one.chio")
    before = {name: about for name, about in contents(state).items() if not name.startswith("authority.db")}
    evidence(state, tmp_path / "two.chio")
    after = {name: about for name, about in contents(state).items() if not name.startswith("authority.db")}
    assert {name: about[2] for name, about in before.items()} == {name: about[2] for name, about in after.items()}


def test_a_state_that_was_tampered_with_signs_a_bundle_that_does_not_verify(state: Path, tmp_path: Path) -> None:
    """The kernel signs what the store holds; what was changed there shows as what it is."""
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    copy.chmod(0o700)
    database = sqlite3.connect(copy / "authority.db")
    database.execute(
        'UPDATE leaf SET body = replace(body, \'"outcome":"applied"\', \'"outcome":"not_applied"\')'
        " WHERE type = 'reconciliation'"
    )
    database.commit()
    database.close()
    evidence(copy, tmp_path / "run.chio")
    assert [check.name for check in verdict(copy, tmp_path / "run.chio").failed] == ["log"]


def test_a_state_in_which_nothing_ever_ran_is_a_bundle_too(tmp_path: Path) -> None:
    state = orders.make(tmp_path / "project")
    evidence(state, tmp_path / "run.chio")
    told = verdict(state, tmp_path / "run.chio")
    assert told.exit is Exit.VERIFIED
    assert told.figures["log_size"] == 1


# --- encrypted, deleted, restored ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run in an encrypted state, and its key file."""
    folder = tmp_path_factory.mktemp("sealed")
    accepted("process", "key", "--out", folder / "chio.key")
    return orders.run(folder / "project", "--key-file", folder / "chio.key"), folder / "chio.key"


def test_an_encrypted_state_is_shown_to_who_has_its_key_file(sealed: tuple[Path, Path], tmp_path: Path) -> None:
    state, key = sealed
    assert "key" in refused("process", "evidence", "--state", state, "--out", tmp_path / "run.chio")
    assert not (tmp_path / "run.chio").exists()
    evidence(state, tmp_path / "run.chio", "--key-file", str(key))
    told = verdict(state, tmp_path / "run.chio")
    assert told.exit is Exit.VERIFIED
    assert told.figures["hidden"] == {"arguments": 0, "outputs": 0}


def test_no_input_of_a_worker_is_in_the_plan_that_is_shown(sealed: tuple[Path, Path], tmp_path: Path) -> None:
    state, key = sealed
    evidence(state, tmp_path / "run.chio", "--key-file", str(key), "--withhold", "arguments", "--withhold", "outputs")
    assert b"fail_until" in (orders.ROOT / "fixtures/orders/plan.json").read_bytes()
    assert b"fail_until" not in (tmp_path / "run.chio").read_bytes()


def test_what_was_deleted_is_not_shown_and_its_tombstone_says_why(sealed: tuple[Path, Path], tmp_path: Path) -> None:
    state, key = tmp_path / "state", sealed[1]
    shutil.copytree(sealed[0], state)
    accepted("process", "delete", "--state", state, "--process", "packer", "--by", "A. Operator", "--key-file", key)
    evidence(state, tmp_path / "run.chio", "--key-file", str(key))
    told = verdict(state, tmp_path / "run.chio")
    assert told.exit is Exit.VERIFIED
    assert told.figures["hidden"] == {"arguments": 2, "outputs": 2}
    assert states(told)["withheld"] == "passed"
    assert (states(told)["arguments"], states(told)["outputs"]) == ("unchecked", "unchecked")


def test_a_restored_state_has_its_epochs_in_the_bundle(sealed: tuple[Path, Path], tmp_path: Path) -> None:
    key, restored = sealed[1], tmp_path / "restored"
    accepted("process", "backup", "--state", sealed[0], "--out", tmp_path / "backup", "--with-signing-key")
    accepted("process", "restore", "--backup", tmp_path / "backup", "--state", restored, "--by", "A. Operator")
    accepted("process", "accept", "--state", restored, "--by", "A. Operator", "--key-file", key)
    evidence(restored, tmp_path / "run.chio", "--key-file", str(key))
    told = verdict(restored, tmp_path / "run.chio")
    assert told.exit is Exit.VERIFIED
    leaves = [json.loads(leaf) for leaf in Bundle.open(str(tmp_path / "run.chio")).sections["leaves"]]
    assert [leaf["body"]["event"] for leaf in leaves if leaf["type"] == "epoch"] == ["restored", "accepted"]
    assert states(told)["epochs"] == "passed"


# --- the log as files ------------------------------------------------------------------------------------------------


def log(state: Path, *files: object) -> Any:
    result = CliRunner().invoke(main, ["log", *map(str, files), "--pins", str(state / "pins.json"), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_log_is_exported_with_the_checkpoint_over_it(state: Path, tmp_path: Path) -> None:
    evidence(state, tmp_path / "run.chio")
    said = accepted(
        "process",
        "export-log",
        "--state",
        state,
        "--out",
        tmp_path / "leaves.ndjson",
        "--checkpoint",
        tmp_path / "note",
    )
    assert (tmp_path / "note").read_text() == said["checkpoint"]
    lines = (tmp_path / "leaves.ndjson").read_bytes().splitlines()
    assert lines == list(Bundle.open(str(tmp_path / "run.chio")).sections["leaves"])
    assert log(state, tmp_path / "leaves.ndjson", tmp_path / "note")["result"] == "verified"


def test_one_leaf_is_proved_to_be_in_the_log(state: Path, tmp_path: Path) -> None:
    accepted("process", "export-log", "--state", state, "--out", tmp_path / "proof", "--leaf", 9)
    assert log(state, tmp_path / "proof")["result"] == "verified"
    assert "--leaf" in refused("process", "export-log", "--state", state, "--out", tmp_path / "no", "--leaf", 10_000)
    assert not (tmp_path / "no").exists()


def test_the_log_is_proved_to_have_only_grown(state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    accepted("process", "export-log", "--state", copy, "--out", tmp_path / "before", "--checkpoint", tmp_path / "old")
    size = (tmp_path / "old").read_text().split("\n")[1]
    accepted("process", "cancel", "--state", copy, "--process", "courier")
    accepted("process", "export-log", "--state", copy, "--out", tmp_path / "grown", "--since", size)
    assert log(copy, tmp_path / "old", tmp_path / "grown")["result"] == "verified"
