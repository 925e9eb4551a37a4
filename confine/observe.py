"""What really holds for the program at its exec stop, read from outside: /proc/PID and nothing the worker says.

Each fact is a Field whose `asked` and `value` have the same shape, so that they are equal exactly when it holds.
"""

import os
import re
from dataclasses import dataclass

from confine.digests import FileState, file_state
from confine.mounts import expected_mounts
from confine.namespaces import INNER_ID, OBSERVED
from confine.spec import JSON, Field, LaunchSpec

_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_OCTAL = re.compile(r"\\([0-7]{3})")
_ABSENT = ("seccomp", "landlock", "cgroup")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the launcher knows and the spec does not: the hashed program, and the pipes it gave as 0, 1 and 2."""

    program: FileState
    program_sha256: str
    standard: tuple[tuple[int, int], ...]


def observe(pid: int, spec: LaunchSpec, expected: Expected) -> tuple[tuple[Field, ...], bool, str]:
    """(fields, whether everything asked for holds, digest of the running program). OSError if the process is gone."""
    executable, digest = _executable(pid, spec, expected)
    fields = [executable, _descriptors(pid, expected), _environment(pid, spec), _limits(pid, spec), _cwd(pid, spec)]
    if spec.confined:
        status = _status(pid)
        fields += _identity(pid, spec, status)
        fields += [_namespaces(pid), _mounts(pid, spec), _network(pid)]
        fields += _installed(spec)
    satisfied = all(field.asked == field.value for field in fields if field.source == "observed")
    if spec.confined:
        fields.append(_id_mapped(pid, spec))
    fields += [Field(name, None, None, "absent", "this version has no such layer") for name in _ABSENT]
    return tuple(fields), satisfied, digest


def peak_resident_bytes(pid: int) -> int | None:
    """VmHWM: the largest resident set of the present image (proc(5)); None once its memory is gone."""
    peak = _status(pid).get("VmHWM")
    return int(peak.split()[0]) * 1024 if peak else None


def _read(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _executable(pid: int, spec: LaunchSpec, expected: Expected) -> tuple[Field, str]:
    """The running file against the descriptor that was hashed. A change since then shows in size, mtime or ctime."""
    same = file_state(os.stat(f"/proc/{pid}/exe")) == expected.program
    asked = {"path": spec.plan.program, "sha256": spec.plan.program_sha256}
    value = {"path": os.readlink(f"/proc/{pid}/exe"), "sha256": expected.program_sha256 if same else None}
    return Field("executable", asked, value, "observed"), expected.program_sha256 if same else ""


def _descriptors(pid: int, expected: Expected) -> Field:
    value = {}
    for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        status = os.stat(f"/proc/{pid}/fd/{name}")
        known = int(name) < 3 and (status.st_dev, status.st_ino) == expected.standard[int(name)]
        value[name] = "given" if known else "unexpected"
    return Field("descriptors", {"0": "given", "1": "given", "2": "given"}, value, "observed")


def _environment(pid: int, spec: LaunchSpec) -> Field:
    """Names only, in the record; a value that is not the one given shows as a name with a question mark."""
    given = dict(spec.environment)
    value = []
    for entry in _read(pid, "environ").split("\0")[:-1]:
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
        Field("groups", [], [int(part) for part in status["Groups"].split()], "observed"),
        Field("id_maps", maps, read, "observed"),
        Field("capabilities", [0] * 5, [int(status[name], 16) for name in _CAPABILITY_SETS], "observed"),
        Field("no_new_privs", 1, int(status["NoNewPrivs"]), "observed"),
        Field("pid_inside", 2, int(status["NSpid"].split()[-1]), "observed"),
    ]


def _namespaces(pid: int) -> Field:
    def of(who: str, name: str) -> tuple[int, int]:
        status = os.stat(f"/proc/{who}/ns/{name}")
        return status.st_dev, status.st_ino

    value = {name: "own" if of(str(pid), name) != of("self", name) else "shared" for name in OBSERVED}
    return Field("namespaces", dict.fromkeys(OBSERVED, "own"), value, "observed")


def _mountinfo(pid: int) -> list[tuple[str, frozenset[str]]]:
    mounts = []
    for line in _read(pid, "mountinfo").splitlines():
        parts = line.split(" ")
        path = _OCTAL.sub(lambda match: chr(int(match[1], 8)), parts[4])
        mounts.append((path, frozenset(parts[5].split(","))))
    return mounts


def _mounts(pid: int, spec: LaunchSpec) -> Field:
    """Every mount point with those of its required options that hold; one too many shows as an entry of its own."""
    expected = expected_mounts(spec.plan)
    asked = {path: sorted(options) for path, options in expected.items()}
    value: dict[str, list[str]] = {}
    for path, options in _mountinfo(pid):
        if path in value:
            value[f"{path} (twice)"] = sorted(options)
        else:
            value[path] = sorted(options & expected.get(path, options))
    return Field("mounts", asked, value, "observed")


def _id_mapped(pid: int, spec: LaunchSpec) -> Field:
    """Not a promise to the operator but to the worker: a file system without ID-mapped mounts shows it less."""
    asked = [bind.path for bind in spec.plan.binds if bind.owner is not None]
    mapped = {path for path, options in _mountinfo(pid) if "idmapped" in options}
    value = [path for path in asked if path in mapped]
    detail = None if asked == value else "a file system here has no ID-mapped mounts: the worker sees less of it"
    return Field("id_mapped_mounts", asked, value, "observed", detail)


def _network(pid: int) -> Field:
    interfaces = [line.split(":")[0].strip() for line in _read(pid, "net/dev").splitlines()[2:]]
    return Field("network_interfaces", ["lo"], interfaces, "observed", "lo is down")


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
