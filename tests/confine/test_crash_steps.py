"""SIGKILL for the host, the launcher and init, all along a launch: nothing is left, or the next start removes it.

A step is a system call's beginning or end; every one is tried, for each of the three.
"""

import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from confine import Event, Exited, Launcher, LaunchFailed, Observed, runtime_directory
from tests.confine.launching import PATIENCE_SECONDS, PYTHON, WITHOUT, Runner
from tests.confine.test_life import SURVIVOR, processes_of
from tests.confine.tracing import Stepper

pytestmark = [
    pytest.mark.skipif(bool(WITHOUT), reason="as root, whose attempts have uids and cgroups to be looked for"),
    pytest.mark.timeout(1200),  # a launch for each of some 850 steps
]
COMMAND = ["/bin/sh", "-c", "echo begun; exit 0"]
HOST = """
import os, select, sys
from pathlib import Path
from confine import Launcher, Observed
from tests.confine.launching import Runner
launcher = Launcher.start([int(sys.argv[1])])
own = Runner(launcher)
spec, lock = own.spec(sys.argv[2:], Path("/usr"))
print(spec.uid, flush=True)
sys.stdin.readline()
own.start(spec, lock)
print(own.finish().exited.exit_code, flush=True)
sys.stdin.readline()
"""


class Left:
    """What the machine had before, and a lock that everything of a launch but the worker holds."""

    def __init__(self, folder: Path) -> None:
        self._mounts = Path("/proc/self/mountinfo").read_text()
        self._path = folder / "lock"
        self.lock = os.open(self._path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def check(self, uid: int) -> None:
        """Everything is dead, no mount is there that was not; and no cgroup once another launcher has started."""
        os.close(self.lock)
        again = os.open(self._path, os.O_RDWR)
        until(lambda: _locked(again), "a process still holds the lock")
        os.close(again)
        until(lambda: processes_of(uid) == [], "a worker lives")
        assert Path("/proc/self/mountinfo").read_text() == self._mounts
        with Launcher.start() as following:
            Runner(following).run(["/bin/true"], Path("/usr"))
        until(lambda: orphaned_cgroups() == [], "cgroups are left")


def until(holds: Callable[[], bool], otherwise: str) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < give_up, otherwise


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def orphaned_cgroups() -> list[str]:
    """Folders of launchers whose file nobody has locked, in any hierarchy: a live launcher's are none of ours."""
    launchers = "chio-" + "[0-9a-f]" * 12  # others' begin like that too: a benchmark's, say
    folders = {path.name for path in Path("/sys/fs/cgroup").glob(f"*/{launchers}")}
    folders |= {path.name for path in Path("/sys/fs/cgroup").glob(launchers)}
    return sorted(name for name in folders if not _held(f"{runtime_directory()}/cgroups/{name}"))


def _held(path: str) -> bool:
    try:
        with open(path, "rb+") as file:
            asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            (kind,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked))
            return bool(kind != fcntl.F_UNLCK)
    except FileNotFoundError:
        return False


def steps_of(total: int) -> list[int]:
    """Every place between nothing done and everything: before and after each system call."""
    return list(range(total + 1))


def drive(launcher: Launcher, seen: list[Event]) -> Callable[[], bool]:
    """The host's part between the steps of another: lets the worker run, and says when the attempt has ended."""

    def ended() -> bool:
        for event in launcher.receive():
            seen.append(event)
            if isinstance(event, Observed):
                launcher.resume(event.attempt)
        return bool(seen) and not isinstance(seen[-1], Observed)

    return ended


def launcher_steps(folder: Path, stop_at: int) -> tuple[int, int]:
    """One launch whose launcher is killed at that step. (the steps it came to, the attempt's uid)"""
    left = Left(folder)
    launcher = Launcher.start([left.lock])
    runner = Runner(launcher)
    runner.run(["/bin/true"], Path("/usr"))  # what a launcher does once is behind it
    spec, lock_fd = runner.spec(COMMAND, Path("/usr"))
    stepper = Stepper(launcher.pid)
    runner.start(spec, lock_fd)
    came_to = stepper.advance(stop_at, drive(launcher, []))
    stepper.kill()
    left.check(spec.uid)
    launcher.close()
    return came_to, spec.uid


def test_a_launcher_that_is_killed_at_any_step_leaves_nothing(tmp_path: Path) -> None:
    total, _ = launcher_steps(tmp_path, 100_000)
    assert total > 200
    for stop_at in steps_of(total)[:-1]:
        launcher_steps(tmp_path, stop_at)


def test_an_init_that_is_killed_at_any_step_ends_its_attempt_alone(runner: Runner) -> None:
    """Its launcher goes on: it says what happened, and the next attempt runs."""

    def one(stop_at: int) -> tuple[int, Event]:
        spec, lock_fd = runner.spec(COMMAND, Path("/usr"))
        launcher = Stepper(runner.launcher.pid, children=True)
        runner.start(spec, lock_fd)
        init = launcher.advance_to_init()
        seen: list[Event] = []
        came_to = init.advance(stop_at, drive(runner.launcher, seen))
        init.kill()
        until(drive(runner.launcher, seen), "the launcher said nothing")
        until(lambda: processes_of(spec.uid) == [], "a worker lives")
        return came_to, seen[-1]

    mounts = Path("/proc/self/mountinfo").read_text()
    total, _ = one(100_000)
    assert total > 200
    ends = [one(stop_at)[1] for stop_at in steps_of(total)[:-1]]
    assert isinstance(ends[0], LaunchFailed)
    assert all(isinstance(end, LaunchFailed | Exited) for end in ends)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert runner.run(["/bin/true"], Path("/usr")).exited.exit_code == 0


def start_host(left: Left, command: list[str]) -> subprocess.Popen[bytes]:
    """It says which uid its attempt will have, and waits for a line before each thing it does."""
    return subprocess.Popen(
        [sys.executable, "-c", HOST, str(left.lock), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[left.lock],
        cwd=Path(__file__).parent.parent.parent,
    )


def host_steps(folder: Path, stop_at: int) -> int:
    left = Left(folder)
    with start_host(left, COMMAND) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        uid = int(host.stdout.readline())
        stepper = Stepper(host.pid)
        host.stdin.write(b"\n")
        host.stdin.flush()
        os.set_blocking(host.stdout.fileno(), False)
        came_to = stepper.advance(stop_at, lambda: bool(host.stdout and host.stdout.read()))
        stepper.kill()
    left.check(uid)
    return came_to


def test_a_host_that_is_killed_at_any_step_leaves_nothing(tmp_path: Path) -> None:
    total = host_steps(tmp_path, 100_000)
    assert total > 20
    for stop_at in steps_of(total)[:-1]:
        host_steps(tmp_path, stop_at)


def test_a_host_that_is_killed_during_a_run_leaves_nothing(tmp_path: Path) -> None:
    left = Left(tmp_path)
    with start_host(left, [PYTHON, "-c", SURVIVOR.replace("os.wait()", "time.sleep(1000)")]) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        uid = int(host.stdout.readline())
        host.stdin.write(b"\n")
        host.stdin.flush()
        until(lambda: len(processes_of(uid)) >= 3, "init, the worker and its grandchild are not there")
        host.kill()
    left.check(uid)


def test_what_is_left_would_be_seen(tmp_path: Path) -> None:
    """The control: an abandoned cgroup, and a live process of a uid."""
    hierarchy = next(path for path in Path("/sys/fs/cgroup").glob("*") if (path / "cgroup.procs").exists())
    abandoned = hierarchy / f"chio-{'0' * 12}"
    abandoned.mkdir()
    try:
        assert abandoned.name in orphaned_cgroups()
    finally:
        abandoned.rmdir()
    with Launcher.start() as launcher:
        runner = Runner(launcher)
        spec, lock_fd = runner.spec(["/bin/sleep", "1000"], Path("/usr"))
        runner.start(spec, lock_fd)
        assert isinstance(next(runner.events()), Observed)
        assert len(processes_of(spec.uid)) == 2
