"""The report project's commands, word for word, and what each has to show: in the tree's copy as in the packed kit.

A step is a function of a `Project`; later steps stand on earlier ones in the order of `STEPS`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60
TEN = '{\n  "item_count": 3,\n  "total": 10\n}\n'
EIGHTEEN = '{\n  "item_count": 3,\n  "total": 18\n}\n'


@dataclass(frozen=True, slots=True)
class Project:
    """A folder in which the commands are given."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = f"{ROOT}/.venv/bin:{ROOT}/.node/bin:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "LANG": "C.UTF-8"}

    def attempt(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=DEADLINE_S, check=False,
        )

    def run(self, command: str) -> str:
        """Standard output of a command that has to succeed."""
        done = self.attempt(command)
        assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def json(self, command: str) -> Any:
        return json.loads(self.run(command))

    def refused(self, command: str) -> str:
        """The one line of a command that has to be refused."""
        done = self.attempt(command)
        assert done.returncode == 1, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.stderr.startswith("chio: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def receipts(self, state: str) -> list[str]:
        return (self.folder / state / "receipts.ndjson").read_text(encoding="utf-8").removesuffix("\n").split("\n")

    def verify(self, state: str) -> int:
        """How many distinct receipts of the state verify under the key that its init saved."""
        key = (self.folder / state / "kernel.pub").read_text(encoding="utf-8").removesuffix("\n")
        verified = self.json(
            f"chio receipt verify --input {state}/receipts.ndjson \\\n  --trusted-kernel-pubkey {state}/kernel.pub"
        )
        assert verified == {
            "schema": "chio.receipt.signatures.v1",
            "receipts_verified": verified["receipts_verified"],
            "trusted_kernel_key": key,
            "checks": ["signature", "signer_pin", "action_parameter_hash"],
        }
        return int(verified["receipts_verified"])

    def recorded(self, state: str, process: str) -> dict[str, Any]:
        """What `status` says of one process: its attempts, its calls, its ceiling."""
        status = self.json(f"chio process status --state {state}")
        assert status["schema"] == "chio.process.status.v1"
        return dict(next(entry for entry in status["processes"] if entry["process_id"] == process))

    def outcomes(self, state: str, process: str) -> list[str]:
        return [attempt["outcome"] for attempt in self.recorded(state, process)["attempts"]]


def finished(report: Any, *, producer: int, consumer: int, abandoned_sockets: int = 0) -> None:
    """A complete report with these numbers of attempts, and every field that the document shows."""
    assert report["schema"] == "chio.process.run-report.v1"
    assert report["complete"] is True
    assert report["pending_container_records"] == 0
    assert report["abandoned_socket_intents"] == abandoned_sockets
    assert [worker["process"] for worker in report["workers"]] == ["consumer", "producer"]
    for worker, attempts in zip(report["workers"], (consumer, producer), strict=True):
        assert (worker["state"], worker["outcome"], worker["suspensions"]) == ("completed", "exit_0", 0)
        assert worker["attempts"] == attempts
        assert worker["confined"] is True
        assert len(worker["launch_id"]) == 64
        # A bare interpreter's size is in megabytes; the launcher's own, some 80 of them, must not be counted in.
        assert 4 << 20 < worker["peak_resident_bytes"] < 80 << 20
        assert 0 < worker["cpu_ms"] < 10_000


def decisions(lines: list[str]) -> list[tuple[str, str]]:
    """(tool, verdict) of each line."""
    bodies = [json.loads(line)["body"] for line in lines]
    return [(body["tool_name"], body["decision"]["verdict"]) for body in bodies]


def first_run(project: Project) -> None:
    made = project.json("chio process init --config host.json --state .chio")
    assert made == {
        "initialized": True, "processes": 3, "kernel_key": made["kernel_key"], "runtime_id": made["runtime_id"],
    }
    state = project.folder / ".chio"
    assert (state / "kernel.pub").read_text(encoding="utf-8") == made["kernel_key"] + "\n"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700

    finished(project.json("chio process run --state .chio --plan process.json"), producer=1, consumer=1)
    assert project.run("cat .chio/result.json") == TEN
    assert decisions(project.receipts(".chio")) == [
        ("send_jobs", "allow"), ("receive_jobs", "allow"), ("ack_jobs", "allow"),
    ]
    assert project.verify(".chio") == 3


def second_run_of_the_same(project: Project) -> None:
    before = project.receipts(".chio")
    finished(project.json("chio process run --state .chio --plan process.json"), producer=1, consumer=1)
    assert project.receipts(".chio") == before


def checkpoint_is_the_recovery_record(project: Project) -> None:
    kept = project.json("chio process state --state .chio --process consumer")
    assert (kept["schema"], kept["process"]) == ("chio.process.application-state.v1", "consumer")
    assert kept["data"]["checkpoint"] == {"revision": "1", "value": {"item_count": 3, "total": 10}}


def recovery(project: Project) -> None:
    project.run("chio process init --config host.json --state .chio-recovery")
    finished(
        project.json("chio process run --state .chio-recovery --plan process-recovery.json"), producer=2, consumer=1
    )
    checked = project.run(".venv/bin/python check-result.py .chio-recovery")
    assert checked == "Report total and original handoff verified\n"

    send, replay, *rest = lines = project.receipts(".chio-recovery")
    assert send == replay
    assert decisions(rest) == [
        ("receive_jobs", "deny"), ("receive_jobs", "allow"), ("ack_jobs", "allow"), ("send_jobs", "deny"),
    ]
    assert project.verify(".chio-recovery") == 5

    assert project.outcomes(".chio-recovery", "producer") == ["exit_77", "exit_0"]
    assert project.outcomes(".chio-recovery", "consumer") == ["exit_0"]
    # A replay costs nothing: two calls of the producer's and three of the consumer's make the five decisions.
    assert [project.recorded(".chio-recovery", name)["calls"] for name in ("root", "producer", "consumer")] == [5, 2, 3]

    logs = "chio process logs --state .chio-recovery --process"
    first = project.json(f"{logs} producer --attempt 1")
    assert first["schema"] == "chio.process.logs.v1"
    assert first["stdout"] == send + "\n"
    assert project.json(f"{logs} producer --attempt 2")["stdout"] == f"{send}\n{rest[0]}\n"
    assert project.json(f"{logs} consumer --attempt 1")["stdout"] == "".join(f"{line}\n" for line in rest[1:])

    finished(
        project.json("chio process run --state .chio-recovery --plan process-recovery.json"), producer=2, consumer=1
    )
    assert project.receipts(".chio-recovery") == lines


def changed_batch(project: Project) -> None:
    project.run("chio process init --config host.json --state .chio-changed")
    finished(project.json("chio process run --state .chio-changed --plan process-changed.json"), producer=1, consumer=1)
    assert project.run("cat .chio-changed/result.json") == EIGHTEEN


STEPS = (first_run, second_run_of_the_same, checkpoint_is_the_recovery_record, recovery, changed_batch)
