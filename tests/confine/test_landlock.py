"""Landlock: the table of interfaces, the rules, and from inside what only Landlock refuses."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from confine import Bind, ConfineError, landlock, syscalls
from confine.spec import MountPlan
from tests.confine.launching import Runner

ABI = syscalls.landlock_abi()
TRY = """
import errno, json, os, socket, sys
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
"""


def needs(abi: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(abi > ABI, reason=f"this Linux kernel has Landlock ABI {ABI}, not {abi}")


def plan(*binds: Bind, scratch: str | None = None) -> MountPlan:
    return MountPlan(("x",), "/", "/x", "", "/x", "", binds, (), (), scratch, None, {})


# --- the table and the rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("abi", "missing"),
    [
        (7, ()),
        (6, ()),
        (5, ("abstract_unix_socket", "signal")),
        (4, ("ioctl_dev", "abstract_unix_socket", "signal")),
        (3, ("bind_tcp", "connect_tcp", "ioctl_dev", "abstract_unix_socket", "signal")),
        (2, ("truncate", "bind_tcp", "connect_tcp", "ioctl_dev", "abstract_unix_socket", "signal")),
    ],
)
def test_what_an_older_interface_lacks_is_named_and_refused_where_required(
    abi: int, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "landlock_abi", lambda: abi)
    held = landlock.rights("none", "best-effort")
    assert held is not None
    assert held.missing == missing
    assert not set(landlock.names(held)) & set(missing)
    assert len(landlock.names(held)) + len(missing) == len(landlock.TABLE)
    if not missing:
        assert landlock.rights("none", "required") == held
        return
    with pytest.raises(ConfineError, match=missing[0]) as refused:
        landlock.rights("none", "required")
    assert "--without landlock" in str(refused.value)


def test_without_landlock_best_effort_goes_on_and_required_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "landlock_abi", lambda: 0)
    assert landlock.rights("none", "best-effort") is None
    with pytest.raises(ConfineError, match="has no Landlock"):
        landlock.rights("none", "required")


def test_rules_follow_the_mount_plan() -> None:
    rules = dict(landlock.rules(plan(Bind("/usr", True), Bind("/etc/file", False), scratch="/folder/out")))
    assert set(rules) == {"/", "/etc", "/proc", "/dev", "/tmp", "/dev/shm", "/usr", "/etc/file", "/folder/out"}
    writes = landlock.WRITE_FILE | landlock.MAKE_REG | landlock.REMOVE_FILE | landlock.TRUNCATE
    assert {path for path, bits in rules.items() if bits & writes} == {"/dev", "/tmp", "/dev/shm", "/folder/out"}
    assert {path for path, bits in rules.items() if bits & landlock.EXECUTE} == {
        *("/usr", "/etc/file", "/tmp", "/dev/shm", "/folder/out")
    }
    devices = landlock.MAKE_CHAR | landlock.MAKE_BLOCK
    assert not any(bits & devices for bits in rules.values())


# --- from inside ------------------------------------------------------------------------------------------------------


@needs(1)
def test_a_worker_writes_where_its_mounts_let_it_and_proc_is_read_only(runner: Runner, cwd: Path) -> None:
    """/proc is mounted for writing: a refusal there is Landlock's, as the control shows."""
    script = f"""{TRY}
def write(path):
    with open(path, "w") as file:
        file.write("0")
paths = ("/tmp/x", "/dev/shm/x", "/dev/null", "/proc/self/oom_score_adj", "/proc/self/comm")
print(json.dumps([[attempt(lambda: write(p)) for p in paths], open("/proc/self/comm").read() != ""]))
"""
    assert runner.python(script, cwd).json() == [["ok", "ok", "ok", "EACCES", "EACCES"], True]
    assert runner.python(script, cwd, without=("landlock",)).json() == [["ok"] * 5, True]


@needs(1)
def test_everything_a_program_does_in_its_own_folders_still_works(runner: Runner, cwd: Path) -> None:
    (cwd / "out").mkdir()
    script = f"""{TRY}
import shutil, subprocess
for top in ("/tmp", "/dev/shm", os.path.abspath("out")):
    os.makedirs(top + "/a/b")
    with open(top + "/a/file", "w") as file:
        file.write("12345")
    os.truncate(top + "/a/file", 2)
    os.link(top + "/a/file", top + "/a/b/hard")
    os.rename(top + "/a/b/hard", top + "/a/moved")
    os.symlink("file", top + "/a/soft")
    os.mkfifo(top + "/a/fifo")
    socket.socket(socket.AF_UNIX).bind(top + "/a/socket")
    shutil.copy("/bin/true", top + "/a/program")
    subprocess.run([top + "/a/program"], check=True)
    shutil.rmtree(top + "/a")
print(json.dumps(sorted(os.listdir("/"))))
"""
    assert "tmp" in runner.python(script, cwd, exports_directory="out").json()


@needs(6)
def test_no_signal_and_no_abstract_socket_leaves_the_domain(runner: Runner, cwd: Path) -> None:
    """Init has the worker's uid, so only the scope stands between them; the control has none."""
    script = f"""{TRY}
print(json.dumps([attempt(lambda: os.kill(1, 0)), attempt(lambda: os.kill(os.getpid(), 0)),
                  attempt(lambda: os.kill(os.fork() or os._exit(0), 0))]))
"""
    assert runner.python(script, cwd).json() == ["EPERM", "ok", "ok"]
    assert runner.python(script, cwd, without=("landlock",)).json()[0] == "ok"


@needs(4)
def test_tcp_is_refused_by_landlock_alone(runner: Runner, cwd: Path) -> None:
    script = f"""{TRY}
print(json.dumps([attempt(lambda: socket.socket().bind(("127.0.0.1", 5000))),
                  attempt(lambda: socket.socket().connect(("127.0.0.1", 5000)))]))
"""
    assert runner.python(script, cwd, without=("seccomp",)).json() == ["EACCES", "EACCES"]
    assert "EACCES" not in runner.python(script, cwd, without=("seccomp", "landlock")).json()


@needs(6)
def test_an_abstract_socket_of_another_domain_is_not_reached(cwd: Path) -> None:
    """In one network namespace, which no launch has: a server outside, and a client that puts the ruleset on."""
    script = f"""
import os, socket, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import prctl
from confine import landlock, syscalls
server = socket.socket(socket.AF_UNIX)
server.bind("")
server.listen()
def reach():
    try:
        socket.socket(socket.AF_UNIX).connect(server.getsockname())
        return "reached"
    except PermissionError:
        return "refused"
before = reach()
held = landlock.rights("none", "required")
prctl.set_no_new_privs(1)
ruleset = syscalls.landlock_create_ruleset(held.files, held.tcp, held.scopes)
syscalls.landlock_restrict_self(ruleset)
print(before, reach())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=cwd)
    assert result.stdout == "reached refused\n"


# --- evidence ---------------------------------------------------------------------------------------------------------


@needs(1)
def test_the_record_names_every_right_and_the_rules_digest(runner: Runner, cwd: Path) -> None:
    first, second = runner.run(["/bin/true"], cwd), runner.run(["/bin/true"], cwd)
    field, held = first.field("landlock"), landlock.rights("none", "best-effort")
    assert held is not None
    assert (field.source, field.value["rights"]) == ("installed", landlock.names(held))
    assert field.value["sha256"] == second.field("landlock").value["sha256"]
    (cwd / "more").mkdir()
    third = runner.run(["/bin/true"], cwd, exports_directory="more")
    assert third.field("landlock").value["sha256"] != field.value["sha256"]


def test_given_up_by_name_it_is_recorded_as_absent(runner: Runner, cwd: Path) -> None:
    field = runner.run(["/bin/true"], cwd, without=("landlock",)).field("landlock")
    assert (field.asked, field.value, field.source, field.detail) == (True, False, "absent", "given up by --without")


@needs(1)
def test_rights_that_this_linux_kernel_does_not_know_fail_the_launch(runner: Runner, cwd: Path) -> None:
    spec, lock = runner.spec(["/bin/true"], cwd)
    assert spec.landlock is not None
    broken = type(spec.landlock)(ABI, 1 << 60, 0, 0, ())
    if lock is not None:
        os.close(lock)
    failed = runner.changed(["/bin/true"], cwd, landlock=broken).failed
    assert (failed.step, failed.errno) == ("landlock rules", errno.EINVAL)
