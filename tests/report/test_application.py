"""The application function and the two checks around it, alone: no host, no kernel, no confinement."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.report.walkthrough import ROOT, TEN, Project

REPORT = ROOT / "fixtures/report"


def summaries(batches: list[Any]) -> list[Any]:
    """What `summarize` makes of each batch, or the name of its error, from one Node process."""
    script = f"""
        import {{ summarize }} from {json.dumps(str(REPORT / "report.mjs"))};
        const answers = {json.dumps(batches)}.map((batch) => {{
          try {{ return summarize(batch); }} catch (error) {{ return error.constructor.name; }}
        }});
        console.log(JSON.stringify(answers));
    """
    done = subprocess.run(
        ["node", "--input-type=module", "-"], input=script, env=Project(REPORT).environment, text=True,
        capture_output=True, check=True, timeout=30,
    )
    return list(json.loads(done.stdout))


def test_a_summary_counts_and_totals_a_batch_and_refuses_what_is_none() -> None:
    largest = 2**53 - 1
    expected: list[tuple[Any, Any]] = [
        ([2, 3, 5], {"item_count": 3, "total": 10}),
        ([], {"item_count": 0, "total": 0}),
        ([largest], {"item_count": 1, "total": largest}),
        ([1] * 16, {"item_count": 16, "total": 16}),
        ([1] * 17, "TypeError"),
        ([2, -3], "TypeError"),
        ([2.5], "TypeError"),
        (["2"], "TypeError"),
        ([largest + 1], "TypeError"),
        ({"length": 0}, "TypeError"),
        (None, "TypeError"),
        ([largest, 1], "RangeError"),
    ]
    assert summaries([batch for batch, _ in expected]) == [answer for _, answer in expected]


@pytest.fixture
def recovered(tmp_path: Path) -> Path:
    """A state directory's exports, as a good recovery run leaves them; the receipts here are any text."""
    send, receive, ack, first, second = (f'{{"body":{{"log_index":{index}}}}}' for index in range(5))
    (tmp_path / "result.json").write_text(TEN)
    lines = (send, send, first, receive, ack, second)
    (tmp_path / "receipts.ndjson").write_text("".join(f"{line}\n" for line in lines))
    for attempt in (1, 2):
        (tmp_path / f"producer-{attempt}.json").write_text(json.dumps({"send_receipt": send}))
    return tmp_path


def check(state: Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / ".venv/bin/python", REPORT / "check-result.py", state]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=30)


def test_check_result_accepts_what_a_recovery_run_leaves(recovered: Path) -> None:
    done = check(recovered)
    assert (done.returncode, done.stdout) == (0, "Report total and original handoff verified\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "times", "complaint"),
    [
        ("result.json", "10", "11", 1, "result.json says"),
        ("producer-2.json", '"{', '" {', 1, "different send receipts"),
        ("receipts.ndjson", '{"body":{"log_index":0}}', '{"body": {"log_index":0}}', 1, "has 6 lines, 6 distinct"),
        ("receipts.ndjson", '{"body":{"log_index":4}}\n', "", 1, "has 5 lines, 4 distinct"),
        ("receipts.ndjson", '"log_index":0', '"log_index":-0', 2, "not given out twice, unchanged"),
    ],
)
def test_check_result_names_what_differs(
    recovered: Path, file: str, old: str, new: str, times: int, complaint: str
) -> None:
    """A receipt that was parsed and written again has the same meaning and other bytes: that has to be caught."""
    text = (recovered / file).read_text()
    assert text.count(old) >= times
    (recovered / file).write_text(text.replace(old, new, times))
    done = check(recovered)
    assert (done.returncode, done.stdout) == (1, "")
    assert complaint in done.stderr


def test_check_result_misses_no_attempt(recovered: Path) -> None:
    (recovered / "producer-2.json").unlink()
    done = check(recovered)
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 producer attempts saved a receipt, not 2" in done.stderr


def test_the_plans_differ_only_in_what_their_names_say() -> None:
    """Six plans are kept by hand: batch, exports and order must not drift apart."""
    plans = {path.name: json.loads(path.read_text()) for path in sorted(REPORT.glob("process*.json"))}
    assert len(plans) == 6
    directories = set()
    for name, plan in plans.items():
        producer, consumer = plan["workers"]
        assert (plan["schema"], plan["max_parallel"]) == ("chio.process.run.v2", 2)
        directories |= {worker["input"]["directory"] for worker in plan["workers"]}
        for worker in plan["workers"]:
            assert worker["confinement"]["exports"]["directory"] == worker["input"]["directory"]
            assert worker["input"]["items"] == ([4, 6, 8] if name == "process-changed.json" else [2, 3, 5])
            assert (REPORT / worker["command"][1]).is_file()
            assert worker["timeout_seconds"] == 30
        assert (producer["process"], producer["depends_on"]) == ("producer", [])
        assert (consumer["process"], consumer["depends_on"]) == ("consumer", ["producer"])
    assert len(directories) == len(plans)
