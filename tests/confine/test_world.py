"""What a confined worker can see and do: each promise is attempted for real, from inside."""

import ctypes
import json
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from confine import Launcher, Observed, plan_mounts
from confine.observe import _mountinfo, _mounts
from tests.confine.launching import PYTHON, WITHOUT, Runner, needs_distinct_uids

ADD_KEY, KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
# Runs a list of (name, expression) and prints what each gave: a value, or the name of its errno.
ATTEMPT = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
def attempt(act):
    try:
        return act()
    except OSError as error:
        return errno.errorcode.get(error.errno, error.errno)
"""


def test_a_worker_reaches_no_network_of_the_machine(runner: Runner, cwd: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0chio-test-{os.getpid()}")
        abstract.listen()
        script = f"""{ATTEMPT}
def tcp():
    socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), 2)
def abstract():
    socket.socket(socket.AF_UNIX).connect("\\0chio-test-{os.getpid()}")
print(json.dumps([attempt(tcp), attempt(abstract)]))
"""
        assert runner.python(script, cwd).json() == ["EPERM", "ECONNREFUSED"]
        # Each layer alone holds as well: here the network namespace.
        without = ("seccomp", "landlock")
        assert runner.python(script, cwd, without=without).json() == ["ENETUNREACH", "ECONNREFUSED"]


def test_a_worker_sees_no_process_of_the_machine(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
print(json.dumps([pids, attempt(lambda: os.kill({os.getpid()}, 0))]))
"""
    assert runner.python(script, cwd).json() == [[2], "ESRCH"]


def test_only_the_given_folders_are_there(runner: Runner, cwd: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    script = f"""{ATTEMPT}
print(json.dumps([attempt(lambda: os.listdir("/root")), attempt(lambda: open({str(tmp_path / "secret")!r}).read()),
                  attempt(lambda: open("/etc/shadow").read()), sorted(os.listdir("/"))]))
"""
    root, secret, shadow, top = runner.python(script, cwd).json()
    assert (root, secret, shadow) == ("ENOENT", "ENOENT", "ENOENT")
    assert set(top) <= {
        "bin",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "sbin",
        "tmp",
        "usr",
        str(cwd).split("/")[1],
    }


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_state_directory_below_cwd_is_closed_whoever_it_belongs_to(runner: Runner, cwd: Path, mode: int) -> None:
    """Also in a folder of mode 0700, which is open to the worker."""
    other = cwd / "deep" / "other"
    own = cwd / "own"
    for state in (other, own):
        state.mkdir(parents=True)
        (state / "authority.db").write_text("rows")
        (state / "keys").write_text("keys")
    (own / "authority.db").unlink()
    cwd.chmod(mode)
    script = f"""{ATTEMPT}
print(json.dumps([[attempt(lambda: os.listdir(p)), attempt(lambda: open(p + "/keys").read()),
                   attempt(lambda: os.rmdir(p))] for p in sys.argv[1:]]))
"""
    result = runner.python(script, cwd, str(own), str(other), state_dir=str(own)).json()
    assert result == [["EACCES", "EACCES", "EROFS"]] * 2


def test_the_same_folder_without_a_state_is_readable(runner: Runner, cwd: Path) -> None:
    """The control for the test above."""
    (cwd / "deep").mkdir()
    (cwd / "deep" / "keys").write_text("not a state")
    cwd.chmod(0o700)
    assert runner.run(["/bin/cat", "deep/keys"], cwd).exited.stdout == b"not a state"


def test_a_folder_of_mode_0700_is_readable_and_not_writable(runner: Runner, cwd: Path) -> None:
    (cwd / "input").write_text("data")
    cwd.chmod(0o700)
    script = f"""{ATTEMPT}
print(json.dumps([open("input").read(), attempt(lambda: open("input", "w")), attempt(lambda: open("new", "w")),
                  attempt(lambda: os.chmod("input", 0o666)), attempt(lambda: os.unlink("input"))]))
"""
    ended = runner.python(script, cwd)
    assert ended.json() == ["data", "EROFS", "EROFS", "EROFS", "EROFS"]


@needs_distinct_uids
def test_what_is_private_below_a_given_folder_stays_private_also_when_it_is_made_later(
    runner: Runner, cwd: Path
) -> None:
    """A state made during the run, say."""

    def make(_: object) -> None:
        for name in ("early", "late"):
            (cwd / name).mkdir(mode=0o700, exist_ok=True)
            (cwd / name / "keys").write_text("keys")
            (cwd / f"{name}-file").write_text("keys")
            (cwd / f"{name}-file").chmod(0o600)

    (cwd / "early").mkdir(mode=0o700)
    cwd.chmod(0o700)
    script = f"""{ATTEMPT}
print(json.dumps([attempt(lambda: open(n + p).read()) for n in ("early", "late") for p in ("/keys", "-file")]))
"""
    assert runner.run([PYTHON, "-c", script], cwd, at_exec=make).json() == ["EACCES"] * 4


def test_a_single_file_of_mode_0600_is_readable_and_not_writable(runner: Runner, cwd: Path, tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_text("data")
    file.chmod(0o600)
    if os.geteuid() != 0 and "distinct-uids" not in WITHOUT:
        pytest.skip("an ordinary user cannot map ids on the machine's file systems")
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (6, 3):
        pytest.skip("tmpfs, where the file may lie, has no ID-mapped mounts before Linux 6.3")
    script = f"""{ATTEMPT}
file = {str(file)!r}
print(json.dumps([open(file).read(), attempt(lambda: open(file, "w")), attempt(lambda: os.chmod(file, 0o666))]))
"""
    ended = runner.python(script, cwd, read=[str(file)])
    assert ended.json() == ["data", "EROFS", "EROFS"]
    assert ended.field("id_mapped_mounts").value == ([] if os.geteuid() != 0 else [str(file)])


def test_sockets_and_pipes_in_a_given_folder_lead_nowhere(runner: Runner, cwd: Path) -> None:
    """And the control: through a bind of the same folder, read-only too, they do."""
    os.mkfifo(cwd / "pipe")
    reader = os.open(cwd / "pipe", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    script = f"""{ATTEMPT}
def connect():
    socket.socket(socket.AF_UNIX).connect("host.sock")
def write():
    os.write(os.open("pipe", os.O_WRONLY | os.O_NONBLOCK), b"x")
print(json.dumps([attempt(connect), attempt(write)]))
"""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(cwd / "host.sock"))
        listener.listen()
        for name in ("pipe", "host.sock"):
            (cwd / name).chmod(0o777)
        without = ("seccomp", "landlock")  # each layer alone holds
        assert runner.python(script, cwd, without=without).json() == ["ECONNREFUSED", "ENXIO"]
        binds = [replace(bind, system=True) for bind in plan_mounts(argv=[PYTHON], cwd=str(cwd), state_dir=None).binds]
        ended = runner.changed([PYTHON, "-c", script], cwd, binds=tuple(binds), landlock=None)
        assert ended.json() == [None, None]
        assert os.read(reader, 2) == b"x"
    os.close(reader)


def test_a_folder_that_is_bound_where_an_overlay_was_asked_for_would_be_seen(runner: Runner, cwd: Path) -> None:
    """/usr, which is bound, stands for it: what is read from outside is the type of the mounted file system."""
    spec, lock_fd = runner.spec(["/bin/true"], cwd)
    other = replace(spec.plan, binds=tuple(replace(bind, system=False) for bind in spec.plan.binds))
    seen = {}

    def look(event: Observed) -> None:
        seen["as asked"] = _mounts(_mountinfo(event.pid), spec)
        seen["otherwise"] = _mounts(_mountinfo(event.pid), replace(spec, plan=other))

    runner.start(spec, lock_fd)
    runner.finish(look)
    assert seen["as asked"].value == seen["as asked"].asked
    assert seen["as asked"].value[str(cwd)] == ["nodev", "nosuid", "overlay", "ro"]
    assert seen["otherwise"].asked["/usr"] == ["nodev", "nosuid", "overlay", "ro"]
    assert seen["otherwise"].value["/usr"] == ["nodev", "nosuid", "ro"]


def test_nothing_but_tmp_can_be_written(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
where = ["/", "/usr", "/etc", "/dev", "/proc/sys/kernel", ".", "/tmp", "/dev/shm"]
print(json.dumps({{p: attempt(lambda: open(p + "/x", "w").close()) for p in where}}))
"""
    result = runner.python(script, cwd).json()
    refused = {path: answer for path, answer in result.items() if answer}
    assert set(result) - set(refused) == {"/tmp", "/dev/shm"}
    assert set(refused.values()) <= {"EROFS", "EACCES", "ENOENT"}
    assert list(cwd.iterdir()) == []


def test_tmp_is_limited_in_bytes_and_files(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
def fill():
    with open("/tmp/big", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
def many():
    for n in range(100_000):
        os.close(os.open(f"/dev/shm/{{n}}", os.O_CREAT))
print(json.dumps([attempt(fill), attempt(many)]))
"""
    assert runner.python(script, cwd).json() == ["ENOSPC", "ENOSPC"]


def test_no_descriptor_of_the_host_is_inherited(runner: Runner, cwd: Path) -> None:
    with (cwd / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        script = """
import json, os
print(json.dumps(sorted(int(n) for n in os.listdir("/proc/self/fd"))))
"""
        ended = runner.python(script, cwd)
    assert ended.json() == [0, 1, 2, 3]  # 3 is the listing itself
    assert ended.field("descriptors").value == {"0": "given", "1": "given", "2": "given"}


def test_the_environment_is_the_profiles_and_nothing_else(
    runner: Runner, cwd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    environment = runner.python(script, cwd).json()
    environment.pop("LC_CTYPE", None)  # CPython adds it to its own copy
    assert environment == {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
    }


@needs_distinct_uids
def test_the_uid_is_unprivileged_outside_and_differs_between_live_attempts(runner: Runner, cwd: Path) -> None:
    first, second = runner.spec(["/bin/true"], cwd), runner.spec(["/bin/true"], cwd)
    assert 65_536 < first[0].uid != second[0].uid > 65_536
    owners = []
    for spec, lock_fd in (first, second):
        runner.start(spec, lock_fd)
        runner.finish(at_exec=lambda event: owners.append(os.stat(f"/proc/{event.pid}").st_uid))
    assert owners == [first[0].uid, second[0].uid]


def test_privileged_acts_are_refused(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
print(json.dumps([
    attempt(lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None)),
    attempt(lambda: call("umount2", b"/proc/sys", 2)),
    attempt(lambda: call("chroot", b"/tmp")),
    attempt(lambda: call("sethostname", b"x", 1)),
    attempt(lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0))),
    attempt(lambda: os.setuid(0)),
    attempt(lambda: os.setgroups([0])),
    attempt(lambda: os.chown("/tmp", 0, 0)),
]))
"""
    assert set(runner.python(script, cwd).json()) <= {"EPERM", "EINVAL"}


def test_a_setuid_file_gives_nothing(runner: Runner, cwd: Path) -> None:
    program = cwd / "id"
    program.write_bytes(Path("/usr/bin/id").read_bytes())
    program.chmod(0o4755)
    assert runner.run([str(program), "-u"], cwd).exited.stdout == b"1000\n"


def test_init_is_closed_to_the_worker_and_survives_it(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
import signal
def ptrace():
    call("ptrace", 16, 1, 0, 0)
acts = [lambda: os.listdir("/proc/1/fd"), lambda: open("/proc/1/mem").read(1), lambda: open("/proc/1/environ").read(),
        lambda: open("/proc/1/cmdline").read(),
        lambda: os.listdir("/proc/1/root"), lambda: os.listdir("/proc/1/cwd"), ptrace]
refused = [attempt(act) for act in acts]
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
    attempt(lambda: os.kill(1, number))
print(json.dumps([refused, os.path.exists("/proc/1")]))  # and we live, so init does
"""
    refused, shown = runner.python(script, cwd).json()
    assert set(refused) <= {"EACCES", "EPERM", "ENOENT"}
    assert not shown


def test_the_machine_is_hidden_in_proc(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
def read(name):
    return len(open("/proc/" + name, "rb").read(1))
def sysrq():
    with open("/proc/sysrq-trigger", "w") as file:
        file.write("h")
names = ("kcore", "keys", "timer_list", "kallsyms", "cmdline", "interrupts")
reads = {{n: attempt(lambda: read(n)) for n in names if os.path.exists("/proc/" + n)}}
print(json.dumps([reads, attempt(sysrq), attempt(lambda: os.listdir("/proc/fs")),
                  attempt(lambda: open("/proc/sys/kernel/core_pattern", "w"))]))
"""
    reads, sysrq, filesystems, core_pattern = runner.python(script, cwd).json()
    assert reads
    assert set(reads.values()) <= {0, "EACCES", "EPERM"}
    assert sysrq in {None, "EACCES", "EROFS", "ENOENT"}
    assert filesystems == []
    assert core_pattern in {"EROFS", "EACCES"}


def in_a_launcher_of_its_own(prepare: Callable[[], None], script: str, cwd: Path) -> Any:
    """What a script prints confined, and unconfined as the control, under a launcher whose process was prepared.

    Without the filter, which would answer before what is looked at does.
    """
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            with Launcher.start() as launcher:
                own = Runner(launcher)
                confined = own.python(script, cwd, without=("seccomp",)).json()
                answers = [confined, own.python(script, cwd, confined=False).json()]
            os.write(say, json.dumps(answers).encode())
        finally:
            os._exit(0)
    os.close(say)
    os.waitpid(child, 0)
    with open(said) as file:
        return json.loads(file.read() or "null")


def test_the_operators_session_keyring_is_left_behind(cwd: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    script = f"""{ATTEMPT}
def key():
    serial = libc.syscall({KEYCTL}, 10, -3, b"user", b"chio-test", 0)  # KEYCTL_SEARCH, the session keyring
    if serial < 0:
        raise OSError(ctypes.get_errno(), "keyctl")
    return "found"
print(json.dumps(attempt(key)))
"""

    def add_key() -> None:
        libc.syscall(KEYCTL, 1, None)
        assert libc.syscall(ADD_KEY, b"user", b"chio-test", b"secret", 6, -3) > 0

    assert in_a_launcher_of_its_own(add_key, script, cwd) == ["ENOKEY", "found"]


@needs_distinct_uids
def test_the_operators_groups_are_left_behind(cwd: Path) -> None:
    script = f"{ATTEMPT}\nprint(json.dumps(os.getgroups()))"
    assert in_a_launcher_of_its_own(lambda: os.setgroups([4, 24]), script, cwd) == [[], [4, 24]]


def test_the_worker_leads_a_session_of_its_own_with_locked_securebits(runner: Runner, cwd: Path) -> None:
    script = f"""{ATTEMPT}
print(json.dumps([os.getsid(0) == os.getpid(), os.umask(0), libc.prctl(27, 0, 0, 0, 0)]))  # PR_GET_SECUREBITS
"""
    assert runner.python(script, cwd).json() == [True, 0o022, 0b1110_1111]


def test_the_hostname_and_the_accounts_are_synthetic(runner: Runner, cwd: Path) -> None:
    script = "import json, pwd, socket; print(json.dumps([socket.gethostname(), [p.pw_name for p in pwd.getpwall()]]))"
    assert runner.python(script, cwd).json() == ["chio", ["chio", "nobody"]]


def test_stdin_is_the_given_file_and_stdout_can_be_opened_again(runner: Runner, cwd: Path) -> None:
    ended = runner.run(["/bin/sh", "-c", "cat > /dev/stdout; echo bad > /dev/stderr"], cwd, stdin=b"bootstrap")
    assert ended.exited.stdout == b"bootstrap"
    assert ended.exited.stderr == b"bad\n"


def test_the_attempts_socket_is_the_one_way_out(runner: Runner, cwd: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o666)
        server.listen()
        server.settimeout(10)
        script = """
import socket
with socket.socket(socket.AF_UNIX) as s:
    s.connect("/run/chio/process.sock")
    s.sendall(b"hello")
"""
        ended = runner.python(script, cwd, socket=str(path))
        assert ended.exited.exit_code == 0, ended.exited.stderr
        connection, _ = server.accept()
        with connection:
            assert connection.recv(16) == b"hello"
    assert path.exists()


def test_a_read_path_is_visible_and_its_neighbour_is_not(runner: Runner, cwd: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("A")
    (tmp_path / "file").write_text("F")
    (tmp_path / "near").write_text("N")
    for path in (tmp_path / "data", tmp_path / "file"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    ended = runner.run(
        ["/bin/cat", str(tmp_path / "data" / "a"), str(tmp_path / "file"), str(tmp_path / "near")],
        cwd,
        read=[str(tmp_path / "data"), str(tmp_path / "file")],
    )
    assert ended.exited.stdout == b"AF"
    assert ended.exited.exit_code == 1
