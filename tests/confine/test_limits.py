"""Every limit met for real: which ends the attempt, under which name, and what can be said of the others."""

import os
import signal
from pathlib import Path

from tests.confine.launching import PYTHON, Runner, needs_cgroups

pytestmark = needs_cgroups

SMALL = {"memory_bytes": 96 << 20, "scratch_bytes": 4_096}
# A tree of processes, of which one that is not the worker takes all the memory.
CHILD_EATS = """
import os, sys
pid = os.fork()
if pid == 0:
    x = bytearray(300 << 20)
    os._exit(0)
os.waitpid(pid, 0)
print("outlived it", flush=True)
"""


def test_memory_over_the_limit_ends_the_attempt_by_that_name(runner: Runner, cwd: Path) -> None:
    exited = runner.python("x = bytearray(300 << 20)", cwd, limits=SMALL).exited
    assert (exited.killed_for, exited.signal) == ("memory_limit", signal.SIGKILL)
    assert exited.limits_hit == ("memory_bytes",)
    assert exited.usage.oom_kills is not None
    assert exited.usage.memory_peak_bytes is not None
    # What is being killed may take a little more on its way out.
    assert 80 << 20 < exited.usage.memory_peak_bytes < 104 << 20


def test_a_child_that_runs_out_of_memory_ends_the_whole_attempt(runner: Runner, cwd: Path) -> None:
    for _ in range(5):  # the kernel's kill and ours are a race that must not show
        exited = runner.python(CHILD_EATS, cwd, limits=SMALL).exited
        assert exited.killed_for == "memory_limit"
        assert "memory_bytes" in exited.limits_hit


def test_files_in_memory_count_as_memory(runner: Runner, cwd: Path) -> None:
    script = "exec head -c 60000000 /dev/zero > /dev/shm/a"
    limits = SMALL | {"memory_bytes": 66 << 20}
    fill = ["/bin/sh", "-c", f"{script[5:]} && {script[5:].replace('/dev/shm/a', '/tmp/b')}"]
    assert runner.run(fill, cwd, limits=limits).exited.killed_for == "memory_limit"


def test_memory_below_the_limit_is_measured_and_nothing_is_hit(runner: Runner, cwd: Path) -> None:
    exited = runner.python("x = bytearray(40 << 20)", cwd, limits=SMALL).exited
    assert (exited.exit_code, exited.killed_for, exited.limits_hit) == (0, None, ())
    assert exited.usage.memory_peak_bytes is not None
    assert 40 << 20 < exited.usage.memory_peak_bytes < 70 << 20
    assert exited.usage.oom_kills == 0


def test_the_peak_of_a_small_program_is_small(runner: Runner, cwd: Path) -> None:
    usage = runner.run(["/bin/true"], cwd).exited.usage
    assert usage.memory_peak_bytes is not None
    assert 0 < usage.memory_peak_bytes < 8 << 20


def test_a_fork_over_the_limit_fails_and_is_named(runner: Runner, cwd: Path) -> None:
    script = """
import os, json, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except BlockingIOError:
    print(json.dumps(made))
"""
    ended = runner.python(script, cwd, limits={"pids": 10})
    assert ended.json() == 9
    assert (ended.exited.killed_for, ended.exited.limits_hit) == (None, ("pids",))
    assert ended.exited.usage.process_peak in (10, None)


def test_threads_count_as_processes(runner: Runner, cwd: Path) -> None:
    script = """
import json, threading
stop, made = threading.Event(), 0
try:
    while True:
        threading.Thread(target=stop.wait).start()
        made += 1
except RuntimeError:
    print(json.dumps(made))
stop.set()
"""
    assert runner.python(script, cwd, limits={"pids": 5}).json() == 4


def test_a_fork_bomb_ends_at_its_deadline_and_is_named(runner: Runner, cwd: Path) -> None:
    script = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    exited = runner.python(script, cwd, limits={"pids": 20}, timeout_ms=500).exited
    assert exited.killed_for == "timeout"
    assert "pids" in exited.limits_hit


def test_cpu_seconds_used_up_end_the_attempt_by_that_name(runner: Runner, cwd: Path) -> None:
    exited = runner.python("while True: pass", cwd, limits={"cpu_seconds": 1}).exited
    assert (exited.killed_for, exited.signal, exited.limits_hit) == ("cpu_limit", signal.SIGKILL, ("cpu_seconds",))
    assert 1_000 <= exited.usage.cpu_ms < 1_500


def test_cpu_seconds_are_those_of_the_whole_attempt(runner: Runner, cwd: Path) -> None:
    """Grandchildren that nobody waits for are counted as well."""
    script = """
import os
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        while True: pass
os.read(os.pipe()[0], 1)
"""
    exited = runner.python(script, cwd, limits={"cpu_seconds": 1}).exited
    assert exited.killed_for == "cpu_limit"
    assert 1_000 <= exited.usage.cpu_ms < 1_500
    assert exited.usage.cpu_source == "cgroup"


def test_sleeping_uses_no_cpu_seconds(runner: Runner, cwd: Path) -> None:
    exited = runner.run(["/bin/sleep", "1.2"], cwd, limits={"cpu_seconds": 1}).exited
    assert (exited.exit_code, exited.killed_for) == (0, None)


def test_a_cpu_quota_slows_down_and_is_named(runner: Runner, cwd: Path) -> None:
    script = "import time\nwhile time.process_time() < 0.3: pass"
    exited = runner.python(script, cwd, limits={"cpu_quota_percent": 20}).exited
    assert (exited.exit_code, exited.limits_hit) == (0, ("cpu_quota_percent",))
    assert exited.usage.wall_ms > 1_000


def test_a_scratch_directory_filled_to_the_brim_is_named(runner: Runner, cwd: Path) -> None:
    (cwd / "out").mkdir()
    limits = {"scratch_bytes": 65_536}
    fill = ["/bin/sh", "-c", "head -c 1000000 /dev/zero > out/a; true"]
    ended = runner.run(fill, cwd, limits=limits, exports_directory=str(cwd / "out"))
    os.close(ended.exited.exports_fd)  # type: ignore[arg-type]
    assert (ended.exited.exit_code, ended.exited.limits_hit) == (0, ("scratch_bytes",))


def test_files_in_the_scratch_directory_are_limited_in_number(runner: Runner, cwd: Path) -> None:
    (cwd / "out").mkdir()
    script = """
import json
made = 0
try:
    while True:
        open(f"out/{made}", "x").close()
        made += 1
except OSError as error:
    print(json.dumps([made, error.errno]))
"""
    ended = runner.run([PYTHON, "-c", script], cwd, exports_directory=str(cwd / "out"))
    os.close(ended.exited.exports_fd)  # type: ignore[arg-type]
    assert ended.json() == [16_383, 28]
    assert ended.exited.limits_hit == ("inodes",)


def test_a_file_too_large_that_ends_the_program_is_named(runner: Runner, cwd: Path) -> None:
    script = "exec head -c 200000 /dev/zero > /tmp/file"
    exited = runner.run(["/bin/sh", "-c", script], cwd, limits={"file_bytes": 100_000}).exited
    assert (exited.signal, exited.killed_for, exited.limits_hit) == (signal.SIGXFSZ, None, ("file_bytes",))


def test_output_over_its_limit_is_named(runner: Runner, cwd: Path) -> None:
    exited = runner.run(["/bin/cat", "/dev/zero"], cwd, limits={"output_bytes": 100_000}).exited
    assert (exited.killed_for, exited.limits_hit) == ("output_limit", ("output_bytes",))
