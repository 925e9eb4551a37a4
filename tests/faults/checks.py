"""The invariants, put to a case of Chio's: rows through `invariants`, and what only the machine can tell."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from chio.cli import main as chio_command
from chio.errors import StateError
from chio.host import Host
from confine import Launcher
from tests.faults.exchanges import Exchange, exchanges
from tests.faults.invariants import ROWS, SETTLED, Facts, broken, effects, note_of
from tests.faults.order import told_too_early
from tests.faults.scenario import Case, Check, History, Scenario
from tests.faults.snapshot import BLOBS, Snapshot
from verify.cli import main as verify_command
from verify.keys import Pins

_OWN_FILES = {
    "authority.db", "bootstrap.json", "host.json", "kernel.pub", "keys.json", "lock", "pins.json", "policy.yaml",
    "receipts.ndjson", BLOBS,
}  # fmt: skip
_RUNTIME = "/run/chio"
_SHARED = {f"{_RUNTIME}/uids", f"{_RUNTIME}/cgroups"}  # locks, of every host of this machine


def _exchanges(history: History) -> list[Exchange]:
    return [exchange for made in history.made for exchange in exchanges(made)]


def facts_of(scenario: Scenario, history: History, state: Path, *, copy: bool = False) -> Facts | None:
    """None while there is no state to speak of: `init` has not come to its end. What is seen in a `copy`, whose log
    goes its own way, binds nobody."""
    snapshot = Snapshot.of(state)
    if snapshot is None or (not snapshot.usable and not snapshot.damage):
        return None
    all_of_them = _exchanges(history)
    notes = {note for exchange in all_of_them if (note := note_of(exchange.answer))}
    notes |= history.more.setdefault("notes", set())
    if not copy:
        history.more["notes"] |= {row["note"] for row in snapshot["log_checkpoint"]}
    reads = frozenset(scenario.more.get("reads", ()))
    return Facts(snapshot, Pins.from_file(str(state / "pins.json")), all_of_them, frozenset(notes), reads)


def _owners_record(scenario: Scenario, case: Case) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = scenario.more["effects"](case)
    return found


# --- right after the fault -------------------------------------------------------------------------------------------


def _at_once(name: str) -> Check:
    """What is on disk right after the fault keeps every promise already, whether or not the next start mends it."""

    def check(scenario: Scenario, case: Case, history: History) -> list[str]:
        if "at_once" not in history.more:
            facts = facts_of(scenario, history, case.state)
            history.more["at_once"] = broken(facts, ROWS) if facts is not None else {}
        return [f"right after the fault: {what}" for what in history.more["at_once"].get(name, [])]

    return check


def recovers(scenario: Scenario, case: Case, history: History) -> list[str]:
    """On a copy: the state can be opened, everything holds then, and a second recovery finds nothing to do."""
    if facts_of(scenario, history, case.state) is None:
        told = any(exchange.ok and exchange.op != "init" for exchange in _exchanges(history))
        return ["something was answered, and there is no state"] if told else []
    return _recovered_twice(scenario, case, history)


def _recovered_twice(scenario: Scenario, case: Case, history: History) -> list[str]:
    copy = case.output / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(case.state, copy, symlinks=True)
    try:
        snapshots = []
        for _ in range(2):
            _start_and_stop(scenario, case, copy)
            facts = facts_of(scenario, history, copy, copy=True)
            assert facts is not None
            snapshots.append(facts)
        found = broken(snapshots[0], {**ROWS, "calls_settled": SETTLED["calls_settled"]})
        wrong = [f"{name}: {what}" for name, some in found.items() for what in some]
        wrong += [f"the second recovery: {what}" for what in snapshots[0].snapshot.differences(snapshots[1].snapshot)]
        return wrong
    except StateError as error:
        return [f"the state cannot be recovered: {error}"]
    finally:
        shutil.rmtree(copy)


# --- at the end ------------------------------------------------------------------------------------------------------


def _rows(name: str) -> Check:
    def check(scenario: Scenario, case: Case, history: History) -> list[str]:
        facts = facts_of(scenario, history, case.state)
        if facts is None:
            return ["there is no state"]
        return [what for wrong in broken(facts, {name: {**ROWS, **SETTLED}[name]}).values() for what in wrong]

    return check


def owner(scenario: Scenario, case: Case, history: History) -> list[str]:
    """Effects at the owner, by the owner's own record."""
    facts = facts_of(scenario, history, case.state)
    return effects(facts, _owners_record(scenario, case)) if facts is not None else ["there is no state"]


def _start_and_stop(scenario: Scenario, case: Case, state: Path) -> None:
    key_file = scenario.more.get("key_file")
    Host(state, key_file=key_file(case) if key_file else None).close()


def second_recovery(scenario: Scenario, case: Case, history: History) -> list[str]:
    """Another start and stop of the host changes no row."""
    before = Snapshot.of(case.state)
    _start_and_stop(scenario, case, case.state)
    after = Snapshot.of(case.state)
    assert before is not None
    assert after is not None
    return before.differences(after)


def reported(scenario: Scenario, case: Case, history: History) -> list[str]:
    """A run report is a promise too: who was told as completed has an attempt that ended with exit_0."""
    facts = facts_of(scenario, history, case.state)
    done = {row["process"] for row in facts.snapshot["attempt"] if row["outcome"] == "exit_0"} if facts else set()
    wrong = []
    for outputs in history.stdout:
        for report in filter(None, map(_document, outputs)):
            for worker in report.get("workers", []):
                if worker["state"] == "completed" and worker["process"] not in done:
                    wrong.append(f"{worker['process']} was reported as completed")
    last = [report for report in map(_document, history.stdout[-1]) if report and "complete" in report]
    return wrong + ["the last run was not complete" for report in last if not report["complete"]]


def _document(text: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def nothing_left(scenario: Scenario, case: Case, history: History) -> list[str]:
    """No process outlives its host; no cgroup, socket, mount, staged or unknown file is left once all is done."""
    wrong = [f"alive after its host: {line}" for line in history.survivors]
    made = {boundary.path for run in history.made for boundary in run if boundary.call.startswith("mkdir")}
    cgroups = sorted(path for path in made if path.startswith("/sys/fs/cgroup/") and os.path.isdir(path))
    if cgroups:
        with Launcher.start():  # a start is what removes a dead launcher's
            pass
    wrong += [f"a cgroup is left: {path}" for path in cgroups if os.path.isdir(path)]
    runtime = {path for path in made if os.path.dirname(path) == _RUNTIME} - _SHARED
    wrong += [f"a runtime folder is left: {path}" for path in sorted(runtime) if os.path.isdir(path)]
    with open("/proc/self/mountinfo") as mounts:
        wrong += [f"a mount is left: {line.split()[4]}" for line in mounts if str(case.folder) in line]
    wrong += [f"a staged file is left: {path.name}" for path in case.folder.rglob(".chio-staged*")]
    exported = scenario.more.get("exported", set())
    with suppress(FileNotFoundError):
        wrong += [f"an unknown file: {name}" for name in sorted({*os.listdir(case.state)} - _OWN_FILES - exported)]
    return wrong + _blob_files_left(case.state)


def _blob_files_left(state: Path) -> list[str]:
    snapshot, folder = Snapshot.of(state), state / BLOBS
    named = {row.get("file") for row in snapshot["blob"]} if snapshot else set()
    found = os.listdir(folder) if folder.is_dir() else []
    return [f"a file of no blob: {name}" for name in sorted(set(found) - named)]


def verify(scenario: Scenario, case: Case, history: History) -> list[str]:
    """`chio-verify` agrees, from exported files and pins alone."""
    folder = case.output / "auditor"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(case.state / "pins.json", folder / "pins.json")
    exported = CliRunner().invoke(
        chio_command,
        ["receipt", "export", "--state", str(case.state), "--out", str(folder / "receipts.ndjson")],
        env={"CHIO_KEY_FILE": scenario.environment(case).get("CHIO_KEY_FILE", "")},
    )
    if exported.exit_code:
        return [f"the receipts cannot be exported: {exported.output.strip()}"]
    wrong = []
    if (folder / "receipts.ndjson").stat().st_size:
        words = ["receipts", str(folder / "receipts.ndjson"), "--pins", str(folder / "pins.json")]
        wrong += _verified(words, withheld=bool(scenario.more.get("withheld")))
    return wrong + _bundle(case, folder)


def _verified(words: list[str], *, withheld: bool = False) -> list[str]:
    """`withheld`: some receipts disclose nothing any more, so that one check cannot be made (exit 3)."""
    said = CliRunner().invoke(verify_command, words)
    accepted = (0, 3) if withheld else (0,)
    return [f"chio-verify {words[0]}: {said.output.strip()[-300:]}"] if said.exit_code not in accepted else []


def _bundle(case: Case, folder: Path) -> list[str]:
    """The whole run as evidence, where the commands for that exist."""
    process = chio_command.commands["process"]
    if "evidence" not in getattr(process, "commands", {}) or "bundle" not in verify_command.commands:
        return []
    bundle = folder / "evidence"
    made = CliRunner().invoke(chio_command, ["process", "evidence", "--state", str(case.state), "--out", str(bundle)])
    if made.exit_code:
        return [f"the evidence cannot be exported: {made.output.strip()[-300:]}"]
    return _verified(["bundle", str(bundle), "--pins", str(folder / "pins.json")])


def synced(scenario: Scenario, case: Case, history: History) -> list[str]:
    """Nothing is told before it is on disk, in any of the runs."""
    roots = [str(case.folder / name) for name in scenario.roots]
    return [what for made in history.made for what in told_too_early(made, roots)]


ALWAYS: dict[str, Check] = {
    "synced": synced,
    **{name: _rows(name) for name in (*ROWS, *SETTLED)},
    "second_recovery": second_recovery,
    "nothing_left": nothing_left,
    "verify": verify,
    "reported": reported,
}
"""The checks of every scenario that ends with a state."""

EFFECTS: dict[str, Check] = {"effects": owner}
AFTER_FAULT: dict[str, Check] = {**{name: _at_once(name) for name in (*ROWS, "database")}, "recovers": recovers}
