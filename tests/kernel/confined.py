"""Whole runs, confined: a host, a plan, one worker that makes calls, and one tool server of tests/servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kernel.external import SERVERS

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/usr/bin/python3"
TOOLS = {"resource.py": ("pay", "balance"), "rogue.py": ("do", "look")}

# Makes each call of its input twice and prints every answer as it came. Standard library only: it runs confined.
WORKER = """
import json, socket, sys
bootstrap = json.load(sys.stdin)
connection = bootstrap["connection"]
for call in bootstrap["input"]["calls"] * 2:
    operation = {"op": "invoke", "server_id": "bank", **call}
    request = {"protocol": connection["protocol"], "credential": connection["credential"], "operation": operation}
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(connection["socket_path"])
        line.sendall(json.dumps(request).encode() + b"\\n")
        print(line.makefile("rb").readline().decode(), end="", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a host, a plan and a bank; its state beside it."""

    folder: Path

    @property
    def bank(self) -> Path:
        return self.folder / "bank"

    @property
    def state(self) -> Path:
        return self.folder.parent / "state"

    @classmethod
    def make(cls, folder: Path, *calls: dict[str, Any], script: str = "resource.py", timeout_s: int = 60) -> Project:
        """A project that `init` has made a state for."""
        project = cls.write(folder, *calls, script=script, timeout_s=timeout_s)
        done = project.init()
        assert done.returncode == 0, done.stderr
        return project

    def init(self) -> subprocess.CompletedProcess[str]:
        return self.chio("process", "init", "--config", str(self.folder / "host.json"), "--state", str(self.state))

    @classmethod
    def write(cls, folder: Path, *calls: dict[str, Any], script: str, timeout_s: int) -> Project:
        project = cls(folder)
        project.bank.mkdir(parents=True)
        (folder / "worker.py").write_text(WORKER)
        shutil.copyfile(SERVERS / script, folder / script)
        tools = [{"server": "bank", "tool": "*", "operations": ["invoke", "delegate"], "ttl": 3600}]
        kernel = {"max_capability_ttl": 3600, "delegation_depth_limit": 2, "durable_admission_mode": "all"}
        routes = [{"server_id": "bank", "tool_name": name} for name in TOOLS[script]]
        documents: dict[str, Any] = {
            "policy.yaml": {"kernel": kernel, "capabilities": {"default": {"tools": tools}}},
            "host.json": {
                "schema": "chio.process.host.v1",
                "policy": "policy.yaml",
                "limits": {"max_processes": 2, "max_depth": 1, "max_calls": 100},
                "servers": [
                    {
                        "id": "bank",
                        "command": [PYTHON, "-I", script, str(project.bank)],
                        "request_timeout_seconds": timeout_s,
                        "confinement": {"write": [str(project.bank)]},
                    }
                ],
                "children": [{"id": "payer", "parent": "root", "tools": routes, "budget_share_bps": 5000}],
            },
            "plan.json": {
                "schema": "chio.process.run.v2",
                "max_parallel": 1,
                "workers": [
                    {
                        "process": "payer",
                        "command": [PYTHON, "-I", "worker.py"],
                        "cwd": ".",
                        "input": {"calls": list(calls)},
                        "depends_on": [],
                        "max_attempts": 1,
                        "timeout_seconds": 60,
                    }
                ],
            },
        }
        for name, document in documents.items():
            (folder / name).write_text(json.dumps(document))
        return project

    def chio(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "chio", *words], cwd=ROOT, text=True, capture_output=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def run_command(self) -> list[str]:
        plan = str(self.folder / "plan.json")
        return [sys.executable, "-m", "chio", "process", "run", "--state", str(self.state), "--plan", plan]

    def run(self) -> subprocess.Popen[str]:
        """The host, as its own process."""
        return subprocess.Popen(
            self.run_command, cwd=ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def report(self, host: subprocess.Popen[str]) -> dict[str, Any]:
        try:
            out, err = host.communicate(timeout=60)
        finally:
            host.kill()
        assert out, err
        return dict(json.loads(out))

    def resume(self) -> dict[str, Any]:
        return self.report(self.run())

    def answers(self, attempt: int) -> list[dict[str, Any]]:
        """What the worker of one attempt was answered, in order."""
        logs = self.chio("process", "logs", "--state", str(self.state), "--process", "payer", "--attempt", str(attempt))
        assert logs.returncode == 0, logs.stderr
        return [json.loads(line)["result"] for line in json.loads(logs.stdout)["stdout"].splitlines()]

    def verified_receipts(self) -> int:
        done = self.chio(
            "receipt", "verify", "--input", str(self.state / "receipts.ndjson"),
            "--trusted-kernel-pubkey", str(self.state / "kernel.pub"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["receipts_verified"])

    def kill(self, victim: str, host: subprocess.Popen[str]) -> None:
        """SIGKILL to one of the three, found from the host's own children or by the folder that it was given."""
        os.kill(self.find(victim, host), signal.SIGKILL)

    def find(self, victim: str, host: subprocess.Popen[str]) -> int:
        if victim == "host":
            return host.pid
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            is_kernel = parent == host.pid and b"chio.kernel" in words
            is_server = {b"resource.py", b"rogue.py"} & set(words) and str(self.bank).encode() in words
            if is_kernel if victim == "kernel" else is_server:
                found.append(int(entry.name))
        (pid,) = found
        return pid
