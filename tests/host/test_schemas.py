"""`chio schema`: the published schemas against documents that were really written, and against broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from chio.schemas import names, published
from confine import load_profile
from tests.host.commands import accepted, refused
from tests.kernel.external import ToolState, host_config, server, tool
from tests.kernel.external import child as tool_child
from tests.kernel.serving import State, all_of, child, config, mailbox, policy
from tests.state.served import Served
from verify.bundle import Bundle
from verify.leaves import BODIES, read_leaf_text

ROOT = Path(__file__).parents[2]
CALLS = sorted((ROOT / "fixtures" / "artifacts" / "valid" / "calls").iterdir())
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def complaints(name: str, document: Any) -> list[str]:
    validator = jsonschema_rs.validator_for(published(name))
    return [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(document)]


def of(text: str) -> Any:
    return json.loads(text)


def leaf_complaints(text: str) -> list[str]:
    leaf = of(text)
    return [*complaints("leaf", leaf), *complaints(f"leaf.{leaf['type']}", leaf)]


# --- what was written ---


def test_the_command_lists_every_schema_and_prints_each(tmp_path: Path) -> None:
    listed = accepted("schema")["schemas"]
    assert listed == names()
    for name in ("chio.receipt.v1", "leaf", "leaf.intent"):
        assert accepted("schema", name) == published(name)
    assert "there is no such schema" in refused("schema", "nonsense")


@pytest.mark.parametrize("name", names())
def test_each_is_a_schema_of_its_draft_that_refuses_what_it_does_not_know(name: str) -> None:
    made = published(name)
    jsonschema_rs.meta.validate(made)
    assert complaints(name, {"surprise": 1}) != []
    assert complaints(name, []) != []
    # Patterns are ECMA-262's, which has no \A and no \Z.
    assert "\\A" not in json.dumps(made)


@pytest.mark.parametrize("folder", CALLS, ids=lambda folder: folder.name)
def test_artifacts_of_every_outcome_are_of_their_schemas(folder: Path) -> None:
    observation = of((folder / "call.json").read_text(encoding="utf-8"))
    assert complaints("chio.process.call-observation.v2", observation) == []
    assert complaints("request", of((folder / "request.json").read_text(encoding="utf-8"))) == []
    assert complaints("context", of((folder / "context.json").read_text(encoding="utf-8"))) == []
    body = observation["body"]
    assert complaints("chio.bootstrap.v1", of(body["bootstrap_json"])) == []
    for token in body["capabilities_json"]:
        assert complaints("chio.capability.v1", of(token)) == []
    for leaf in body["leaves"]:
        assert leaf_complaints(leaf["leaf_json"]) == []
    if body["response_json"] is not None:
        response = of(body["response_json"])
        assert complaints("response", response) == []
        assert complaints("chio.receipt.v1", of(response["receipt_json"])) == []


def test_the_worked_example_of_a_real_run_is_of_its_schemas() -> None:
    examples = dict(re.findall(r"^<!-- example: ([^>]+) -->\n```json\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL))
    schemas = {
        "pins": "chio.pins.v1", "bootstrap": "chio.bootstrap.v1", "capability root": "chio.capability.v1",
        "capability producer": "chio.capability.v1", "receipt": "chio.receipt.v1",
    }  # fmt: skip
    for example, name in schemas.items():
        assert complaints(name, of(examples[example])) == []
    for example in ("leaf 1", "leaf 4"):
        assert leaf_complaints(examples[example]) == []


def test_every_leaf_of_a_whole_run_is_of_its_schema() -> None:
    bundle = Bundle.open(str(ROOT / "fixtures" / "artifacts" / "valid" / "bundles" / "orders.chio"))
    kinds = set()
    for text in bundle.sections["leaves"]:
        assert leaf_complaints(text.decode()) == []
        kinds.add(read_leaf_text(text).kind)
    assert kinds >= {"bootstrap", "attempt", "intent", "receipt"}


def test_what_commands_print_of_a_served_state_is_of_its_schema(tmp_path: Path) -> None:
    state = State.make(tmp_path / "folder", config(child("a", *all_of("jobs")), mailboxes=[mailbox("jobs")]))
    with state.serve() as serving:
        worker = serving.worker("a")
        worker.send("send", "jobs", "m", {"total": 10})
        worker.invoke("far", "transfer", {})
    assert complaints("chio.pins.v1", of((state.path / "pins.json").read_text(encoding="utf-8"))) == []
    assert complaints("chio.bootstrap.v1", of((state.path / "bootstrap.json").read_text(encoding="utf-8"))) == []
    assert complaints("chio.process.status.v1", accepted("process", "status", "--state", state.path)) == []
    leaves = tmp_path / "leaves.ndjson"
    written = accepted("process", "export-log", "--state", state.path, "--out", leaves)
    assert complaints("chio.log.export.v1", written) == []
    for line in leaves.read_text(encoding="utf-8").splitlines():
        assert leaf_complaints(line) == []
    logs = accepted("process", "logs", "--state", state.path, "--process", "a", "--attempt", 1)
    assert complaints("chio.process.logs.v1", logs) == []
    kept = accepted("process", "state", "--state", state.path, "--process", "a")
    assert complaints("chio.process.application-state.v1", kept) == []
    receipts = tmp_path / "export.ndjson"
    exported = accepted("receipt", "export", "--state", state.path, "--out", receipts)
    assert complaints("chio.receipt.export.v1", exported) == []
    for line in receipts.read_text(encoding="utf-8").splitlines():
        assert complaints("chio.receipt.v1", of(line)) == []
    key = ("--trusted-kernel-pubkey", state.path / "kernel.pub")
    assert complaints("chio.receipt.signatures.v1", accepted("receipt", "verify", "--input", receipts, *key)) == []
    assert complaints("chio.verdict.v1", accepted("verify", "receipts", receipts, *key)) == []


def test_what_the_commands_of_a_whole_life_print_is_of_its_schemas(tmp_path: Path) -> None:
    folder, key = tmp_path / "folder", tmp_path / "chio.key"
    assert complaints("key", accepted("process", "key", "--out", key)) == []
    documents = {"policy.yaml": policy(), "host.json": config(child("a", *all_of("jobs")), child("b"))}
    folder.mkdir()
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    keyed = ("--key-file", key)
    made = accepted("process", "init", "--config", folder / "host.json", "--state", folder / "state", *keyed)
    assert complaints("init", made) == []
    at = ("--state", folder / "state")
    socket = ("--socket", tmp_path / "socket", "--out", tmp_path / "connection")
    assert complaints("credential", accepted("process", "credential", *at, "--process", "a", *socket, *keyed)) == []
    connection = of((tmp_path / "connection").read_text(encoding="utf-8"))
    assert complaints("connection", connection) == []
    for verb, *more in (("revoke",), ("revoke-capability",), ("cancel",), ("delete", "--by", "me")):
        assert complaints(verb, accepted("process", verb, *at, "--process", "a", *more, *keyed)) == []
    written = accepted("process", "evidence", *at, "--out", tmp_path / "run.chio", "--withhold", "outputs", *keyed)
    assert complaints("chio.process.evidence.v1", written) == []
    copy = tmp_path / "copy"
    assert complaints("backup", accepted("process", "backup", *at, "--out", copy)) == []
    assert complaints("chio.backup.v1", of((copy / "backup.json").read_text(encoding="utf-8"))) == []
    new = ("--state", tmp_path / "restored")
    keys = ("--signing-key", folder / "state" / "keys.json")
    restored = accepted("process", "restore", "--backup", copy, *new, "--by", "me", *keys, *keyed)
    assert complaints("restore", restored) == []
    assert complaints("accept", accepted("process", "accept", *new, "--by", "me", *keyed)) == []


def test_the_line_of_a_host_that_serves_is_of_its_schema(tmp_path: Path) -> None:
    with Served(State.make(tmp_path / "folder"), "a") as served:
        served.start()
        assert complaints("serve", served.ready) == []


def test_a_statement_about_an_unknown_outcome_is_of_its_schema(tmp_path: Path) -> None:
    servers = [server("rogue", "rogue.py", tmp_path / "rogue")]
    host = host_config(servers, tool_child("a", "rogue/do"))
    state = ToolState.make(tmp_path / "folder", host, policy(tool("rogue")))
    with state.serve() as serving:
        serving.worker("a").invoke("lost", "do", {"how": "exit"}, "rogue")
    (tmp_path / "evidence").write_text("said by the bank")
    said = ("--key", "lost", "--outcome", "applied", "--evidence", tmp_path / "evidence", "--by", "me")
    told = accepted("process", "reconcile", "--state", state.path, "--process", "a", *said)
    assert complaints("reconcile", told) == []
    assert complaints("reconcile", {**told, "outcome": "unknown"}) != []


# --- what is kept ---


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "policies").glob("*.yaml"))])
def test_the_resolved_form_of_each_profile_is_of_its_schema(name: str) -> None:
    resolved = of(load_profile(name).resolved("0" * 64))
    assert complaints("chio.resolved-profile.v1", resolved) == []
    assert complaints("chio.resolved-profile.v1", {**resolved, "landlock": "off"}) != []


@pytest.mark.parametrize("path", sorted((ROOT / "fixtures/checkpoints").glob("*/*.json")), ids=lambda path: path.stem)
def test_kept_checkpoint_envelopes_are_of_their_schema(path: Path) -> None:
    document = of(path.read_text(encoding="utf-8"))
    assert complaints("checkpoint-envelope", document) == []
    for change in ({"revision": -1}, {"kind": "Agent"}, {"kind": "chio"}, {"id": ""}, {"payload": []}, {"more": 1}):
        assert complaints("checkpoint-envelope", {**document, **change}) != []


def test_snapshot_references_of_the_vectors_are_of_their_schema() -> None:
    for file in ("small", "large"):
        for case in of((ROOT / f"fixtures/vectors/snapshots/{file}.json").read_text(encoding="utf-8"))["cases"]:
            reference = case["reference"]
            assert complaints("chio.process.json-snapshot.v1", reference) == []
            bare = {**reference, "index": {**reference["index"], "blobs": []}}
            assert complaints("chio.process.json-snapshot.v1", bare) != []


# --- the two readers of leaves ---


def test_every_type_of_leaf_that_the_verifier_reads_has_a_schema_and_no_other() -> None:
    assert {name.removeprefix("leaf.") for name in names() if name.startswith("leaf.")} == set(BODIES)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("body.log_index", -1), ("body.log_index", "0"), ("body.kernel_key", "00"), ("body.schema", "chio.receipt.v2"),
        ("body.call.dispatch", 4), ("body.decision.verdict", "maybe"), ("body.attempt", {}), ("signature", None),
        ("disclosed.parameter_salt", "zz"), ("disclosed.surprise", 1),
    ],
)  # fmt: skip
def test_a_receipt_of_another_shape_is_refused(path: str, value: Any) -> None:
    found = re.search(r"^<!-- example: receipt -->\n```json\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    document = json.loads(found[1])
    *parents, last = path.split(".")
    place = document
    for name in parents:
        place = place[name]
    place[last] = value
    assert complaints("chio.receipt.v1", document) != []
