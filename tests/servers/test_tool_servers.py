"""Tool servers as the host runs them, confined: what one that misbehaves does to `init`, to a run, and to its calls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.confined import Project
from tests.kernel.external import effects

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="confining a server that writes needs root in this version"),
]

UNKNOWN = {"state": "incomplete", "reason": "outcome_unknown_after_dispatch"}


def call(key: str, **arguments: Any) -> dict[str, Any]:
    return {"operation_key": key, "tool_name": "do", "arguments": arguments}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("exit", "closed"), ("refuses", "not for you"), ("no_list", "is no list"),
        ("large_integer", "canonical profile"), ("annotations_are_text", "annotations"),
    ],
)  # fmt: skip
def test_init_refuses_a_server_that_cannot_be_used_and_names_it(tmp_path: Path, how: str, why: str) -> None:
    project = Project.write(tmp_path / "project", script="rogue.py", timeout_s=5)
    (project.bank / "next_start").write_text(how)
    done = project.init()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("chio: a tool server cannot be used (")
    assert "servers[0]" in done.stderr
    assert why in done.stderr
    assert not project.state.exists()
    (project.bank / "next_start").unlink()
    assert project.init().returncode == 0


@pytest.mark.parametrize(
    ("how", "why"), [("other_tools", "pinned at init"), ("other_hint", "pinned at init"), ("exit", "closed")]
)
def test_a_server_that_is_not_what_was_pinned_refuses_the_run_before_any_worker_starts(
    tmp_path: Path, how: str, why: str
) -> None:
    project = Project.make(tmp_path / "project", call("key"), script="rogue.py")
    (project.bank / "next_start").write_text(how)
    host = project.run()
    _, stderr = host.communicate(timeout=60)
    assert host.returncode == 1
    assert "a tool server cannot be used" in stderr
    assert "servers.bank" in stderr
    assert why in stderr
    status = json.loads(project.chio("process", "status", "--state", str(project.state)).stdout)
    assert [process["attempts"] for process in status["processes"]] == [[], []]
    assert effects(project.bank, "seen.ndjson") == []
    (project.bank / "next_start").unlink()
    assert project.resume()["complete"]
    assert len(effects(project.bank, "seen.ndjson")) == 1


def test_whatever_a_server_does_to_a_call_the_run_goes_on(tmp_path: Path) -> None:
    ways = ["garbage", "twice", "huge", "exit", "never", "both", "no_text", "ok"]
    project = Project.make(
        tmp_path / "project", *(call(how, how=how, mine=how) for how in ways), script="rogue.py", timeout_s=2
    )
    report = project.resume()
    assert report["complete"], report
    answers = project.answers(1)
    first, again = answers[: len(ways)], answers[len(ways) :]
    assert first == again
    outcomes = {how: (found["verdict"], found["terminal_state"]) for how, found in zip(ways, first, strict=True)}
    known = ("allow", {"state": "completed"})
    assert outcomes == {how: known if how in ("garbage", "twice", "ok") else ("deny", UNKNOWN) for how in ways}
    seen = [entry["arguments"]["how"] for entry in effects(project.bank, "seen.ndjson")]
    assert seen == ways  # each was asked for once, repeats and all
    assert project.verified_receipts() == len(ways)


def test_what_a_server_wrote_to_its_stderr_is_kept_with_the_record_of_its_end(tmp_path: Path) -> None:
    import sqlite3
    from contextlib import closing

    project = Project.make(tmp_path / "project", call("first", how="exit"), call("second"), script="rogue.py")
    assert project.resume()["complete"]
    with closing(sqlite3.connect(f"file:{project.state}/authority.db?mode=ro", uri=True)) as database:
        starts = database.execute("SELECT number, outcome, kept, bytes FROM server_start ORDER BY number").fetchall()
        details = [json.loads(body)["detail"] for (body,) in database.execute(
            "SELECT body FROM leaf WHERE type = 'incident'")]  # fmt: skip
        launches = database.execute("SELECT count(*) FROM leaf WHERE type = 'launch'").fetchone()
    text = b"this server has had enough\n"
    assert starts[0] == (1, "exit_1", text, len(text))
    assert [number for number, *_ in starts] == [1, 2]
    assert "ended: exit_1" in details
    assert launches == (3,)  # two starts of the server and the worker: each has its signed record


def test_a_server_that_ends_with_every_call_is_started_for_every_next_one(tmp_path: Path) -> None:
    """The host hears of the death, of the need and of a new peer at once, in any order, and loses none of them."""
    calls = [call(f"key {n}", how="exit", n=n) for n in range(40)]
    project = Project.make(tmp_path / "project", *calls, script="rogue.py", timeout_s=20)
    assert project.resume()["complete"]
    status = json.loads(project.chio("process", "status", "--state", str(project.state)).stdout)
    assert status["calls"] == {"unknown": 40}
    assert [entry["arguments"]["n"] for entry in effects(project.bank, "seen.ndjson")] == list(range(40))
