"""A worker is killed at each point of a recipe, alone or with its host, on a fresh state; the next attempt goes on.

Whatever the point: one completed item, the same calculation, the original receipts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_experiments import descendants, died
from tests.report.walkthrough import Project
from tests.state.recipes import RESULT, came_to, checkpoint, confined, mailboxes, plan_that_stops

pytestmark = [pytest.mark.timeout(120), confined]

DEADLINE_S = 30
REPORT = json.dumps(RESULT, sort_keys=True, separators=(",", ":")).encode()

Seen = Callable[[Project, str], bool]


def blob_is_kept(project: Project, state: str) -> bool:
    digest = sha256(REPORT).hexdigest()
    return project.attempt(f"chio process state --state {state} --process consumer --blob {digest}").returncode == 0


def saved(project: Project, state: str) -> bool:
    return bool(checkpoint(project, state)["revision"] == "1")


def acknowledged(project: Project, state: str) -> bool:
    return bool(mailboxes(project, state)["jobs"]["acknowledged_through"] == 1)


def published(project: Project, state: str) -> bool:
    return bool(mailboxes(project, state)["reports"]["last_sequence"] == 1)


@contextmanager
def running(project: Project, state: str, command: str, seen: Seen) -> Iterator[subprocess.Popen[bytes]]:
    """A run that has come as far as a reader can see it."""
    with subprocess.Popen(
        command.split(), cwd=project.folder, env=project.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as host:  # fmt: skip
        deadline = time.monotonic() + DEADLINE_S
        while not seen(project, state):
            assert host.poll() is None, host.communicate()
            assert time.monotonic() < deadline, "the point was not reached"
        yield host


def host_killed(project: Project, state: str, command: str, seen: Seen) -> Any:
    """SIGKILL to the host; when everything that it had started is dead too, the same command."""
    with running(project, state, command, seen) as host:
        started = [os.pidfd_open(pid) for pid in descendants(host.pid)]
        host.kill()
    assert len(started) >= 4, "kernel, launcher, init and worker were to be alive"
    assert all([died(descriptor) for descriptor in started])
    for descriptor in started:
        os.close(descriptor)
    return project.json(command)


def worker_killed(project: Project, state: str, command: str, seen: Seen) -> Any:
    """SIGKILL to the consumer alone; its host goes on."""
    with running(project, state, command, seen) as host:
        programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(host.pid)}
        (worker,) = [pid for pid, program in programs.items() if b"/worker." in program]
        os.kill(worker, signal.SIGKILL)
        printed, complaints = host.communicate(timeout=DEADLINE_S)
        assert host.returncode == 0, complaints
    return json.loads(printed)


Stop = Callable[[Project, str, str, Seen], Any]
STOPS: dict[str, tuple[Stop, str]] = {
    "host": (host_killed, "host_interrupted"), "worker": (worker_killed, "signal_9"),
}  # fmt: skip


def stopped_and_resumed(project: Project, language: str, recipe: str, point: str, seen: Seen, whom: str) -> str:
    """The state of a run whose consumer was stopped at a point and came to its end at its second attempt."""
    stop, outcome = STOPS[whom]
    state = f".chio-{language}-{point}-{whom}"
    project.run(f"chio process init --config host.json --state {state}")
    plan = plan_that_stops(project, language, recipe, point)
    report = stop(project, state, f"chio process run --state {state} --plan {plan}", seen)
    assert report["complete"] is True
    assert project.outcomes(state, "consumer") == [outcome, "exit_0"]
    assert project.outcomes(state, "producer") == ["exit_0"]
    return state


CONSUMED: dict[str, Seen] = {"blob": blob_is_kept, "commit": saved, "acknowledgement": acknowledged}


@pytest.mark.parametrize("whom", STOPS)
@pytest.mark.parametrize(("point", "seen"), CONSUMED.items(), ids=CONSUMED)
def test_a_consumer_killed_alone_or_with_its_host_completes_one_item_under_the_original_receipts(
    project: Project, language: str, point: str, seen: Seen, whom: str
) -> None:
    state = stopped_and_resumed(project, language, "consume-order", point, seen, whom)

    done = came_to(project, state, "consumer", 2)["consume-order"]
    assert done["result"] == RESULT
    kept = checkpoint(project, state)
    assert kept == done["checkpoint"]
    # Had the second attempt saved what the first had saved, this would be revision 2.
    assert kept["revision"] == "1"
    assert kept["value"] == {
        "report.v1": {
            "version": 1, "completed": ["order"], "report_sha256": sha256(REPORT).hexdigest(),
            "report_bytes": len(REPORT),
        },
    }  # fmt: skip
    box = mailboxes(project, state)["jobs"]
    assert (box["last_sequence"], box["acknowledged_through"], box["pending_messages"]) == (1, 1, 0)

    send, receive, *rest = project.receipts(state)
    again, ack = rest[-2:]
    assert again == receive
    assert rest[:-2] == ([ack] if point == "acknowledgement" else [])
    assert done["receipts"] == [receive, ack]
    assert len({send, receive, ack}) == project.verify(state) == 3
    assert project.recorded(state, "consumer")["calls"] == 2


PUBLISHED: dict[str, Seen] = {"prepared": saved, "published": published}


@pytest.mark.parametrize(("point", "seen"), PUBLISHED.items(), ids=PUBLISHED)
def test_a_publisher_killed_between_its_phases_publishes_once_what_it_had_prepared(
    project: Project, language: str, point: str, seen: Seen
) -> None:
    state = stopped_and_resumed(project, language, "publish", point, seen, "host")

    done = came_to(project, state, "consumer", 2)["publish"]
    kept = checkpoint(project, state)
    assert kept == done["checkpoint"]
    assert (kept["revision"], kept["value"]["report.v1"]["phase"]) == ("2", "completed")
    assert kept["value"]["report.v1"]["completed"] == ["publish"]
    assert mailboxes(project, state)["reports"]["last_sequence"] == 1
    _send, *published = project.receipts(state)
    assert published == [done["receipt"]] * (2 if point == "published" else 1)
    assert project.verify(state) == 2
