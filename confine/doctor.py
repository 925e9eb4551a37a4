"""chio-confine doctor: what this Linux kernel and this user can do, layer by layer, and the command that fixes it.

Nothing is believed from a version number: each thing is tried, in a child that ends right after, in namespaces of its
own. Settings of the machine are read only to say why a try failed. The last line is a real launch under the profile.
"""

import errno
import os
import platform
import select
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from confine import cgroups, hierarchies, mounts, syscalls
from confine.errors import ConfineError, LayerMissing
from confine.identities import LAYER as DISTINCT_UIDS
from confine.identities import claim_identity
from confine.landlock import LINUX_OF_ABI, TABLE
from confine.launch import Launcher, launch_spec
from confine.namespaces import MountIdMaps, map_own_user
from confine.plan import plan_mounts
from confine.profile import Profile, load_profile
from confine.seccomp import load_filter
from confine.spec import LaunchFailed, Observed

State = Literal["ok", "limited", "missing"]
_NAMESPACES = {
    "mnt": syscalls.CLONE_NEWNS,
    "net": syscalls.CLONE_NEWNET,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
    "cgroup": syscalls.CLONE_NEWCGROUP,
    "pid": syscalls.CLONE_NEWPID,
}
_PATIENCE_MS = 10_000
_UNPRIVILEGED_ID = 65_534


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. state: ok | limited (there, with less than there could be) | missing. `fix` is a command, or None."""

    layer: str
    state: State
    detail: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What `chio-confine doctor` prints. `ready`: a launch under the profile holds, but for the layers of `without`."""

    profile: str
    kernel: str
    user: str
    without: tuple[str, ...]
    findings: tuple[Finding, ...]
    ready: bool


def examine(profile_name: str = "worker", without: Sequence[str] = ()) -> Report:
    """Tries everything. ConfineError when there is no such profile; nothing else is an error here, but a finding."""
    profile = load_profile(profile_name)
    findings = [
        _machine(),
        _container(),
        _user_namespaces(),
        *_other_namespaces(),
        _mount_interface(),
        _fresh_proc(),
        _overlays(),
        _id_mapped_mounts(),
        _ptrace(),
        _seccomp(profile),
        _filter_read_back(),
        _landlock(profile),
        _cgroups(profile),
        _identities(),
    ]
    launch = _launch(profile, without)
    user = "root" if os.geteuid() == 0 else str(os.geteuid())
    return Report(profile.name, os.uname().release, user, tuple(without), (*findings, launch), launch.state == "ok")


# --- trying something in a child ------------------------------------------------------------------------------------


def _try(act: Callable[[], None]) -> OSError | None:
    """What `act` raised in a forked child; None if it went well. The child's changes end with it."""
    read, write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        number = errno.EIO
        try:
            act()
            number = 0
        except OSError as error:
            number = error.errno or errno.EIO
        finally:
            os.write(write, bytes([number & 0xFF]))
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answered = select.select([file], [], [], _PATIENCE_MS / 1000)[0]
        if not answered:
            os.kill(child, signal.SIGKILL)
        answer = file.read(1)
    os.waitpid(child, 0)
    number = answer[0] if answer else errno.ETIMEDOUT
    return OSError(number, os.strerror(number)) if number else None


def _own_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    map_own_user(uid, gid)


def _use_own_user_namespace() -> None:
    """Where it is restricted, making one may go well, and leave it without any Linux capability."""
    _own_user_namespace()
    syscalls.unshare(syscalls.CLONE_NEWNET)


def _privileged() -> None:
    """As much privilege as a launch has at this point: root's own, or that of a user namespace."""
    if os.geteuid() != 0:
        _own_user_namespace()


def _setting(path: str) -> str | None:
    with suppress(OSError), open(path, encoding="ascii") as file:
        return file.read().strip()
    return None


# --- one finding each -----------------------------------------------------------------------------------------------


def _machine() -> Finding:
    """confine.syscalls is imported, so the machine's numbers are known."""
    return Finding("machine", "ok", f"{platform.machine()}, Linux {os.uname().release}")


def _container() -> Finding:
    marks = [path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)]
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}
    filtered = status.get("Seccomp") == "2"
    where = f"in a container ({marks[0]})" if marks else "not in a container that can be seen"
    if not filtered:
        return Finding("container", "ok", f"{where}, and under no system call filter")
    fix = "run the container with --security-opt seccomp=unconfined"
    return Finding("container", "limited", f"{where}, under a system call filter: see the lines below", fix)


def _user_namespaces() -> Finding:
    error = _try(_own_user_namespace)
    if error is None and os.geteuid() == 0:
        return Finding("user namespaces", "ok", "the worker's own")
    if error is None:
        error = _try(_use_own_user_namespace)
        if error is None:
            return Finding("user namespaces", "ok", "an ordinary user may make them")
    return Finding("user namespaces", "missing", error.strerror or "", _user_namespace_fix())


def _user_namespace_fix() -> str:
    if _setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu's restriction), or run it as root"
    if _setting("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if _setting("/proc/sys/user/max_user_namespaces") == "0":
        return "sudo sysctl -w user.max_user_namespaces=15000"
    return "in a container: run it with --security-opt seccomp=unconfined; otherwise run as root"


def _other_namespaces() -> list[Finding]:
    findings = []
    for name, flag in _NAMESPACES.items():

        def act(flag: int = flag) -> None:
            _privileged()
            syscalls.unshare(flag)

        error = _try(act)
        detail = "own" if error is None else error.strerror or ""
        fix = None if error is None else f"a Linux kernel with CONFIG_{name.upper()}_NS, or the fix for user namespaces"
        findings.append(Finding(f"namespace {name}", "ok" if error is None else "missing", detail, fix))
    return findings


def _mount_interface() -> Finding:
    def act() -> None:
        _privileged()
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.make_mounts_private()
        tree = syscalls.new_mount("tmpfs", {"size": "64k"}, 0)
        syscalls.mount_setattr(tree, syscalls.MOUNT_ATTR_RDONLY)
        at = os.open("/tmp", os.O_PATH | os.O_DIRECTORY)
        syscalls.move_mount(tree, at)  # in this child's own mount namespace

    error = _try(act)
    if error is None:
        return Finding("mounts", "ok", "fsopen, mount_setattr, move_mount")
    fix = "Linux 5.12 or newer" if error.errno == errno.ENOSYS else _user_namespace_fix()
    return Finding("mounts", "missing", error.strerror or "", fix)


def _fresh_proc() -> Finding:
    def act() -> None:
        _privileged()
        syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
        syscalls.make_mounts_private()
        error = _try(lambda: os.close(syscalls.new_mount("proc", {}, 0)))  # a child is process 1 of the new namespace
        if error is not None:
            raise error

    error = _try(act)
    if error is None:
        return Finding("fresh /proc", "ok", "a new one can be mounted")
    fix = "the machine's /proc is covered in part, as containers do: run it with --security-opt systempaths=unconfined"
    return Finding("fresh /proc", "missing", error.strerror or "", fix)


def _a_folder() -> tempfile.TemporaryDirectory[str]:
    """Here, where workers' folders may be, if this user can write here."""
    return tempfile.TemporaryDirectory(dir=os.getcwd() if os.access(".", os.W_OK) else None)


def _overlays() -> Finding:
    def act() -> None:
        """As a launch does it: an empty folder, which must be mounted somewhere, over one of this file system."""
        _privileged()
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.make_mounts_private()
        folder, place = (os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (one_here, "/tmp"))
        empty = syscalls.new_mount("tmpfs", {"mode": "755", "size": "4k", "nr_inodes": "1"}, 0)
        syscalls.move_mount(empty, place)
        os.close(mounts.overlay(empty, folder))

    with _a_folder() as one_here:
        error = _try(act)
    if error is None:
        return Finding("overlay", "ok", "folders can be given without the sockets and pipes in them")
    fix = mounts.OVERLAY_HINTS.get(error.errno or 0, "run it as root")
    return Finding("overlay", "missing", error.strerror or "", fix)


def _id_mapped_mounts() -> Finding:
    name = "ID-mapped mounts"
    if os.geteuid() != 0:
        return Finding(name, "ok", "not needed: an ordinary user's worker has the user's own rights to read")
    with _a_folder() as folder:
        source = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            tree = syscalls.open_tree_clone(source)
            os.close(source)
            source = tree
            ids = MountIdMaps().namespace((0, 0), _UNPRIVILEGED_ID, _UNPRIVILEGED_ID)
            syscalls.mount_setattr(tree, syscalls.MOUNT_ATTR_IDMAP, ids)
            os.close(ids)
        except OSError as error:
            fix = "chmod o+r the single files that workers read, or keep them on ext4, xfs or btrfs"
            return Finding(name, "limited", f"not on the file system of {folder}: {error.strerror}", fix)
        finally:
            os.close(source)
    return Finding(name, "ok", "single files of mode 0600 can be given")


def _ptrace() -> Finding:
    def act() -> None:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            theirs.recv(1)
            os._exit(0)
        syscalls.ptrace(syscalls.PTRACE_SEIZE, child, syscalls.PTRACE_O_EXITKILL)

    error = _try(act)
    if error is None:
        return Finding("ptrace", "ok", "a launch can be observed at its exec")
    fix = None
    if _setting("/proc/sys/kernel/yama/ptrace_scope") in {"2", "3"}:
        fix = "sudo sysctl -w kernel.yama.ptrace_scope=1 (3 stays until the next boot), or run it as root"
    return Finding("ptrace", "missing", error.strerror or "", fix or "run it outside strace and gdb, and as root")


def _seccomp(profile: Profile) -> Finding:
    actions = _setting("/proc/sys/kernel/seccomp/actions_avail")
    if actions is None or "kill_process" not in actions.split():
        return Finding("seccomp", "missing", "this Linux kernel has no filters", "a kernel with CONFIG_SECCOMP_FILTER")
    try:
        compiled = load_filter(profile.seccomp)
    except ConfineError as error:
        return Finding("seccomp", "missing", error.what, error.fix)
    return Finding("seccomp", "ok", f"the list {compiled.name} compiles to {len(compiled.program) // 16} instructions")


def _filter_read_back() -> Finding:
    """PTRACE_SECCOMP_GET_FILTER needs CAP_SYS_ADMIN in the first user namespace and an unfiltered tracer."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        status = {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}
    initial = (_setting("/proc/self/uid_map") or "").split() == ["0", "0", "4294967295"]
    if int(status["CapEff"], 16) >> 21 & 1 and initial and status.get("Seccomp") == "0":
        return Finding("filter read back", "ok", "a launch record shows the filter as observed")
    return Finding("filter read back", "limited", "a launch record shows the filter as installed", "run it as root")


def _landlock(profile: Profile) -> Finding:
    abi = syscalls.landlock_abi()
    newest = max(needed for needed, *_ in TABLE)
    if abi >= newest:
        return Finding("landlock", "ok", f"ABI {abi}")
    missing = ", ".join(name for needed, name, *_ in TABLE if needed > abi)
    state: State = "missing" if profile.landlock == "required" or not abi else "limited"
    if not abi:
        return Finding("landlock", state, "none", "boot with landlock in lsm= (see /sys/kernel/security/lsm)")
    return Finding("landlock", state, f"ABI {abi}, without {missing}", f"Linux {LINUX_OF_ABI[newest]} or newer")


def _cgroups(profile: Profile) -> Finding:
    try:
        layout = hierarchies.find_layout()
    except LayerMissing as missing:
        return Finding("cgroup", "missing" if profile.cgroup == "required" else "limited", missing.what, missing.fix)
    places = sorted({place.path for place in layout.places.values()})
    return Finding("cgroup", "ok", f"{layout.version}: {', '.join(places)}")


def _identities() -> Finding:
    try:
        claim_identity().close()
    except ConfineError as error:
        return Finding(DISTINCT_UIDS, "missing", error.what, error.fix)
    return Finding(DISTINCT_UIDS, "ok", "each attempt has a uid of its own")


def _launch(profile: Profile, without: Sequence[str]) -> Finding:
    """/usr/bin/true, observed at its exec as every worker is."""
    try:
        with tempfile.TemporaryDirectory() as folder, Launcher.start() as launcher:
            os.chmod(folder, 0o755)
            cgroups.require_cgroups(profile.cgroup, (), without)
            plan = plan_mounts(argv=["true"], cwd=folder, state_dir=None, path_env="/usr/bin:/bin")
            identity = claim_identity(without)
            spec = launch_spec(plan, profile, profile.limits, _PATIENCE_MS, identity, without)
            null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            launcher.launch("doctor", spec, null, [identity.fd])
            os.close(null)
            identity.close()
            return _first_event(launcher)
    except ConfineError as error:
        return Finding("launch", "missing", error.what, error.fix)


def _first_event(launcher: Launcher) -> Finding:
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    events = launcher.receive() if poll.poll(_PATIENCE_MS) else []
    if not events:
        return Finding("launch", "missing", "no word from the launcher", "see the lines above")
    event = events[0]
    if isinstance(event, LaunchFailed):
        parts = (event.step, os.strerror(event.errno) if event.errno else None, event.path)
        return Finding("launch", "missing", ", ".join(part for part in parts if part), event.hint)
    assert isinstance(event, Observed)
    sources: dict[str, list[str]] = {}
    for field in event.fields:
        sources.setdefault(field.source, []).append(field.name)
    if not event.satisfied:
        differing = [field.name for field in event.fields if field.source == "observed" and field.asked != field.value]
        return Finding("launch", "missing", f"not enforced: {', '.join(differing)}", "see the lines above")
    counts = ", ".join(f"{len(names)} fields {source}" for source, names in sources.items())
    return Finding("launch", "ok", f"every promise holds: {counts}")
