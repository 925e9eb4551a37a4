"""How attempts end: by themselves, by a limit, by a death of somebody on the way. Nothing stays alive or open."""

import ctypes
import fcntl
import os
import platform
import resource
import select
import signal
import struct
import time
from pathlib import Path

import pytest

from confine import Launcher, LauncherLost, Observed
from tests.confine.launching import PATIENCE_SECONDS, PYTHON, Runner

# Leaves a grandchild in a session of its own, which holds stdout and outlives its parent by far.
SURVIVOR = """
import os, sys, time
ready, say = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("ready", flush=True)
        os.write(say, b"x")
        time.sleep(1000)
    os._exit(0)
os.read(ready, 1)
os.wait()
"""


def processes_of(uid: int) -> list[int]:
    """Live processes with that uid in a pid namespace below ours; one that is dead and not yet reaped is no process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{name}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        inside = len(status.partition("\nNSpid:")[2].partition("\n")[0].split()) > 1
        if inside and f"\nUid:\t{uid}\t" in status and "\nState:\tZ" not in status:
            found.append(int(name))
    return found


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def wait_for_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE_SECONDS * 1000), "a process that should be dead lives"


@pytest.mark.parametrize("status", [0, 1, 77, 255])
def test_an_exit_code_is_reported_as_it_was(runner: Runner, cwd: Path, status: int) -> None:
    exited = runner.run(["/bin/sh", "-c", f"exit {status}"], cwd).exited
    assert (exited.exit_code, exited.signal, exited.killed_for) == (status, None, None)


def test_a_signal_that_ends_the_worker_is_reported(runner: Runner, cwd: Path) -> None:
    exited = runner.run(["/bin/sh", "-c", "kill -SEGV $$"], cwd).exited
    assert (exited.exit_code, exited.signal, exited.killed_for) == (None, signal.SIGSEGV, None)


def test_a_signal_that_the_worker_handles_reaches_it(runner: Runner, cwd: Path) -> None:
    exited = runner.run(["/bin/sh", "-c", "trap 'exit 5' USR1; kill -USR1 $$; exit 6"], cwd).exited
    assert exited.exit_code == 5


def test_a_stopped_worker_stays_stopped_until_it_is_continued(runner: Runner, cwd: Path) -> None:
    """A group stop under the tracer: the child sees its parent stopped, then continues it."""
    script = """
import os, signal, time
parent = os.getpid()
if os.fork() == 0:
    while open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] not in "Tt":
        time.sleep(0.001)
    os.kill(parent, signal.SIGCONT)
    os._exit(0)
os.kill(parent, signal.SIGSTOP)
os.wait()
print("continued")
"""
    assert runner.python(script, cwd).exited.stdout == b"continued\n"


def test_ignored_signals_are_default_again_in_the_worker(runner: Runner, cwd: Path) -> None:
    ended = runner.run(["/bin/sh", "-c", "grep -E 'SigIgn|SigBlk' /proc/self/status"], cwd)
    assert [int(line.split()[1], 16) for line in ended.exited.stdout.splitlines()] == [0, 0]


def test_signals_that_the_hosts_starter_blocked_or_ignored_are_as_new_in_the_worker(cwd: Path) -> None:
    """The C library's own ones too, which its functions do not touch."""
    blocked = ctypes.c_uint64(1 << 31 | 1 << 14)  # 32 (SIGCANCEL) and SIGTERM
    before = ctypes.c_uint64()
    mask = ctypes.CDLL(None).syscall
    number, size = {"x86_64": 14, "aarch64": 135}[platform.machine()], ctypes.c_size_t(8)
    ignore, was = ctypes.create_string_buffer(struct.pack("=QQQQ", 1, 0, 0, 0)), ctypes.create_string_buffer(32)
    mask(number - 1, 33, ignore, was, size)  # rt_sigaction: SIGSETXID is ignored
    mask(number, signal.SIG_BLOCK, ctypes.byref(blocked), ctypes.byref(before), size)
    try:
        launcher = Launcher.start()
    finally:
        mask(number, signal.SIG_SETMASK, ctypes.byref(before), None, size)
        mask(number - 1, 33, was, None, size)
    with launcher:
        ended = Runner(launcher).run(["/bin/sh", "-c", "grep -E 'SigBlk|SigIgn' /proc/self/status"], cwd)
    assert [int(line.split()[1], 16) for line in ended.exited.stdout.splitlines()] == [0, 0]


def test_the_peak_memory_is_the_programs_own_and_not_the_launchers(runner: Runner, cwd: Path) -> None:
    usage = runner.run(["/bin/true"], cwd).exited.usage
    assert usage.peak_resident_source == "vm_hwm"
    assert 0 < usage.peak_resident_bytes < 4 << 20
    larger = runner.python("x = bytearray(100 << 20)", cwd).exited.usage
    assert 100 << 20 < larger.peak_resident_bytes < 160 << 20


def test_cpu_time_is_the_workers_own(runner: Runner, cwd: Path) -> None:
    script = "import time\nwhile time.process_time() < 0.3: pass"
    usage = runner.python(script, cwd).exited.usage
    assert 290 <= usage.cpu_ms < 2_000
    assert usage.wall_ms >= 290


def test_a_worker_past_its_deadline_is_killed_with_all_its_children(runner: Runner, cwd: Path) -> None:
    spec, lock_fd = runner.spec(["/bin/sh", "-c", "sleep 1000 & sleep 1000"], cwd, timeout_ms=200)
    runner.start(spec, lock_fd)
    exited = runner.finish().exited
    assert (exited.exit_code, exited.signal, exited.killed_for) == (None, signal.SIGKILL, "timeout")
    assert 200 <= exited.usage.wall_ms < 5_000
    assert processes_of(spec.uid) == []


def test_output_over_the_limit_ends_the_attempt_and_is_counted(runner: Runner, cwd: Path) -> None:
    exited = runner.run(["/bin/cat", "/dev/zero"], cwd, limits={"output_bytes": 1_000_000}).exited
    assert exited.killed_for == "output_limit"
    assert len(exited.stdout) == 65_536 + 63
    assert 1_000_000 < exited.stdout_bytes < 20_000_000


def test_output_below_the_limit_is_drained_and_counted_but_kept_in_part(runner: Runner, cwd: Path) -> None:
    exited = runner.run(["/bin/sh", "-c", "head -c 500000 /dev/zero; echo done >&2"], cwd).exited
    assert (exited.exit_code, exited.stdout_bytes, len(exited.stdout)) == (0, 500_000, 65_599)
    assert (exited.stderr, exited.stderr_bytes) == (b"done\n", 5)


def test_a_file_over_the_limit_cannot_be_written(runner: Runner, cwd: Path) -> None:
    command = ["/usr/bin/head", "-c", "200000", "/dev/zero"]
    script = f"exec {' '.join(command)} > /tmp/file"
    exited = runner.run(["/bin/sh", "-c", script], cwd, limits={"file_bytes": 100_000}).exited
    assert exited.signal == signal.SIGXFSZ


def test_open_files_are_limited_and_observed(runner: Runner, cwd: Path) -> None:
    ended = runner.run(["/bin/sh", "-c", "ulimit -n; ulimit -c"], cwd, limits={"open_files": 64})
    assert ended.exited.stdout == b"64\n0\n"
    assert ended.field("rlimits").value == {"open_files": 64, "file_bytes": 268_435_456, "core_bytes": 0}


def test_a_daemon_of_the_worker_dies_with_it(runner: Runner, cwd: Path) -> None:
    spec, lock_fd = runner.spec([PYTHON, "-c", SURVIVOR], cwd)
    runner.start(spec, lock_fd)
    exited = runner.finish().exited
    assert (exited.exit_code, exited.stdout) == (0, b"ready\n")
    assert processes_of(spec.uid) == []


def test_an_exec_by_another_thread_is_followed_to_its_end(runner: Runner, cwd: Path) -> None:
    """The exec takes the traced thread's place (ptrace(2), "execve(2) under ptrace"): init tells how it ended."""
    script = """
import os, threading
threading.Thread(target=lambda: os.execv("/bin/sh", ["sh", "-c", "exit 9"])).start()
threading.Event().wait()
"""
    exited = runner.python(script, cwd).exited
    assert (exited.exit_code, exited.signal) == (9, None)


def test_a_worker_whose_first_thread_ended_is_waited_for(runner: Runner, cwd: Path) -> None:
    script = """
import ctypes, os, threading, time
def last():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    os._exit(11)
threading.Thread(target=last).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    assert runner.python(script, cwd).exited.exit_code == 11


def test_killing_an_attempt_gives_the_reason_back(runner: Runner, cwd: Path) -> None:
    spec, lock_fd = runner.spec(["/bin/sleep", "1000"], cwd)
    name = runner.start(spec, lock_fd)
    ended = runner.finish(at_exec=lambda event: runner.launcher.kill(name, "cancelled"))
    assert (ended.exited.killed_for, ended.exited.signal) == ("cancelled", signal.SIGKILL)
    assert processes_of(spec.uid) == []


def test_a_killed_init_takes_the_worker_along(runner: Runner, cwd: Path) -> None:
    def kill_init(event: Observed) -> None:
        parent = next(line for line in open(f"/proc/{event.pid}/status") if line.startswith("PPid"))  # noqa: SIM115
        os.kill(int(parent.split()[1]), signal.SIGKILL)

    spec, lock_fd = runner.spec(["/bin/sleep", "1000"], cwd)
    runner.start(spec, lock_fd)
    exited = runner.finish(at_exec=kill_init).exited
    assert exited.signal == signal.SIGKILL
    assert processes_of(spec.uid) == []


def test_an_unconfined_worker_does_not_outlive_its_init(runner: Runner, cwd: Path) -> None:
    """Without a pid namespace it stands at its exit stop when both are killed at once, until its tracer lets it go."""
    pidfds = []

    def kill_init(event: Observed) -> None:
        parent = next(line for line in open(f"/proc/{event.pid}/status") if line.startswith("PPid"))  # noqa: SIM115
        pidfds.append(os.pidfd_open(event.pid))
        os.kill(int(parent.split()[1]), signal.SIGKILL)

    ended = runner.run(["/bin/sleep", "1000"], cwd, confined=False, at_exec=kill_init)
    assert ended.exited.signal == signal.SIGKILL
    wait_for_end(pidfds[0])
    os.close(pidfds[0])


@pytest.mark.parametrize("end", ["launcher is killed", "host closes its socket"])
def test_nothing_outlives_the_launcher_and_its_lock_is_free_only_then(cwd: Path, tmp_path: Path, end: str) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    launcher = Launcher.start([lock])
    os.close(lock)
    own = Runner(launcher)
    spec, lock_fd = own.spec([PYTHON, "-c", SURVIVOR.replace("os.wait()", "time.sleep(1000)")], cwd)
    own.start(spec, lock_fd)
    observed = next(own.events())
    assert isinstance(observed, Observed)
    launcher.resume(observed.attempt)
    waiting = [os.pidfd_open(pid) for pid in processes_of(spec.uid)]
    assert len(waiting) >= 2  # init and the worker
    again = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if end == "launcher is killed":
        os.kill(launcher.pid, signal.SIGKILL)
        fcntl.flock(again, fcntl.LOCK_EX)
        with pytest.raises(LauncherLost):
            for _ in own.events():
                pass
    else:
        launcher.close()
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for pidfd in waiting:
        wait_for_end(pidfd)
        os.close(pidfd)
    assert processes_of(spec.uid) == []
    launcher.close()
    os.close(again)


def test_a_terminals_interrupt_leaves_the_launcher_alone(runner: Runner, cwd: Path) -> None:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        os.kill(runner.launcher.pid, number)
    assert runner.run(["/bin/true"], cwd).exited.exit_code == 0


def test_fifty_launches_leave_no_descriptor_and_no_process(runner: Runner, cwd: Path) -> None:
    runner.run(["/bin/true"], cwd)
    before = open_descriptors(runner.launcher.pid), open_descriptors(os.getpid())
    for _ in range(50):
        assert runner.run(["/bin/true"], cwd).exited.exit_code == 0
    give_up = time.monotonic() + PATIENCE_SECONDS  # the launcher may still be closing what its last message carried
    while open_descriptors(runner.launcher.pid) > before[0] or open_descriptors(os.getpid()) > before[1]:
        assert time.monotonic() < give_up, "descriptors leak"
    children = Path(f"/proc/{runner.launcher.pid}/task/{runner.launcher.pid}/children").read_text()
    assert children == ""


def test_attempts_run_side_by_side(runner: Runner, cwd: Path) -> None:
    names = set()
    for _ in range(8):
        names.add(runner.start(*runner.spec(["/bin/sh", "-c", "echo $$"], cwd)))
    exited = {}
    for event in runner.events():
        if isinstance(event, Observed):
            runner.launcher.resume(event.attempt)
            continue
        exited[event.attempt] = event
        if exited.keys() == names:
            break
    assert {event.stdout for event in exited.values()} == {b"2\n"}


@pytest.mark.parametrize(("last", "killed_for"), [("os.wait()", None), ("time.sleep(1000)", "timeout")])
def test_an_unconfined_worker_runs_as_the_operator_and_leaves_nothing_either(
    runner: Runner, cwd: Path, last: str, killed_for: str | None
) -> None:
    script = SURVIVOR.replace("os.wait()", last).replace('"ready"', "os.getpid()")
    spec, _ = runner.spec([PYTHON, "-c", script], cwd, confined=False, timeout_ms=1_000)
    runner.start(spec, None)
    inits = []

    def look(event: Observed) -> None:
        status = Path(f"/proc/{event.pid}/status").read_text()
        inits.append(os.pidfd_open(int(status.split("PPid:")[1].split()[0])))
        assert f"\nUid:\t{os.getuid()}\t" in status

    exited = runner.finish(at_exec=look).exited
    assert exited.killed_for == killed_for
    with pytest.raises(ProcessLookupError):
        os.kill(int(exited.stdout), 0)
    wait_for_end(inits[0])
    assert Path(f"/proc/{runner.launcher.pid}/task/{runner.launcher.pid}/children").read_text() == ""


def test_an_unconfined_worker_may_write_where_the_operator_may(runner: Runner, cwd: Path) -> None:
    assert runner.run(["/bin/sh", "-c", "echo x > made"], cwd, confined=False).exited.exit_code == 0
    assert (cwd / "made").read_text() == "x\n"


def test_limits_never_rise_above_the_machines(runner: Runner, cwd: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ended = runner.run(["/bin/sh", "-c", "ulimit -n"], cwd, limits={"open_files": 1_048_576})
    assert int(ended.exited.stdout) == min(hard, 1_048_576)
    assert ended.observed is not None
    assert ended.observed.satisfied
