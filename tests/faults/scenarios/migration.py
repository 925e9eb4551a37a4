"""Checkpoint envelopes from one schema version to the next: a file offline, and a worker's process state under `serve`
while another worker, in Node, saves a member of the same value."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from chio_process.checkpoints import Checkpoint, MigrationRegistry, SqliteStore
from chio_process.checkpoints.migrations import BUILT_IN
from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import ROOT, WORKERS, Project, Worker, environment, init, scenario
from tests.faults.scenarios.serve import NODE, served
from tests.faults.snapshot import Snapshot

_PROJECT = Project((Worker("keeper", "noting.mjs"),))
_VERSION = 2
_NOTES = [f"note {number}" for number in range(1, 6)]
_SLOT = "chio.checkpoints"
_FILE = "progress.db"


def _originals() -> dict[str, Checkpoint]:
    """Both kinds at version 1, in each phase, as revision 0 of a record of its own."""
    found = {}
    for path in sorted((ROOT / "fixtures/checkpoints").glob("*/v1-*.json")):
        document = json.loads(path.read_text())
        id = f"{path.parent.name}-{path.stem}"
        found[id] = Checkpoint.initial(id, "run-1", document["kind"], 1, document["payload"])
    return found


def _envelopes(case: Case) -> Path:
    return case.project / "envelopes.ndjson"


def _prepare(case: Case) -> None:
    _PROJECT.write(case)
    originals = _originals()
    with SqliteStore(case.project / _FILE) as store:
        for checkpoint in originals.values():
            store.compare_and_swap(checkpoint, None)
    lines = [json.dumps(checkpoint.to_document()) for checkpoint in originals.values()]
    _envelopes(case).write_text("".join(f"{line}\n" for line in lines))
    fill = [sys.executable, str(WORKERS / "migrating.py"), "fill", str(_envelopes(case))]
    for command in (init(case), served(case, "keeper", fill)):
        subprocess.run(command, check=True, capture_output=True, env=environment(case))


def _commands(case: Case) -> list[list[str]]:
    file = ["--file", str(case.project / _FILE), "--to", str(_VERSION)]
    noting = [NODE, str(case.project / "noting.mjs")]
    client = [sys.executable, str(WORKERS / "migrating.py"), str(_VERSION), *noting, str(_envelopes(case))]
    return [
        [sys.executable, "-m", "chio_process.checkpoints", "migrate", *file],
        served(case, "keeper", client),
    ]


def _of_file(case: Case) -> dict[str, Checkpoint]:
    """From a copy: whoever looks must not take part."""
    with tempfile.TemporaryDirectory(dir=case.output) as private:
        for path in case.project.glob(f"{_FILE}*"):
            if not path.name.endswith("-shm"):
                shutil.copy2(path, Path(private) / path.name)
        with SqliteStore(Path(private) / _FILE, create=False) as store:
            return {id: store.load(id) for id in store.ids()}


def _value(case: Case) -> tuple[int, dict[str, Any]]:
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    (row,) = snapshot["worker_checkpoint"]
    return int(row["revision"]), json.loads(row["value"])


def _of_state(case: Case) -> dict[str, Checkpoint]:
    _, value = _value(case)
    members = {name.removeprefix(f"{_SLOT}/"): value[name] for name in value if name.startswith(f"{_SLOT}/")}
    return {id: Checkpoint.from_document(document) for id, document in members.items()}


def _kept(case: Case) -> dict[str, Checkpoint]:
    """Every envelope as it was made, by its id."""
    found = (Checkpoint.from_document(json.loads(line)) for line in _envelopes(case).read_text().splitlines())
    return {checkpoint.id: checkpoint for checkpoint in found}


def _strays(before: dict[str, Checkpoint], now: dict[str, Checkpoint], registry: MigrationRegistry) -> list[str]:
    """Each envelope is the one that was made, or that one migrated once: nothing between, nothing twice, none lost."""
    wrong = [f"lost: {id}" for id in sorted(before.keys() - now.keys())]
    wrong += [f"nobody's: {id}" for id in sorted(now.keys() - before.keys())]
    for id in sorted(before.keys() & now.keys()):
        migrated = registry.migrated(before[id], _VERSION, now[id].updated_at)
        if now[id].encoded() not in (before[id].encoded(), migrated.encoded()):
            at = f"version {now[id].schema_version}, revision {now[id].revision}"
            wrong.append(f"{id} is at {at}, and neither as it was made nor migrated once")
    return wrong


def one_version_each(_: Scenario, case: Case, __: History) -> list[str]:
    """Right after the fault: every envelope can be read and is at one version; those of the file, all at the same."""
    before, file = _kept(case), _of_file(case)
    wrong = [f"in the file: {what}" for what in _strays(before, file, BUILT_IN)]
    if len({checkpoint.schema_version for checkpoint in file.values()}) != 1:
        wrong.append("in the file: some are migrated, some are not")
    return wrong + [f"in the state: {what}" for what in _strays(before, _of_state(case), BUILT_IN)]


def migrated(_: Scenario, case: Case, __: History) -> list[str]:
    """In the end all are, each by one revision, and beside them stands what the other worker saved."""
    before, wrong = _kept(case), []
    for where, now in (("file", _of_file(case)), ("state", _of_state(case))):
        wrong += [f"in the {where}: {what}" for what in _strays(before, now, BUILT_IN)]
        wrong += [f"in the {where}: {id} is not migrated" for id in now if now[id].schema_version != _VERSION]
    revision, value = _value(case)
    if value.get("notes") != _NOTES:
        wrong.append(f"the other worker's notes are {value.get('notes')}")
    saves = 2 * len(before) + len(_NOTES)
    return wrong if revision == saves else [*wrong, f"{revision} saves of the value, not {saves}"]


SCENARIO = replace(
    scenario(
        "migration", "checkpoint envelopes to the next schema version: a file, and a worker's state", _PROJECT,
        checks={"migrated": migrated}, after_fault={"one_version_each": one_version_each},
    ),
    prepare=_prepare,
    commands=_commands,
)  # fmt: skip
