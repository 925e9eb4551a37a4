"""Limits of a plan's workers, from the plan to the signed record of how the attempt ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import refused, run_chio
from tests.kernel.serving import State, child, config

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has these limits only with delegation"),
]

EATS = "x = bytearray(300 << 20)"
SPINS = "while True: pass"
FORKS = """
import os
children = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            os.read(os.pipe()[0], 1)
        children.append(pid)
except BlockingIOError:
    for pid in children:
        os.kill(pid, 9)
"""


@pytest.fixture
def state(tmp_path: Path) -> State:
    tmp_path.chmod(0o755)
    return State.make(tmp_path / "folder", config(child("a"), max_calls=10))


def put_plan(state: State, script: str, limits: dict[str, int], **changes: Any) -> tuple[object, ...]:
    worker = {"process": "a", "command": ["/usr/bin/python3", "-c", script], "timeout_seconds": 20, "limits": limits}
    document = {"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker | changes]}
    (state.folder / "plan.json").write_text(json.dumps(document))
    return ("process", "run", "--state", state.path, "--plan", state.folder / "plan.json")


def record(state: State, kind: str) -> dict[str, Any]:
    ((text,),) = state.rows(f"SELECT body FROM leaf WHERE type = '{kind}'")
    return dict(json.loads(text))


@pytest.mark.parametrize(
    ("script", "limits", "outcome", "hit"),
    [
        (EATS, {"memory_bytes": 96 << 20, "scratch_bytes": 1 << 20}, "memory_limit", ["memory_bytes"]),
        (SPINS, {"cpu_seconds": 1}, "cpu_limit", ["cpu_seconds"]),
        (FORKS, {"pids": 8}, "exit_0", ["pids"]),
        ("", {}, "exit_0", []),
    ],
    ids=["memory", "cpu", "pids", "none"],
)
def test_a_limit_that_was_met_is_in_the_report_and_in_the_signed_exit_record(
    state: State, script: str, limits: dict[str, int], outcome: str, hit: list[str]
) -> None:
    done = run_chio(*put_plan(state, script, limits))
    assert done.returncode == (0 if outcome == "exit_0" else 1), done.stderr
    assert json.loads(done.stdout)["workers"][0]["outcome"] == outcome
    ended = record(state, "exit")
    assert (ended["outcome"], ended["limits_hit"]) == (outcome, hit)
    assert ended["usage"]["cpu_source"] == "cgroup"
    assert ended["usage"]["memory_peak_bytes"] > 100_000
    assert ended["usage"]["process_peak"] in (8 if hit == ["pids"] else 1, None)
    fields = {field["name"]: field for field in record(state, "launch")["fields"]}
    assert fields["cgroup"]["source"] == fields["cgroup_limits"]["source"] == "observed"
    assert fields["cgroup_limits"]["value"] == fields["cgroup_limits"]["asked"]
    assert (
        fields["cgroup_limits"]["value"].items()
        >= {k: v for k, v in limits.items() if k in ("pids", "memory_bytes")}.items()
    )


def test_limits_that_do_not_fit_are_refused_before_anything_starts(state: State) -> None:
    line = refused(*put_plan(state, "", {"memory_bytes": 100 << 20, "scratch_bytes": 64 << 20}))
    assert "memory_bytes" in line
    assert "scratch_bytes" in line
    assert "workers[0].limits" in line
    assert state.rows("SELECT count(*) FROM attempt") == [(0,)]


def test_a_limit_of_a_layer_that_was_given_up_is_refused_and_the_layer_alone_is_not(state: State) -> None:
    line = refused(*put_plan(state, "", {"pids": 8}), "--without", "cgroup")
    assert "workers[0].limits" in line
    assert state.rows("SELECT count(*) FROM attempt") == [(0,)]
    done = run_chio(*put_plan(state, "", {}), "--without", "cgroup")
    assert done.returncode == 0, done.stderr
    launch = record(state, "launch")
    assert launch["asked"]["without"] == ["cgroup"]
    field = next(field for field in launch["fields"] if field["name"] == "cgroup")
    assert (field["source"], field["value"], field["detail"]) == ("absent", False, "given up by --without")
    usage = record(state, "exit")["usage"]
    assert (usage["cpu_source"], usage["memory_peak_bytes"], usage["process_peak"]) == ("wait4", None, None)
