"""A real Chio kernel with tool servers that are plain processes: the host's part of them, without confinement.

What the host does for its servers (start one, hand its pipes over, say when it is dead, start it again when it is
needed) is done here by a thread, since the tests speak to the same kernel meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from chio.errors import HostFault
from chio.host import KernelProcess
from chio.keyfile import open_for
from tests.kernel.serving import PATIENCE_S, Serving, State, all_of, config, grant

SERVERS = Path(__file__).resolve().parents[1] / "servers"


def server(name: str, script: str, folder: Path, timeout_s: int = 20) -> dict[str, Any]:
    """A server of the config: one of tests/servers with a folder of its own."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-I", str(SERVERS / script), str(folder)]
    return {"id": name, "command": command, "request_timeout_seconds": timeout_s}


def tool(server_id: str, name: str = "*", **changes: Any) -> dict[str, Any]:
    """One entry of a policy's tools."""
    return grant(name, server=server_id, **changes)


def child(name: str, *routes: str, parent: str = "root", share: int = 1000) -> dict[str, Any]:
    """A child whose routes are `server/tool`."""
    tools = [dict(zip(("server_id", "tool_name"), route.split("/"), strict=True)) for route in routes]
    return {"id": name, "parent": parent, "tools": tools, "budget_share_bps": share}


def mailbox_routes(*boxes: str) -> list[str]:
    return [f"chio-ipc/{name}" for name in all_of(*boxes)]


def host_config(servers: Iterable[dict[str, Any]], *children: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**config(*children, **more), "servers": list(servers)}


class Gate:
    """A cut point of the resource, from the test's side."""

    def __init__(self, folder: Path, point: str) -> None:
        self.reached_path, self.go_path = folder / f"{point}.reached", folder / f"{point}.go"
        for path in (self.go_path, self.reached_path):
            if not path.exists():
                os.mkfifo(path)
                path.chmod(0o666)

    def reached(self) -> int:
        """Wait until the server stands there; its pid (in its own pid namespace)."""
        with open(self.reached_path) as gate:
            return int(gate.read())

    def go(self) -> None:
        """Let the one who stands here go on, and stop nobody else."""
        fd = os.open(self.go_path, os.O_WRONLY)  # waits until it is being read
        self.disarm()
        os.close(fd)

    def disarm(self) -> None:
        """No later call stops here; whoever stands here stands on, even if it has yet to open the way on."""
        self.reached_path.unlink()


def effects(folder: Path, file: str = "effects.ndjson") -> list[dict[str, Any]]:
    """What the resource itself says happened."""
    path = folder / file
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(command: list[str]) -> tuple[subprocess.Popen[bytes], int, int]:
    """A server's process and our ends of its pipes: its stdin, its stdout."""
    stdin, to_server = os.pipe2(os.O_CLOEXEC)
    from_server, stdout = os.pipe2(os.O_CLOEXEC)
    process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL)
    os.close(stdin)
    os.close(stdout)
    return process, to_server, from_server


@dataclass(frozen=True, slots=True)
class ToolState(State):
    """A state whose host has tool servers."""

    @classmethod
    def make(
        cls,
        folder: Path,
        host: dict[str, Any] | None = None,
        rules: dict[str, Any] | None = None,
        key_file: Path | None = None,
    ) -> Self:
        assert host is not None
        assert rules is not None
        folder.mkdir(exist_ok=True)
        state = cls(folder, key_file)
        documents = {"policy.yaml": json.dumps(rules), "host.json": json.dumps(host)}
        for name, text in documents.items():
            (folder / name).write_text(text)
        started = [start(entry["command"]) for entry in host["servers"]]
        keys = [open_for(key_file, state.path)] if key_file is not None else []
        kernel = KernelProcess()
        try:
            texts = {name: base64.b64encode(text.encode()).decode() for name, text in documents.items()}
            kernel.call(
                "init",
                (*(fd for _, *fds in started for fd in fds), *keys),
                path=str(state.path),
                config=[str(folder / "host.json"), texts["host.json"]],
                policy=[str(folder / "policy.yaml"), texts["policy.yaml"]],
                allow_volatile=False,
                servers=[entry["id"] for entry in host["servers"]],
                key_file=str(key_file) if key_file is not None else None,
            )
        finally:
            kernel.close()
            for key in keys:
                os.close(key)
            for process, *fds in started:
                for fd in fds:
                    os.close(fd)
                process.kill()
                process.wait()
        return state

    def serve(self) -> ToolServing:
        return ToolServing(self)

    def call(self, key: str, column: str = "state") -> Any:
        """One column of the row of a call."""
        ((found,),) = self.rows(f"SELECT {column} FROM call WHERE operation_key = ?", key)
        return found

    def used(self) -> dict[tuple[str, int], int]:
        """What stands debited of each grant: {(process, position): n}."""
        return {(name, at): n for name, at, n in self.rows("SELECT process, position, used FROM grant_usage")}


class SharedKernel:
    """The kernel for two threads: one request at a time, and the other is woken for what arrived meanwhile."""

    def __init__(self, kernel: KernelProcess) -> None:
        self._kernel = kernel
        self._lock = threading.RLock()
        self.woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def pid(self) -> int:
        return self._kernel.pid

    def fileno(self) -> int:
        return self._kernel.fileno()

    def call(self, op: str, fds: tuple[int, ...] = (), **members: Any) -> dict[str, Any]:
        with self._lock:
            answer = self._kernel.call(op, fds, **members)
        self.wake()
        return answer

    def events(self) -> list[dict[str, Any]]:
        with self._lock:
            return [event for event, _ in self._kernel.events()]

    def wake(self) -> None:
        try:
            os.write(self._wake, b"x")
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            self._kernel.close()
        os.close(self.woken)
        os.close(self._wake)


@dataclass(slots=True)
class Running:
    process: subprocess.Popen[bytes]
    pidfd: int
    number: int
    wanted: bool = False


@dataclass(slots=True, eq=False)
class Servers:
    """The servers of one live kernel. `said` is what the kernel reported of their handshakes, in order."""

    kernel: SharedKernel
    commands: dict[str, list[str]]
    said: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    stopping: bool = False
    patient: bool = False  # at the end, let each take all that was written to it
    unavailable: bool = False  # when the kernel needs a server, say that it cannot be started
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, name: str) -> None:
        process, stdin, stdout = start(self.commands[name])
        record = {"observer": "host", "confined": False, "process_id": None, "server": name, "asked": {}, "fields": []}
        self.running[name] = Running(process, os.pidfd_open(process.pid), 0)
        try:
            self.running[name].number = self.kernel.call(
                "server_started", (stdin, stdout), server=name, record=record, texts=[]
            )["number"]
        finally:
            os.close(stdin)
            os.close(stdout)

    def run(self) -> None:
        """Until told to stop, or until the kernel is gone: then nothing that it used stays alive."""
        try:
            while not self.stopping:
                for event in self.kernel.events():
                    self.kernel_said(event)
                watched = {running.pidfd: name for name, running in self.running.items()}
                sources: list[Any] = [self.kernel, self.kernel.woken, *watched]
                found, _, _ = select.select(sources, [], [])
                for ready in found:
                    if ready == self.kernel.woken:
                        os.read(self.kernel.woken, 4096)
                    elif ready in watched:
                        self.died(watched[ready])
        except HostFault:
            pass
        for running in self.running.values():
            if self.patient:
                running.process.wait(PATIENCE_S)
            running.process.kill()
            running.process.wait()
            os.close(running.pidfd)
        with self.changed:
            self.running.clear()
            self.changed.notify_all()

    def refusal(self) -> dict[str, Any]:
        """The first that the kernel said of a server that it does not use."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(not event["up"] for event in self.said), PATIENCE_S)
            return next(event for event in self.said if not event["up"])

    def kernel_said(self, event: dict[str, Any]) -> None:
        name = event.get("server", "")
        if event["event"] == "server_needed":
            if self.unavailable:
                self.kernel.call("server_failed", server=name)
            elif name in self.running:
                self.running[name].wanted = True
                self.running[name].process.kill()
            else:
                self.start(name)
        elif event["event"] == "server":
            if not event["up"] and name in self.running:
                self.running[name].process.kill()
            with self.changed:
                self.said.append(event)
                self.changed.notify_all()

    def died(self, name: str) -> None:
        with self.changed:
            running = self.running.pop(name)
            code = running.process.wait()
            os.close(running.pidfd)
        outcome = f"signal_{-code}" if code < 0 else f"exit_{code}"
        self.kernel.call("server_ended", server=name, number=running.number, outcome=outcome, stderr=["", 0])
        if running.wanted:
            self.start(name)
        with self.changed:
            self.changed.notify_all()


class ToolServing(Serving):
    """A live kernel on a state with tool servers, all of which are up."""

    state: ToolState

    def __init__(self, state: ToolState) -> None:
        super().__init__(state)
        self.kernel = SharedKernel(self.host.kernel)
        self.host.kernel = self.kernel  # type: ignore[assignment]
        commands = {entry["id"]: entry["command"] for entry in json.loads(self.host.config_text)["servers"]}
        self.servers = Servers(self.kernel, commands)
        for name in commands:
            self.servers.start(name)
        self._thread = threading.Thread(target=self.servers.run, daemon=True)
        self._thread.start()
        with self.servers.changed:
            assert self.servers.changed.wait_for(lambda: len(self.servers.said) >= len(commands), PATIENCE_S)

    def kill_server(self, name: str) -> None:
        """SIGKILL to a server; returns when the kernel has been told and has said so."""
        with self.servers.changed:
            running = self.servers.running[name]
            os.kill(running.process.pid, signal.SIGKILL)
            assert self.servers.changed.wait_for(lambda: self.servers.running.get(name) is not running, PATIENCE_S)
        self.settle()

    def settle(self) -> None:
        """Everything that the kernel has begun to commit is committed."""
        self.kernel.call("progress")

    def kill(self) -> None:
        os.kill(self.kernel.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.servers.stopping = True
        self.kernel.wake()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        super().close()
