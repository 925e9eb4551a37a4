"""The worker's file system: sources opened by the launcher, the new root built by init.

Sources are opened and cloned as descriptors before any process has given privileges up, and attached by descriptor,
so no path is walked twice: what was opened is what is mounted. Only init's own mount namespace is ever changed.
"""

import errno
import os
import stat
from dataclasses import dataclass

from confine import syscalls
from confine.errors import StepFailed
from confine.namespaces import INNER_ID, MountIdMaps
from confine.spec import SOCKET_PATH, Bind, LaunchSpec, MountPlan
from confine.syscalls import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY

# Of a fresh /proc, what tells of the machine and not of the worker, or acts on the machine. Listed for a reason each:
# keys (CVE-less leak of key descriptions), timer_list and sched_debug (host pids and addresses), kcore and kmsg
# (kernel memory and log), sysrq-trigger (acts), cmdline (boot secrets), the rest names hardware and disks.
_PROC_MASKED = (
    "acpi", "asound", "bus", "cmdline", "config.gz", "consoles", "crypto", "diskstats", "driver", "dynamic_debug",
    "fs", "interrupts", "iomem", "ioports", "irq", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup",
    "kpagecount", "kpageflags", "latency_stats", "locks", "mdstat", "modules", "mtrr", "partitions", "sched_debug",
    "schedstat", "scsi", "swaps", "sysrq-trigger", "timer_list", "timer_stats", "vmallocinfo",
)  # fmt: skip
PROC_MASKED = tuple(f"/proc/{name}" for name in _PROC_MASKED if os.path.exists(f"/proc/{name}"))

_DEVICES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9))
_DEVICE_LINKS = (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"))
_ETC = (
    ("passwd", f"chio:x:{INNER_ID}:{INNER_ID}:worker:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
    ("group", f"chio:x:{INNER_ID}:\nnogroup:x:65534:\n"),
    ("hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
)
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
_PRIVATE = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
_MASK = _READ_ONLY | MOUNT_ATTR_NOEXEC
_PROC_COVER = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC  # a cover may be /dev/null: not nodev
_INSIDE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
_BUILD_AT = "/tmp"  # any directory that every machine has; covered in init's own mount namespace only


@dataclass(frozen=True, slots=True)
class Sources:
    """Detached mounts, one per bind of the plan and in its order, then the socket's (or None)."""

    binds: tuple[int, ...]
    socket: int | None

    def close(self) -> None:
        for fd in self.binds if self.socket is None else (*self.binds, self.socket):
            os.close(fd)


NO_SOURCES = Sources((), None)


def open_sources(spec: LaunchSpec, id_maps: MountIdMaps) -> Sources:
    """Clones every source of the plan. StepFailed("mount sources") with the path; nothing stays open then."""
    opened: list[int] = []
    plan = spec.plan
    try:
        for bind in plan.binds:
            opened.append(_clone_source(bind.path, bind.directory, _PRIVATE if bind.writable else _READ_ONLY))
            if bind.owner is not None:
                _map_ids(opened[-1], bind, spec, id_maps)
        socket_fd = None
        if plan.socket is not None:
            socket_fd = _clone_source(plan.socket, False, _READ_ONLY | MOUNT_ATTR_NOEXEC)
    except StepFailed:
        for fd in opened:
            os.close(fd)
        raise
    return Sources(tuple(opened), socket_fd)


def _clone_source(path: str, directory: bool, attributes: int) -> int:
    flags = os.O_PATH | (os.O_DIRECTORY if directory else 0)
    source = tree = -1
    try:
        # The plan holds resolved paths: a link in one now is a change since, not something to follow.
        source = syscalls.openat2(syscalls.AT_FDCWD, path, flags, syscalls.RESOLVE_NO_SYMLINKS)
        tree = syscalls.open_tree_clone(source)
        syscalls.mount_setattr(tree, attributes)
    except OSError as error:
        if tree >= 0:
            os.close(tree)
        hint = (
            "it is no longer what it was when the run was planned"
            if error.errno in {errno.ENOENT, errno.ELOOP}
            else None
        )
        raise StepFailed("mount sources", error.errno or 0, path, hint) from None
    finally:
        if source >= 0:
            os.close(source)
    return tree


def _map_ids(tree: int, bind: Bind, spec: LaunchSpec, id_maps: MountIdMaps) -> None:
    assert bind.owner is not None
    try:
        syscalls.mount_setattr(tree, syscalls.MOUNT_ATTR_IDMAP, id_maps.namespace(bind.owner, spec.uid, spec.gid))
    except OSError as error:
        # EINVAL, EPERM: this file system has no ID-mapped mounts. The mount stays, unmapped: the worker then sees
        # less, never more, and the launch record says which mounts are mapped.
        if error.errno not in {errno.EINVAL, errno.EPERM}:
            raise StepFailed("map ids", error.errno or 0, bind.path) from None


def expected_mounts(plan: MountPlan) -> dict[str, frozenset[str]]:
    """Mount point -> the options it must show in mountinfo, for every mount a worker sees and no other."""
    bind = frozenset({"ro", "nosuid", "nodev"})
    private = frozenset({"rw", "nosuid", "nodev"})
    mounts = {"/": bind} | {entry.path: private if entry.writable else bind for entry in plan.binds}
    mounts |= {"/proc": private | {"noexec"}, "/proc/sys": bind | {"noexec"}}
    mounts |= dict.fromkeys(PROC_MASKED, frozenset({"ro", "nosuid", "noexec"}))
    mounts |= {"/dev": frozenset({"ro", "nosuid", "noexec"}), "/dev/shm": private, "/tmp": private}
    mounts |= dict.fromkeys(plan.masks, bind | {"noexec"})
    if plan.scratch is not None:
        mounts[plan.scratch] = private
    if plan.socket is not None:
        mounts[SOCKET_PATH] = bind | {"noexec"}
    return mounts


def build_root(spec: LaunchSpec, sources: Sources) -> int:
    """In init, as real root, in the new mount namespace: builds the root. Returns its descriptor."""
    syscalls.make_mounts_private()
    root = syscalls.new_mount("tmpfs", {"mode": "755", "size": "1m", "nr_inodes": "8192"}, _PRIVATE)
    at = os.open(_BUILD_AT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.move_mount(root, at)
    os.close(at)
    _etc(root)
    _dev(root, spec)
    _proc(root)
    _attach(_tmpfs(spec, spec.tmp_bytes, {"mode": "1777"}), root, "/tmp", True)
    for bind, tree in zip(spec.plan.binds, sources.binds, strict=True):
        _attach(tree, root, bind.path, bind.directory)
    for path, target in spec.plan.links:
        _make_parents(root, path)
        os.symlink(target, path.lstrip("/"), dir_fd=root)
    for path in spec.plan.masks:
        _attach(syscalls.new_mount("tmpfs", {"mode": "0", "size": "4k", "nr_inodes": "1"}, _MASK), root, path, True)
    if spec.plan.scratch is not None:
        owner = {"mode": "700", "uid": str(spec.uid), "gid": str(spec.gid)}
        _attach(_tmpfs(spec, spec.limits.scratch_bytes, owner), root, spec.plan.scratch, True)
    if sources.socket is not None:
        _attach(sources.socket, root, SOCKET_PATH, False)
    return root


def enter_root(root: int) -> None:
    """pivot_root into the built root and make it read-only. Afterwards no descriptor of ours reaches the old one."""
    os.fchdir(root)
    syscalls.pivot_root_here()
    syscalls.mount_setattr(root, MOUNT_ATTR_RDONLY)
    os.chdir("/")


def _tmpfs(spec: LaunchSpec, size: int, options: dict[str, str]) -> int:
    return syscalls.new_mount("tmpfs", {"size": str(size), "nr_inodes": str(spec.inodes)} | options, _PRIVATE)


def _etc(root: int) -> None:
    _make_directory(root, "/etc")
    for name, content in _ETC:
        _write(root, f"etc/{name}", content)


def _dev(root: int, spec: LaunchSpec) -> None:
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
    dev = syscalls.new_mount("tmpfs", {"mode": "755", "size": "64k", "nr_inodes": "32"}, attributes)
    _attach(dev, root, "/dev", True, close=False)
    for name, major, minor in _DEVICES:
        os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(major, minor), dir_fd=dev)
    for name, target in _DEVICE_LINKS:
        os.symlink(f"/proc/self/fd{target}", name, dir_fd=dev)
    os.mkdir("shm", 0o755, dir_fd=dev)
    syscalls.mount_setattr(dev, MOUNT_ATTR_RDONLY)
    os.close(dev)
    _attach(_tmpfs(spec, spec.shm_bytes, {"mode": "1777"}), root, "/dev/shm", True)


def _proc(root: int) -> None:
    """A fresh procfs, so only this pid namespace; then /proc/sys read-only and the masks, each covered by a clone.

    hidepid hides what the worker may not trace, which is init: its command line is the launcher's.
    """
    _attach(syscalls.new_mount("proc", {"hidepid": "invisible"}, _PRIVATE | MOUNT_ATTR_NOEXEC), root, "/proc", True)
    _attach(_clone_inside(root, "/proc/sys", _READ_ONLY | MOUNT_ATTR_NOEXEC), root, "/proc/sys", True)
    empty_directory = None
    for path in PROC_MASKED:
        target = syscalls.openat2(root, path, os.O_PATH, _INSIDE)
        try:
            if not stat.S_ISDIR(os.fstat(target).st_mode):
                cover = _clone_inside(root, "/dev/null", _PROC_COVER)
            elif empty_directory is None:
                cover = syscalls.new_mount("tmpfs", {"mode": "555", "size": "4k", "nr_inodes": "1"}, _PROC_COVER)
                empty_directory = path
            else:
                cover = _clone_inside(root, empty_directory, _PROC_COVER)
            syscalls.move_mount(cover, target)
            os.close(cover)
        finally:
            os.close(target)


def _clone_inside(root: int, path: str, attributes: int) -> int:
    source = syscalls.openat2(root, path, os.O_PATH, _INSIDE)
    try:
        tree = syscalls.open_tree_clone(source)
    finally:
        os.close(source)
    syscalls.mount_setattr(tree, attributes)
    return tree


def _attach(tree: int, root: int, path: str, directory: bool, *, close: bool = True) -> None:
    """Mounts `tree` at `path` of the new root, making the mount point where the new root is still ours to write."""
    try:
        target = _target(root, path, directory)
        try:
            syscalls.move_mount(tree, target)
        finally:
            os.close(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    if close:
        os.close(tree)


def _target(root: int, path: str, directory: bool) -> int:
    try:
        return syscalls.openat2(root, path, os.O_PATH, _INSIDE)
    except FileNotFoundError:
        if directory:
            _make_directory(root, path)
        else:
            _make_parents(root, path)
            _write(root, path.lstrip("/"), "")
    return syscalls.openat2(root, path, os.O_PATH, _INSIDE)


def _make_parents(root: int, path: str) -> None:
    parent = os.path.dirname(path)
    if parent != "/":
        _make_directory(root, parent)


def _make_directory(root: int, path: str) -> None:
    try:
        os.mkdir(path.lstrip("/"), 0o755, dir_fd=root)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_parents(root, path)
        os.mkdir(path.lstrip("/"), 0o755, dir_fd=root)


def _write(root: int, path: str, content: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=root)
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)
