"""Four of the README's five experiments, each on fresh state; the first is the walk-through's recovery run."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.report.walkthrough import TEN, Project, decisions, finished

DEADLINE_S = 30


def test_a_consumer_that_dies_before_its_acknowledgement_finishes_from_its_checkpoint(project: Project) -> None:
    state = ".chio-consumer-stops"
    project.run(f"chio process init --config host.json --state {state}")
    report = project.json(f"chio process run --state {state} --plan process-consumer-stops.json")
    finished(report, producer=1, consumer=2)
    assert project.run(f"cat {state}/result.json") == TEN

    _, receive, replay, _ = lines = project.receipts(state)
    assert receive == replay
    assert decisions(lines) == [
        ("send_jobs", "allow"), ("receive_jobs", "allow"), ("receive_jobs", "allow"), ("ack_jobs", "allow"),
    ]
    assert project.verify(state) == 3
    assert project.outcomes(state, "consumer") == ["exit_77", "exit_0"]
    # The second attempt found its result there: a second save would have made it revision 2.
    kept = project.json(f"chio process state --state {state} --process consumer")["data"]["checkpoint"]
    assert kept == {"revision": "1", "value": {"item_count": 3, "total": 10}}


def test_what_a_grant_forbids_is_refused_with_receipts_and_counted(project: Project) -> None:
    state = ".chio-forbidden"
    project.run(f"chio process init --config host.json --state {state}")
    # The worker itself compares each refusal with its repeat, and counts on a fifth call being its last.
    finished(project.json(f"chio process run --state {state} --plan process-forbidden.json"), producer=1, consumer=1)
    assert project.run(f"cat {state}/result.json") == TEN

    lines = project.receipts(state)
    refused = ["receive_jobs", "ack_jobs", "send_invoices", "transfer"]
    assert decisions(lines) == [
        ("send_jobs", "allow"),
        *[(tool, "deny") for tool in refused for _ in range(2)],
        ("receive_jobs", "allow"), ("ack_jobs", "allow"),
    ]
    for line in lines[1:9]:
        body = json.loads(line)["body"]
        assert body["decision"]["reason"] == "out_of_scope"
        assert body["output"] is None
        assert body["terminal_state"] == {"state": "completed"}
    assert project.verify(state) == 7
    producer = project.recorded(state, "producer")
    assert (producer["calls"], producer["ceiling"]) == (5, 5)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_changed_plan_is_refused_before_anything_starts(project: Project) -> None:
    """Against a state that is complete: neither a file of it nor a folder beside it may change."""
    state = ".chio-unchanged"
    plan = (project.folder / "process.json").read_text()
    (project.folder / "plan.json").write_text(plan.replace('".chio"', f'"{state}"'))
    project.run(f"chio process init --config host.json --state {state}")
    finished(project.json(f"chio process run --state {state} --plan plan.json"), producer=1, consumer=1)
    before = contents(project.folder / state)
    beside = sorted(os.listdir(project.folder))

    for change in (('"items": [2, 3, 5]', '"items": [4, 6, 8]'), ('"timeout_seconds": 30', '"timeout_seconds": 31')):
        text = (project.folder / "plan.json").read_text()
        (project.folder / "plan-changed.json").write_text(text.replace(*change))
        line = project.refused(f"chio process run --state {state} --plan plan-changed.json")
        assert "plan-changed.json" in line
        (project.folder / "plan-changed.json").unlink()
    project.refused(f"chio process run --state {state} --plan process-changed.json")

    assert contents(project.folder / state) == before
    assert sorted(os.listdir(project.folder)) == beside


def test_a_changed_program_is_refused_like_a_changed_plan(project: Project) -> None:
    """What a plan names runs as it was when the plan was frozen: its digests are part of it."""
    state = ".chio-program"
    plan = (project.folder / "process.json").read_text()
    (project.folder / "program.json").write_text(
        plan.replace('".chio"', f'"{state}"').replace("producer.py", "producer_copy.py")
    )
    program = project.folder / "producer_copy.py"
    program.write_text((project.folder / "producer.py").read_text())
    project.run(f"chio process init --config host.json --state {state}")
    finished(project.json(f"chio process run --state {state} --plan program.json"), producer=1, consumer=1)
    before = contents(project.folder / state)

    program.write_text(program.read_text() + "\n")
    assert "producer_copy.py" in project.refused(f"chio process run --state {state} --plan program.json")
    assert contents(project.folder / state) == before


def descendants(pid: int) -> Iterator[int]:
    """Every process below this one, in whatever namespaces: the kernel and the launcher, inits, workers."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we were looking
            parents[int(name)] = int(fields[1])
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        yield from more
        below |= more


def died(descriptor: int) -> bool:
    """Whether the process of a pidfd ends in time; pidfd_open(2): it is readable once the process has ended."""
    return bool(select.select([descriptor], [], [], DEADLINE_S)[0])


def wait_for(project: Project, command: str, wanted: Any) -> None:
    """Ask again until `wanted` holds; each question is a whole command, so nothing spins."""
    deadline = time.monotonic() + DEADLINE_S
    while not wanted(project.json(command)):
        assert time.monotonic() < deadline, project.run(command)


def test_a_killed_host_takes_everything_along_and_the_same_command_resumes(project: Project) -> None:
    state = ".chio-host-killed"
    command = f"chio process run --state {state} --plan process-host-killed.json"
    project.run(f"chio process init --config host.json --state {state}")
    host = subprocess.Popen(
        command.split(), cwd=project.folder, env=project.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    with host:
        wait_for(
            project, f"chio process state --state {state} --process consumer",
            lambda kept: kept["data"]["checkpoint"]["revision"] == "1",
        )
        started = [os.pidfd_open(pid) for pid in descendants(host.pid)]
        host.kill()
    assert len(started) >= 4, "kernel, launcher, init and worker were to be alive"
    assert all([died(descriptor) for descriptor in started])
    for descriptor in started:
        os.close(descriptor)

    # The plan allows one attempt; the one that the host's death ended is not held against it. Its socket is found and
    # counted by the run that resumes, and gone for the next.
    finished(project.json(command), producer=1, consumer=2, abandoned_sockets=1)
    finished(project.json(command), producer=1, consumer=2)
    assert project.run(f"cat {state}/result.json") == TEN
    assert decisions(project.receipts(state)) == [
        ("send_jobs", "allow"), ("receive_jobs", "allow"), ("receive_jobs", "allow"), ("ack_jobs", "allow"),
    ]
    assert project.verify(state) == 3
    assert project.outcomes(state, "consumer") == ["host_interrupted", "exit_0"]
