"""A host with one server that somebody else wrote, driven by confined workers through the real commands.

`Drive.make` writes the two documents and gives `chio process init`; `run` gives each worker its list of calls and
returns their answers, after every receipt has been verified under the key that init printed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.report.walkthrough import ROOT, Project
from verify.canonical import encode

SERVERS = ROOT / "build/servers"
PYTHON = SERVERS / "python"
SQLITE = SERVERS / "sqlite"
NODE = SERVERS / "node"


def module(name: str) -> str:
    """The file of a Node server."""
    return str(NODE / "node_modules/@modelcontextprotocol" / name / "dist/index.js")


@dataclass(frozen=True, slots=True)
class Answer:
    """One call and what the worker was told; `error` is a code without a receipt."""

    call: dict[str, Any]
    reply: dict[str, Any]
    receipt: dict[str, Any] | None

    @property
    def error(self) -> str | None:
        return self.reply.get("error")

    @property
    def result(self) -> dict[str, Any]:
        """The server's own answer to an allowed call, an MCP tool result."""
        assert self.reply.get("verdict") == "allow", self.reply
        assert self.reply["output"]["kind"] == "value", self.reply
        return dict(self.reply["output"]["value"])

    @property
    def text(self) -> str:
        """The text of a tool result that is no error."""
        assert not self.result.get("isError"), self.result
        return "\n".join(part["text"] for part in self.result["content"] if part["type"] == "text")

    @property
    def refusal(self) -> str:
        """Why the kernel denied it; the server never saw it, so there is no output."""
        assert (self.reply.get("verdict"), self.reply.get("output")) == ("deny", None), self.reply
        return str(self.reply["reason"])


@dataclass(frozen=True, slots=True)
class Drive:
    """A folder with a host config, a policy, a worker and, after `init`, a state."""

    project: Project
    server: str
    options: str = ""

    @classmethod
    def make(
        cls,
        folder: Path,
        server: dict[str, Any],
        *,
        granted: Iterable[str],
        children: dict[str, list[str]],
        options: str = "",
    ) -> Drive:
        """`granted` are root's tools of the server, `children` each child's; `options` go to `init` and to `run`."""
        shutil.copytree(ROOT / "chio/clients/python/chio_process", folder / "chio_process")
        shutil.copy(ROOT / "tests/real_servers/worker.py", folder / "worker.py")
        tools = [
            {"server": server["id"], "tool": tool, "operations": ["invoke", "delegate"], "ttl": 3600}
            for tool in granted
        ]
        policy = {
            "kernel": {"max_capability_ttl": 3600, "delegation_depth_limit": 1, "durable_admission_mode": "all"},
            "capabilities": {"default": {"tools": tools}},
        }
        host = {
            "schema": "chio.process.host.v1",
            "policy": "policy.yaml",
            "limits": {"max_processes": len(children) + 1, "max_depth": 1, "max_calls": 1000},
            "servers": [server],
            "children": [
                {
                    "id": name,
                    "parent": "root",
                    "budget_share_bps": 10_000 // len(children),
                    "tools": [{"server_id": server["id"], "tool_name": tool} for tool in routes],
                }
                for name, routes in children.items()
            ],
        }
        (folder / "policy.yaml").write_text(json.dumps(policy))
        (folder / "host.json").write_text(json.dumps(host))
        drive = cls(Project(folder), server["id"], options)
        drive.project.run(f"chio process init --config host.json --state .chio {options}")
        return drive

    def run(self, calls: dict[str, list[tuple[str, str, dict[str, Any]]]]) -> dict[str, list[Answer]]:
        """Run one worker for each process of `calls` ((key, tool, arguments) in order), one after the other."""
        listed = {
            name: [
                {"key": key, "server": self.server, "tool": tool, "arguments": arguments}
                for key, tool, arguments in entries
            ]
            for name, entries in calls.items()
        }
        names = list(listed)
        plan = {
            "schema": "chio.process.run.v2",
            "max_parallel": 1,
            "workers": [
                {
                    "process": name,
                    "command": ["python", "worker.py"],
                    "input": {"directory": ".chio", "calls": listed[name]},
                    "depends_on": names[:position][-1:],
                    "timeout_seconds": 60,
                    "confinement": {"exports": {"directory": ".chio", "files": ["answers-*.json"]}},
                }
                for position, name in enumerate(names)
            ],
        }
        (self.project.folder / "process.json").write_text(json.dumps(plan))
        report = self.project.json(f"chio process run --state .chio --plan process.json {self.options}")
        assert report["complete"], report
        assert all(worker["confined"] for worker in report["workers"]), report
        self._verify()
        return {name: self._answers(name, listed[name]) for name in names}

    def _verify(self) -> None:
        """Every line under the pinned key, and no line that is not a receipt."""
        assert self.project.verify(".chio") == len(set(self.project.receipts(".chio")))

    def _answers(self, process: str, calls: list[dict[str, Any]]) -> list[Answer]:
        """What the worker kept, each reply held against its receipt."""
        replies = json.loads((self.project.folder / ".chio" / f"answers-{process}.json").read_text())
        answers = []
        for call, reply in zip(calls, replies, strict=True):
            if "error" in reply:
                answers.append(Answer(call, reply, None))
                continue
            receipt = json.loads(reply["receipt_json"])
            body = receipt["body"]
            assert reply["receipt_json"] in self.project.receipts(".chio")
            assert (body["call"]["process_id"], body["call"]["operation_key"]) == (process, call["key"])
            assert (body["tool_server"], body["tool_name"]) == (call["server"], call["tool"])
            assert receipt["disclosed"]["parameters"] == call["arguments"]
            assert body["terminal_state"] == reply["terminal_state"]
            if reply["output"] is None:
                assert body["output"] is None
            else:
                salt = bytes.fromhex(receipt["disclosed"]["output_salt"])
                assert body["output"]["hash"] == sha256(salt + encode(reply["output"])).hexdigest()
            answers.append(Answer(call, reply, receipt))
        return answers
