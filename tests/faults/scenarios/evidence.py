"""A finished run as files for an auditor: receipts, the log with its checkpoint, one attested call, a signed bundle."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from tests.faults.boundaries import Boundary
from tests.faults.notify import SYNCS
from tests.faults.scenario import Case, History, Scenario
from tests.faults.scenarios.project import WORKERS, Project, Worker, environment, init, run, scenario
from tests.faults.snapshot import Snapshot
from verify.cli import main as chio_verify

_PROJECT = Project(
    (Worker("payer", "payer.mjs", ("ledger/pay", "ledger/look")), Worker("keeper", "blobs.mjs")), ledger=True
)


def _prepare(case: Case) -> None:
    _PROJECT.write(case)
    (case.folder / "exports").mkdir()
    for command in (init(case), *run(case)):
        subprocess.run(command, check=True, capture_output=True, env=environment(case))
    _keep_a_call(case)


def _keep_a_call(case: Case) -> None:
    """What somebody wrote down of a call: the request, and in whose name it was made."""
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    (process,) = (row for row in snapshot["process"] if row["id"] == "payer")
    kept = {
        "request": {
            "operation_key": "pay-1", "server_id": "ledger", "tool_name": "pay",
            "arguments": {"process": "payer", "key": "pay-1"},
        },
        "context": {
            "runtime_id": json.loads((case.state / "pins.json").read_text())["runtime_id"], "process_id": "payer",
            "capability_id": process["capability_id"],
        },
    }  # fmt: skip
    for name, document in kept.items():
        (case.project / f"{name}.json").write_text(json.dumps(document))


def _commands(case: Case) -> list[list[str]]:
    folders = map(str, (case.state, case.folder / "exports", case.project))
    return [[sys.executable, str(WORKERS / "exporting.py"), *folders, "--", *case.chio]]


def _verdict(case: Case, command: str, *files: Path) -> int:
    words = [command, *map(str, files), "--pins", str(case.state / "pins.json")]
    if command == "call":
        words += ["--request", str(case.project / "request.json"), "--context", str(case.project / "context.json")]
    code: int = CliRunner().invoke(chio_verify, words).exit_code
    return code


def _exports(case: Case, name: str) -> list[Path]:
    return sorted((case.folder / "exports").glob(f"{name}-*"))


def nothing_half(_: Scenario, case: Case, __: History) -> list[str]:
    """What lies under the name that was asked for is the whole, or nobody takes it for that: `chio-verify` accepts no
    bundle and no log that is short, and no receipts are missing from a file of receipts that it accepts."""
    snapshot = Snapshot.of(case.state)
    assert snapshot is not None
    receipts = sum(leaf["type"] == "receipt" for leaf in snapshot["leaf"])
    wrong = []
    for file in _exports(case, "receipts"):
        found = file.read_bytes().count(b"\n")
        if found != receipts and _verdict(case, "receipts", file) == 0:
            wrong.append(f"{file.name} has {found} of {receipts} receipts, and passes for an export")
    for checkpoint in _exports(case, "checkpoint"):
        leaves = checkpoint.with_name(checkpoint.name.replace("checkpoint", "leaves")).with_suffix(".ndjson")
        size = int(checkpoint.read_text().split("\n")[1]) if checkpoint.stat().st_size else 0
        found = leaves.read_bytes().count(b"\n")
        if found != size and _verdict(case, "log", leaves, checkpoint) == 0:
            wrong.append(f"{leaves.name} has {found} of {size} leaves, and passes for the log")
    return wrong


def _told(history: History) -> list[Path]:
    """The files that commands have said to be written."""
    lines = [line for outputs in history.stdout for text in outputs for line in text.splitlines()]
    return [Path(document["file"]) for document in map(json.loads, lines) if "file" in document]


def complete(_: Scenario, case: Case, history: History) -> list[str]:
    """Each export that was told as written, in any of the runs, is accepted by `chio-verify`, the bundle with every
    check; the last run told of all four."""
    wrong = []
    for file in _told(history):
        kind, _, number = file.stem.partition("-")
        checkpoint = file.with_name(f"checkpoint-{number}.txt")
        command, files = {
            "receipts": ("receipts", [file]),
            "leaves": ("log", [file, checkpoint]),
            "call": ("call", [file]),
            "bundle": ("bundle", [file]),
        }[kind]
        if code := _verdict(case, command, *files):
            wrong.append(f"{file.name} was told as written: chio-verify {command} ends with {code}")
    told = {file.stem.partition("-")[0] for file in _told(History(stdout=history.stdout[-1:]))}
    return wrong if told == {"receipts", "leaves", "call", "bundle"} else [*wrong, f"the last run wrote {sorted(told)}"]


def named(_: Scenario, case: Case, history: History) -> list[str]:
    """The name of a bundle is synced by the process that made it, before that one's last word. (`synced` cannot tell:
    another process writes the file.)"""
    wrong, folder = [], str(case.folder / "exports")
    for file in _told(history):
        steps = [boundary for made in history.made for boundary in made]
        if file.stem.startswith("bundle") and not _synced_by_its_maker(steps, str(file), folder):
            wrong.append(f"{file.name} was told as written, and its name owes a sync")
    return wrong


def _synced_by_its_maker(steps: list[Boundary], file: str, folder: str) -> bool:
    at = next(position for position, step in enumerate(steps) if step.path == file and step.call == "openat")
    later = [step for step in steps[at:] if step.pid == steps[at].pid]
    return any(step.call in SYNCS and step.path == folder for step in later)


def unchanged(_: Scenario, case: Case, __: History) -> list[str]:
    """An export takes nothing from the state and adds nothing but a checkpoint of the log."""
    before, now = Snapshot.of(case.template / "state"), Snapshot.of(case.state)
    assert before is not None
    assert now is not None
    return [what for what in before.differences(now) if not what.startswith("log_checkpoint:")]


SCENARIO = replace(
    scenario(
        "evidence", "a finished run's receipts, log, an attested call and the signed bundle, as files", _PROJECT,
        checks={"complete": complete, "named": named, "unchanged": unchanged},
        after_fault={"nothing_half": nothing_half},
    ),
    prepare=_prepare,
    commands=_commands,
    roots=("state", "project", "owner", "exports"),
)  # fmt: skip
