"""What one launch costs: from asking for it to knowing that it ended, beside other ways to start the same command.

Every contender's turn comes once in each round, so that what the machine does meanwhile hits all alike. Cold: nothing
was started for a while, so that a cgroup's attach waits for an RCU grace period. Chio's launcher is running already,
as it is in a host; a peer is a program that starts anew, and so is `chio-confine run`, which is shown as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import orjson

from chio.host import Host, initialize
from confine import (
    Exited,
    Identity,
    Launcher,
    LaunchSpec,
    Observed,
    check_limits,
    claim_identity,
    launch_spec,
    load_profile,
    plan_mounts,
)
from confine.hierarchies import find_layout
from tests.bench import peers

ROUNDS = 40
IDLE_SECONDS = 0.1
IN_A_ROW = 500
COMMANDS = (("/bin/true",), ("/usr/bin/python3", "-c", "pass"))
_WARM_UP = 3

Launch = Callable[[], None]


class Chio:
    """One running launcher, and specs of one command; the launch's whole life is waited for."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._null = os.open("/dev/null", os.O_RDONLY)

    def spec(self, argv: tuple[str, ...], *, without: tuple[str, ...] = ()) -> LaunchSpec:
        profile = load_profile("worker")
        plan = plan_mounts(argv=argv, cwd="/usr", state_dir=None)
        identity = Identity(0, 0, -1)  # each launch claims its own
        return launch_spec(plan, profile, check_limits({}, profile.limits), 60_000, identity, without)

    def launch(self, spec: LaunchSpec, records: Records | None = None) -> None:
        number = records.reserve() if records is not None else 0
        identity = claim_identity()
        spec = replace(spec, uid=identity.uid, gid=identity.gid)
        self._launcher.launch("bench", spec, self._null, [identity.fd])
        identity.close()
        poll = select.poll()
        poll.register(self._launcher, select.POLLIN)
        while True:
            poll.poll()
            for event in self._launcher.receive():
                if isinstance(event, Observed):
                    assert event.satisfied, [field for field in event.fields if field.asked != field.value]
                    if records is not None:
                        records.launched(number, event)
                    self._launcher.resume("bench")
                    continue
                assert isinstance(event, Exited), event
                assert event.exit_code == 0, event
                if records is not None:
                    records.ended(number, event)
                return


class Records:
    """A Chio kernel that commits each attempt's reservation, launch record and exit record, as in a run."""

    def __init__(self, host: Host) -> None:
        self._kernel = host.kernel

    def reserve(self) -> int:
        number: int = self._kernel.call("reserve", process="w", confined=True)["number"]
        return number

    def launched(self, number: int, event: Observed) -> None:
        fields = [{"name": f.name, "asked": f.asked, "value": f.value, "source": f.source} for f in event.fields]
        record = {
            "process_id": "w",
            "attempt": number,
            "observer": "host",
            "confined": True,
            "asked": {"command": ["bench"]},
            "executable_sha256": event.executable_sha256,
            "fields": fields,
        }
        self._launch_id = self._kernel.call("launched", process="w", number=number, record=record, texts=[])[
            "launch_id"
        ]

    def ended(self, number: int, event: Exited) -> None:
        record = {
            "process_id": "w",
            "attempt": number,
            "launch_id": self._launch_id,
            "observer": "host",
            "outcome": "exit_1",
            "status": {"exit": event.exit_code},
            "usage": {
                "peak_resident_bytes": event.usage.peak_resident_bytes,
                "peak_resident_source": event.usage.peak_resident_source,
                "cpu_ms": event.usage.cpu_ms,
                "wall_ms": event.usage.wall_ms,
            },
            "output": {"stdout_bytes": 0, "stderr_bytes": 0},
            "limits_hit": [],
            "exports": [],
        }
        # Anything but exit_0, which would settle the process for good.
        members = {"outcome": "exit_1", "record": record, "exports": None, "logs": {}}
        self._kernel.call("ended", process="w", number=number, **members)


@contextlib.contextmanager
def records(directory: Path) -> Iterator[Records]:
    (directory / "policy.yaml").write_text(
        "kernel: {max_capability_ttl: 3600, delegation_depth_limit: 1, durable_admission_mode: all}\n"
        "capabilities: {default: {tools: [{server: chio-ipc, tool: '*', operations: [invoke, delegate], ttl: 3600}]}}\n"
    )
    child = {
        "id": "w",
        "parent": "root",
        "budget_share_bps": 5_000,
        "tools": [{"server_id": "chio-ipc", "tool_name": "send_m"}],
    }
    config = {
        "schema": "chio.process.host.v1",
        "policy": "policy.yaml",
        "limits": {"max_processes": 2, "max_depth": 1, "max_calls": 10},
        "mailboxes": [{"id": "m"}],
        "children": [child],
    }
    (directory / "host.json").write_bytes(orjson.dumps(config))
    initialize(directory / "host.json", directory / "state", allow_volatile=False)
    host = Host(directory / "state")
    try:
        yield Records(host)
    finally:
        host.close()


def run(directory: str | None) -> None:
    """Print the tables. `directory` is where the kernel's state lies: a real disk."""
    if absent := peers.missing():
        print(f"not here, so not compared: {', '.join(absent)} (make bench ARGS=launch installs them, as root)")
    with (
        tempfile.TemporaryDirectory(prefix="chio-bench-", dir=directory) as folder,
        Launcher.start() as launcher,
        records(Path(folder)) as kept,
        peers.nsjail_parents() as limits_for_nsjail,
    ):
        os.chmod(folder, 0o711)  # runc walks to its bundle with another uid
        chio = Chio(launcher)
        for argv in COMMANDS:
            place = Path(folder) / os.path.basename(argv[0])
            contenders = _contenders(argv, chio, kept, place, nsjail_limits=limits_for_nsjail)
            for kind, idle in (("warm", 0.0), ("cold", IDLE_SECONDS)):
                _print(f"{' '.join(argv)}, {kind}", measure(contenders, idle))
        _print_in_a_row(chio, launcher.pid)


def _contenders(
    argv: tuple[str, ...], chio: Chio, kept: Records, place: Path, *, nsjail_limits: bool
) -> dict[str, Launch]:
    full, bare = chio.spec(argv), chio.spec(argv, without=("cgroup",))
    command = [sys.executable, "-m", "confine.cli", "run", "--", *argv]
    contenders = {
        "plain spawn": lambda: _spawn(argv),
        "chio, no cgroups": lambda: chio.launch(bare),
        "chio": lambda: chio.launch(full),
        "chio, records committed": lambda: chio.launch(full, kept),
        "chio-confine run": lambda: _spawn(command),
    }
    absent = peers.missing()
    if "bubblewrap" not in absent:
        assert full.seccomp is not None
        program = bytes.fromhex(full.seccomp.program)
        contenders["bubblewrap, no cgroups"] = lambda: _bubblewrap(argv, program)
    if "nsjail" not in absent:
        contenders["nsjail, no cgroups"] = lambda: _spawn(peers.nsjail(argv, cgroups=False))
        if nsjail_limits:
            contenders["nsjail"] = lambda: _spawn(peers.nsjail(argv, cgroups=True))
    if "runc" not in absent:
        bundle = peers.Runc(place, argv)
        contenders["runc"] = lambda: _spawn(bundle.command())
    return contenders


def _spawn(argv: tuple[str, ...] | list[str], pass_fds: tuple[int, ...] = ()) -> None:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, pass_fds=pass_fds, check=False, cwd="/usr"
    )
    assert done.returncode == 0, (argv, done.stderr.decode())


def _bubblewrap(argv: tuple[str, ...], program: bytes) -> None:
    fd = os.memfd_create("filter", 0)
    os.write(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    _spawn(peers.bubblewrap(argv, fd), (fd,))
    os.close(fd)


def measure(contenders: dict[str, Launch], idle: float) -> dict[str, list[float]]:
    """Milliseconds of each contender's launches, interleaved."""
    for launch in contenders.values():
        for _ in range(_WARM_UP):
            launch()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, launch in contenders.items():
            if idle:
                time.sleep(idle)
            else:
                launch()  # warm means that the same has just been done
            start = time.perf_counter()
            launch()
            taken[name].append((time.perf_counter() - start) * 1000)
    return taken


def _print(title: str, taken: dict[str, list[float]]) -> None:
    reference = statistics.median(taken["chio"])
    print(f"\n{title}, {ROUNDS} interleaved launches    median ms    p95 ms   of chio")
    for name, times in taken.items():
        median, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        print(f"  {name:42} {median:10.2f} {p95:9.2f} {median / reference:8.2f}")


def _print_in_a_row(chio: Chio, pid: int) -> None:
    spec = chio.spec(("/bin/true",))
    for _ in range(50):
        chio.launch(spec)
    before, start = _held(pid), time.perf_counter()
    for _ in range(IN_A_ROW):
        chio.launch(spec)
    took, after = time.perf_counter() - start, _held(pid)
    print(f"\n{IN_A_ROW} launches in a row at {IN_A_ROW / took:.0f} launches/s; the launcher before and after:")
    for name in before:
        print(f"  {name:42} {before[name]:10} {after[name]:9}")


def _held(pid: int) -> dict[str, int]:
    """Once it waits: it closes what it sent of an attempt's output a moment after we have it."""
    while "State:\tS" not in (status := Path(f"/proc/{pid}/status").read_text()):
        os.sched_yield()
    return {
        "resident KiB": int(status.split("VmRSS:")[1].split()[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "its cgroups": _cgroups(pid),
        "own descriptors": len(os.listdir("/proc/self/fd")),
    }


def _cgroups(pid: int) -> int:
    """The launcher's own folders and all below them; they have the name of the lock file that it holds open."""
    names = {os.path.basename(os.readlink(link)) for link in Path(f"/proc/{pid}/fd").iterdir()}
    tops = {place.path for place in find_layout().places.values()}
    folders = [f"{top}/{name}" for top in tops for name in names if name.startswith("chio-")]
    return sum(1 for folder in folders for _ in os.walk(folder))
