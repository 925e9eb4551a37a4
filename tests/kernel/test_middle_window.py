"""A crash while an effect is on its way: looked at where the effect is, then the very same call again.

A confined worker pays through a confined tool server that owns its effects (`tests/servers/resource.py`), under
`chio process run`. At each cut point the host, the Chio kernel or the server is killed; the same command then resumes
the same state, whose worker repeats the exact call. The service must have seen the effect at most once.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.confined import Project
from tests.kernel.external import SERVERS, Gate, effects, start

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="the tool server writes a folder of root's, under a uid of its own"),
]

UNKNOWN = {"state": "incomplete", "reason": "outcome_unknown_after_dispatch"}
PAY: dict[str, Any] = {"operation_key": "pay-42", "tool_name": "pay", "arguments": {"to": "somebody", "cents": 100}}
READ = {"operation_key": "read-42", "tool_name": "balance", "arguments": {"to": "somebody"}}

VICTIMS = ["host", "kernel", "server"]


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize(("point", "happened"), [("before_effect", 0), ("after_effect", 1), ("before_answer", 1)])
def test_an_effect_cut_off_in_the_middle_is_unknown_and_never_asked_for_again(
    tmp_path: Path, point: str, happened: int, victim: str
) -> None:
    project = Project.make(tmp_path / "project", PAY)
    gate = Gate(project.bank, point)
    host = project.run()
    gate.reached()
    assert len(effects(project.bank)) == happened
    gate.disarm()
    old_server = os.pidfd_open(project.find("server", host))
    project.kill(victim, host)
    if victim == "server":
        report, attempt = project.report(host), 1
    else:
        host.communicate(timeout=60)
        assert host.returncode != 0
        assert len(effects(project.bank)) == happened
        report, attempt = project.resume(), 2
    assert report["complete"], report
    assert report["workers"][0]["attempts"] == attempt
    first, second = project.answers(attempt)
    assert first == second
    assert (first["verdict"], first["output"], first["terminal_state"]) == ("deny", None, UNKNOWN)
    assert len(effects(project.bank)) == happened
    assert project.verified_receipts() == 1
    assert select.select([old_server], [], [], 0)[0]  # no server outlives its host into another run
    os.close(old_server)


@pytest.mark.parametrize("victim", VICTIMS)
def test_an_effect_whose_outcome_was_retained_is_replayed_and_a_read_cut_off_is_made_again(
    tmp_path: Path, victim: str
) -> None:
    project = Project.make(tmp_path / "project", PAY, READ)
    gate = Gate(project.bank, "before_reading")
    host = project.run()
    gate.reached()  # the payment was answered, since its worker has gone on to the read
    retained = (project.state / "receipts.ndjson").read_text().splitlines()
    assert len(retained) == len(effects(project.bank)) == 1
    gate.disarm()
    project.kill(victim, host)
    if victim == "server":
        report, attempt = project.report(host), 1
    else:
        host.communicate(timeout=60)
        report, attempt = project.resume(), 2
    assert report["complete"], report
    paid, read, paid_again, read_again = project.answers(attempt)
    assert paid == paid_again
    assert (paid["verdict"], paid["receipt_json"]) == ("allow", retained[0])
    assert len(effects(project.bank)) == 1
    # The read of unknown outcome is dispatched again by whoever repeats it: at once here, or by the next attempt.
    assert (read_again["verdict"], read_again["output"]["value"]["structuredContent"]["cents"]) == ("allow", 100)
    assert json.loads(read_again["receipt_json"])["body"]["call"]["dispatch"] == 2
    assert read["terminal_state"] == (UNKNOWN if victim == "server" else {"state": "completed"})
    assert len(effects(project.bank, "reads.ndjson")) == 2
    project.verified_receipts()


def test_a_repeated_dispatch_would_have_been_visible_at_the_service(tmp_path: Path) -> None:
    """The control: the same request sent twice is two effects there, and one only if the caller asked for that."""
    process, stdin, stdout = start([sys.executable, "-I", str(SERVERS / "resource.py"), str(tmp_path)])
    try:
        with open(stdin, "wb", buffering=0) as requests, open(stdout, "rb") as answers:
            for number, more in enumerate([{}, {}, {"idempotency_key": "k"}, {"idempotency_key": "k"}]):
                call = {"name": "pay", "arguments": {**PAY["arguments"], **more}}
                message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": call}
                requests.write(json.dumps(message).encode() + b"\n")
                assert json.loads(answers.readline())["id"] == number
    finally:
        process.kill()
        process.wait()
    assert [entry["effect"] for entry in effects(tmp_path)] == [1, 2, 3]
