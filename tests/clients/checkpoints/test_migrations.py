"""Schema versions: fixtures of each, both ways, fenced, and offline."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chio_process.checkpoints import (
    BUILT_IN,
    AgentIdentity,
    Checkpoint,
    CheckpointError,
    CheckpointErrorKind,
    CheckpointStore,
    Migration,
    MigrationRegistry,
    SqliteStore,
    WorkflowIdentity,
    migrate,
    migrate_file,
    read,
)

FIXTURES = Path(__file__).parents[3] / "fixtures/checkpoints"
FILES = sorted(FIXTURES.glob("*/v*.json"))
PAIRS = [path for path in FILES if path.name.startswith("v1-")]
ONLY_2 = [path for path in FILES if path.name.startswith("v2-only-")]
IDENTITIES: dict[str, Any] = {
    "chio.agent": AgentIdentity("researcher", "model-1", 3),
    "chio.workflow": WorkflowIdentity("publish", 7),
}


def fixture(path: Path) -> Checkpoint:
    return Checkpoint.from_document(json.loads(path.read_text()))


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def put(store: CheckpointStore, checkpoint: Checkpoint, id: str = "report-42") -> Checkpoint:
    """The payload of a fixture as the first revision of a record."""
    first = Checkpoint.initial(id, "run-1", checkpoint.kind, checkpoint.schema_version, checkpoint.payload, now=5)
    store.compare_and_swap(first, None)
    return first


def test_there_are_fixtures_of_every_supported_version_and_phase() -> None:
    assert {name(path) for path in FILES} >= {
        f"{kind}/v{version}-{phase}"
        for kind, identity in IDENTITIES.items()
        for version in range(1, identity.SCHEMA_VERSION + 1)
        for phase in ("ready", "in-flight", "completed")
    }
    assert len(ONLY_2) == 3


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_fixture_is_a_checkpoint_that_code_of_its_version_reads(path: Path) -> None:
    checkpoint = fixture(path)
    assert json.loads(checkpoint.encoded()) == json.loads(path.read_text())
    identity = IDENTITIES[checkpoint.kind]
    if checkpoint.schema_version == identity.SCHEMA_VERSION:
        assert read(checkpoint, identity).to_payload() == checkpoint.payload
    else:
        with pytest.raises(CheckpointError) as error:
            read(checkpoint, identity)
        assert error.value.kind == "schema_unsupported"


@pytest.mark.parametrize("path", PAIRS, ids=name)
def test_up_down_and_round_trip(path: Path) -> None:
    one, two = fixture(path), fixture(path.with_name(path.name.replace("v1-", "v2-")))
    up = BUILT_IN.migrated(one, 2, now=7)
    assert (up.payload, up.schema_version, up.revision) == (two.payload, 2, one.revision + 1)
    assert up.updated_at == one.updated_at  # the clock of this test is behind it
    down = BUILT_IN.migrated(two, 1)
    assert (down.payload, down.schema_version) == (one.payload, 1)
    assert BUILT_IN.migrated(up, 1).payload == one.payload
    assert BUILT_IN.migrated(down, 2).payload == two.payload


@pytest.mark.parametrize("path", ONLY_2, ids=name)
def test_what_the_older_shape_cannot_hold_is_not_migrated_down(path: Path, store: CheckpointStore) -> None:
    first = put(store, fixture(path))
    with pytest.raises(CheckpointError) as error:
        migrate(store, "report-42", 1)
    assert error.value.kind == "migration_lossy"
    assert store.load("report-42") == first


@pytest.mark.parametrize("path", PAIRS, ids=name)
def test_a_migration_is_one_revision_of_the_store(path: Path, store: CheckpointStore) -> None:
    put(store, fixture(path))
    migrated = migrate(store, "report-42", 2)
    assert store.load("report-42") == migrated
    assert (migrated.revision, migrated.schema_version) == (1, 2)
    assert migrate(store, "report-42", 2) == migrated
    assert store.load("report-42").revision == 1
    assert migrate(store, "report-42", 1).payload == fixture(path).payload
    assert store.load("report-42").revision == 2


def test_a_migration_and_a_writer_that_meet_are_fenced(store: CheckpointStore) -> None:
    first = put(store, fixture(PAIRS[0]))

    def up(payload: dict[str, Any]) -> dict[str, Any]:
        store.compare_and_swap(first.next({"by": "the writer"}), 0)
        return payload

    with pytest.raises(CheckpointError) as error:
        migrate(store, "report-42", 2, MigrationRegistry([Migration(first.kind, 1, 2, up)]))
    assert error.value.kind == "conflict"
    assert store.load("report-42").payload == {"by": "the writer"}


@pytest.mark.parametrize(
    ("version", "to_version", "kind"),
    [
        (2, 3, "migration_missing"), (1, 9, "migration_missing"), (3, 2, "migration_missing"),
        (3, 1, "migration_missing"), (1, 0, "invalid"), (1, True, "invalid"),
    ],
)  # fmt: skip
def test_a_path_that_is_missing_is_refused(store: CheckpointStore, version: int, to_version: int, kind: str) -> None:
    first = Checkpoint.initial("report-42", "run-1", "chio.agent", version, fixture(PAIRS[0]).payload)
    store.compare_and_swap(first, None)
    with pytest.raises(CheckpointError) as error:
        migrate(store, "report-42", to_version)
    assert error.value.kind == kind
    assert store.load("report-42") == first


def test_there_is_no_way_back_where_a_migration_has_none(store: CheckpointStore) -> None:
    registry = MigrationRegistry(
        [
            Migration("acme.order", 1, 2, lambda payload: {**payload, "two": True}),
            Migration("acme.order", 2, 3, lambda payload: {**payload, "three": True}, lambda payload: {"two": True}),
        ]
    )
    first = Checkpoint.initial("o", "run-1", "acme.order", 1, {})
    store.compare_and_swap(first, None)
    assert migrate(store, "o", 3, registry).payload == {"two": True, "three": True}
    assert migrate(store, "o", 2, registry).payload == {"two": True}
    with pytest.raises(CheckpointError, match=r"no migration of acme\.order leads from version 2 to 1"):
        migrate(store, "o", 1, registry)


def test_migrations_are_single_steps_and_one_for_each() -> None:
    with pytest.raises(CheckpointError, match="from one version to the next"):
        Migration("acme.order", 1, 3, dict)
    with pytest.raises(CheckpointError, match="two migrations"):
        MigrationRegistry([Migration("acme.order", 1, 2, dict), Migration("acme.order", 1, 2, dict)])


@pytest.mark.parametrize("path", FILES, ids=name)
@pytest.mark.parametrize("damage", ["extra", "missing", "phase", "type"])
def test_a_payload_that_is_not_of_its_version_is_not_guessed_at(path: Path, damage: str) -> None:
    checkpoint = fixture(path)
    payload = checkpoint.to_document()["payload"]
    match damage:
        case "extra":
            payload["surprise"] = 1
        case "missing":
            del payload["result"]
        case "phase":
            payload["phase" if "phase" in payload else "branches"] = "guess"
        case "type":
            payload["definition_version"] = "3"
    damaged = Checkpoint.initial("a", "run-1", checkpoint.kind, checkpoint.schema_version, payload)
    with pytest.raises(CheckpointError) as error:
        BUILT_IN.migrated(damaged, 3 - checkpoint.schema_version)
    assert error.value.kind is CheckpointErrorKind.CORRUPT


# --- offline ---------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, "-m", "chio_process.checkpoints", "migrate", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with every fixture of version 1."""
    with SqliteStore(tmp_path / "checkpoints.db") as store:
        for path in PAIRS:
            put(store, fixture(path), name(path))
    return tmp_path / "checkpoints.db"


def contents(file: Path) -> dict[str, str]:
    with SqliteStore(file, create=False) as store:
        return {id: store.load(id).encoded() for id in store.ids()}


def test_a_file_is_migrated_offline_and_back(file: Path) -> None:
    before = contents(file)
    status, printed, complaints = command("--file", str(file), "--to", "2")
    assert (status, complaints, len(printed["migrated"])) == (0, "", len(PAIRS))
    with SqliteStore(file) as store:
        for id in before:
            migrated = store.load(id)
            assert read(migrated, IDENTITIES[migrated.kind]).to_payload() == migrated.payload
    assert command("--file", str(file), "--to", "2") == (0, {"dry_run": False, "migrated": []}, "")
    assert command("--file", str(file), "--to", "1")[0] == 0
    payloads = {id: json.loads(text)["payload"] for id, text in contents(file).items()}
    assert payloads == {id: json.loads(text)["payload"] for id, text in before.items()}


def test_a_dry_run_says_what_would_be_done_and_stores_nothing(file: Path) -> None:
    before = contents(file)
    status, printed, _ = command("--file", str(file), "--to", "2", "--dry-run", "--kind", "chio.agent")
    assert status == 0
    assert printed["dry_run"] is True
    assert [one["kind"] for one in printed["migrated"]] == ["chio.agent"] * 3
    assert printed["migrated"][0] == {
        "id": "chio.agent/v1-completed", "kind": "chio.agent", "from_version": 1, "to_version": 2, "revision": 1,
    }  # fmt: skip
    assert contents(file) == before


def test_one_checkpoint_that_cannot_be_migrated_leaves_the_whole_file_as_it_was(file: Path) -> None:
    with SqliteStore(file) as store:
        put(store, fixture(ONLY_2[0]), "zzz")
        for id in store.ids():
            migrate(store, id, 2)
    before = contents(file)
    status, printed, complaints = command("--file", str(file), "--to", "1")
    assert (status, printed) == (1, None)
    assert complaints.startswith(f"chio: nothing was migrated ({file}, migration_lossy: ")
    assert contents(file) == before


def test_a_writer_that_meets_the_migration_of_a_file_leaves_it_as_it_was(file: Path) -> None:
    """The writer comes after the conversion of the first checkpoint, and changes the last."""
    before = contents(file)
    last = max(before)

    def up(payload: dict[str, Any]) -> dict[str, Any]:
        with SqliteStore(file) as writer:
            current = writer.load(last)
            writer.compare_and_swap(current.next({"by": "the writer"}), current.revision)
        return payload

    steps = [Migration(kind, 1, 2, up if kind == "chio.agent" else dict) for kind in IDENTITIES]
    with pytest.raises(CheckpointError) as error:
        migrate_file(file, 2, MigrationRegistry(steps))
    assert error.value.kind == "conflict"
    after = contents(file)
    assert json.loads(after.pop(last))["payload"] == {"by": "the writer"}
    del before[last]
    assert after == before


def test_a_kind_that_this_code_does_not_know_is_refused_unless_it_is_left_out(file: Path) -> None:
    with SqliteStore(file) as store:
        store.compare_and_swap(Checkpoint.initial("o", "run-1", "acme.order", 1, {}), None)
    assert command("--file", str(file), "--to", "2")[0] == 1
    assert command("--file", str(file), "--to", "2", "--kind", "chio.workflow")[0] == 0


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    status, _, complaints = command("--file", str(tmp_path / "absent.db"), "--to", "2")
    assert status == 1
    assert "No such file" in complaints
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("notes " * 200)
    other.chmod(0o600)
    before = hashlib.sha256(other.read_bytes()).hexdigest()
    assert command("--file", str(other), "--to", "2")[0] == 1
    assert hashlib.sha256(other.read_bytes()).hexdigest() == before


def test_wrong_usage_is_told_apart(file: Path) -> None:
    assert command("--file", str(file))[0] == 2
    assert command("--file", str(file), "--to", "two")[0] == 2
