"""What the Chio kernel's process does to itself: it keeps the operator's uid and namespaces, and nothing else.

Two calls, since the first must come before its event loop exists (libuv sets io_uring up and then cannot do without)
and the second after its state is open:

    start_filtered()          no_new_privs, not dumpable, the system call filter policies/seccomp/kernel.list
    confine_kernel(…)         no Linux capability, and of all files only those of its state directory

Both need one thread: prctl, capset and landlock_restrict_self hold for the calling thread alone. Python's own folders
stay readable, since a codec is imported when it is first used; extension modules cannot be loaded any more (no memory
becomes executable), so those that come late come here. Each failure is raised: a kernel that could not be confined does
not serve.
"""

import importlib
import os
import sys
from typing import Final

import prctl

from confine import landlock, syscalls
from confine.errors import ConfineError
from confine.seccomp import load_filter
from confine.spec import Field, Filter

LIST: Final = "kernel"
# Imported by the product, the interpreter or a library only when first needed; yaml has an extension module.
_LATE: Final = ("json", "linecache", "logging", "rfc8785", "tokenize", "traceback", "unicodedata", "yaml")
_STATE = landlock.READ_FILE | landlock.READ_DIR | landlock.WRITE_FILE | landlock.TRUNCATE
_STATE |= landlock.MAKE_REG | landlock.REMOVE_FILE
_CAP_SETPCAP = 8
_NONE = ("CapInh", "CapPrm", "CapEff", "CapAmb")


def start_filtered() -> Filter:
    """Before the event loop is made. Returns the filter that now holds. ConfineError, or OSError of the call."""
    _require_one_thread()
    for module in _LATE:
        importlib.import_module(module)
    held = load_filter(LIST)
    prctl.set_no_new_privs(1)
    prctl.set_dumpable(0)  # its memory holds the keys: no core file, and no other process of the same uid looks in
    syscalls.install_filter(bytes.fromhex(held.program))
    return held


def confine_kernel(held: Filter, state_directory_fd: int) -> list[Field]:
    """After the state is open and before anything is served. ConfineError if one thing asked for does not hold."""
    _require_one_thread()
    effective = int(_status()["CapEff"], 16)
    if effective >> _CAP_SETPCAP & 1:
        for capability in range(int(_read("/proc/sys/kernel/cap_last_cap")) + 1):
            prctl.capbset_drop(capability)
        syscalls.lock_securebits()
    syscalls.drop_all_capabilities()
    fields = _observed(held)
    for field in fields:
        if field.source == "observed" and field.asked != field.value:
            raise ConfineError(
                f"{field.name} of the Chio kernel's process is {field.value!r}, not {field.asked!r}",
                fix="run chio-confine doctor",
            )
    fields.append(_restrict_files(state_directory_fd))
    return fields


def _require_one_thread() -> None:
    if (count := len(os.listdir("/proc/self/task"))) != 1:
        raise ConfineError(f"the Chio kernel's process has {count} threads, and one alone can be confined")


def _readable() -> dict[str, int]:
    """Python's folders, but not what an editable installation adds: a state may lie there. And /dev/null, of which
    libuv keeps a descriptor for the day when they run out."""
    prefixes = tuple(f"{prefix}/" for prefix in (sys.prefix, sys.base_prefix))
    folders = [path for path in sys.path if path.startswith(prefixes) and os.path.isdir(path)]
    return {"/dev/null": landlock.READ_FILE} | dict.fromkeys(folders, landlock.READ_FILE | landlock.READ_DIR)


def _restrict_files(state_directory_fd: int) -> Field:
    rights = landlock.rights("none", "best-effort")
    if rights is None:
        return Field("landlock", True, False, "absent", "this Linux kernel has none")
    ruleset = syscalls.landlock_create_ruleset(rights.files, rights.tcp, rights.scopes)
    try:
        syscalls.landlock_add_path(ruleset, state_directory_fd, _STATE & rights.files)
        for path, bits in _readable().items():
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                syscalls.landlock_add_path(ruleset, fd, bits & rights.files)
            finally:
                os.close(fd)
        syscalls.landlock_restrict_self(ruleset)
    finally:
        os.close(ruleset)
    names = landlock.names(rights)
    return Field("landlock", [*names, *rights.missing], names, "installed", "writes in the state directory alone")


def _observed(held: Filter) -> list[Field]:
    status = _status()
    program = {"list": held.name, "sha256": held.sha256}
    return [
        Field("seccomp", 2, int(status["Seccomp"]), "observed"),
        Field("seccomp_program", program, program, "installed"),
        Field("capabilities", [0] * len(_NONE), [int(status[name], 16) for name in _NONE], "observed"),
        Field("no_new_privs", 1, int(status["NoNewPrivs"]), "observed"),
    ]


def _status() -> dict[str, str]:
    lines = (line.partition(":") for line in _read("/proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
