"""`python -m tests.faults.soak [--seconds S] [--workers N] [--seed N]`: many workers, random kills, every invariant.

A host under `chio process serve` with a confined tool server, and workers that somebody else launched. For most of the
time the host, the kernel, the launcher, the tool server's init and workers are killed at random; for the rest nobody
is, and what the processes hold is measured. JSON on stdout; exit 1 when an invariant does not hold or something grows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from chio.host import Host
from tests.faults.boundaries import process
from tests.faults.exchanges import Exchange
from tests.faults.invariants import ROWS, SETTLED, Facts, broken, effects
from tests.faults.roles import chio as role_of
from tests.faults.scenarios.project import LEDGER, PYTHON, WORKERS
from tests.faults.snapshot import Snapshot
from verify.keys import Pins

_VERIFY = str(Path(sys.executable).with_name("chio-verify"))
_WORKER = Path(__file__).with_name("soak_worker.py")
_VICTIMS = ("host", "kernel", "launcher", "init", "worker", "worker")
_BETWEEN_S = (0.2, 1.5)
_QUIET = 0.3  # of the time nobody is killed
_READY_S = 60.0
_WAL_BYTES = 64 * 1024 * 1024
_MORE_DESCRIPTORS = 8
_MORE_MEMORY = 1.5


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one role at one moment."""

    resident_kb: int
    descriptors: int


@dataclass(slots=True)
class Soak:
    folder: Path
    workers: int
    draw: random.Random
    host: subprocess.Popen[bytes] | None = None
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @property
    def owner(self) -> Path:
        return self.folder / "owner"

    def names(self) -> list[str]:
        return [f"w{n}" for n in range(self.workers)]

    # --- before --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.owner.mkdir()
        self._documents()
        chio = [sys.executable, "-m", "chio", "process"]
        config = str(self.folder / "host.json")
        subprocess.run([*chio, "init", "--config", config, "--state", str(self.state)], check=True, capture_output=True)
        host = Host(self.state)
        try:
            for name in self.names():
                connection = host.kernel.call("credential", process=name)["connection"]
                connection["socket_path"] = str(self.socket)
                (self.folder / f"{name}.json").write_text(json.dumps(connection))
        finally:
            host.close()

    def _documents(self) -> None:
        ledger = self.folder / LEDGER
        ledger.write_bytes((WORKERS / LEDGER).read_bytes())
        server = {"id": "ledger", "command": [PYTHON, "-I", LEDGER, str(self.owner)],
                  "confinement": {"write": [str(self.owner)]}}  # fmt: skip
        children = [
            {"id": name, "parent": "root", "budget_share_bps": 10_000 // self.workers, "tools": [
                {"server_id": "ledger", "tool_name": tool} for tool in ("pay", "look")] + [
                {"server_id": "chio-ipc", "tool_name": f"{verb}_{name}"} for verb in ("send", "ack")]}
            for name in self.names()
        ]  # fmt: skip
        limits = {"max_processes": self.workers + 1, "max_depth": 1, "max_calls": 100_000_000}
        boxes = [{"id": name, "limits": {"max_messages": 100_000}} for name in self.names()]
        host = {"schema": "chio.process.host.v1", "policy": "policy.yaml", "limits": limits, "servers": [server],
                "mailboxes": boxes, "children": children}  # fmt: skip
        grant = {"tool": "*", "operations": ["invoke", "delegate"], "ttl": 86_400}
        policy = {
            "kernel": {"max_capability_ttl": 86_400, "delegation_depth_limit": 1, "durable_admission_mode": "all"},
            "capabilities": {"default": {"tools": [{"server": server, **grant} for server in ("chio-ipc", "ledger")]}},
        }
        (self.folder / "host.json").write_text(json.dumps(host))
        (self.folder / "policy.yaml").write_text(json.dumps(policy))

    # --- meanwhile -----------------------------------------------------------------------------------------------

    def soak(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        quiet = end - seconds * _QUIET
        self._serve()
        try:
            while time.monotonic() < end:
                self._workers()
                time.sleep(self.draw.uniform(*_BETWEEN_S))
                if time.monotonic() < quiet:
                    self._kill(self.draw.choice(_VICTIMS))
                else:
                    self._measure()
                if self.host is not None and self.host.poll() is not None:
                    self._serve()
        finally:
            self._stop()

    def _serve(self) -> None:
        """A host that is ready; what it says on stderr while it is being killed is kept out of the way."""
        with suppress(FileNotFoundError):
            self.socket.unlink()  # left by a host that was killed
        command = [
            sys.executable,
            "-m",
            "chio",
            "process",
            "serve",
            "--state",
            str(self.state),
            "--socket",
            str(self.socket),
        ]
        with open(self.folder / "stderr", "ab") as errors:
            self.host = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self.host.stdout is not None
        line = self.host.stdout.readline()
        if b'"ready"' not in line:
            said = (self.folder / "stderr").read_text()[-600:]
            raise AssertionError(f"the host did not start: {line!r} {said}")

    def _workers(self) -> None:
        for name in self.names():
            known = self.running.get(name)
            if known is None or known.poll() is not None:
                command = [
                    sys.executable,
                    "-I",
                    str(_WORKER),
                    str(self.folder / f"{name}.json"),
                    str(self.record(name)),
                ]
                self.running[name] = subprocess.Popen(command)

    def record(self, name: str) -> Path:
        return self.folder / f"{name}.ndjson"

    def _family(self) -> dict[str, int]:
        """{role: pid} of the host and what it started."""
        assert self.host is not None
        found, queue = {}, [self.host.pid]
        while queue:
            pid = queue.pop()
            with suppress(OSError):
                queue += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            about = process(pid)
            if about is not None:
                found.setdefault(role_of(about, process), pid)
        return found

    def _kill(self, role: str) -> None:
        pid = self.draw.choice(list(self.running.values())).pid if role == "worker" else self._family().get(role)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.kills[role] += 1
        if role in ("host", "kernel", "launcher"):  # any of them ends the host: there is no half-alive mode
            assert self.host is not None
            self.host.wait(_READY_S)

    def _measure(self) -> None:
        for role, pid in self._family().items():
            if role in ("host", "kernel", "launcher"):
                with suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
                    self.samples.setdefault(role, []).append(Sample(resident, len(os.listdir(f"/proc/{pid}/fd"))))
        for name in ("authority.db", "authority.db-wal", "receipts.ndjson"):
            with suppress(FileNotFoundError):
                self.sizes.setdefault(name, []).append((self.state / name).stat().st_size)

    def _stop(self) -> None:
        for worker in self.running.values():
            worker.kill()
            worker.wait()
        if self.host is not None:
            self.host.send_signal(signal.SIGTERM)
            try:
                self.host.wait(_READY_S)
            except subprocess.TimeoutExpired:
                self.host.kill()
                self.host.wait()

    # --- afterwards ----------------------------------------------------------------------------------------------

    def exchanges(self) -> list[Exchange]:
        found = []
        for name in self.names():
            credential = json.loads((self.folder / f"{name}.json").read_text())["credential"]
            digest = sha256(credential.encode()).hexdigest()
            text = self.record(name).read_bytes() if self.record(name).exists() else b""
            for line in text[: text.rfind(b"\n") + 1].splitlines():
                entry = json.loads(line)
                raw = entry["raw"].encode()
                found.append(Exchange(len(found), digest, entry["request"], json.loads(raw), raw))
        return found

    def judge(self) -> tuple[int, dict[str, list[str]]]:
        """(answers, {invariant: what is wrong}), once nothing lives any more."""
        Host(self.state).close()
        first = Snapshot.of(self.state)
        Host(self.state).close()
        second = Snapshot.of(self.state)
        assert first is not None
        assert second is not None
        exchanges = self.exchanges()
        pins = Pins.from_file(str(self.state / "pins.json"))
        facts = Facts(second, pins, exchanges, frozenset(), frozenset({("ledger", "look")}))
        wrong = broken(facts, {**ROWS, **SETTLED})
        lines = (self.owner / "effects.ndjson").read_text().splitlines()
        if found := effects(facts, [(entry["process"], entry["key"]) for entry in map(json.loads, lines)]):
            wrong["effects"] = found
        if changed := first.differences(second):
            wrong["second_recovery"] = changed
        if found := self.growth():
            wrong["flat"] = found
        files = [str(self.state / name) for name in ("receipts.ndjson", "pins.json")]
        verified = subprocess.run([_VERIFY, "receipts", files[0], "--pins", files[1]], capture_output=True, check=False)
        if verified.returncode:
            wrong["verify"] = [verified.stderr.decode()[-400:]]
        return len(exchanges), wrong

    def growth(self) -> list[str]:
        """What grew while nobody was killed: memory and descriptors of the longest life, the write-ahead log ever."""
        wrong = []
        for role, samples in self.samples.items():
            first, last = samples[len(samples) // 3], samples[-1]
            if last.descriptors > first.descriptors + _MORE_DESCRIPTORS:
                wrong.append(f"{role}: {first.descriptors} descriptors became {last.descriptors}")
            if last.resident_kb > first.resident_kb * _MORE_MEMORY:
                wrong.append(f"{role}: {first.resident_kb} kB became {last.resident_kb}")
        if (most := max(self.sizes.get("authority.db-wal", [0]))) > _WAL_BYTES:
            wrong.append(f"the write-ahead log grew to {most} bytes")
        return wrong

    def figures(self) -> dict[str, Any]:
        held = {
            role: {name: [getattr(samples[at], name) for at in (0, len(samples) // 2, -1)] for name in Sample.__slots__}
            for role, samples in self.samples.items()
        }
        return {"held": held, "bytes": {name: [sizes[0], max(sizes), sizes[-1]] for name, sizes in self.sizes.items()}}


def run(folder: Path, seconds: float, workers: int, seed: int) -> dict[str, Any]:
    """One soak in an empty folder on a disk: its report."""
    soak = Soak(folder, workers, random.Random(seed))
    soak.prepare()
    soak.soak(seconds)
    answers, wrong = soak.judge()
    return {"seconds": seconds, "workers": workers, "seed": seed, "kills": dict(soak.kills), "answers": answers,
            **soak.figures(), "violations": wrong}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", default="build/faults", help="where the state lies, on a disk")
    options = parser.parse_args()
    work = Path(options.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=work) as folder:
        report = run(Path(folder), options.seconds, options.workers, options.seed)
    print(json.dumps(report, indent=1))
    return int(bool(report["violations"]))


if __name__ == "__main__":
    sys.exit(main())
