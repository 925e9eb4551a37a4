"""A real `chio process serve`: who connects to it, and its end, in order or by SIGKILL of one of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.host.commands import CHIO, accepted
from tests.kernel.serving import PROTOCOL, Line, State, result_of
from tests.report.test_experiments import descendants, died


@dataclass(slots=True)
class Served:
    """One process of a state, served again and again on one socket under one credential, with these options."""

    state: State
    process: str
    options: tuple[str, ...] = ()
    folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="chio-test-")
    )
    connection: dict[str, Any] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    host: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> str:
        return f"{self.folder.name}/kernel"

    def __post_init__(self) -> None:
        out = Path(self.folder.name, "connection")
        accepted(
            "process", "credential", "--state", self.state.path, "--process", self.process, "--socket", self.path,
            "--out", out,
        )  # fmt: skip
        self.connection = json.loads(out.read_text())

    def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)  # a killed host leaves its socket behind
        command = [CHIO, "process", "serve", "--state", str(self.state.path), "--socket", self.path, *self.options]
        self.host = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self.host.stdout is not None
        self.ready = json.loads(self.host.stdout.readline())
        assert self.ready["ready"] is True

    def kill(self, whom: str) -> None:
        """SIGKILL to the `host` or to its `kernel`; returns when both are dead."""
        assert self.host is not None
        (kernel,) = descendants(self.host.pid)
        descriptor = os.pidfd_open(kernel)
        os.kill(self.host.pid if whom == "host" else kernel, signal.SIGKILL)
        assert died(descriptor)
        os.close(descriptor)
        self._ended(1 if whom == "kernel" else -signal.SIGKILL)

    def stop(self) -> None:
        if self.host is not None:
            self.host.send_signal(signal.SIGTERM)
            self._ended(0)

    def _ended(self, status: int) -> None:
        assert self.host is not None
        with self.host as host:
            assert host.wait(30) == status
        self.host = None

    def frame(self, op: str, **members: Any) -> bytes:
        request = {
            "protocol": PROTOCOL, "credential": self.connection["credential"], "operation": {"op": op, **members},
        }  # fmt: skip
        return json.dumps(request).encode() + b"\n"

    def ask(self, op: str, **members: Any) -> dict[str, Any]:
        with Line(self.path) as line:
            line.send(self.frame(op, **members))
            return result_of(line.read())

    def checkpoint(self) -> dict[str, Any]:
        return dict(self.ask("inspect")["checkpoint"])

    def save(self, value: Any) -> dict[str, Any]:
        """A save on whatever is there."""
        return self.ask("checkpoint", expected_revision=self.checkpoint()["revision"], value=value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.host is not None and kind is not None:
            self.kill("host")
        self.stop()
        self.folder.cleanup()
