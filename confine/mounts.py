"""The worker's file system: sources opened by the launcher and by init, the new root built by init.

Sources are opened as descriptors before any process has given privileges up, and attached by descriptor, so no path is
walked twice: what was opened is what is mounted. Only init's own mount namespace is ever changed.

The machine's own folders and single files are binds. A folder of the operator's is an overlay without an upper layer
(overlayfs, "Multiple lower layers"): a read-only bind stops neither connect() to a socket in it nor a write into a
pipe, while an overlay's socket has nobody listening and its pipe nobody else at the other end. The layer on top is an
empty folder of mode 0755, so the folder itself is open to the worker whatever its mode; what is below keeps its own.
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
_MASKED_HERE = tuple(name for name in _PROC_MASKED if os.path.exists(f"/proc/{name}"))
_MASKED_FOLDERS = frozenset(name for name in _MASKED_HERE if os.path.isdir(f"/proc/{name}"))
PROC_MASKED = tuple(f"/proc/{name}" for name in _MASKED_HERE)

_DEVICES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9))
_DEVICE_LINKS = (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"))
_ETC = (
    ("passwd", f"chio:x:{INNER_ID}:{INNER_ID}:worker:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
    ("group", f"chio:x:{INNER_ID}:\nnogroup:x:65534:\n"),
    ("hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
)
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
# No attribute of a file may lead the overlay elsewhere, and st_ino stays the file's own: confine.observe compares it.
_OVERLAY = {"redirect_dir": "nofollow", "metacopy": "off", "xino": "off"}
_PRIVATE = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
_MASK = _READ_ONLY | MOUNT_ATTR_NOEXEC
_DEVICE = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC  # of the node, which is writable all the same
_PROC_COVER = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC  # a cover may be /dev/null: not nodev
_INSIDE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS
_BUILD_AT = "/tmp"  # any directory that every machine has; covered in init's own mount namespace only


_CHANGED = "it is no longer what it was when the run was planned"
_SOURCE_HINTS = {
    errno.ENOENT: _CHANGED,
    errno.ELOOP: _CHANGED,
    # MNT_LOCKED, mount_namespaces(7): what lies under a mount stays covered for whoever did not make that mount.
    errno.EINVAL: "another file system is mounted below it, which an ordinary user cannot leave out: name folders "
    "that have none below them",
}
OVERLAY_HINTS = {
    errno.ENODEV: "this Linux kernel has no overlay file system: modprobe overlay, or one with CONFIG_OVERLAY_FS",
    errno.EPERM: "an ordinary user may mount an overlay since Linux 5.11: use a newer one, or run it as root",
    errno.EINVAL: "its file system cannot be a layer of an overlay (it may be one of two overlays already): name a "
    "folder of another file system",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Detached mounts: of those binds of the plan that are not overlaid, in its order; of the socket (or None).

    `devices` are one per entry of _DEVICES where they cannot be made, in a user namespace (mknod(2), EPERM).
    """

    binds: tuple[int, ...]
    socket: int | None
    devices: tuple[int, ...] = ()

    def close(self) -> None:
        for fd in self.binds if self.socket is None else (*self.binds, self.socket):
            os.close(fd)


NO_SOURCES = Sources((), None)


def open_sources(spec: LaunchSpec, id_maps: MountIdMaps | None) -> Sources:
    """Clones every source of the plan. StepFailed("mount sources") with the path; nothing stays open then.

    Without `id_maps` (rootless: the machine's file systems are not ours to map) nothing is ID-mapped.
    """
    opened: list[int] = []
    devices: list[int] = []
    plan = spec.plan
    try:
        for bind in (bind for bind in plan.binds if not bind.overlaid):
            opened.append(_clone_source(bind.path, bind.directory, _PRIVATE if bind.writable else _READ_ONLY))
            if bind.owner is not None and id_maps is not None:
                _map_ids(opened[-1], bind, spec, id_maps)
        socket_fd = None
        if plan.socket is not None:
            socket_fd = _clone_source(plan.socket, False, _READ_ONLY | MOUNT_ATTR_NOEXEC)
            opened.append(socket_fd)
        if spec.rootless:
            for name, _, _ in _DEVICES:
                devices.append(_clone_source(f"/dev/{name}", False, _DEVICE))
    except StepFailed:
        for fd in (*opened, *devices):
            os.close(fd)
        raise
    return Sources(tuple(opened[: len(opened) - (socket_fd is not None)]), socket_fd, tuple(devices))


def _open_folders(plan: MountPlan) -> dict[str, int]:
    """path -> descriptor of what is to be overlaid: in init, since layers must be of the caller's mount namespace."""
    opened: dict[str, int] = {}
    for bind in plan.binds:
        if bind.overlaid:
            try:
                opened[bind.path] = _open_source(bind.path, True)
            except OSError as error:
                hint = _SOURCE_HINTS.get(error.errno or 0)
                raise StepFailed("mount sources", error.errno or 0, bind.path, hint) from None
    return opened


def _open_source(path: str, directory: bool) -> int:
    """The plan holds resolved paths: a link in one now is a change since, not something to follow."""
    flags = os.O_PATH | (os.O_DIRECTORY if directory else 0)
    return syscalls.openat2(syscalls.AT_FDCWD, path, flags, syscalls.RESOLVE_NO_SYMLINKS)


def _clone_source(path: str, directory: bool, attributes: int) -> int:
    source = tree = -1
    try:
        source = _open_source(path, directory)
        tree = syscalls.open_tree_clone(source)
        syscalls.mount_setattr(tree, attributes)
    except OSError as error:
        if tree >= 0:
            os.close(tree)
        raise StepFailed("mount sources", error.errno or 0, path, _SOURCE_HINTS.get(error.errno or 0)) from None
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


def expected_mounts(plan: MountPlan, *, rootless: bool) -> dict[str, frozenset[str]]:
    """Mount point -> the options it must show in mountinfo, and "overlay" where it must be one; for every mount a
    worker sees and no other."""
    bind = frozenset({"ro", "nosuid", "nodev"})
    private = frozenset({"rw", "nosuid", "nodev"})
    mounts = {"/": bind}
    for entry in plan.binds:
        mounts[entry.path] = bind | {"overlay"} if entry.overlaid else private if entry.writable else bind
    mounts |= {"/proc": private | {"noexec"}, "/proc/sys": bind | {"noexec"}}
    mounts |= dict.fromkeys(PROC_MASKED, frozenset({"ro", "nosuid", "noexec"}))
    mounts |= {"/dev": frozenset({"ro", "nosuid", "noexec"}), "/dev/shm": private, "/tmp": private}
    if rootless:
        mounts |= {f"/dev/{name}": frozenset({"ro", "nosuid", "noexec"}) for name, _, _ in _DEVICES}
    mounts |= dict.fromkeys(plan.masks, bind | {"noexec"})
    if plan.scratch is not None:
        mounts[plan.scratch] = private
    if plan.socket is not None:
        mounts[SOCKET_PATH] = bind | {"noexec"}
    return mounts


def build_root(spec: LaunchSpec, sources: Sources) -> int:
    """In init, as real root, in the new mount namespace: builds the root. Returns its descriptor."""
    syscalls.make_mounts_private()
    folders = _open_folders(spec.plan)  # before one of them is covered by what is built
    root = syscalls.new_mount("tmpfs", {"mode": "755", "size": "1m", "nr_inodes": "8192"}, _PRIVATE)
    at = os.open(_BUILD_AT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.move_mount(root, at)
    os.close(at)
    _etc(root)
    _dev(root, spec, sources.devices)
    _proc(root)
    empty = _target(root, "/tmp", True)  # stays an empty folder of mode 0755, under what is mounted on it
    _attach(_tmpfs(spec, spec.tmp_bytes, {"mode": "1777"}), root, "/tmp", True)
    trees = iter(sources.binds)
    for bind in spec.plan.binds:
        tree = _overlay_of(bind.path, empty, folders[bind.path]) if bind.overlaid else next(trees)
        _attach(tree, root, bind.path, bind.directory)
    for fd in (empty, *folders.values()):
        os.close(fd)
    for path, target in spec.plan.links:
        _make_parents(root, path)
        os.symlink(target, path.lstrip("/"), dir_fd=root)
    for path in spec.plan.masks:
        _attach(syscalls.new_mount("tmpfs", {"mode": "0", "size": "4k", "nr_inodes": "1"}, _MASK), root, path, True)
    if spec.plan.scratch is not None:
        owner = {"mode": "700", "uid": str(spec.uid), "gid": str(spec.gid)}
        if len(spec.gid_ranges) > 1:
            # The host is an ordinary user with another uid than the attempt's: it collects by its own group.
            owner |= {"mode": "750", "gid": str(spec.gid_ranges[0][0])}
        _attach(_tmpfs(spec, spec.limits.scratch_bytes, owner), root, spec.plan.scratch, True)
    if sources.socket is not None:
        _attach(sources.socket, root, SOCKET_PATH, False)
    return root


def overlay(empty: int, folder: int) -> int:
    """A detached overlay of two folders of mounts of the caller's own namespace, the first of which decides the mode.

    Layers are named by descriptor: no path to walk or to escape, and none for the worker to read in mountinfo.
    """
    options = {"lowerdir": f"/proc/self/fd/{empty}:/proc/self/fd/{folder}"} | _OVERLAY
    return syscalls.new_mount("overlay", options, _READ_ONLY)


def _overlay_of(path: str, empty: int, folder: int) -> int:
    try:
        return overlay(empty, folder)
    except OSError as error:
        hint = OVERLAY_HINTS.get(error.errno or 0)
        if error.errno == errno.EINVAL and (of_source := _refusal_to_clone(folder)) is not None:
            hint = _SOURCE_HINTS.get(of_source, hint)
        raise StepFailed("overlay", error.errno or 0, path, hint) from None


def _refusal_to_clone(folder: int) -> int | None:
    """The errno of a clone, which is refused for fewer reasons than an overlay of it is."""
    try:
        os.close(syscalls.open_tree_clone(folder))
    except OSError as error:
        return error.errno
    return None


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


def _dev(root: int, spec: LaunchSpec, devices: tuple[int, ...]) -> None:
    attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
    dev = syscalls.new_mount("tmpfs", {"mode": "755", "size": "64k", "nr_inodes": "32"}, attributes)
    _attach(dev, root, "/dev", True, close=False)
    for (name, _, _), device in zip(_DEVICES, devices, strict=False):
        _attach(device, root, f"/dev/{name}", False)
    for name, major, minor in _DEVICES[len(devices) :]:
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
    proc = syscalls.new_mount("proc", {"hidepid": "invisible"}, _PRIVATE | MOUNT_ATTR_NOEXEC)
    _attach(proc, root, "/proc", True, close=False)
    _attach(_clone_inside(root, "/proc/sys", _READ_ONLY | MOUNT_ATTR_NOEXEC), root, "/proc/sys", True)
    folders = tuple(name for name in _MASKED_HERE if name in _MASKED_FOLDERS)
    files = tuple(name for name in _MASKED_HERE if name not in _MASKED_FOLDERS)
    if folders:
        empty = syscalls.new_mount("tmpfs", {"mode": "555", "size": "4k", "nr_inodes": "1"}, _PROC_COVER)
        _cover(empty, proc, folders)
    if files:
        _cover(_clone_inside(root, "/dev/null", _PROC_COVER), proc, files)
    os.close(proc)


def _cover(cover: int, proc: int, names: tuple[str, ...]) -> None:
    """The mount on the first of the names, a copy of it, attributes included, on each of the others."""
    syscalls.move_mount(cover, proc, names[0])
    for name in names[1:]:
        copy = syscalls.open_tree_clone(cover)
        syscalls.move_mount(copy, proc, name)
        os.close(copy)
    os.close(cover)


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
