"""Control groups: what a machine has, what an attempt is held to and counted by, and that nothing of them is left."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from confine import Launcher, LimitRefused, Observed, check_limits, load_profile, require_cgroups
from confine.errors import StepFailed
from confine.hierarchies import find_layout
from confine.prefixes import Prefix, locks_directory, sweep
from tests.confine.launching import PATIENCE_SECONDS, Runner
from tests.confine.test_life import SURVIVOR, processes_of, wait_for_end

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has them by delegation only")

LIMITS = load_profile("worker").limits


def tops() -> set[str]:
    return {place.path for place in find_layout().places.values()}


def own_cgroups() -> set[str]:
    """Every cgroup of the project's on this machine: folders of launchers, and of their attempts.

    Other tests' launchers remove theirs meanwhile, so a folder that is gone by the time it is read is none:
    `os.walk` passes over it, where `Path.glob` of Python 3.11 raises.
    """
    launchers = [f"{top}/{name}" for top in tops() for name in os.listdir(top) if name.startswith("chio-")]
    return {folder for launcher in launchers for folder, _, _ in os.walk(launcher)}


def cgroups_of(launcher: int) -> set[str]:
    """Those of one launcher, whose file it holds open."""
    names = set()
    for link in Path(f"/proc/{launcher}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now
            names.add(os.path.basename(os.readlink(link)))
    names = {name for name in names if name.startswith("chio-")}
    return {path for path in own_cgroups() if names & set(path.split("/"))}


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """A folder of locks of this test's own: what stands in the machine's is other launchers'."""
    folder = tmp_path / "locks"
    folder.mkdir()
    return folder


@pytest.fixture
def prefix(locks: Path) -> Iterator[Prefix]:
    made = Prefix(find_layout(), str(locks))
    yield made
    made.close()


# --- what is there ----------------------------------------------------------------------------------------------------


def test_the_layout_is_that_of_the_mounted_hierarchies() -> None:
    layout = find_layout()
    kinds = {line.split(" - ")[1].split()[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert (
        layout.version
        == {(True, True): "hybrid", (True, False): "v1", (False, True): "v2"}["cgroup" in kinds, "cgroup2" in kinds]
    )
    assert all(os.path.exists(f"{place.path}/cgroup.procs") for place in layout.places.values())


def test_a_machine_without_cgroups_is_told_what_to_mount(tmp_path: Path) -> None:
    """In a mount namespace of its own, with the hierarchies covered, as in a bare container."""
    script = f"""
import sys; sys.path.insert(0, {str(Path.cwd())!r})
from confine.cgroups import require_cgroups
from confine.hierarchies import find_layout
from confine import LayerMissing, LimitRefused
try:
    find_layout()
except LayerMissing as missing:
    print(missing)
try:
    require_cgroups("required", [], ())
except LayerMissing as missing:
    print("refused", missing.layer)
try:
    require_cgroups("best-effort", ["open_files", "pids"], ())
except LimitRefused as refused:
    print("refused", refused.name)
require_cgroups("best-effort", ["open_files"], ())
require_cgroups("required", [], ("cgroup",))
"""
    unmount = 'umount -R /sys/fs/cgroup && exec "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", unmount, "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *rest = done.stdout.splitlines()
    assert "mount -t cgroup2" in first
    assert rest == ["refused cgroup", "refused pids"]


def test_hierarchies_that_are_read_only_are_refused_with_the_fix() -> None:
    """As in a container that may not make cgroups."""
    script = f"""
import sys; sys.path.insert(0, {str(Path.cwd())!r})
from confine.hierarchies import find_layout
from confine import LayerMissing
try:
    find_layout()
except LayerMissing as missing:
    print(missing)
"""
    remount = 'for at in $(findmnt -rno TARGET -t cgroup,cgroup2); do mount -o remount,bind,ro "$at"; done; exec "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", remount, "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--without cgroup" in done.stdout


def test_a_limit_and_giving_its_layer_up_exclude_each_other() -> None:
    with pytest.raises(LimitRefused, match="given up") as refused:
        require_cgroups("required", ["pids"], ("cgroup",))
    assert refused.value.name == "pids"
    require_cgroups("required", ["pids"])


# --- one attempt ------------------------------------------------------------------------------------------------------


def test_the_worker_stands_in_its_own_cgroups_and_both_are_observed(runner: Runner, cwd: Path) -> None:
    seen: dict[str, str] = {}

    def look(event: Observed) -> None:
        for line in Path(f"/proc/{event.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            seen.update(dict.fromkeys(controllers.split(",") if controllers else ["unified"], path))

    ended = runner.run(["/bin/cat", "/proc/self/cgroup"], cwd, at_exec=look)
    field = ended.field("cgroup")
    assert field.source == "observed"
    assert field.value == field.asked == {name: seen[name] for name in find_layout().places}
    assert all(path.startswith("/chio-") for path in field.value.values())
    inside = dict(line.split(":", 2)[1:] for line in ended.exited.stdout.decode().splitlines())
    assert all(inside["" if name == "unified" else name] == "/" for name in field.value), "its cgroups are its root"


def test_the_limits_are_read_back_at_the_exec_stop(runner: Runner, cwd: Path) -> None:
    limits = {"memory_bytes": 200_000_001, "pids": 33, "cpu_quota_percent": 55, "cpu_seconds": 44}
    ended = runner.run(["/bin/true"], cwd, limits=limits)
    assert ended.observed is not None
    assert ended.observed.satisfied
    assert ended.field("cgroup_limits").source == "observed"
    assert ended.field("cgroup_limits").value == {name: limits[name] for name in ended.field("cgroup_limits").asked}
    assert ended.field("swap_bytes").value in (0, None)
    assert ended.field("cpu_seconds").source == "installed"


def test_a_worker_that_was_moved_out_of_its_cgroup_does_not_run(runner: Runner, cwd: Path, prefix: Prefix) -> None:
    """The field compares: a group of another name stands for any cgroup that is not the attempt's."""
    group, other = prefix.group(LIMITS), prefix.group(LIMITS)
    try:
        child = subprocess.Popen(["/bin/sleep", "1000"])
        if group.version == "v2":
            Path(f"{group._places['unified'].path}/cgroup.procs").write_text(str(child.pid))
        for place in group._places.values():
            Path(f"{place.path}/cgroup.procs").write_text(str(child.pid))
        assert all(field.asked == field.value for field in group.fields(child.pid) if field.source == "observed")
        strayed = next(iter(other._places.values()))
        Path(f"{strayed.path}/cgroup.procs").write_text(str(child.pid))
        assert any(field.asked != field.value for field in group.fields(child.pid) if field.source == "observed")
    finally:
        group.bury()
        other.bury()
        assert child.wait() == -signal.SIGKILL


def test_without_the_layer_the_record_says_that_it_was_given_up(runner: Runner, cwd: Path) -> None:
    ended = runner.changed(["/bin/true"], cwd, cgroup=False, without=("cgroup",))
    field = ended.field("cgroup")
    assert (field.asked, field.value, field.source, field.detail) == (True, False, "absent", "given up by --without")
    assert ended.exited.usage.cpu_source == "wait4"
    assert ended.exited.usage.memory_peak_bytes is None


def test_a_worker_sees_no_cgroup_file_system_and_cannot_mount_one(runner: Runner, cwd: Path) -> None:
    script = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(b"x", b"/tmp", b"cgroup2", 0, None)
print(json.dumps([os.path.exists("/sys/fs/cgroup"), ctypes.get_errno() != 0]))
"""
    assert runner.python(script, cwd).json() == [False, True]


def test_an_unconfined_worker_is_held_to_its_limits_too(runner: Runner, cwd: Path) -> None:
    limits = {"memory_bytes": 80 << 20, "scratch_bytes": 4096}
    ended = runner.python("x = bytearray(200 << 20)", cwd, confined=False, limits=limits)
    assert ended.exited.killed_for == "memory_limit"
    assert ended.field("cgroup").source == "observed"


def test_what_an_unconfined_worker_leaves_in_its_cgroup_is_killed(runner: Runner, cwd: Path) -> None:
    before = cgroups_of(runner.launcher.pid)
    script = SURVIVOR.replace('"ready"', "os.getpid()")
    pid = int(runner.python(script, cwd, confined=False).exited.stdout)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert cgroups_of(runner.launcher.pid) == before


def test_sixty_launches_leave_no_cgroup_and_the_launcher_as_large_as_it_was(runner: Runner, cwd: Path) -> None:
    runner.run(["/bin/true"], cwd)
    before = cgroups_of(runner.launcher.pid)
    resident = int(Path(f"/proc/{runner.launcher.pid}/statm").read_text().split()[1])
    for _ in range(60):
        assert runner.run(["/bin/true"], cwd).exited.exit_code == 0
    assert cgroups_of(runner.launcher.pid) == before
    assert len(before) == len(tops()), "one folder in each hierarchy, and no attempt's"
    assert int(Path(f"/proc/{runner.launcher.pid}/statm").read_text().split()[1]) < resident + 256


@contextlib.contextmanager
def frozen(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """It cannot die meanwhile, and is killed then (the Linux kernel's admin-guide/cgroup-v1/freezer-subsystem)."""
    top = Path("/sys/fs/cgroup/freezer")
    if not (top / "cgroup.procs").exists():
        pytest.skip("what is frozen by version 2 can be killed all the same")
    folder = top / f"chio-test-{secrets.token_hex(6)}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(process.pid))
        (folder / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (folder / "freezer.state").write_text("THAWED")
        process.kill()
        process.wait()
        folder.rmdir()


def test_a_cgroup_that_is_not_empty_yet_holds_nobody_up_and_is_removed_later(runner: Runner, cwd: Path) -> None:
    runner.run(["/bin/true"], cwd)
    before = cgroups_of(runner.launcher.pid)
    stuck = subprocess.Popen(["/bin/sleep", "1000"])

    def join(event: Observed) -> None:
        for line in Path(f"/proc/{event.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "pids" in controllers.split(","):
                Path(f"/sys/fs/cgroup/pids{path}/tasks").write_text(str(stuck.pid))

    try:
        with frozen(stuck):
            started = time.monotonic()
            assert runner.run(["/bin/true"], cwd, at_exec=join).exited.exit_code == 0
            (left,) = cgroups_of(runner.launcher.pid) - before
            assert "/pids/" in left, "the cgroup that it is in, and none besides"
            assert runner.run(["/bin/true"], cwd).exited.exit_code == 0
            assert time.monotonic() - started < PATIENCE_SECONDS
            assert cgroups_of(runner.launcher.pid) - before == {left}
        give_up = time.monotonic() + PATIENCE_SECONDS
        while cgroups_of(runner.launcher.pid) != before:
            assert time.monotonic() < give_up, "it was given up"
            os.sched_yield()
    finally:
        stuck.kill()
        stuck.wait()


def test_attempts_side_by_side_have_a_cgroup_each(runner: Runner, cwd: Path) -> None:
    names = {runner.start(*runner.spec(["/bin/cat"], cwd)) for _ in range(4)}
    places, ended = set(), 0
    for event in runner.events():
        if isinstance(event, Observed):
            field = next(field for field in event.fields if field.name == "cgroup")
            places.add(tuple(field.value.values()))
            runner.launcher.resume(event.attempt)
        else:
            ended += 1
        if ended == len(names):
            break
    assert len(places) == len(names)


# --- the end of a launcher --------------------------------------------------------------------------------------------


def test_a_launcher_that_ends_in_order_leaves_nothing(cwd: Path) -> None:
    with Launcher.start() as launcher:
        assert Runner(launcher).run(["/bin/true"], cwd).exited.exit_code == 0
        mine = cgroups_of(launcher.pid)
        assert mine
    assert not mine & own_cgroups()
    assert not {path.split("/")[-1] for path in mine} & set(os.listdir(locks_directory()))


def test_what_a_killed_launcher_left_is_removed_by_the_next_start(cwd: Path) -> None:
    launcher = Launcher.start()
    own = Runner(launcher)
    spec, lock_fd = own.spec(["/bin/sleep", "1000"], cwd)
    own.start(spec, lock_fd)
    observed = next(own.events())
    assert isinstance(observed, Observed)
    mine = cgroups_of(launcher.pid)
    assert len(mine) == 2 * len(tops())
    started = [os.pidfd_open(pid) for pid in processes_of(spec.uid)]
    assert len(started) == 2, "init and the worker"
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.close()
    with Launcher.start() as following:
        assert Runner(following).run(["/bin/true"], cwd).exited.exit_code == 0
        assert not mine & own_cgroups()
    for pidfd in started:  # who is dying leaves its cgroup a moment before its end is seen
        wait_for_end(pidfd)
        os.close(pidfd)


def test_a_start_leaves_the_cgroups_of_a_live_launcher_alone(runner: Runner, cwd: Path) -> None:
    spec, lock_fd = runner.spec(["/bin/cat"], cwd)
    name = runner.start(spec, lock_fd)
    observed = next(runner.events())
    assert isinstance(observed, Observed)
    mine = cgroups_of(runner.launcher.pid)
    with Launcher.start() as other:
        assert Runner(other).run(["/bin/true"], cwd).exited.exit_code == 0
    assert mine <= own_cgroups()
    runner.launcher.resume(name)
    assert runner.finish().exited.exit_code == 0


def test_a_sweep_kills_what_still_lives_in_a_dead_launchers_cgroup(locks: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {str(Path.cwd())!r})
import os, signal
from confine import load_profile
from confine.hierarchies import find_layout
from confine.prefixes import Prefix
group = Prefix(find_layout(), {str(locks)!r}).group(load_profile("worker").limits)
if os.fork() == 0:
    os.setsid()
    for place in group._places.values():
        open(f"{{place.path}}/cgroup.procs", "w").write("0")
    print(os.getpid(), flush=True)
    signal.pause()  # with the descriptor of the lock still open: the lock does not pass to a child
sys.stdin.read()
"""
    dead = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert dead.stdout is not None
    survivor = os.pidfd_open(int(dead.stdout.readline()))
    (name,) = os.listdir(locks)
    sweep(str(locks))
    assert os.listdir(locks) == [name], "a live launcher's is not touched"
    dead.kill()
    dead.wait()
    sweep(str(locks))
    assert os.listdir(locks) == []
    assert not [path for path in own_cgroups() if name in path]
    wait_for_end(survivor)
    os.close(survivor)


def test_a_sweep_removes_only_folders_of_its_locks_name(locks: Path, tmp_path: Path) -> None:
    """A file that was cut short, or names something else, gives up its name and nothing more."""
    innocent = tmp_path / "innocent"
    innocent.mkdir()
    (locks / "chio-000000000001").write_text(json.dumps([str(innocent)]))
    (locks / "chio-000000000002").write_text('["/sys/fs/cg')
    (locks / "other").write_text("")
    sweep(str(locks))
    assert os.listdir(locks) == ["other"]
    assert innocent.is_dir()


def test_a_cgroup_of_the_projects_name_without_a_lock_file_is_somebody_elses(cwd: Path) -> None:
    """Another container's launcher has its files elsewhere."""
    foreign = Path(next(iter(tops()))) / f"chio-{secrets.token_hex(6)}"
    foreign.mkdir()
    try:
        with Launcher.start() as launcher:
            assert Runner(launcher).run(["/bin/true"], cwd).exited.exit_code == 0
        assert foreign.is_dir()
    finally:
        foreign.rmdir()


def test_a_group_that_cannot_be_made_leaves_nothing_and_says_where(prefix: Prefix) -> None:
    taken = Path(prefix._places[next(reversed(prefix._places))].path) / "1"
    taken.mkdir()
    before = own_cgroups()
    with pytest.raises(StepFailed) as failed:
        prefix.group(LIMITS)
    assert (failed.value.step, failed.value.path) == ("cgroup", str(taken))
    assert own_cgroups() == before - ({str(taken)} if not taken.exists() else set())


def test_limits_that_do_not_fit_are_refused_naming_both() -> None:
    with pytest.raises(LimitRefused, match=r"memory_bytes.*scratch_bytes") as refused:
        check_limits({"memory_bytes": 100 << 20, "scratch_bytes": 64 << 20}, LIMITS)
    assert refused.value.fix
    assert check_limits({"memory_bytes": 128 << 20, "scratch_bytes": 64 << 20}, LIMITS).memory_bytes == 128 << 20
