"""System call filters: lists and what they mean, then every promise attempted from inside, for real."""

import ctypes
import errno
import json
import os
import platform
import struct
from pathlib import Path
from typing import Any

import pytest

from confine import Launcher, ProfileError
from confine.seccomp import LISTS, Condition, Rule, load_filter, read_list
from tests.confine.launching import Runner

X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has these ways into the Linux kernel")
NUMBERS = ctypes.CDLL("libseccomp.so.2")

# attempt(number, arguments…) makes one raw call and gives "ok" or the errno's name.
RAW = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def raw(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == -1:
        return errno.errorcode[ctypes.get_errno()]
    return "ok"
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
"""
REFUSED = (
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot"),
    *("move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise"),
    *("bpf", "perf_event_open", "userfaultfd", "memfd_secret", "add_key", "request_key", "keyctl"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "seccomp", "modify_ldt", "vmsplice"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff"),
    *("acct", "syslog", "clock_settime", "clock_adjtime", "adjtimex", "settimeofday", "sethostname", "setdomainname"),
    *("name_to_handle_at", "open_by_handle_at", "fanotify_init", "quotactl", "iopl", "ioperm", "setgroups", "capset"),
)


def number_of(call: str) -> int:
    return int(NUMBERS.seccomp_syscall_resolve_name(call.encode()))


def written(folder: Path, text: str, name: str = "own") -> Path:
    path = folder / f"{name}.list"
    path.write_text(text)
    return path


# --- lists ------------------------------------------------------------------------------------------------------------


def test_a_list_is_read_into_rules(tmp_path: Path) -> None:
    text = "read write  # two\nsocket when 0 = 1 2 and 1 & 0xf = 1\nclone3 fails ENOSYS\nnewer?\n"
    assert read_list(written(tmp_path, text)) == [
        Rule("read"),
        Rule("write"),
        Rule("socket", (Condition(0, 0xFFFFFFFF, 1), Condition(1, 0xF, 1))),
        Rule("socket", (Condition(0, 0xFFFFFFFF, 2), Condition(1, 0xF, 1))),
        Rule("clone3", errno=errno.ENOSYS),
        Rule("newer", optional=True),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raed", "knows no call raed"),
        ("read\nread when 0 = 1", "with and without a condition"),
        ("clone3\nclone3 fails ENOSYS", "with and without a condition"),
        ("socket when 0", "cannot hold"),
        ("socket when first = 1", "not a condition"),
        ("socket when 6 = 1", "cannot hold"),
        ("socket when 0 & 0xf = 0x10", "cannot hold"),
        ("socket when 0 = 0x100000000", "cannot hold"),
        ("socket when 0 = 1 and 0 = 2", "looked at twice"),
        ("clone3 fails ENOTHING", "the name of one errno"),
        ("read write when 0 = 1", "holds one call"),
        ("include ../worker", "one list's name"),
        ("include absent", "can be read"),
        ("include nested", "may not include another"),
    ],
)
def test_a_list_that_is_wrong_is_refused_with_its_file(tmp_path: Path, text: str, why: str) -> None:
    written(tmp_path, "include worker", "nested")
    path = written(tmp_path, text)
    with pytest.raises(ProfileError, match=why) as refused:
        load_filter("own", tmp_path)
    assert refused.value.path in {str(path), str(tmp_path / "nested.list"), str(tmp_path / "absent.list")}
    assert refused.value.fix


@pytest.mark.parametrize("name", sorted(path.stem for path in LISTS.glob("*.list")))
def test_every_list_of_the_project_compiles_to_the_same_program_twice(name: str) -> None:
    first = load_filter(name)
    load_filter.__globals__["_compiled"].cache_clear()
    assert load_filter(name) == first
    assert len(first.program) // 16 < 1_024  # instructions; the Linux kernel takes 4096


def test_a_comment_stands_before_each_group_of_a_list() -> None:
    for path in LISTS.glob("*.list"):
        groups = path.read_text().split("\n\n")
        assert all(group.startswith("#") for group in groups), path


# --- from inside ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every call of REFUSED, attempted with arguments that are all zero."""
    cwd = tmp_path_factory.mktemp("calls")
    cwd.chmod(0o755)
    calls = {call: number_of(call) for call in REFUSED}
    script = f"{RAW}\nprint(json.dumps({{call: raw(n, 0, 0, 0, 0, 0, 0) for call, n in {calls!r}.items() if n >= 0}}))"
    result: dict[str, str] = runner.python(script, cwd).json()
    return result


def test_what_is_not_on_the_list_is_not_permitted(answers: dict[str, str]) -> None:
    assert len(answers) > len(REFUSED) - 10  # the others are another architecture's
    assert set(answers.values()) == {"EPERM"}, answers


def test_the_same_calls_without_a_filter_are_answered_by_the_linux_kernel(runner: Runner, cwd: Path) -> None:
    """The control: given up by name, these reach the Linux kernel and fail for another reason, or succeed."""
    calls = {call: number_of(call) for call in ("kcmp", "fsopen", "io_uring_setup", "name_to_handle_at", "capset")}
    script = f"{RAW}\nprint(json.dumps([raw(n, 0, 0, 0, 0, 0, 0) for n in {list(calls.values())!r}]))"
    ended = runner.python(script, cwd, without=("seccomp",))
    assert set(ended.json()) & {"EFAULT", "EINVAL", "ok", "EBADF"}
    field = ended.field("seccomp")
    assert (field.asked, field.value, field.source, field.detail) == (True, False, "absent", "given up by --without")


def test_a_number_that_libseccomp_does_not_know_is_no_such_call(runner: Runner, cwd: Path) -> None:
    script = f"{RAW}\nprint(json.dumps([raw(n, 0, 0, 0, 0, 0, 0) for n in (400, 999, 100_000, 0x3fffffff, 2**64 - 1)]))"
    assert set(runner.python(script, cwd).json()) == {"ENOSYS"}


def test_clone3_is_no_such_call_and_threads_start_without_it(runner: Runner, cwd: Path) -> None:
    script = f"""{RAW}
import threading
ran = []
thread = threading.Thread(target=lambda: ran.append(1))
thread.start()
thread.join()
print(json.dumps([raw({number_of("clone3")}, 0, 0), ran]))
"""
    assert runner.python(script, cwd).json() == ["ENOSYS", [1]]


@pytest.mark.parametrize("high", [0, 1 << 40])
def test_clone_makes_no_namespace(runner: Runner, cwd: Path, high: int) -> None:
    flags = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
    script = f"{RAW}\nprint(json.dumps([raw({number_of('clone')}, f | 17 | {high}, 0, 0, 0, 0) for f in {flags!r}]))"
    assert set(runner.python(script, cwd).json()) == {"EPERM"}


# mmap a page, put code there, call it: what libc's wrappers never do.
MACHINE_CODE = """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex({code!r}))
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print(function(), flush=True)
"""


@X86_64
def test_a_32_bit_call_kills_the_process(runner: Runner, cwd: Path) -> None:
    # mov eax, 20 (getpid on i386; writev here); int 0x80; ret
    code = MACHINE_CODE.format(code="b814000000cd80c3")
    ended = runner.python(RAW + code, cwd)
    assert (ended.exited.signal, ended.exited.stdout) == (31, b"")  # SIGSYS
    without = runner.python(RAW + code, cwd, without=("seccomp",))
    assert without.exited.stdout == b"2\n"  # the control: there it answers


@X86_64
def test_an_x32_call_kills_the_process(runner: Runner, cwd: Path) -> None:
    script = f"{RAW}\nprint(raw(0x40000000 + {number_of('getpid')}), flush=True)"
    ended = runner.python(script, cwd)
    assert (ended.exited.signal, ended.exited.stdout) == (31, b"")


def test_sockets_are_of_the_unix_family_only(runner: Runner, cwd: Path) -> None:
    script = f"""{RAW}
families = [attempt(lambda: socket.socket(family, kind).close()) for family in range(2, 46) for kind in (1, 2, 3, 5)]
pairs = [attempt(lambda: socket.socketpair(family)[0].close()) for family in (2, 10, 16, 30)]
unix = [attempt(lambda: socket.socket(1, kind).close()) for kind in (1, 2, 5)]
high = raw({number_of("socket")}, (1 << 32) | 40, 1, 0)
print(json.dumps([families, pairs, unix, high]))
"""
    families, pairs, unix, high = runner.python(script, cwd).json()
    assert set(families) == set(pairs) == {"EPERM"}
    assert unix == ["ok"] * 3
    assert high == "EPERM"


def test_typing_into_a_terminal_is_refused_whatever_the_high_bits_say(runner: Runner, cwd: Path) -> None:
    """CVE-2017-5226, CVE-2019-10063, CVE-2023-28100; FIONREAD is the control."""
    requests = [request | high for request in (0x5412, 0x541C) for high in (0, 1 << 32, 1 << 63)]
    script = f"""{RAW}
number, pointer = {number_of("ioctl")}, ctypes.addressof(ctypes.create_string_buffer(b"x" * 64))
print(json.dumps([[raw(number, 0, r, pointer) for r in {requests!r}], raw(number, os.pipe()[0], 0x541b, pointer)]))
"""
    refused, control = runner.python(script, cwd).json()
    assert set(refused) == {"EPERM"}
    assert control == "ok"


def test_prctl_and_mknod_are_limited_by_their_arguments(runner: Runner, cwd: Path) -> None:
    script = f"""{RAW}
prctl, personality = {number_of("prctl")}, {number_of("personality")}
print(json.dumps([[raw(prctl, option, 0, 0, 0, 0) for option in (22, 24, 28, 35, 47, 59, 0x59616d61)],
                  raw(personality, 0x0040000), raw(personality, 0xffffffff), raw(prctl, 38, 1, 0, 0, 0),
                  attempt(lambda: os.mkfifo("/tmp/fifo")), attempt(lambda: os.mknod("/tmp/disk", 0o60600, 0x801)),
                  attempt(lambda: os.mknod("/tmp/tty", 0o20600, 0x501))]))
"""
    prctl, randomised, which, no_new_privs, fifo, block, character = runner.python(script, cwd).json()
    assert set(prctl) == {"EPERM"}
    assert (randomised, which, no_new_privs, fifo, block, character) == ("EPERM", "ok", "ok", "ok", "EPERM", "EPERM")


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_no_file_gets_a_set_id_bit_however_it_is_made(runner: Runner, cwd: Path) -> None:
    """What a tool server writes is its folder's owner's outside, where nothing is nosuid."""
    script = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(act):
    try:
        act()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
os.umask(0)
os.mkdir("/tmp/own")
os.chdir("/tmp/own")
open("plain", "w").close()
results = [attempt(act) for act in (
    lambda: os.chmod("plain", 0o4755), lambda: os.chmod("plain", 0o2755),
    lambda: os.fchmod(os.open("plain", os.O_RDONLY), 0o4755),
    lambda: os.open("made", os.O_CREAT | os.O_WRONLY, 0o4755),
    lambda: os.open("made", os.O_CREAT | os.O_WRONLY, 0o2711),
    lambda: os.mknod("node", 0o104755),
)]
libc.syscall(437, -100, b"plain", ctypes.byref(ctypes.create_string_buffer(24)), 24)
results.append(errno.errorcode[ctypes.get_errno()])
results.append(attempt(lambda: os.chmod("plain", 0o1755)))
results.append(attempt(lambda: os.open("new", os.O_CREAT | os.O_WRONLY, 0o700)))
print(json.dumps([results, sorted(os.listdir("."))]))
"""
    answers, files = runner.python(script, cwd).json()
    assert answers == ["EPERM"] * 6 + ["ENOSYS", "ok", "ok"]
    assert files == ["new", "plain"]


def test_the_record_says_which_program_holds_and_where_from(runner: Runner, cwd: Path) -> None:
    ended = runner.run(["/bin/true"], cwd)
    mode, program = ended.field("seccomp"), ended.field("seccomp_program")
    assert (mode.value, mode.source) == ({"mode": 2, "filters": 1}, "observed")
    assert program.asked == program.value == {"list": "worker", "sha256": load_filter("worker").sha256}
    assert program.source == ("observed" if os.geteuid() == 0 else "installed")


@pytest.mark.skipif(os.geteuid() != 0, reason="reading a filter back needs root")
def test_another_program_than_the_asked_one_is_seen_and_not_run(runner: Runner, cwd: Path) -> None:
    held = load_filter("worker")
    allow_all = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000).hex()
    ended = runner.changed(["/bin/echo", "ran"], cwd, seccomp=type(held)("worker", allow_all, held.sha256))
    assert ended.observed is not None
    assert not ended.observed.satisfied
    assert ended.exited.killed_for == "not_enforced"
    assert ended.exited.stdout == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone could have read the filter back")
def test_under_a_filtered_host_the_program_is_installed_and_not_observed(cwd: Path) -> None:
    """A container's filter on the host: what cannot be read back is not said to have been read."""
    allow_all = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    assert in_a_filtered_process(allow_all, cwd) == ["observed", {"mode": 2, "filters": 1}, "installed", True]


def in_a_filtered_process(program: bytes, cwd: Path) -> Any:
    from confine import syscalls

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.install_filter(program)
            with Launcher.start() as launcher:
                ended = Runner(launcher).run(["/bin/true"], cwd)
            mode, held = ended.field("seccomp"), ended.field("seccomp_program")
            os.write(write, json.dumps([mode.source, mode.value, held.source, ended.exited.exit_code == 0]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        content = answer.read()
    os.waitpid(child, 0)
    return json.loads(content or b"null")
