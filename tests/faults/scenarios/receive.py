"""A receive that waits, and is woken by a send."""

from __future__ import annotations

from tests.faults.scenarios.project import Project, Worker, scenario

_WAIT = {"wait_ms": 2000}

SCENARIO = scenario(
    "receive",
    "receives that wait for one another's sends",
    Project(
        (
            Worker(
                "waiter", "waiter.mjs", ("chio-ipc/send_ready", "chio-ipc/receive_jobs", "chio-ipc/ack_jobs"), _WAIT
            ),
            Worker("sender", "sender.mjs", ("chio-ipc/receive_ready", "chio-ipc/send_jobs"), _WAIT),
        ),
        mailboxes=("ready", "jobs"),
        parallel=2,
    ),
)
