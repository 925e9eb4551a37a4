"""Raw system calls, by name: the C library has no wrapper for many of them, and a wrapper may not do what is asked.

Numbers from the Linux kernel's tables; those since Linux 5.1 are the same on every machine.
"""

import ctypes
import errno
import platform
from typing import Any

from confine.probes import Escaped, Skipped

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "fsopen": 430, "fspick": 433, "pidfd_open": 434,
    "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_BY_MACHINE = {
    "x86_64": {
        "ioctl": 16, "getpid": 39, "clone": 56, "shmget": 29, "ptrace": 101, "syslog": 103, "personality": 135,
        "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169, "init_module": 175, "kexec_load": 246,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "bpf": 321,
        "userfaultfd": 323, "capset": 126, "pivot_root": 155,
    },
    "aarch64": {
        "ioctl": 29, "getpid": 172, "clone": 220, "shmget": 194, "ptrace": 117, "syslog": 116, "personality": 92,
        "acct": 89, "mount": 40, "umount2": 39, "swapon": 224, "reboot": 142, "init_module": 105, "kexec_load": 104,
        "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "bpf": 280,
        "userfaultfd": 282, "capset": 91, "pivot_root": 41,
    },
}  # fmt: skip
NUMBERS = _EVERYWHERE | _BY_MACHINE.get(platform.machine(), {})
# What a filter or a permission check says. Anything else comes from a call that was let in.
_REFUSALS = {errno.EPERM, errno.EACCES, errno.ENOSYS}

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
AT_FDCWD = -100


def call(name: str, *arguments: Any) -> int:
    """One system call. Whole numbers are passed as longs. OSError; Skipped on a machine whose number is unknown."""
    if name not in NUMBERS:
        raise Skipped(f"no number of {name} is known for {platform.machine()}")
    return call_number(NUMBERS[name], name, *arguments)


def call_number(number: int, name: str, *arguments: Any) -> int:
    longs = [ctypes.c_long(item) if isinstance(item, int) else item for item in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *longs)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def must_be_refused(name: str, *arguments: Any) -> str:
    """A call that the profile closes altogether. Only a refusal is one: another errno means that it was let in."""
    try:
        result = call(name, *arguments)
    except OSError as error:
        if error.errno in _REFUSALS:
            raise
        raise Escaped(f"{name} was let in, and said {errno.errorcode.get(error.errno or 0, error.errno)}") from None
    raise Escaped(f"{name} gave {result}")
