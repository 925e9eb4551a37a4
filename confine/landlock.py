"""Landlock (landlock(7)): a second lock on what the mounts lay out, kept by the process itself until its end.

Rights came with versions of the interface, and what the running Linux kernel has none of is named, never assumed. Init
opens the paths and fills the ruleset; the worker puts it on, and init stays outside: a signal or a trace from within
the domain does not reach it. Nobody outside can read a domain, so its place in a record is `installed`.

Landlock does not govern what a path socket or UDP reaches, nor what was open before: the mounts and the network
namespace do.
"""

import hashlib
import json
import os
from typing import Final

from confine import syscalls
from confine.errors import ConfineError
from confine.spec import LandlockRights, LaunchSpec, MountPlan

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
SCOPE_ABSTRACT_UNIX, SCOPE_SIGNAL = 1 << 0, 1 << 1

# What each version of the interface added: (ABI, name, file right, TCP right, scope). ABI 7 added flags for the audit
# log, and no right.
TABLE: Final = (
    *((1, name, 1 << bit, 0, 0) for bit, name in enumerate((
        "execute", "write_file", "read_file", "read_dir", "remove_dir", "remove_file", "make_char", "make_dir",
        "make_reg", "make_sock", "make_fifo", "make_block", "make_sym",
    ))),
    (2, "refer", REFER, 0, 0),
    (3, "truncate", TRUNCATE, 0, 0),
    (4, "bind_tcp", 0, BIND_TCP, 0),
    (4, "connect_tcp", 0, CONNECT_TCP, 0),
    (5, "ioctl_dev", IOCTL_DEV, 0, 0),
    (6, "abstract_unix_socket", 0, 0, SCOPE_ABSTRACT_UNIX),
    (6, "signal", 0, 0, SCOPE_SIGNAL),
)  # fmt: skip
LINUX_OF_ABI: Final = {1: "5.13", 2: "5.19", 3: "6.2", 4: "6.7", 5: "6.10", 6: "6.12", 7: "6.15"}

_READ = READ_FILE | READ_DIR
_RUN = EXECUTE | _READ
_DEVICE = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV
# A private tmpfs is the worker's own, but no device is ever made (nodev says so once more).
_PRIVATE = _RUN | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
_PRIVATE |= REFER | TRUNCATE
_OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # a rule for a file may hold no other


def rights(network: str, mode: str) -> LandlockRights | None:
    """What is governed here for a profile of this `network`: all file rights, TCP unless there is a loopback to use it
    on, both scopes. None where the Linux kernel has no Landlock and `mode` is best-effort.

    ConfineError when `mode` is required and something is missing.
    """
    abi = syscalls.landlock_abi()
    asked = [row for row in TABLE if not (row[3] and network == "loopback")]
    missing = tuple(name for needed, name, *_ in asked if needed > abi)
    if missing and mode == "required":
        newest = max(needed for needed, *_ in asked)
        have = f"has Landlock ABI {abi}" if abi else "has no Landlock, or has it disabled (the lsm= boot option)"
        raise ConfineError(
            f"the profile requires Landlock, and this Linux kernel {have}: it lacks {', '.join(missing)}",
            fix=f"use Linux {LINUX_OF_ABI[newest]} or newer, or write landlock: best-effort in the profile, or give it "
            "up by name: --without landlock",
        )
    if abi == 0:
        return None
    held = [row for row in asked if row[0] <= abi]
    return LandlockRights(
        abi, sum(row[2] for row in held), sum(row[3] for row in held), sum(row[4] for row in held), missing
    )


def rules(plan: MountPlan) -> tuple[tuple[str, int], ...]:
    """Path -> file rights below it, from the same plan as the mounts. "/" can be listed: it holds folders and links."""
    found = {"/": READ_DIR, "/etc": _READ, "/proc": _READ, "/dev": _DEVICE | READ_DIR}
    found |= dict.fromkeys(("/tmp", "/dev/shm"), _PRIVATE)
    for bind in plan.binds:
        given = _RUN | _PRIVATE if bind.writable else _RUN
        found[bind.path] = given if bind.directory else given & _OF_A_FILE
    if plan.scratch is not None:
        found[plan.scratch] = _PRIVATE
    return tuple(sorted(found.items()))


def rules_digest(spec: LaunchSpec) -> str:
    """sha256 of what is handed to the Linux kernel, as JSON: the rights governed, then each path with its rights."""
    assert spec.landlock is not None
    held = spec.landlock
    given = [held.files, held.tcp, held.scopes, [[path, bits & held.files] for path, bits in rules(spec.plan)]]
    return hashlib.sha256(json.dumps(given, separators=(",", ":")).encode()).hexdigest()


def prepare(spec: LaunchSpec) -> int:
    """In init, in the new root: the ruleset, as a descriptor. OSError names the path that could not be opened."""
    held = spec.landlock
    assert held is not None
    ruleset = syscalls.landlock_create_ruleset(held.files, held.tcp, held.scopes)
    for path, bits in rules(spec.plan):
        fd = syscalls.openat2(syscalls.AT_FDCWD, path, os.O_PATH, syscalls.RESOLVE_NO_SYMLINKS)
        try:
            syscalls.landlock_add_path(ruleset, fd, bits & held.files)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(fd)
    return ruleset


def names(held: LandlockRights) -> list[str]:
    """The rights governed, by name."""
    return [name for _, name, files, tcp, scope in TABLE if held.files & files or held.tcp & tcp or held.scopes & scope]
