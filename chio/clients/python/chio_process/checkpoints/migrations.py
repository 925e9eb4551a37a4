"""From one schema version of a payload to another: explicit, one step at a time, and as one revision."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from chio_process.checkpoints.agent import AgentIdentity, AgentState
from chio_process.checkpoints.document import JsonObject, checked_fields, checked_integer, invalid
from chio_process.checkpoints.envelope import Checkpoint
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.sqlite import SqliteStore
from chio_process.checkpoints.store import CheckpointStore
from chio_process.checkpoints.workflow import WorkflowIdentity, WorkflowState

Convert = Callable[[JsonObject], JsonObject]


@dataclass(frozen=True, slots=True)
class Migration:
    """One step between neighbouring versions of a kind. `up` and `down` take a payload and return a new one, and raise
    CheckpointError: invalid for a payload that is not of their version, migration_lossy for one that the other shape
    cannot hold. `down` None: there is no way back."""

    kind: str
    from_version: int
    to_version: int
    up: Convert
    down: Convert | None = None

    def __post_init__(self) -> None:
        checked_integer(self.from_version, "from_version", least=1)
        if self.to_version != self.from_version + 1:
            invalid("a migration leads from one version to the next")


class MigrationRegistry:
    """The migrations that are known, at most one between two versions of a kind."""

    def __init__(self, migrations: Iterable[Migration] = ()) -> None:
        self._steps: dict[tuple[str, int], Migration] = {}
        for migration in migrations:
            if (migration.kind, migration.from_version) in self._steps:
                invalid(f"two migrations of {migration.kind} lead from version {migration.from_version}")
            self._steps[migration.kind, migration.from_version] = migration

    def migrated(self, checkpoint: Checkpoint, to_version: int, now: int | None = None) -> Checkpoint:
        """The next revision of `checkpoint`, with its payload at `to_version`; itself if it is there already.

        Nothing is stored. CheckpointError: migration_missing, migration_lossy, corrupt.
        """
        checked_integer(to_version, "to_version", least=1)
        if checkpoint.schema_version == to_version:
            return checkpoint
        payload = checkpoint.to_document()["payload"]
        for convert in self._path(checkpoint.kind, checkpoint.schema_version, to_version):
            try:
                payload = convert(payload)
            except CheckpointError as error:
                if error.kind is not CheckpointErrorKind.INVALID:
                    raise
                raise CheckpointError(
                    CheckpointErrorKind.CORRUPT, f"the payload of {checkpoint.id!r}: {error.message}"
                ) from error
        return checkpoint.next(payload, now, schema_version=to_version)

    def _path(self, kind: str, version: int, to_version: int) -> list[Convert]:
        path: list[Convert] = []
        while version != to_version:
            up = version < to_version
            step = self._steps.get((kind, version if up else version - 1))
            convert = None if step is None else step.up if up else step.down
            if convert is None:
                raise CheckpointError(
                    CheckpointErrorKind.MIGRATION_MISSING,
                    f"no migration of {kind} leads from version {version} to {version + 1 if up else version - 1}",
                )
            path.append(convert)
            version += 1 if up else -1
        return path


def migrate(
    store: CheckpointStore, id: str, to_version: int, registry: MigrationRegistry | None = None, now: int | None = None
) -> Checkpoint:
    """Migrates one checkpoint, fenced by the store's compare-and-swap: of a writer and a migration that meet, one gets
    `conflict`. Returns what is stored then."""
    current = store.load(id)
    migrated = (registry or BUILT_IN).migrated(current, to_version, now)
    if migrated is not current:
        store.compare_and_swap(migrated, current.revision)
    return migrated


def migrate_file(
    path: Path,
    to_version: int,
    registry: MigrationRegistry | None = None,
    *,
    kind: str | None = None,
    dry_run: bool = False,
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Migrates every checkpoint of a SQLite file, or those of one kind: (before, after) of each that changes.

    All of them are stored in one transaction: one that cannot be migrated leaves the file as it was.
    """
    with SqliteStore(path, create=False) as store:
        found = [store.load(id) for id in store.ids()]
        before = [checkpoint for checkpoint in found if kind in (None, checkpoint.kind)]
        after = [(registry or BUILT_IN).migrated(checkpoint, to_version) for checkpoint in before]
        changes = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
        if not dry_run:
            store.compare_and_swap_all([(new, old.revision) for old, new in changes])
    return [old for old, _ in changes], [new for _, new in changes]


# --- chio.agent and chio.workflow, 1 and 2 ---

# Version 1 counted three things, beside the other members, and kept effects in flight as a plain list.
_COUNTERS_V1 = ("model_calls", "input_tokens", "output_tokens")
_AGENT_V1 = ("agent", "model", "definition_version", "phase", "turn", "transcript", "pending", "result", *_COUNTERS_V1)
# A workflow of version 1 was one line of steps.
_WORKFLOW_V1 = (
    "workflow", "definition_version", "input", "phase", "step", "results", "pending", "result", *_COUNTERS_V1,
)  # fmt: skip


def agent_1_to_2(payload: JsonObject) -> JsonObject:
    members = dict(checked_fields(payload, _AGENT_V1, "payload"))
    members["usage"] = _usage_up(members)
    members["in_flight"] = _in_flight_up(members.pop("pending"))
    return AgentState.from_payload(members).to_payload()


def agent_2_to_1(payload: JsonObject) -> JsonObject:
    members = AgentState.from_payload(payload).to_payload()
    members["pending"] = _in_flight_down(members.pop("in_flight"))
    members.update(_usage_down(members.pop("usage")))
    return checked_fields(members, _AGENT_V1, "payload")


def workflow_1_to_2(payload: JsonObject) -> JsonObject:
    members = dict(checked_fields(payload, _WORKFLOW_V1, "payload"))
    usage = _usage_up(members)
    status = _STATUS_V1.get(members.pop("phase"))
    if status is None:
        invalid("payload.phase is none of version 1")
    in_flight = _in_flight_up(members.pop("pending"))
    branch = {
        "status": status, "step": members.pop("step"), "results": members.pop("results"), "in_flight": in_flight,
    }  # fmt: skip
    members.update(branches={"main": branch}, usage=usage)
    return WorkflowState.from_payload(members).to_payload()


def workflow_2_to_1(payload: JsonObject) -> JsonObject:
    members = WorkflowState.from_payload(payload).to_payload()
    branches = members.pop("branches")
    if branches.keys() != {"main"}:
        raise CheckpointError(
            CheckpointErrorKind.MIGRATION_LOSSY, "version 1 has one branch, which is main; finish the others first"
        )
    branch = branches["main"]
    phase = next(phase for phase, status in _STATUS_V1.items() if status == branch["status"])
    pending = _in_flight_down(branch["in_flight"])
    members.update(phase=phase, step=branch["step"], results=branch["results"], pending=pending)
    members.update(_usage_down(members.pop("usage")))
    return checked_fields(members, _WORKFLOW_V1, "payload")


_STATUS_V1 = {"step_pending": "pending", "step_in_flight": "in_flight", "completed": "completed"}


def _usage_up(members: JsonObject) -> JsonObject:
    return {**{name: members.pop(name) for name in _COUNTERS_V1}, "cost_micro_units": 0}


def _usage_down(usage: JsonObject) -> JsonObject:
    if usage["cost_micro_units"] != 0:
        # Usage never decreases, and the way up again would begin at 0.
        raise CheckpointError(CheckpointErrorKind.MIGRATION_LOSSY, "version 1 counts no cost, and there is some")
    return {name: usage[name] for name in _COUNTERS_V1}


def _in_flight_up(pending: object) -> JsonObject | None:
    if pending == []:
        return None
    return {"effects": pending, "attempt": 1, "claim": "version-1"}


def _in_flight_down(in_flight: JsonObject | None) -> list[JsonObject]:
    return [] if in_flight is None else list(in_flight["effects"])


BUILT_IN = MigrationRegistry(
    [
        Migration(AgentIdentity.KIND, 1, 2, agent_1_to_2, agent_2_to_1),
        Migration(WorkflowIdentity.KIND, 1, 2, workflow_1_to_2, workflow_2_to_1),
    ]
)
