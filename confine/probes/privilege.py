"""Probes of privilege: ways to become more than an unprivileged user, and parts of the Linux kernel that need none."""

import ctypes
import errno
import glob
import os
import stat
import struct
import subprocess
import time

from confine.probes import Escaped, Group, Skipped, World
from confine.probes.calls import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER, call, libc, must_be_refused
from confine.probes.files import all_refused, each_refused, writable

probe = Group("privilege")
_SIGCHLD = 17


@probe("contained")
def setuid_files(_: World) -> str:
    """Runs a setuid program of the machine, and looks as whom it runs while it waits for a full pipe to be read."""
    for path in sorted(glob.glob("/usr/bin/*")):
        status = os.stat(path) if os.path.exists(path) else None
        if status is not None and status.st_mode & stat.S_ISUID and os.access(path, os.X_OK):
            return _runs_as_us(path)
    raise Skipped("no setuid program is visible")


def _runs_as_us(path: str) -> str:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, bytes(4096))
    except BlockingIOError:
        os.set_blocking(write, True)
    with subprocess.Popen([path, "--help"], stdin=subprocess.DEVNULL, stdout=write, stderr=write) as process:
        seen = ["unknown"]
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
                lines = {line.partition(":")[0]: line.partition(":")[2].split() for line in file}
            if lines["Name"] == [os.path.basename(path)[:15]]:
                seen = lines.get("Uid", seen)
                break
        process.kill()
        os.close(read)
    if set(seen) != {str(os.getuid())}:
        raise Escaped(f"{path} runs with the uids {seen}")
    return f"{path} runs with the uids {' '.join(seen)}"


@probe("refused")
def becoming_root(_: World) -> str:
    """Sets its uid and gid to 0, in every way."""
    return all_refused(
        {
            "setuid": lambda: os.setuid(0),
            "setreuid": lambda: os.setreuid(0, 0),
            "setresuid": lambda: os.setresuid(0, 0, 0),
            "setgid": lambda: os.setgid(0),
        }
    )


@probe("refused", cve="CVE-2014-8989")
def setgroups(_: World) -> str:
    """Drops or takes supplementary groups: some files are closed to a group."""
    return all_refused({"drop": lambda: os.setgroups([]), "take": lambda: os.setgroups([0])})


@probe("refused", cve="CVE-2022-0185")
def user_namespace(_: World) -> str:
    """Makes a user namespace, in which it has every Linux capability."""
    return must_be_refused("unshare", CLONE_NEWUSER)


@probe("refused")
def user_namespace_by_clone(_: World) -> str:
    """The same by clone()."""
    result = call("clone", CLONE_NEWUSER | _SIGCHLD, None, None, None, 0)
    if result == 0:
        os._exit(0)
    return "clone made a user namespace"


@probe("refused")
def other_namespaces(_: World) -> str:
    """Makes a mount and a network namespace."""
    return all_refused(
        {"mount": lambda: call("unshare", CLONE_NEWNS), "network": lambda: call("unshare", CLONE_NEWNET)}
    )


@probe("refused")
def network_administration_in_a_user_namespace(_: World) -> str:
    """Makes a user and a network namespace: what most exploits of nf_tables start from (CVE-2024-1086 was one)."""
    return must_be_refused("unshare", CLONE_NEWUSER | CLONE_NEWNET)


@probe("refused")
def capabilities(_: World) -> str:
    """Raises its Linux capabilities, and looks that all five sets are empty."""
    with open("/proc/self/status", encoding="ascii") as file:
        sets = {line.split()[0]: int(line.split()[1], 16) for line in file if line.startswith("Cap")}
    if any(sets.values()):
        raise Escaped(f"{sets}")
    everything = struct.pack("=IIIIII", *[0xFFFFFFFF] * 6)
    call("capset", struct.pack("=Ii", 0x20080522, 0), everything)
    return "capset raised them"


@probe("refused", cve="CVE-2016-0728")
def add_key(_: World) -> str:
    """Adds a key to its session's keyring."""
    return must_be_refused("add_key", b"user", b"chio-probe", b"x", 1, -3)


@probe("refused")
def keyctl(_: World) -> str:
    """Asks for its user's keyring, which no namespace but the user's separates."""
    return must_be_refused("keyctl", 0, -4, 0)


@probe("refused")
def request_key(_: World) -> str:
    """Searches the keyrings for a key; the Linux kernel may start a program for that."""
    return must_be_refused("request_key", b"user", b"chio-probe", None, 0)


@probe("refused", cve="CVE-2020-8835")
def bpf(_: World) -> str:
    """Makes a BPF map of one entry."""
    return must_be_refused("bpf", 0, struct.pack("=IIII", 2, 4, 4, 1) + bytes(112), 128)


@probe("refused", cve="CVE-2013-2094")
def perf_event_open(_: World) -> str:
    """Counts its own processor time."""
    attributes = struct.pack("=IIQQQQQ", 1, 128, 0, 0, 0, 0, (1 << 5) | (1 << 6)) + bytes(80)
    return must_be_refused("perf_event_open", attributes, 0, -1, -1, 0)


@probe("refused")
def userfaultfd(_: World) -> str:
    """Handles its own page faults: what holds a race in the Linux kernel open for as long as one likes."""
    return must_be_refused("userfaultfd", os.O_CLOEXEC | 1)


@probe("refused")
def kernel_modules(_: World) -> str:
    """Loads a module of no bytes."""
    return must_be_refused("init_module", b"", 0, b"")


@probe("refused")
def kexec(_: World) -> str:
    """Loads another Linux kernel, of no segments and with flags that do not exist."""
    return must_be_refused("kexec_load", 0, 0, None, 0xFFFF)


@probe("refused")
def reboot(_: World) -> str:
    """Asks for a reboot with magic numbers that are none: permission is checked before them (reboot(2))."""
    return must_be_refused("reboot", 1, 2, 3, None)


@probe("refused")
def swapon(_: World) -> str:
    """Swaps to a file that does not exist."""
    return must_be_refused("swapon", b"/tmp/none", 0)


@probe("refused")
def accounting(_: World) -> str:
    """Asks for process accounting into a file that does not exist."""
    return must_be_refused("acct", b"/tmp/none")


@probe("refused")
def clocks(_: World) -> str:
    """Sets the machine's clock to what it shows."""
    time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    return "set"


@probe("refused")
def hostname(world: World) -> str:
    """Sets the hostname, which is that of its own namespace."""
    name = world.hostname.encode()
    if libc.sethostname(name, ctypes.c_size_t(len(name))):
        raise OSError(ctypes.get_errno(), "sethostname")
    return "set"


@probe("refused")
def core_pattern(_: World) -> str:
    """Names the program that the Linux kernel runs, as root, when a process crashes."""
    return f"opened {os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)}"


@probe("refused")
def usermode_helpers(_: World) -> str:
    """Opens the other files that name a program which the Linux kernel runs."""
    paths = ("/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sys/fs/binfmt_misc/register",
             "/sys/kernel/uevent_helper")  # fmt: skip
    return each_refused(writable, paths)


@probe("refused", cve="CVE-2022-0492")
def release_agent(_: World) -> str:
    """Mounts a v1 hierarchy of cgroups, or finds one, to name a program that is run as root when a group empties."""
    found = [path for top in ("/sys/fs/cgroup", "/cgroup") for path in glob.glob(f"{top}/**/release_agent")]
    if found:
        return f"opened {os.open(found[0], os.O_WRONLY)}"
    os.mkdir("/tmp/cgroup")
    return must_be_refused("mount", b"cgroup", b"/tmp/cgroup", b"cgroup", 0, b"none,name=chio-probe")


@probe("refused")
def own_cgroup(_: World) -> str:
    """Leaves its cgroup, or raises its limits."""
    found = [path for name in ("cgroup.procs", "memory.max") for path in glob.glob(f"/sys/fs/cgroup/**/{name}")]
    if found:
        return f"opened {os.open(found[0], os.O_WRONLY)}"
    raise FileNotFoundError(errno.ENOENT, "no cgroup file system is there")


@probe("refused", cve="CVE-2019-5736")
def own_program(_: World) -> str:
    """Opens the program it runs for writing, by /proc/self/exe and by its path."""
    return each_refused(writable, ("/proc/self/exe", os.readlink("/proc/self/exe")))


@probe("contained", cve="CVE-2025-52881")
def sysrq(_: World) -> str:
    """Opens /proc/sysrq-trigger, and looks whether that is the device which holds nothing. Nothing is written."""
    fd = os.open("/proc/sysrq-trigger", os.O_WRONLY)
    if os.fstat(fd).st_rdev != os.makedev(1, 3):
        raise Escaped("it is the real one")
    return "it is covered by /dev/null"


@probe("refused")
def oom_score(_: World) -> str:
    """Makes others die in its place when memory runs out."""
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        score = int(file.read())
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(score - 1))
    return f"lowered from {score}"


@probe("refused")
def dropping_no_new_privs(_: World) -> str:
    """Takes no_new_privs off."""
    if libc.prctl(38, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    return "taken off"
