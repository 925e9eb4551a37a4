"""Probes of files: what was not given, and writing to what was given read-only."""

import errno
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from confine.probes import Escaped, Group, Skipped, World
from confine.probes.calls import AT_FDCWD, CLONE_NEWNS, CLONE_NEWUSER, call, must_be_refused

probe = Group("files")
_RACE_SECONDS = 1.0
_MNT_DETACH = 2


def all_refused(acts: Mapping[str, Callable[[], object]]) -> str:
    """Raises the first refusal when every act is refused; Escaped with the names of those that were not."""
    refusals, done = [], []
    for name, act in acts.items():
        try:
            act()
        except OSError as error:
            refusals.append(error)
        else:
            done.append(name)
    if done:
        raise Escaped(", ".join(done))
    raise refusals[0]


def each_refused(act: Callable[[str], object], names: Iterable[str]) -> str:
    """all_refused() of one act with each of several names."""
    return all_refused({name: partial(act, name) for name in names})


def writable(path: str) -> None:
    """Opens a file for writing, without making it, and writes nothing."""
    os.close(os.open(path, os.O_WRONLY))


def readable(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


@probe("refused")
def shadow(_: World) -> str:
    """Reads the machine's password hashes."""
    with open("/etc/shadow", "rb") as file:
        return f"{len(file.read())} bytes"


@probe("refused")
def the_secret_beside(world: World) -> str:
    """Reads a file beside the given folder, by its path and by .. from the working directory."""
    climb = "/".join([".."] * 32)
    return each_refused(readable, (world.secret, climb + world.secret))


@probe("refused")
def root_of_process_1(_: World) -> str:
    """Looks through /proc/1/root and /proc/1/cwd."""
    return each_refused(os.listdir, ("/proc/1/root", "/proc/1/cwd", "/proc/1/task"))


@probe("contained")
def descriptors_of_other_processes(world: World) -> str:
    """Looks for a /proc/*/fd, /proc/*/root or /proc/*/mem that is not its own."""
    foreign = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    if foreign:
        raise Escaped(f"processes {', '.join(foreign)}")
    for pid in (1, world.host_pid):
        if os.path.exists(f"/proc/{pid}/fd"):
            raise Escaped(f"/proc/{pid}/fd")
    return "only its own process is there"


@probe("refused")
def open_by_handle(world: World) -> str:
    """Opens a file by its handle, past the mount namespace, as Shocker did in 2014."""
    handle = bytearray(struct.pack("=Ii", 8, 1) + struct.pack("=Q", 2) + bytes(120))
    fd = os.open(world.cwd, os.O_RDONLY)
    return must_be_refused("open_by_handle_at", fd, bytes(handle), os.O_RDONLY)


@probe("refused", cve="CVE-2022-0185")
def fsopen(_: World) -> str:
    """Opens a file system's context."""
    return must_be_refused("fsopen", b"tmpfs", 0)


@probe("refused", cve="CVE-2021-41133")
def open_tree(_: World) -> str:
    """Clones a mount."""
    return must_be_refused("open_tree", AT_FDCWD, b"/tmp", 1)


@probe("refused", cve="CVE-2021-41133")
def mount_setattr(world: World) -> str:
    """Takes the read-only attribute off the given folder."""
    return must_be_refused("mount_setattr", AT_FDCWD, world.cwd.encode(), 0, struct.pack("=QQQQ", 0, 1, 0, 0), 32)


@probe("refused")
def mount(_: World) -> str:
    """Mounts a tmpfs over a folder of its own."""
    os.mkdir("/tmp/own")
    return must_be_refused("mount", b"none", b"/tmp/own", b"tmpfs", 0, b"")


@probe("refused")
def remount(world: World) -> str:
    """Remounts the given folder writable."""
    return must_be_refused("mount", b"none", world.cwd.encode(), b"", 32 | 4096, b"")


@probe("refused")
def unmount_of_masks(world: World) -> str:
    """Takes off what covers files of /proc, and a state directory."""
    return each_refused(_unmount, _masks(world))


@probe("refused")
def unmount_of_masks_in_a_user_namespace(world: World) -> str:
    """The same with all capabilities of a user namespace of its own, where mounts are locked (mount_namespaces(7))."""
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    return each_refused(_unmount, _masks(world))


def _unmount(path: str) -> None:
    call("umount2", path.encode(), _MNT_DETACH)


def _masks(world: World) -> list[str]:
    in_proc = [f"/proc/{name}" for name in ("kcore", "keys", "timer_list", "sys") if os.path.exists(f"/proc/{name}")]
    return [*in_proc, f"{world.cwd}/state", world.cwd]


@probe("refused")
def chroot_escape(_: World) -> str:
    """Leaves by a second chroot, with a descriptor of what is above it."""
    os.mkdir("/tmp/jail")
    above = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/jail")
    os.fchdir(above)
    for _step in range(32):
        os.chdir("..")
    return f"chroot worked: {sorted(os.listdir('.'))[:5]}"


@probe("refused")
def pivot_root(_: World) -> str:
    """Changes the root of its mount namespace."""
    return must_be_refused("pivot_root", b"/tmp", b"/tmp")


@probe("refused")
def mknod(_: World) -> str:
    """Makes a device node of memory and of a disk. Nothing is opened."""
    return all_refused(
        {
            "memory": lambda: os.mknod("/tmp/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1)),
            "disk": lambda: os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0)),
        }
    )


@probe("contained")
def devices(_: World) -> str:
    """Opens devices that are not those five that hold nothing."""
    harmless = {"null", "zero", "full", "random", "urandom"}
    links = {"fd", "stdin", "stdout", "stderr"}
    found = set(os.listdir("/dev")) - harmless - links - {"shm"}
    if found:
        raise Escaped(", ".join(sorted(found)))
    for name in ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "tty", "ptmx", "console", "net/tun", "sda", "vda"):
        if os.path.exists(f"/dev/{name}"):
            raise Escaped(f"/dev/{name}")
    return f"only {', '.join(sorted(harmless))}"


@probe("refused")
def write_through_a_read_only_bind(world: World) -> str:
    """Writes to a given file in every way there is: open, truncate, mode, times, attributes, a reopened descriptor."""
    path = f"{world.private}/input"

    def reopened() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY))

    def by_path_descriptor() -> None:
        fd = os.open(path, os.O_PATH)
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))

    return all_refused(
        {
            "open": lambda: writable(path),
            "truncate": lambda: os.truncate(path, 0),
            "chmod": lambda: os.chmod(path, 0o777),
            "utime": lambda: os.utime(path),
            "setxattr": lambda: os.setxattr(path, "user.probe", b"x"),
            "unlink": lambda: os.unlink(path),
            "create": lambda: os.close(os.open(f"{world.private}/new", os.O_CREAT | os.O_WRONLY)),
            "mkdir": lambda: os.mkdir(f"{world.private}/folder"),
            "reopen": reopened,
            "O_PATH": by_path_descriptor,
        }
    )


def _write_into(pipe: str) -> None:
    os.write(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), b"x")


@probe("refused")
def pipe_in_a_read_folder(world: World) -> str:
    """Writes into a named pipe of the host in a given folder, where a read-only bind would not stop it."""
    return each_refused(_write_into, [f"{folder}/pipe" for folder in (world.cwd, world.private)])


@probe("refused")
def pipe_in_a_read_folder_below_tmp(world: World) -> str:
    """The same in a folder below /tmp: Landlock's rules add up along a path, and /tmp is writable."""
    return each_refused(_write_into, [f"{world.below_tmp}/pipe"])


@probe("refused")
def links_and_renames_out(world: World) -> str:
    """Moves files across the edge of what it may write."""
    with open("/tmp/own", "w", encoding="ascii") as file:
        file.write("own")
    return all_refused(
        {
            "link in": lambda: os.link("/tmp/own", f"{world.cwd}/own"),
            "link out": lambda: os.link(f"{world.cwd}/input", "/tmp/linked"),
            "rename in": lambda: os.rename("/tmp/own", f"{world.cwd}/own"),
            "rename out": lambda: os.rename(f"{world.cwd}/input", "/tmp/input"),
            "rename inside": lambda: os.rename(f"{world.cwd}/input", f"{world.cwd}/moved"),
            "symlink": lambda: os.symlink("/etc/shadow", f"{world.cwd}/link"),
        }
    )


@probe("contained", cve="CVE-2021-30465")
def race_on_a_link_in_cwd(world: World) -> str:
    """Opens a link that the command turns again and again from a harmless folder to a secret one."""
    return _never_the_secret(world, f"{world.cwd}/swap/secret")


@probe("contained", cve="CVE-2025-31133")
def race_on_a_mask(world: World) -> str:
    """Opens a state directory while the command renames it to and fro."""
    return _never_the_secret(world, f"{world.cwd}/moving/keys", f"{world.cwd}/moved/keys")


def _never_the_secret(world: World, *paths: str) -> str:
    tries, until = 0, time.monotonic() + _RACE_SECONDS
    while time.monotonic() < until:
        for path in paths:
            tries += 1
            try:
                with open(path, encoding="utf-8") as file:
                    text = file.read()
            except OSError:
                continue
            if world.secret_text in text:
                raise Escaped(f"read at try {tries}")
    return f"never in {tries} tries"


@probe("contained", cve="CVE-2021-30465")
def race_on_exports(world: World) -> str:
    """Leaves a process that turns an export into a link and back until it is killed; the command then harvests."""
    os.chdir(world.exports)
    with open("file", "w", encoding="ascii") as file:
        file.write("own")
    os.symlink(world.secret, "link")
    if os.fork() == 0:
        try:
            os.setsid()
            while True:
                shutil.copyfile("file", "next")
                os.rename("next", "out")
                os.symlink(world.secret, "next")
                os.rename("next", "out")
        finally:
            os._exit(1)
    while not os.path.lexists("out"):
        time.sleep(0.001)
    return "left a process that swaps its export"


@probe("refused", cve="CVE-2023-0386")
def overlay(world: World) -> str:
    """Mounts an overlay over the given folder, to write in it."""
    for name in ("upper", "work", "merged"):
        os.mkdir(f"/tmp/{name}")
    options = f"lowerdir={world.cwd},upperdir=/tmp/upper,workdir=/tmp/work".encode()
    return must_be_refused("mount", b"overlay", b"/tmp/merged", b"overlay", 0, options)


@probe("refused")
def state_directory(world: World) -> str:
    """Reads and takes away the state directory of a host, below the given folder."""
    state = f"{world.cwd}/state"
    return all_refused(
        {
            "list": lambda: os.listdir(state),
            "read": lambda: readable(f"{state}/keys"),
            "chmod": lambda: os.chmod(state, 0o777),
            "rename": lambda: os.rename(state, f"{world.cwd}/mine"),
            "rmdir": lambda: os.rmdir(state),
        }
    )


@probe("refused", layer="distinct-uids")
def state_directory_made_later(world: World) -> str:
    """Reads a state directory that was made after the launch, of mode 0700 as every state is."""
    with open(f"{world.cwd}/late/keys", encoding="utf-8") as file:
        return f"read {len(file.read())} characters"


@probe("refused", layer="distinct-uids")
def state_directory_made_later_in_a_private_folder(world: World) -> str:
    """The same in a folder that was given although its own mode is 0700."""
    with open(f"{world.private}/late/keys", encoding="utf-8") as file:
        return f"read {len(file.read())} characters"


@probe("refused")
def another_attempts_scratch(world: World) -> str:
    """Reads what an attempt beside this one wrote into its scratch folder."""
    with open(f"{world.neighbour_scratch}/secret", encoding="utf-8") as file:
        return f"read {len(file.read())} characters"


@probe("refused")
def another_attempts_memory(world: World) -> str:
    """Attaches System V shared memory that an attempt beside this one made."""
    try:
        call("shmget", world.neighbour_shm_key, 0, 0)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise Skipped("this Linux kernel has no System V shared memory") from None
        raise
    return "found"


@probe("contained")
def another_attempts_tmp(world: World) -> str:
    """Looks for files of the machine and of other attempts in /tmp and /dev/shm."""
    paths = (world.cwd, world.private, world.below_tmp, world.exports)
    given = {f"/{part}" for path in paths for part in path.split("/")}
    folders = [folder for folder in ("/tmp", "/dev/shm", "/var/tmp") if os.path.isdir(folder)]
    found = {f"/{name}" for folder in folders for name in os.listdir(folder)}
    if found - given:
        raise Escaped(", ".join(sorted(found - given)))
    return "empty, apart from what was given"


@probe("refused")
def writing_in_proc(_: World) -> str:
    """Sets values of the machine in /proc/sys."""
    names = ("kernel/hostname", "kernel/randomize_va_space", "vm/overcommit_memory", "net/ipv4/ip_forward")
    return each_refused(writable, [f"/proc/sys/{name}" for name in names])
