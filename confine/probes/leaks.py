"""Probes of what may have been left lying about: descriptors, secrets, names."""

import errno
import grp
import os
import pwd
import socket

from confine.probes import Escaped, Group, World
from confine.probes.calls import must_be_refused
from confine.probes.files import each_refused, readable

probe = Group("leaks")
_SYSLOG_READ_ALL = 3


@probe("refused", cve="CVE-2024-21626")
def descriptor_7(world: World) -> str:
    """Goes to a folder of the host by descriptor 7, which the command holds open without close-on-exec."""
    os.chdir(f"/proc/self/fd/{world.inherited}")
    return f"went to {os.getcwd()}"


@probe("contained")
def open_descriptors(_: World) -> str:
    """Looks for open descriptors besides 0, 1 and 2."""
    with os.scandir("/proc/self/fd") as entries:
        names = {entry.name: os.readlink(entry.path) for entry in entries}
    others = {name: to for name, to in names.items() if int(name) > 2 and not to.endswith("/fd")}
    if others:
        raise Escaped(str(others))
    return "0, 1 and 2"


@probe("contained")
def environment(world: World) -> str:
    """Looks for a secret of the command's environment in its own, as given and as it is now."""
    with open("/proc/self/environ", encoding="utf-8", errors="replace") as file:
        given = file.read()
    if world.secret_text in given or world.secret_text in str(dict(os.environ)):
        raise Escaped("the operator's variables are there")
    return f"{len(os.environ)} variables of the profile's"


@probe("contained")
def arguments_of_the_host(world: World) -> str:
    """Looks for arguments of other processes."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with open(f"/proc/{name}/cmdline", encoding="utf-8", errors="replace") as file:
            raise Escaped(f"process {name}: {file.read()[:80]}")
    return "no other process is there"


@probe("refused")
def arguments_of_init(_: World) -> str:
    """Reads the arguments of process 1, which are the launcher's, and of the Linux kernel."""
    with open("/proc/cmdline", "rb") as file:
        if file.read(1):
            raise Escaped("the Linux kernel's command line")
    return each_refused(readable, ("/proc/1/cmdline",))


@probe("contained")
def names_of_the_machine(world: World) -> str:
    """Looks for the host's name."""
    names = {socket.gethostname(), os.uname().nodename}
    for path in ("/etc/hostname", "/etc/hosts", "/proc/sys/kernel/hostname"):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                names |= set(file.read().split())
    if world.host_name in names and world.host_name not in {world.hostname, "localhost"}:
        raise Escaped(world.host_name)
    return f"it is {socket.gethostname()}"


@probe("contained")
def accounts(world: World) -> str:
    """Looks for the machine's accounts."""
    names = {entry.pw_name for entry in pwd.getpwall()} | {entry.gr_name for entry in grp.getgrall()}
    found = (names & set(world.host_accounts)) - {"nobody", "nogroup"}
    if found:
        raise Escaped(", ".join(sorted(found)))
    return f"only {', '.join(sorted(names))}"


@probe("contained")
def identity_of_the_machine(_: World) -> str:
    """Looks for the machine's id, and for the login that started all this."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id", "/sys/class/dmi/id/product_uuid"):
        if os.path.exists(path):
            raise Escaped(path)
    return "none is there"


@probe("contained")
def keys(_: World) -> str:
    """Reads the descriptions of keys, which name accounts and services."""
    found = []
    for path in ("/proc/keys", "/proc/key-users"):
        if os.path.exists(path):
            with open(path, "rb") as file:
                found += [path] if file.read(1) else []
    if found:
        raise Escaped(", ".join(found))
    return "empty"


@probe("refused")
def kernel_log(_: World) -> str:
    """Reads the Linux kernel's log."""
    return must_be_refused("syslog", _SYSLOG_READ_ALL, bytes(4096), 4096)


@probe("contained")
def kernel_memory_and_addresses(_: World) -> str:
    """Reads files of /proc that hold the Linux kernel's memory, addresses and timers."""
    found = []
    for name in ("kcore", "kallsyms", "modules", "timer_list", "sched_debug", "vmallocinfo", "iomem", "kmsg"):
        try:
            fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            found += [name] if os.read(fd, 1) else []
        except OSError:
            found.append(name)
        os.close(fd)
    if found:
        raise Escaped(", ".join(found))
    return "absent or empty"


@probe("refused")
def terminal_of_the_host(_: World) -> str:
    """Opens the controlling terminal."""
    return f"opened {os.open('/dev/tty', os.O_RDWR | os.O_NOCTTY)}"


@probe("refused")
def folders_of_the_machine(world: World) -> str:
    """Lists folders that hold the machine's secrets and everyone's."""
    paths = ("/root", "/home", "/var", "/run/secrets", "/sys", "/boot", "/mnt", "/srv", "/etc/ssh", "/etc/ssl/private")
    given = {part for path in (world.cwd, world.exports) for part in path.split("/")}
    found = []
    for path in paths:
        try:
            found += [f"{path}/{name}" for name in os.listdir(path) if name not in given]
        except OSError:
            continue
    if found:
        raise Escaped(", ".join(found))
    raise FileNotFoundError(errno.ENOENT, "none is there")
