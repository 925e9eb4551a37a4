"""One thin function per system call that Python has no wrapper for; each raises OSError with the call's errno.

Prepared once at import (PyDLL: the interpreter lock stays held, so a raw clone() leaves a usable interpreter in the
child, and nothing is imported after a fork). prctl(2) calls go through python-prctl. Struct layouts and numbers are
those of linux/mount.h, linux/openat2.h, linux/ptrace.h and linux/capability.h; calls added since Linux 5.1 have the
same number everywhere, the older ones are listed per machine.
"""

import ctypes
import errno
import os
import signal
import struct
from typing import Final

_libc = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# clone, pivot_root, keyctl, seccomp, rt_sigaction, rt_sigprocmask
_BY_MACHINE: Final = {"x86_64": (56, 155, 250, 317, 13, 14), "aarch64": (220, 41, 219, 277, 134, 135)}
_MACHINE = os.uname().machine
if _MACHINE not in _BY_MACHINE:
    raise ImportError(f"confine knows no system call numbers for {_MACHINE}")
_CLONE, _PIVOT_ROOT, _KEYCTL, _SECCOMP, _RT_SIGACTION, _RT_SIGPROCMASK = _BY_MACHINE[_MACHINE]
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLONE3, _CLOSE_RANGE, _OPENAT2, _PIDFD_GETFD, _MOUNT_SETATTR = 435, 436, 437, 438, 442
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
_CLONE_PIDFD = 0x00001000
_CLONE_INTO_CGROUP = 0x2_0000_0000

AT_FDCWD: Final = -100
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 0x04, 0x40
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_CLOEXEC_FLAG = 1  # FSOPEN_CLOEXEC, FSMOUNT_CLOEXEC

MOUNT_ATTR_RDONLY: Final = 0x01
MOUNT_ATTR_NOSUID: Final = 0x02
MOUNT_ATTR_NODEV: Final = 0x04
MOUNT_ATTR_NOEXEC: Final = 0x08
MOUNT_ATTR_IDMAP: Final = 0x00100000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 1 << 18, 2

RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

_CLOSE_RANGE_CLOEXEC = 4
_SIGNALS = 64

PTRACE_CONT: Final = 7
PTRACE_SEIZE: Final = 0x4206
PTRACE_LISTEN: Final = 0x4208
PTRACE_O_TRACEEXEC: Final = 1 << 4
PTRACE_O_TRACEEXIT: Final = 1 << 6
PTRACE_O_EXITKILL: Final = 1 << 20
PTRACE_EVENT_EXEC: Final = 4
PTRACE_EVENT_EXIT: Final = 6
PTRACE_EVENT_STOP: Final = 128
WAIT_ALL: Final = 0x40000000  # __WALL: a tracee is waited for whatever signal its clone() named


def _check(result: int, path: str | None = None) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


def clone(flags: int, cgroup_fd: int = -1) -> tuple[int, int]:
    """fork() into new namespaces. (0, -1) in the child, (pid, pidfd) in the parent. The caller has one thread.

    With cgroup_fd (of a v2 folder) the child is born in that cgroup, which is clone3(2)'s to do.
    """
    pidfd = ctypes.c_int(-1)
    if cgroup_fd >= 0:
        flags |= _CLONE_PIDFD | _CLONE_INTO_CGROUP
        # struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
        # set_tid_size, cgroup
        arguments = struct.pack("=11Q", flags, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup_fd)
        pid = _check(_syscall(_CLONE3, arguments, ctypes.c_size_t(len(arguments))))
        return pid, pidfd.value if pid else -1
    pid = _check(
        _syscall(
            _CLONE,
            ctypes.c_ulong(flags | _CLONE_PIDFD | signal.SIGCHLD),
            None,
            ctypes.byref(pidfd),
            None,
            ctypes.c_ulong(0),
        )
    )
    return pid, pidfd.value if pid else -1


def reset_every_signal() -> None:
    """Default dispositions and an empty mask, as a program expects to start with.

    The C library's own signals (32, 33) included, which its functions leave alone: whoever started the host may have
    ignored or blocked them (make(1) does), and exec passes both on (signal(7)).
    """
    default, size = ctypes.create_string_buffer(32), ctypes.c_size_t(8)  # struct kernel_sigaction: SIG_DFL, no flags
    for number in range(1, _SIGNALS + 1):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            _check(_syscall(_RT_SIGACTION, number, default, None, size))
    _check(_syscall(_RT_SIGPROCMASK, signal.SIG_SETMASK, ctypes.byref(ctypes.c_uint64(0)), None, size))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags))


def sethostname(name: str) -> None:
    encoded = name.encode()
    _check(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))))


def make_mounts_private() -> None:
    """No mount made below propagates to the machine, and none of the machine's to us (mount_namespaces(7))."""
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "/")


def open_tree_clone(fd: int) -> int:
    """A detached private copy of the mount at `fd` (an O_PATH descriptor), without what is mounted below it."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
    return _check(_syscall(_OPEN_TREE, fd, b"", flags))


def mount_setattr(fd: int, set_flags: int, user_namespace: int = 0) -> None:
    """Sets attributes of the mount at `fd`; with MOUNT_ATTR_IDMAP, ids follow that user namespace's maps."""
    attributes = struct.pack("=QQQQ", set_flags, 0, 0, user_namespace)
    _check(_syscall(_MOUNT_SETATTR, fd, b"", _AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes))))


def move_mount(fd: int, target_fd: int, name: str = "") -> None:
    """Attaches the detached mount `fd` on the file or directory `target_fd`, no path being walked; or on what is called
    `name` in that directory, and is no link."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (0 if name else _MOVE_MOUNT_T_EMPTY_PATH)
    _check(_syscall(_MOVE_MOUNT, fd, b"", target_fd, name.encode(), flags), name or None)


def new_mount(filesystem: str, options: dict[str, str], attributes: int) -> int:
    """A detached mount of a new instance of `filesystem`, as a descriptor."""
    context = _check(_syscall(_FSOPEN, filesystem.encode(), _CLOEXEC_FLAG), filesystem)
    try:
        for key, value in options.items():
            _check(
                _syscall(_FSCONFIG, context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0),
                f"{filesystem} {key}",
            )
        _check(_syscall(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0), filesystem)
        return _check(_syscall(_FSMOUNT, context, _CLOEXEC_FLAG, attributes), filesystem)
    finally:
        os.close(context)


def pivot_root_here() -> None:
    """pivot_root(".", "."): the working directory becomes the root and the old root, now on top of it, is let go."""
    _check(_syscall(_PIVOT_ROOT, b".", b"."))
    _check(_libc.umount2(b".", _MNT_DETACH))


def openat2(directory_fd: int, path: str, flags: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return _check(_syscall(_OPENAT2, directory_fd, os.fsencode(path), how, ctypes.c_size_t(len(how))), path)


def close_on_exec_from(first: int) -> None:
    _check(_syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), _CLOSE_RANGE_CLOEXEC))


def close_all_except(keep: list[int]) -> None:
    """Closes every descriptor that is not named, listed or not: no listing can be out of date."""
    first = 0
    for fd in sorted(set(keep)):
        if fd > first:
            _check(_syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(fd - 1), 0))
        first = fd + 1
    _check(_syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), 0))


def drop_all_capabilities() -> None:
    """Permitted, effective and inheritable to none (capset(2), _LINUX_CAPABILITY_VERSION_3)."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)))


def leave_session_keyring() -> None:
    """A new, empty session keyring. The inherited one is the operator's, and whoever possesses it may read its keys,
    whatever its uid (keyctl(2), keyrings(7)). No keys in this Linux kernel: nothing to leave."""
    join_session_keyring = 1
    try:
        _check(_syscall(_KEYCTL, join_session_keyring, None))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise


def lock_securebits() -> None:
    """NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, each with its lock, and KEEP_CAPS_LOCKED (capabilities(7)).

    Here because python-prctl refuses the ambient bits.
    """
    set_securebits, bits = 28, 0b1110_1111
    _check(_libc.prctl(set_securebits, ctypes.c_ulong(bits), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def child_signals_fd() -> int:
    """A signalfd for SIGCHLD, which stays blocked: polled readable when a child or tracee changed state."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    mask = struct.pack("=Q", 1 << (signal.SIGCHLD - 1)) + bytes(120)  # sizeof(sigset_t) is 128 in the C library
    return _check(_libc.signalfd(-1, mask, os.O_NONBLOCK | os.O_CLOEXEC))


def pidfd_getfd(pidfd: int, number: int) -> int | None:
    """A copy of another process's descriptor, which may be looked at like an own one (pidfd_getfd(2)); None where it
    has none of that number."""
    copy: int = _syscall(_PIDFD_GETFD, pidfd, number, 0)
    return None if copy == -1 and ctypes.get_errno() == errno.EBADF else _check(copy)


def read_memory(pid: int, start: int, size: int) -> bytes:
    """process_vm_readv(2) of one piece; shorter where the mapping ends."""
    buffer = ctypes.create_string_buffer(size)
    ours = struct.pack("=QQ", ctypes.addressof(buffer), size)
    read = _libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    count = _check(read(pid, ours, one, struct.pack("=QQ", start, size), one, flags))
    return buffer.raw[:count]


def ptrace(request: int, pid: int, data: int = 0) -> None:
    _check(_libc.ptrace(ctypes.c_long(request), ctypes.c_int(pid), ctypes.c_void_p(0), ctypes.c_void_p(data)))


def install_filter(program: bytes) -> None:
    """This thread, and what it executes, is held to a BPF program (seccomp(2)); needs no_new_privs."""
    set_mode_filter, instruction_bytes = 1, 8
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // instruction_bytes, ctypes.addressof(instructions))
    _check(_syscall(_SECCOMP, ctypes.c_uint(set_mode_filter), ctypes.c_uint(0), header))


def read_filter(pid: int, index: int) -> bytes:
    """A stopped tracee's program, the oldest at index 0. EACCES unless the tracer has CAP_SYS_ADMIN in the first user
    namespace and no filter of its own; ENOENT past the last (ptrace(2), PTRACE_SECCOMP_GET_FILTER)."""
    get_filter, instruction_bytes = 0x420C, 8
    request, process, which = ctypes.c_long(get_filter), ctypes.c_int(pid), ctypes.c_void_p(index)
    count = _check(_libc.ptrace(request, process, which, None))
    program = ctypes.create_string_buffer(count * instruction_bytes)
    _check(_libc.ptrace(request, process, which, program))
    return program.raw


def landlock_abi() -> int:
    """The version of Landlock's interface in the running Linux kernel; 0 where it has none, or it was not enabled."""
    version_flag = 1
    result: int = _syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(version_flag))
    return max(result, 0)


def landlock_create_ruleset(files: int, tcp: int, scopes: int) -> int:
    """A ruleset that governs these rights, as a descriptor. An older interface takes a shorter structure."""
    attribute = struct.pack("=QQQ", files, tcp, scopes)
    size = 24 if scopes else 16 if tcp else 8
    return _check(_syscall(_LANDLOCK_CREATE_RULESET, attribute, ctypes.c_size_t(size), ctypes.c_uint(0)))


def landlock_add_path(ruleset: int, path_fd: int, rights: int) -> None:
    path_beneath = 1
    attribute = struct.pack("=Qi", rights, path_fd)
    _check(_syscall(_LANDLOCK_ADD_RULE, ruleset, ctypes.c_int(path_beneath), attribute, ctypes.c_uint(0)))


def landlock_restrict_self(ruleset: int) -> None:
    """This thread and its descendants, for good; needs no_new_privs."""
    _check(_syscall(_LANDLOCK_RESTRICT_SELF, ruleset, ctypes.c_uint(0)))
