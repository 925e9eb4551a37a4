"""The Chio kernel's own process: what it may still do once it serves, seen from outside and while it works."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chio.host import Host, initialize
from confine import syscalls

ROOT = Path(__file__).parents[2]
POLICY = (
    "kernel: {max_capability_ttl: 3600, delegation_depth_limit: 1, durable_admission_mode: all}\n"
    "capabilities: {default: {tools: [{server: chio-ipc, tool: '*', operations: [invoke, delegate], ttl: 3600}]}}\n"
)
CONFIG = {
    "schema": "chio.process.host.v1",
    "policy": "policy.yaml",
    "limits": {"max_processes": 2, "max_depth": 1, "max_calls": 100},
    "mailboxes": [{"id": "box"}],
    "children": [
        {
            "id": "worker",
            "parent": "root",
            "budget_share_bps": 5000,
            "tools": [{"server_id": "chio-ipc", "tool_name": "send_box"}],
        }
    ],
}


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chio-kernel-", dir=os.environ.get("CHIO_TEST_DISK")) as folder:
        (Path(folder) / "policy.yaml").write_text(POLICY)
        (Path(folder) / "host.json").write_text(json.dumps(CONFIG))
        initialize(Path(folder) / "host.json", Path(folder) / "state", allow_volatile=True)
        yield Path(folder) / "state"


@pytest.fixture(scope="module")
def host(state: Path) -> Iterator[Host]:
    host = Host(state, allow_volatile=True)
    yield host
    host.close()


def status(host: Host) -> dict[str, str]:
    lines = Path(f"/proc/{host.kernel.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_serves_under_its_filter_without_a_linux_capability(host: Host) -> None:
    seen = status(host)
    assert (seen["Seccomp"], seen["NoNewPrivs"]) == ("2", "1")
    assert {int(seen[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    if os.geteuid() == 0:
        assert int(seen["CapBnd"], 16) == 0
    reserved = host.kernel.call("reserve", process="worker", confined=False)
    assert reserved["number"] >= 1


def test_it_keeps_the_operators_uid(host: Host) -> None:
    assert status(host)["Uid"].split() == [str(os.geteuid())] * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="its /proc is closed to its own uid: only root can look")
def test_it_keeps_the_hosts_namespaces(host: Host) -> None:
    for name in ("user", "pid", "mnt", "net"):
        assert os.stat(f"/proc/{host.kernel.pid}/ns/{name}").st_ino == os.stat(f"/proc/self/ns/{name}").st_ino


def test_its_memory_and_descriptors_are_closed_to_others_of_its_uid(host: Host) -> None:
    """Not dumpable: one without CAP_SYS_PTRACE is refused (ptrace(2)), which root without capabilities is too."""
    script = """
import os, sys
sys.path.insert(0, sys.argv[2])
from confine import syscalls
syscalls.drop_all_capabilities()
def attempt(act):
    try:
        act()
    except PermissionError:
        return "refused"
    return "ok"
print(*[attempt(act) for pid in (sys.argv[1], os.getpid())
        for act in (lambda: open(f"/proc/{pid}/mem", "rb"), lambda: os.readlink(f"/proc/{pid}/fd/0"))])
"""
    command = [sys.executable, "-c", script, str(host.kernel.pid), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "refused refused ok ok\n"


# What the process tries after locking itself, printed as name -> ok or errno. Only that process is confined by it.
TRIES = """
import ctypes, errno, json, mmap, os, socket, sys, threading
sys.path.insert(0, sys.argv[2])
from confine.lockdown import confine_kernel, start_filtered
libc = ctypes.CDLL(None, use_errno=True)
state = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1] + "/given.sock")
listening.listen()
other = os.open(sys.argv[1] + "/..", os.O_RDONLY | os.O_DIRECTORY)
parent = os.getppid()
fields = confine_kernel(start_filtered(), state)
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def raw(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def make(name, directory):
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))
tries = {
    "execve": lambda: os.execv("/bin/true", ["true"]),
    "fork": lambda: os.fork() or os._exit(0),
    "inet socket": lambda: socket.socket(socket.AF_INET),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "kill": lambda: os.kill(parent, 0),
    "ptrace": lambda: raw(*[PTRACE], 16, parent, 0, 0),
    "executable memory": lambda: mmap.mmap(-1, 4096, prot=7),
    "write elsewhere": lambda: make("new", other),
    "read elsewhere": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    "a codec": lambda: "x".encode("cp1257"),
    "link": lambda: os.link("db", "db2", src_dir_fd=state, dst_dir_fd=state),
    "rename": lambda: os.rename("db", "db2", src_dir_fd=state, dst_dir_fd=state),
    "mkdir": lambda: os.mkdir("folder", dir_fd=state),
    "truncate elsewhere": lambda: os.truncate("/etc/passwd", 0),
    "write in the state": lambda: make("db", state),
    "remove in the state": lambda: os.unlink("db", dir_fd=state),
    "a socket it was given": lambda: listening.getsockname(),
    "a loop's wake-up": lambda: socket.socketpair(),
    "a thread": lambda: threading.Thread(target=lambda: None).start(),
}
print(json.dumps([{name: attempt(act) for name, act in tries.items()},
                  {field.name: [field.asked, field.value, field.source] for field in fields}]))
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("locked") / "state"
    folder.mkdir()
    script = TRIES.replace("[PTRACE]", "[101]" if os.uname().machine == "x86_64" else "[117]")
    command = [sys.executable, "-c", script, str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answers, fields = json.loads(result.stdout)
    return answers, fields


def test_it_can_execute_connect_or_make_nothing(tried: tuple[dict[str, str], dict[str, Any]]) -> None:
    answers, _ = tried
    refused = ("execve", "fork", "inet socket", "unix socket", "kill", "ptrace", "executable memory")
    refused += ("link", "rename", "mkdir", "truncate elsewhere")
    assert {name: answers[name] for name in refused} == dict.fromkeys(refused, errno.errorcode[errno.EPERM])


@pytest.mark.skipif(syscalls.landlock_abi() == 0, reason="this Linux kernel has no Landlock")
def test_it_reaches_no_file_outside_its_state(tried: tuple[dict[str, str], dict[str, Any]]) -> None:
    answers, _ = tried
    assert {answers[name] for name in ("write elsewhere", "read elsewhere")} == {errno.errorcode[errno.EACCES]}


def test_what_it_needs_still_works(tried: tuple[dict[str, str], dict[str, Any]]) -> None:
    answers, _ = tried
    needed = (
        "write in the state",
        "remove in the state",
        "a socket it was given",
        "a loop's wake-up",
        "a thread",
        "a codec",
    )
    assert {name: answers[name] for name in needed} == dict.fromkeys(needed, "ok")


def test_it_says_what_holds_and_where_that_was_read(tried: tuple[dict[str, str], dict[str, Any]]) -> None:
    _, fields = tried
    assert {name for name, (_, _, source) in fields.items() if source == "observed"} == {
        *("seccomp", "capabilities", "no_new_privs")
    }
    assert all(asked == value for asked, value, source in fields.values() if source == "observed")


def test_a_process_with_two_threads_is_not_half_confined(tmp_path: Path) -> None:
    script = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from confine import ConfineError
from confine.lockdown import start_filtered
hold = threading.Event()
threading.Thread(target=hold.wait).start()
try:
    start_filtered()
except ConfineError as error:
    print(error)
hold.set()
"""
    command = [sys.executable, "-c", script, str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 threads" in result.stdout
