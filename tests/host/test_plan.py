"""Plans that are refused: by one line with file, field and fix, before any attempt is reserved or any file is made."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import CHIO, contents, refused, run_chio
from tests.kernel.serving import State, child, config

pytestmark = pytest.mark.timeout(60)

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    """A folder as an ordinary project's: documents, programs, a state of ours and one of somebody else's."""
    top = tmp_path_factory.mktemp("project")
    top.chmod(0o755)
    made = State.make(top / "folder", config(child("a"), child("b"), max_calls=100))
    (made.folder / "out").mkdir()
    (made.folder / "program.py").write_text("#!/usr/bin/env python3\nraise SystemExit(3)\n")
    (made.folder / "program.py").chmod(0o755)
    (made.folder / "not-executable").write_text("#!/bin/sh\n")
    (made.folder / "way-out").symlink_to("/etc")
    (made.folder / "big.json").write_bytes(b" " * (4 * 1024 * 1024 + 1))
    State.make(top / "other")
    return made


def worker(name: str = "a", **changes: Any) -> dict[str, Any]:
    return {"process": name, "command": ["true"], "timeout_seconds": 5, **changes}


def plan(*workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"schema": "chio.process.run.v2", "max_parallel": 2, "workers": list(workers) or [worker()], **changes}


def run(state: State, text: str | bytes | None = None, *options: str) -> tuple[object, ...]:
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (state.folder / "plan.json").write_bytes(data)
    return ("process", "run", "--state", state.path, "--plan", state.folder / "plan.json", *options)


def untouched(state: State) -> dict[str, tuple[int, int, bytes]]:
    """Everything but the times of the state directory, in which SQLite makes and removes files of its own."""
    return {name: entry for name, entry in contents(state.folder).items() if name not in ("state", "plan.json")}


def nothing_happened(state: State) -> bool:
    rows = state.rows("SELECT (SELECT count(*) FROM attempt), (SELECT count(*) FROM leaf), (SELECT plan FROM host)")
    return rows == [(0, 1, None)] and not os.path.exists(f"/run/chio/{state.pins.runtime_id.replace('-', '')[:16]}")


def exports(directory: str = "out", *files: str, **more: Any) -> dict[str, Any]:
    return {"exports": {"directory": directory, "files": list(files) or ["result.json"], **more}}


# The workers of the plan; then the field that the line names, and a word of why.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no worker": ({**plan(), "workers": []}, "workers", "length >= 1"),
    "129 workers": (plan(*[worker(f"w{n}") for n in range(129)]), "workers", "length <= 128"),
    "another schema": (plan(schema="chio.process.run.v1"), "schema", "v1"),
    "no schema": ({"max_parallel": 1, "workers": [worker()]}, "schema", "missing"),
    "no max_parallel": ({"schema": "chio.process.run.v2", "workers": [worker()]}, "max_parallel", "missing"),
    "nobody in parallel": (plan(max_parallel=0), "max_parallel", ">= 1"),
    "33 in parallel": (plan(max_parallel=33), "max_parallel", "<= 32"),
    "an unknown field": (plan(more=1), "more", "unknown"),
    "an unknown field of a worker": (plan(worker(), worker("b", more=1)), "workers[1].more", "unknown"),
    "an unknown field of the confinement": (
        plan(worker(confinement={"more": 1})), "workers[0].confinement.more", "unknown"),
    "a worker without a process": (plan({"command": ["true"], "timeout_seconds": 5}), "workers[0].process", "missing"),
    "a worker without a command": (plan({"process": "a", "timeout_seconds": 5}), "workers[0].command", "missing"),
    "a worker without a deadline": (plan({"process": "a", "command": ["x"]}), "workers[0].timeout_seconds", "missing"),
    "a process the host does not have": (plan(worker("c")), "workers[0].process", "`c`"),
    "a process twice": (plan(worker(), worker("b"), worker()), "workers[2]", "`a`"),
    "an impossible process": (plan(worker("a b")), "workers[0].process", ""),
    "an empty command": (plan(worker(command=[])), "workers[0].command", ">= 1"),
    "129 words": (plan(worker(command=["true"] * 129)), "workers[0].command", "<= 128"),
    "a word of 16,385 characters": (plan(worker(command=["true", "x" * 16_385])), "workers[0].command[1]", "16384"),
    "an empty program name": (plan(worker(command=["", "x"])), "workers[0].command", "empty"),
    "a NUL in a word": (plan(worker(command=["true", "a\0b"])), "workers[0].command", "NUL"),
    "a word that is a number": (plan(worker(command=["true", 1])), "workers[0].command[1]", "str"),
    "a command that is text": (plan(worker(command="true")), "workers[0].command", "array"),
    "no time": (plan(worker(timeout_seconds=0)), "workers[0].timeout_seconds", ">= 1"),
    "an hour and a second": (plan(worker(timeout_seconds=3601)), "workers[0].timeout_seconds", "<= 3600"),
    "no attempt": (plan(worker(max_attempts=0)), "workers[0].max_attempts", ">= 1"),
    "17 attempts": (plan(worker(max_attempts=17)), "workers[0].max_attempts", "<= 16"),
    "a dependency on itself": (plan(worker(depends_on=["a"])), "workers[0].depends_on", "the worker itself"),
    "a dependency on nobody": (plan(worker(depends_on=["c"])), "workers[0].depends_on", "`c`"),
    "a dependency that the plan lacks": (plan(worker(depends_on=["b"])), "workers[0].depends_on", "`b`"),
    "a dependency twice": (plan(worker(depends_on=["b", "b"]), worker("b")), "workers[0].depends_on[1]", "`b`"),
    "a cycle": (plan(worker(depends_on=["b"]), worker("b", depends_on=["a"])), "depends_on", "`a`, `b`"),
    "a bare program that is not there": (plan(worker(command=["no-such-program"])), "workers[0].command", "not there"),
    "a program that is not there": (plan(worker(command=["./nothing"])), "workers[0].command", "not there"),
    "a program that is a folder": (plan(worker(command=["./out"])), "workers[0].command", "out"),
    "a program that may not be executed": (plan(worker(command=["./not-executable"])), "workers[0].command", "chmod"),
    "a cwd that is not there": (plan(worker(cwd="nowhere")), "workers[0]", "nowhere"),
    "a cwd that is a file": (plan(worker(cwd="program.py")), "workers[0]", "program.py"),
    "a cwd that is the whole machine": (plan(worker(cwd="/")), "workers[0]", "machine"),
    "a cwd that is our state": (plan(worker(cwd="state")), "workers[0]", "state"),
    "a cwd in another state": (plan(worker(cwd="../other/state")), "workers[0]", "other/state"),
    "an unknown profile": (plan(worker(confinement={"profile": "none-such"})), "confinement.profile", "none-such"),
    "a profile that is not there": (plan(worker(confinement={"profile": "./p.yaml"})), "confinement.profile", "p.yaml"),
    "no profile": (plan(worker(confinement={"profile": ""})), "workers[0].confinement.profile", ""),
    "no confinement": (plan(worker(confinement={"profile": "none"})), "confinement.profile", "--allow-unconfined"),
    "a read path that is not there": (plan(worker(confinement={"read": ["nothing"]})), "workers[0]", "nothing"),
    "a read path that is a link": (plan(worker(confinement={"read": ["way-out"]})), "workers[0]", "way-out"),
    "a read path that is another state": (
        plan(worker(confinement={"read": ["../other/state"]})), "workers[0]", "other/state"),
    "65 read paths": (plan(worker(confinement={"read": ["out"] * 65})), "workers[0].confinement.read", "<= 64"),
    "an unknown limit": (plan(worker(limits={"more": 1})), "workers[0].limits", "more"),
    "a limit of nothing": (plan(worker(limits={"open_files": 0})), "workers[0].limits", "1"),
    "a limit that makes no sense": (plan(worker(limits={"open_files": 1})), "workers[0].limits", "open_files"),
    "a limit in text": (plan(worker(limits={"open_files": "64"})), "workers[0].limits", "int"),
    "exports to nowhere": (plan(worker(confinement=exports("nowhere"))), "confinement.exports.directory", "nowhere"),
    "exports into another state": (
        plan(worker(confinement=exports("../other/state"))), "confinement.exports.directory", "other/state"),
    "exports of nothing": (
        plan(worker(confinement={"exports": {"directory": "out", "files": []}})), "confinement.exports.files", ">= 1"),
    "exports without files": (
        plan(worker(confinement={"exports": {"directory": "out"}})), "workers[0].confinement.exports.files", "missing"),
    "exports of no bytes": (plan(worker(confinement=exports(max_bytes=0))), "confinement.exports.max_bytes", ">= 1"),
    "an absolute export": (plan(worker(confinement=exports("out", "/etc/passwd"))), "exports.files[0]", "/etc/passwd"),
    "an export that climbs": (plan(worker(confinement=exports("out", "a", "../b"))), "exports.files[1]", "../b"),
    "an export that climbs later": (plan(worker(confinement=exports("out", "a/../../b"))), "exports.files[0]", "a/../"),
    "an export with a reserved name": (
        plan(worker(confinement=exports("state", "kernel.pub"))), "exports.files[0]", "kernel.pub"),
    "an export that could be the database": (
        plan(worker(confinement=exports("state", "authority.*"))), "exports.files[0]", "authority.db"),
    "an export of everything into the state": (
        plan(worker(confinement=exports("state", "*"))), "exports.files[0]", "`*` matches"),
    "an export that could be the receipts": (
        plan(worker(confinement=exports("state", "[a-z]eceipts.ndjson"))), "exports.files[0]", "receipts.ndjson"),
    "an export with the host's own prefix": (
        plan(worker(confinement=exports("state", ".chio-x"))), "exports.files[0]", ".chio-x"),
    "an export into the state through another way": (
        plan(worker(confinement=exports("out/../state", "pins.json"))), "exports.files[0]", "pins.json"),
}  # fmt: skip


@pytest.mark.parametrize(("document", "field", "word"), REFUSED.values(), ids=REFUSED)
def test_a_bad_plan_is_one_line_with_file_field_and_fix_and_nothing_is_started(
    state: State, document: dict[str, Any], field: str, word: str
) -> None:
    command = run(state, json.dumps(document))
    before = untouched(state)
    line = refused(*command)
    shown = line.replace(str(state.folder), "")
    assert "(/plan.json, " in shown
    assert field in shown
    assert word in shown
    assert untouched(state) == before
    assert nothing_happened(state)


TEXTS: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "not JSON"),
    "half a plan": (json.dumps(plan())[:-1], "not JSON"),
    "a list": ("[]", "object"),
    "bytes that are no UTF-8": (b"\xff", "UTF-8"),
    "a duplicate field": (json.dumps(plan()).replace('"process"', '"process": "b", "process"'), "workers[0].process"),
    "a number beyond 2^53": (json.dumps(plan(worker(input=2**53))), "2^53"),
    "65 levels of input": (json.dumps(plan(worker(input=json.loads("[" * 62 + "]" * 62)))), "nested deeper"),
    "a lone surrogate": (json.dumps(plan(worker(input="\ud800"))), "surrogate"),
    "more than 4 MiB": (b" " * (4 * 1024 * 1024 + 1), "bytes"),
}


@pytest.mark.parametrize(("text", "word"), TEXTS.values(), ids=TEXTS)
def test_a_plan_that_cannot_be_read_is_one_line_and_nothing_is_started(
    state: State, text: str | bytes, word: str
) -> None:
    command = run(state, text)
    before = untouched(state)
    line = refused(*command)
    assert "(/plan.json, " in line.replace(str(state.folder), "")
    assert word in line
    assert untouched(state) == before
    assert nothing_happened(state)


def test_a_plan_that_is_not_there_is_named(state: State) -> None:
    line = refused("process", "run", "--state", state.path, "--plan", state.folder / "nothing.json")
    assert f"{state.folder}/nothing.json" in line


def test_a_name_that_a_plan_chose_is_shown_and_not_obeyed(state: State) -> None:
    line = refused(*run(state, json.dumps(plan(worker(command=["./\x1b[2J\nchio: done"])))))
    assert "chio: done" in line


def test_exports_may_not_go_through_a_link_that_leads_into_another_state(state: State) -> None:
    (state.folder / "link").symlink_to("../other/state")
    document = plan(worker(confinement=exports("link")))
    assert "exports may not go into a state" in refused(*run(state, json.dumps(document)))
    (state.folder / "link").unlink()


# --- the first run freezes -------------------------------------------------------------------------------------------


@pytest.fixture
def frozen(tmp_path: Path) -> State:
    """A state whose plan has been run once, without confinement, so that it needs no privilege."""
    made = State.make(tmp_path / "folder", config(child("a"), child("b"), max_calls=100))
    program = made.folder / "program.sh"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    (made.folder / "data.txt").write_text("data")
    if os.geteuid() != 0 and not os.environ.get("XDG_RUNTIME_DIR"):
        pytest.skip("no place for sockets")
    done = run_chio(*run(made, json.dumps(frozen_plan()), "--allow-unconfined"))
    assert done.returncode == 0, done.stderr
    return made


def frozen_plan() -> dict[str, Any]:
    none = {"profile": "none"}
    first = worker("a", command=["./program.sh", "data.txt"], confinement=none, input={"n": 1})
    return plan(first, worker("b", command=["true"], confinement=none, depends_on=["a"]))


def put(path: str, value: Any) -> Change:
    def change(document: dict[str, Any]) -> None:
        *names, last = [int(name) if name.isdigit() else name for name in path.split(".")]
        target: Any = document
        for name in names:
            target = target[name]
        target[last] = value

    return change


CHANGED: dict[str, tuple[Change, str]] = {
    "an input": (put("workers.0.input.n", 2), "workers[0].input.n"),
    "an input's type": (put("workers.0.input.n", 1.5), "workers[0].input.n"),
    "an input more": (put("workers.0.input.m", 1), "workers[0].input.m"),
    "a command": (put("workers.0.command.1", "other.txt"), "workers[0].command[1]"),
    "a deadline": (put("workers.1.timeout_seconds", 6), "workers[1].timeout_seconds"),
    "an attempt more": (put("workers.1.max_attempts", 2), "workers[1].max_attempts"),
    "a dependency less": (put("workers.1.depends_on", []), "workers[1].depends_on[0]"),
    "the parallelism": (put("max_parallel", 1), "max_parallel"),
    "a worker less": (lambda document: document["workers"].pop(), "workers[1]"),
    "the order": (lambda document: document["workers"].reverse(), "workers[0].command"),
    "a profile": (put("workers.0.confinement.profile", "worker"), "workers[0].confinement.profile"),
}


@pytest.mark.parametrize(("change", "field"), CHANGED.values(), ids=CHANGED)
def test_a_plan_that_changed_since_its_first_run_is_refused_by_field(frozen: State, change: Change, field: str) -> None:
    document = copy.deepcopy(frozen_plan())
    change(document)
    leaves = frozen.rows("SELECT count(*) FROM leaf")
    line = refused(*run(frozen, json.dumps(document), "--allow-unconfined"))
    assert "the plan was changed since its first run" in line
    assert f"/plan.json, {field}" in line
    assert frozen.rows("SELECT count(*) FROM leaf") == leaves


@pytest.mark.parametrize("name", ["program.sh", "data.txt"])
def test_a_file_that_a_command_names_is_frozen_by_its_digest(frozen: State, name: str) -> None:
    with open(frozen.folder / name, "a") as file:
        file.write("\n")
    line = refused(*run(frozen, None, "--allow-unconfined"))
    assert "the plan was changed since its first run" in line
    assert "resolved[0]" in line


def test_a_plan_in_another_spelling_is_the_same_plan(frozen: State) -> None:
    attempts = frozen.rows("SELECT * FROM attempt")
    text = json.dumps(frozen_plan(), indent=4, sort_keys=True) + "\n"
    done = run_chio(*run(frozen, text, "--allow-unconfined"))
    assert done.returncode == 0, done.stderr
    assert frozen.rows("SELECT * FROM attempt") == attempts


def test_a_bare_command_is_looked_up_once_and_stays_what_it_was(frozen: State, tmp_path: Path) -> None:
    """A program of the same name that comes first on PATH later is not what was frozen, and is not run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "true").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "true").chmod(0o755)
    arguments = [str(argument) for argument in run(frozen, None, "--allow-unconfined")]
    done = subprocess.run(
        [CHIO, *arguments],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
