"""What really holds for the program at its exec stop, read from outside: /proc/PID and nothing the worker says.

Each fact is a Field whose `asked` and `value` have the same shape, so that they are equal exactly when it holds.
"""

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache

from confine import landlock, syscalls
from confine.cgroups import Group
from confine.digests import FileState, file_state
from confine.hierarchies import LAYER
from confine.mounts import expected_mounts
from confine.namespaces import INNER_ID, OBSERVED
from confine.spec import GIVEN_UP, JSON, Field, LaunchSpec

_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LOCAL_ADDRESS = re.compile(r"\|-- (\S+)\n +/32 host LOCAL")
_READ_BYTES = 65_536
_UNREADABLE = {errno.EACCES, errno.EIO, errno.EINVAL}  # EIO, EINVAL: a Linux kernel built without the request


@dataclass(frozen=True, slots=True)
class Expected:
    """What the launcher knows and the spec does not: the hashed program, the pipes given as 0, 1 and 2, the cgroups."""

    program: FileState
    program_sha256: str
    standard: tuple[tuple[int, int], ...]
    group: Group | None = None


def observe(pid: int, spec: LaunchSpec, expected: Expected) -> tuple[tuple[Field, ...], bool, str]:
    """(fields, whether everything asked for holds, digest of the running program). OSError if the process is gone."""
    status, mounts = _status(pid), _mountinfo(pid) if spec.confined else []
    executable, digest = _executable(pid, spec, expected)
    fields = [executable, _descriptors(pid, expected, int(status["FDSize"]))]
    fields += [_environment(pid, spec), _limits(pid, spec), _cwd(pid, spec)]
    if spec.confined:
        fields += _identity(pid, spec, status)
        fields += [_namespaces(pid), _mounts(mounts, spec), *_network(pid, spec)]
        fields += [*_seccomp(pid, spec, status), _landlock(spec)]
        fields += _installed(spec)
    fields += _cgroups(pid, spec, expected)
    satisfied = all(field.asked == field.value for field in fields if field.source == "observed")
    if spec.confined:
        fields.append(_id_mapped(mounts, spec))
    if "distinct-uids" in spec.without:
        # Root has uids to give whatever it gave up: what holds then is `uid`, above.
        fields.append(Field("distinct-uids", True, spec.uid != os.getuid(), "absent", GIVEN_UP))
    return tuple(fields), satisfied, digest


def peak_resident_bytes(pid: int) -> int | None:
    """VmHWM: the largest resident set of the present image (proc(5)); None once its memory is gone."""
    peak = _status(pid).get("VmHWM")
    return int(peak.split()[0]) * 1024 if peak else None


def _read(pid: int, name: str) -> str:
    """A whole file of the process; without Python's layers, since an attempt stands still meanwhile."""
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while chunk := os.read(fd, _READ_BYTES):
            content += chunk
    finally:
        os.close(fd)
    return content.decode(errors="surrogateescape")


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _executable(pid: int, spec: LaunchSpec, expected: Expected) -> tuple[Field, str]:
    """The running file against the descriptor that was hashed. A change since then shows in size, mtime or ctime.

    An overlay gives its files a device number of its own: there, the mount it runs from stands in for that.
    """
    state, hashed = file_state(os.stat(f"/proc/{pid}/exe")), expected.program
    overlay = _overlay_of(spec)
    same = state == hashed if overlay is None else state[1:] == hashed[1:] and _runs_from(pid, overlay)
    asked = {"path": spec.plan.program, "sha256": spec.plan.program_sha256}
    value = {"path": os.readlink(f"/proc/{pid}/exe"), "sha256": expected.program_sha256 if same else None}
    return Field("executable", asked, value, "observed"), expected.program_sha256 if same else ""


def _overlay_of(spec: LaunchSpec) -> str | None:
    """The mount point of the overlay that the program lies in, if it does."""
    program = spec.plan.program
    holders = [bind for bind in spec.plan.binds if program == bind.path or program.startswith(f"{bind.path}/")]
    holder = max(holders, key=lambda bind: len(bind.path), default=None)
    return holder.path if holder is not None and holder.overlaid else None


def _runs_from(pid: int, mount_point: str) -> bool:
    """Whether the running file lies in the process's overlay at that place, by its mount's number (proc(5), fdinfo)."""
    fd = os.open(f"/proc/{pid}/exe", os.O_PATH | os.O_CLOEXEC)
    try:
        number = re.search(r"^mnt_id:\s+(\d+)$", _read(os.getpid(), f"fdinfo/{fd}"), re.MULTILINE)
    finally:
        os.close(fd)
    return number is not None and (number[1], mount_point, True) in {
        (mount.number, mount.path, "overlay" in mount.options) for mount in _mountinfo(pid)
    }


def _descriptors(pid: int, expected: Expected, slots: int) -> Field:
    """Every slot of the descriptor table is looked into: a tracer may, where /proc/PID/fd is closed to another uid."""
    value = {}
    pidfd = os.pidfd_open(pid)
    try:
        for number in range(slots):
            copy = syscalls.pidfd_getfd(pidfd, number)
            if copy is None:
                continue
            status = os.fstat(copy)
            os.close(copy)
            known = number < 3 and (status.st_dev, status.st_ino) == expected.standard[number]
            value[str(number)] = "given" if known else "unexpected"
    finally:
        os.close(pidfd)
    return Field("descriptors", {"0": "given", "1": "given", "2": "given"}, value, "observed")


def _environment(pid: int, spec: LaunchSpec) -> Field:
    """Names only, in the record; a value that is not the one given shows as a name with a question mark.

    Read from the memory where exec put it: /proc/PID/environ is closed to another uid, a tracer's own included.
    """
    given = dict(spec.environment)
    value = []
    start, end = map(int, _read(pid, "stat").rpartition(")")[2].split()[47:49])  # env_start, env_end: proc(5)
    for entry in os.fsdecode(syscalls.read_memory(pid, start, end - start)).split("\0")[:-1]:
        name, _, content = entry.partition("=")
        value.append(name if given.get(name) == content else f"{name}?")
    return Field("environment", sorted(given), sorted(value), "observed")


def _limits(pid: int, spec: LaunchSpec) -> Field:
    names = {"open_files": "Max open files", "file_bytes": "Max file size", "core_bytes": "Max core file size"}
    asked: dict[str, JSON] = {
        "open_files": spec.limits.open_files,
        "file_bytes": spec.limits.file_bytes,
        "core_bytes": 0,
    }
    text = _read(pid, "limits")
    value: dict[str, JSON] = {}
    for name, label in names.items():
        found = re.search(rf"^{label}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
        both = [int(part) for part in found.groups() if part.isdigit()] if found else []
        # A machine's lower hard limit stays (rlimits never rise): the lower number is no weaker than what was asked.
        value[name] = asked[name] if len(both) == 2 and max(both) <= asked[name] else both
    return Field("rlimits", asked, value, "observed")


def _cwd(pid: int, spec: LaunchSpec) -> Field:
    return Field("cwd", spec.plan.cwd, os.readlink(f"/proc/{pid}/cwd"), "observed")


def _identity(pid: int, spec: LaunchSpec, status: dict[str, str]) -> list[Field]:
    maps = [[INNER_ID, outer, 1] for outer in (spec.uid, spec.gid)]
    read = [[int(part) for part in _read(pid, name).split()] for name in ("uid_map", "gid_map")]
    return [
        Field("uid", [spec.uid] * 4, [int(part) for part in status["Uid"].split()], "observed"),
        Field("gid", [spec.gid] * 4, [int(part) for part in status["Gid"].split()], "observed"),
        _groups(spec, status),
        Field("id_maps", maps, read, "observed"),
        Field("capabilities", [0] * 5, [int(status[name], 16) for name in _CAPABILITY_SETS], "observed"),
        Field("no_new_privs", 1, int(status["NoNewPrivs"]), "observed"),
        Field("pid_inside", 2, int(status["NSpid"].split()[-1]), "observed"),
    ]


def _groups(spec: LaunchSpec, status: dict[str, str]) -> Field:
    value = sorted(int(part) for part in status["Groups"].split())
    if not spec.keeps_groups:
        return Field("groups", [], value, "observed")
    return Field("groups", sorted(os.getgroups()), value, "observed", "the user's own: they cannot be dropped")


def _cgroups(pid: int, spec: LaunchSpec, expected: Expected) -> list[Field]:
    if expected.group is not None:
        return expected.group.fields(pid)
    return [Field(LAYER, True, False, "absent", GIVEN_UP if LAYER in spec.without else "there are none to make here")]


def _namespaces(pid: int) -> Field:
    ours = _our_namespaces()
    value = {name: "own" if _namespace(pid, name) != ours[name] else "shared" for name in OBSERVED}
    return Field("namespaces", dict.fromkeys(OBSERVED, "own"), value, "observed")


def _namespace(pid: int, name: str) -> tuple[int, int]:
    status = os.stat(f"/proc/{pid}/ns/{name}")
    return status.st_dev, status.st_ino


@cache
def _our_namespaces() -> dict[str, tuple[int, int]]:
    """The launcher never leaves its own."""
    return {name: _namespace(os.getpid(), name) for name in OBSERVED}


@cache
def _our_filters() -> int:
    """How many were put on before this process was started: it adds none."""
    return int(_status(os.getpid())["Seccomp_filters"])


@dataclass(frozen=True, slots=True)
class _Mount:
    """A line of mountinfo (proc_pid_mountinfo(5)). `options` are the mount's own, and the type of its file system."""

    number: str
    path: str
    options: frozenset[str]


def _mountinfo(pid: int) -> list[_Mount]:
    mounts = []
    for line in _read(pid, "mountinfo").splitlines():
        own, _, file_system = line.partition(" - ")
        parts = own.split(" ")
        path = parts[4]
        if "\\" in path:
            path = _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)
        mounts.append(_Mount(parts[0], path, frozenset([*parts[5].split(","), file_system.split(" ")[0]])))
    return mounts


def _mounts(mounts: list[_Mount], spec: LaunchSpec) -> Field:
    """Every mount point with those of its required options that hold; one too many shows as an entry of its own."""
    expected = expected_mounts(spec.plan, rootless=spec.rootless)
    asked = {path: sorted(options) for path, options in expected.items()}
    value: dict[str, list[str]] = {}
    for mount in mounts:
        if mount.path in value:
            value[f"{mount.path} (twice)"] = sorted(mount.options)
        else:
            value[mount.path] = sorted(mount.options & expected.get(mount.path, mount.options))
    return Field("mounts", asked, value, "observed")


def _id_mapped(mounts: list[_Mount], spec: LaunchSpec) -> Field:
    """Of single files. Not a promise to the operator but to the worker: without ID-mapped mounts it sees less."""
    asked = [bind.path for bind in spec.plan.binds if bind.owner is not None and not spec.rootless]
    mapped = {mount.path for mount in mounts if "idmapped" in mount.options}
    value = [path for path in asked if path in mapped]
    detail = None if asked == value else "a file system here has no ID-mapped mounts: the worker sees less of it"
    return Field("id_mapped_mounts", asked, value, "observed", detail)


def _network(pid: int, spec: LaunchSpec) -> list[Field]:
    """An interface that is up has its addresses among the local ones, and one that is down has none."""
    interfaces = [line.split(":")[0].strip() for line in _read(pid, "net/dev").splitlines()[2:]]
    addresses = sorted(set(_LOCAL_ADDRESS.findall(_read(pid, "net/fib_trie"))))
    asked = ["127.0.0.1"] if spec.network == "loopback" else []
    return [
        Field("network_interfaces", ["lo"], interfaces, "observed"),
        Field("local_addresses", asked, addresses, "observed", None if asked else "lo is down"),
    ]


def _seccomp(pid: int, spec: LaunchSpec, status: dict[str, str]) -> list[Field]:
    """That one filter more than our own holds, and which: its bytes are read back where we may."""
    held = spec.seccomp
    if held is None:
        return [Field("seccomp", True, False, "absent", GIVEN_UP)]
    own = _our_filters()
    value = {"mode": int(status["Seccomp"]), "filters": int(status["Seccomp_filters"]) - own}
    asked = {"list": held.name, "sha256": held.sha256}
    source, detail = "observed", None
    try:
        read = {"list": held.name, "sha256": hashlib.sha256(syscalls.read_filter(pid, own)).hexdigest()}
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        read, source = asked, "installed"
        detail = f"reading it back ({os.strerror(error.errno or 0)}) needs root, and a host without a filter"
    return [
        Field("seccomp", {"mode": 2, "filters": 1}, value, "observed"),
        Field("seccomp_program", asked, read, source, detail),
    ]


def _landlock(spec: LaunchSpec) -> Field:
    held = spec.landlock
    if held is None:
        given_up = "landlock" in spec.without
        return Field("landlock", True, False, "absent", GIVEN_UP if given_up else "this Linux kernel has none")
    rights, digest = landlock.names(held), landlock.rules_digest(spec)
    lacking = f"Landlock ABI {held.abi} lacks {', '.join(held.missing)}; " if held.missing else ""
    return Field(
        "landlock",
        {"rights": [*rights, *held.missing], "sha256": digest},
        {"rights": rights, "sha256": digest},
        "installed",
        f"{lacking}the Linux kernel shows a domain to nobody outside",
    )


def _installed(spec: LaunchSpec) -> list[Field]:
    unreadable = "the Linux kernel shows it to nobody outside"
    return [
        Field("hostname", spec.hostname, spec.hostname, "installed", "readable only from inside its namespace"),
        Field("securebits", "locked", "locked", "installed", unreadable),
        Field("session_keyring", "own", "own", "installed", unreadable),
        Field("parent_death_signal", 9, 9, "installed", unreadable),
        Field("scratch_bytes", spec.limits.scratch_bytes, spec.limits.scratch_bytes, "installed"),
        Field(
            "output_bytes", spec.limits.output_bytes, spec.limits.output_bytes, "installed", "counted by the launcher"
        ),
        Field("timeout_ms", spec.timeout_ms, spec.timeout_ms, "installed", "kept by the launcher"),
    ]
