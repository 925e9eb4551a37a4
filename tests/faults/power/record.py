"""Records one run of a scenario: everything that its process tree writes below the case's folder and says to others."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.boundaries import Boundary
from tests.faults.cases import run_once
from tests.faults.power.disk import Disk
from tests.faults.power.events import Event, events
from tests.faults.scenario import Case, History, Scenario

# Whoever else writes sees folders of its own under the same names; only the owner's record is everybody's.
_ON_THE_MACHINE = frozenset({"kernel", "host", "host's child", "launcher"})
_EVERYBODYS = "owner"


class RecordingIncomplete(Exception):
    """What the model says is on the disk differs from what is: the recording missed something."""


@dataclass(frozen=True, slots=True)
class Recording:
    """`folder` is the root of the model; `before` what lay in the scenario's roots, durable, before the first event.

    `roots` are the scenario's in which anything happened.
    `kept` is a copy of the folder after the run: what a file's owner and mode are.
    """

    folder: Path
    roots: tuple[str, ...]
    kept: Path
    before: tuple[tuple[str, bytes | None], ...]
    boundaries: list[Boundary]
    events: list[tuple[int, Event]]

    def disk(self) -> Disk:
        disk = Disk(self.folder)
        disk.start_from(self.before)
        return disk


def listing(folder: Path, root: str) -> tuple[tuple[str, bytes | None], ...]:
    """(path, content) of a folder's root and all below it; None for directories. Only directories and regular files."""
    if not (folder / root).is_dir():
        return ()
    found: list[tuple[str, bytes | None]] = [(root, None)]
    for path in sorted((folder / root).rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            continue
        if path.is_dir():
            found.append((name, None))
        elif path.is_file():
            found.append((name, path.read_bytes()))
    return tuple(found)


def record(scenario: Scenario, case: Case) -> Recording:
    """A run without a fault. Raises `RecordingIncomplete`, `Unsupported`; AssertionError when it does not succeed."""
    case.prepared(scenario)
    listed = {root: listing(case.folder, root) for root in scenario.roots}
    history = History()
    run_once(scenario, case, history, None, data=True)
    assert not any(history.exit_codes[-1]), f"{scenario.name}: the run without a fault failed; see {case.output}"
    (made,) = history.made
    boundaries = [replace(boundary, number=position) for position, boundary in enumerate(made)]
    seen = [boundary for boundary in boundaries if _on_the_machine(boundary, case.folder)]
    kept = case.folder.parent / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(case.folder, kept, symlinks=True)
    paths = {boundary.path for boundary in seen if boundary.kind == "file"}
    roots = tuple(root for root in scenario.roots if any(f"{at}/".startswith(f"{case.folder / root}/") for at in paths))
    before = tuple(entry for root in roots for entry in listed[root])
    recording = Recording(case.folder, roots, kept, before, boundaries, events(seen, case.folder, roots))
    _require_complete(recording)
    return recording


def _on_the_machine(boundary: Boundary, folder: Path) -> bool:
    base = boundary.role.partition(".")[0]
    return (
        boundary.kind != "file" or base in _ON_THE_MACHINE or f"{boundary.path}/".startswith(f"{folder}/{_EVERYBODYS}/")
    )


def _require_complete(recording: Recording) -> None:
    """With every event played and nothing lost, the model is the folder, byte for byte."""
    disk = recording.disk()
    for _, event in recording.events:
        disk.play(event)
    now = [entry for root in recording.roots for entry in listing(recording.folder, root)]
    model, real = (
        {path: data for path, data in files if not path.endswith("-shm")} for files in (disk.live.files(), now)
    )
    if model != real:
        wrong = sorted(path for path in model.keys() | real.keys() if model.get(path, b"?") != real.get(path, b"?"))
        raise RecordingIncomplete(f"{', '.join(wrong[:5])}")
