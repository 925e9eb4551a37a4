"""Broken variants of the product, each of which must be caught, by the invariant that it breaks.

A variant is a copy of the packages in a virtual environment of its own, with a few lines changed; the tree is never
touched. A control whose lines are not in the product any more says so: it has to be written anew.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults import sweep
from tests.faults.boundaries import Boundary
from tests.faults.cases import Result
from tests.faults.scenarios import ALL
from tests.faults.supervise import AFTER, BEFORE, LATE, Fault

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("chio", "confine", "verify", "policies")
_MOST_CASES = 12


@dataclass(frozen=True, slots=True)
class Edit:
    """`old`, which stands exactly once in `file`, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Control:
    """`caught_by` is the invariant that must break: in a run without a fault, or in one with `actions` at a boundary
    that is `where`, the first few of them."""

    name: str
    edits: tuple[Edit, ...]
    scenario: str
    caught_by: str
    where: Callable[[Boundary], bool] = lambda _: False
    actions: tuple[str, ...] = ()


def _replies(boundary: Boundary) -> bool:
    """The kernel's answers to workers."""
    return boundary.role == "kernel" and boundary.kind == "socket" and boundary.call == "write"


def _dispatches(boundary: Boundary) -> bool:
    """The kernel's calls of its tool server: what it writes to a pipe after a wake-up of its own and the handshake."""
    return boundary.role == "kernel" and boundary.kind == "pipe" and boundary.ordinal > 4


def _syncs(boundary: Boundary) -> bool:
    """The kernel's commits; the first ones are the start's."""
    wal = boundary.call == "fdatasync" and boundary.target.endswith("-wal")
    return boundary.role == "kernel" and wal and boundary.ordinal > 5


_SETTLED_EARLY = """\
            call = result.call
            early = b'{"kind":"value","value":{"content":[],"structuredContent":{"done":"pay"}}}'
            work = lambda: self.ledger.settle(replace(call), Event.ANSWERED, "answered", early)
            sent = call.parameters or b"{}"
            def told(answer: Answer) -> None:
                self.router.call(call.server, call.tool, sent, lambda ended: None, lambda late: None)
                receive.connection.reply(wire.ok_frame(answer.result))
            self.writer.submit(Item(work, told, lambda: None))
"""
_DISPATCHED = """\
            self._send(receive, result.call)
"""
_INVOKED = """\
        if isinstance(result, Answer):
            self._show_receipt(result.receipt)
        return result
"""
_COMMITS = """\
        if self._store.in_transaction:
            self._store.commit()
        self._tell_checkpoint()
        return done
"""
_RELEASES = """\
        for item, result in done:
            item.answer(result)
"""

CONTROLS: Final = (
    Control(
        "sync off",
        (Edit("chio/kernel/database.py", '"synchronous": "full"', '"synchronous": "off"'),),
        "checkpoints", "synced",
    ),
    Control(
        "sync after the reply",
        (
            Edit("chio/kernel/database.py", '"synchronous": "full"', '"synchronous": "off"'),
            Edit(
                "chio/kernel/writer.py", _RELEASES,
                _RELEASES + "        wal = os.open('authority.db-wal', os.O_RDWR)\n        os.fdatasync(wal)\n"
                "        os.close(wal)\n",
            ),
        ),
        "checkpoints", "synced",
    ),
    Control(
        "reply before the commit",
        (
            Edit("chio/kernel/writer.py", _COMMITS, "        self._tell_checkpoint()\n        return done\n"),
            Edit(
                "chio/kernel/writer.py", _RELEASES,
                _RELEASES + "        if self._store.in_transaction:\n            self._store.commit()\n",
            ),
        ),
        "checkpoints", "acknowledged", _replies, (AFTER,),
    ),
    Control(
        "outcome recorded before dispatch",
        (Edit("chio/kernel/process.py", _DISPATCHED, _SETTLED_EARLY),),
        "effect", "effects", _dispatches, (BEFORE,),
    ),
    Control(
        "intent recorded after the send",
        (
            Edit("chio/kernel/process.py", _DISPATCHED, "            pass\n"),
            Edit(
                "chio/kernel/process.py", _INVOKED,
                "        if isinstance(result, Dispatch):\n            self._send(receive, result.call)\n" + _INVOKED,
            ),
        ),
        "effect", "effects", _dispatches, (LATE,),
    ),
    Control(
        "receipt in another commit than its effect",
        (
            Edit(
                "chio/kernel/ledger.py", "            ran.write()\n",
                "            ran.write()\n            self._store.commit()\n",
            ),
        ),
        "receive", "mailboxes", _syncs, (AFTER,),
    ),
    Control(
        "a directory not synced",
        (
            Edit("confine/exports.py", "            os.fsync(folder_fd)\n", ""),
            Edit(
                "confine/exports.py", "            os.close(folder_fd)\n    os.fsync(target_fd)\n",
                "            os.close(folder_fd)\n",
            ),
        ),
        "harvest", "synced",
    ),
    Control(
        "an export renamed before its record",
        (
            Edit(
                "chio/runner.py", '        attempt = work.attempt\n        assert attempt is not None\n'
                '        self._kernel.call(\n            "ended",',
                '        attempt = work.attempt\n        assert attempt is not None\n        if staged is not None:\n'
                '            with _directory(staged["directory"]) as target:\n'
                '                publish_staged(target, [(e["staged"], e["file"]) for e in staged["files"]])\n'
                '        self._kernel.call(\n            "ended",',
            ),
        ),
        "harvest", "recorded_first",
        lambda boundary: boundary.role == "host" and boundary.call.startswith("rename"), (AFTER,),
    ),
    Control(
        "a leaf left out",
        (Edit("chio/kernel/ledger.py", "                self.incident(call, detail)\n", "                pass\n"),),
        "effect", "log", _dispatches, (AFTER,),
    ),
    Control(
        "a refund given twice",
        (
            Edit(
                "chio/kernel/ledger.py", "self._store.debit_grant(name, position, -1)",
                "self._store.debit_grant(name, position, -min(2, self._store.grant_used(name, position)))",
            ),
        ),
        "effect", "budgets", _dispatches, ("EPIPE",),
    ),
    Control(
        "an unknown effect asked for again",
        (
            Edit(
                "chio/kernel/ledger.py", "        if not self._servers.is_read(call.server, call.tool):\n",
                "        if not self._servers.has(call.server, call.tool):\n",
            ),
            Edit("chio/kernel/ledger.py", "grant.max_invocations is None and not grant.constraints", "True"),
        ),
        "effect", "effects", lambda boundary: boundary.role == "ledger" and boundary.call == "write", (AFTER,),
    ),
    Control(
        "an interrupted attempt left as it is",
        (Edit("chio/kernel/recovery.py", 'if attempt["state"] != "ended"]', 'if attempt["state"] == "never"]'),),
        "checkpoints", "attempts", _replies, (BEFORE,),
    ),
)  # fmt: skip


def variant(control: Control, folder: Path) -> tuple[str, ...]:
    """The command `chio` of a broken product in `folder`. AssertionError when an edit does not fit any more."""
    return copy_of_the_product(folder, control.edits)


def copy_of_the_product(folder: Path, edits: tuple[Edit, ...] = ()) -> tuple[str, ...]:
    """The command `chio` of a copy of the packages in `folder`, with these lines changed."""
    packages = site_of(folder)
    assert not packages.exists()
    _copied(folder, packages)
    for edit in edits:
        file = packages / edit.file
        text = file.read_text()
        assert text.count(edit.old) == 1, f"these lines stand in {edit.file} no more: {edit.old!r}"
        file.write_text(text.replace(edit.old, edit.new))
    return (str(folder / "bin" / "python"), "-m", "chio")


def site_of(folder: Path) -> Path:
    """Where a copy keeps its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def _copied(folder: Path, packages: Path) -> None:
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    ours = Path(sys.prefix)
    (folder / "bin" / "python").symlink_to((ours / "bin" / "python").resolve())
    (folder / "pyvenv.cfg").write_text((ours / "pyvenv.cfg").read_text())
    site = sysconfig.get_path("purelib")
    # Links, not copies; without the files that name this tree.
    subprocess.run(["cp", "-al", f"{site}/.", str(packages)], check=True)
    for named in packages.glob("__editable__*"):
        named.unlink()
    for name in _PACKAGES:
        subprocess.run(["cp", "-a", str(ROOT / name), str(packages / name)], check=True)


def catch(control: Control, work: Path, jobs: int) -> str:
    """The invariant that caught it and where; empty when it was not caught as it must be."""
    folder = work / "controls" / control.name.replace(" ", "-")
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    chio = variant(control, folder / "product")
    scenario = ALL[control.scenario]
    boundaries, clean = sweep.clean(scenario, folder, chio)
    if control.caught_by in clean.violations:
        return f"{control.caught_by}, without a fault"
    places = [boundary.place for boundary in boundaries if control.where(boundary)]
    faults = [Fault.parse(f"{place}={action}") for place in places for action in control.actions][:_MOST_CASES]

    def caught(result: Result) -> bool:
        return control.caught_by in result.violations

    for result in sweep.sweep(scenario, faults, folder, chio, jobs, lambda _: None, until=caught):
        if caught(result):
            return f"{control.caught_by}, at {result.fault}"
    return ""


def catch_all(work: Path, jobs: int, only: tuple[str, ...] = ()) -> dict[str, str]:
    """{control: what caught it}."""
    return {control.name: catch(control, work, jobs) for control in CONTROLS if not only or control.name in only}
