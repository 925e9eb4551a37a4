"""What a launch is asked to be, and what is reported back: frozen plain values, the same on both sides of the wire.

Paths are the same inside and outside: a folder appears in the new root where it is on the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

JSON = Any  # a value that json can carry; the launch record's fields hold several shapes


@dataclass(frozen=True, slots=True)
class Bind:
    """One bind of `path` at the same path, read-only unless `writable`.

    `owner` is (uid, gid) of the source when the mount is to be ID-mapped onto the attempt's identity, because others
    may not read it; None leaves ids alone. `system` is one of the machine's own folders (/usr, /lib, some of /etc),
    which no host keeps a state in that others could read.
    """

    path: str
    directory: bool
    owner: tuple[int, int] | None = None
    system: bool = False
    writable: bool = False


@dataclass(frozen=True, slots=True)
class MountPlan:
    """Everything that decides what one worker sees. Frozen with the plan, apart from `socket` and `masks`.

    executable         the path given to execve; `program` is the file the kernel then runs (a script's interpreter),
                       resolved. Digests are of those two files.
    binds              parents before children; `links` are (path, target) symbolic links made in the new root
    masks              state directories below a bind: covered by an empty read-only tmpfs of mode 0
    scratch            the exports directory: an own tmpfs at that path, or None
    socket             the attempt's socket on the machine, seen at SOCKET_PATH; None for a worker without one
    visible_files      argv items that name a regular file the worker will see -> sha256
    """

    argv: tuple[str, ...]
    cwd: str
    executable: str
    executable_sha256: str
    program: str
    program_sha256: str
    binds: tuple[Bind, ...]
    links: tuple[tuple[str, str], ...]
    masks: tuple[str, ...]
    scratch: str | None
    socket: str | None
    visible_files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in force for one attempt. The cgroup's (memory, pids, cpu) join in a later version."""

    open_files: int
    file_bytes: int
    scratch_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One launch. `plan` says what to run in both cases; unconfined, only its argv, cwd and program are used.

    uid and gid are the attempt's own, outside; 0 when unconfined (it runs as the operator). `timeout_ms` counts from
    resume(). Sizes of /tmp and /dev/shm are the profile's, in bytes and inodes.

    uid_ranges, gid_ranges   (first, count) of the ids that exist in init's own user namespace, under the numbers they
                             have outside; empty for root, which needs no such namespace. See confine.identities
    without                  the layers (LAYERS) that the operator gave up by name
    """

    confined: bool
    plan: MountPlan
    environment: tuple[tuple[str, str], ...]
    uid: int
    gid: int
    limits: Limits
    timeout_ms: int
    hostname: str = "chio"
    tmp_bytes: int = 64 << 20
    shm_bytes: int = 64 << 20
    inodes: int = 16_384
    uid_ranges: tuple[tuple[int, int], ...] = ()
    gid_ranges: tuple[tuple[int, int], ...] = ()
    without: tuple[str, ...] = ()

    @property
    def rootless(self) -> bool:
        """Confined by an ordinary user: init is in a user namespace of its own from its first instruction."""
        return bool(self.uid_ranges)


@dataclass(frozen=True, slots=True)
class Field:
    """One line of a launch record. source: observed | installed | unobservable | absent."""

    name: str
    asked: JSON
    value: JSON
    source: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The worker stands at its exec stop, before its first instruction. resume() it, or kill() it.

    `satisfied` is False when something asked for does not hold: the launcher has then killed it already, and Exited
    with killed_for "not_enforced" follows.
    """

    attempt: str
    pid: int
    fields: tuple[Field, ...]
    satisfied: bool
    executable_sha256: str


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """Nothing of the launch is left. `errno` is 0 where no system call failed."""

    attempt: str
    step: str
    errno: int
    path: str | None
    hint: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """peak_resident_source: vm_hwm (read at the exit stop) or wait4 (an upper bound: counts the image before exec)."""

    peak_resident_bytes: int
    peak_resident_source: str
    cpu_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The attempt and everything it started is dead. Exactly one of exit_code and signal is set.

    killed_for: None (it ended by itself), "timeout", "output_limit", "not_enforced", or the reason given to kill().
    stdout and stderr hold at most CAPTURE_BYTES; the *_bytes members count everything that was written.
    exports_fd: the scratch directory, to be closed by the receiver; None without one.
    """

    attempt: str
    exit_code: int | None
    signal: int | None
    killed_for: str | None
    usage: Usage
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    exports_fd: int | None


Event = Observed | LaunchFailed | Exited

# 64 KiB are shown; the rest lets the host find a 64-character credential that the cut would have split.
CAPTURE_BYTES = 65_536 + 63
SOCKET_PATH = "/run/chio/process.sock"
# What --without may name: a layer whose absence is the operator's decision, and stands in the launch record.
LAYERS = ("cgroup", "distinct-uids", "landlock", "seccomp")
GIVEN_UP = "given up by --without"


def spec_to_wire(spec: LaunchSpec) -> dict[str, JSON]:
    plan, limits = spec.plan, spec.limits
    return {name: getattr(spec, name) for name in LaunchSpec.__slots__} | {
        "plan": {name: getattr(plan, name) for name in MountPlan.__slots__}
        | {
            "binds": [(b.path, b.directory, b.owner, b.system, b.writable) for b in plan.binds],
            "visible_files": dict(plan.visible_files),
        },
        "limits": {name: getattr(limits, name) for name in Limits.__slots__},
    }


def spec_from_wire(wire: dict[str, JSON]) -> LaunchSpec:
    plan = wire["plan"]
    binds = tuple(
        Bind(path, directory, (owner[0], owner[1]) if owner else None, system, writable)
        for path, directory, owner, system, writable in plan["binds"]
    )
    mount_plan = MountPlan(
        **plan
        | {
            "argv": tuple(plan["argv"]),
            "binds": binds,
            "links": tuple((path, target) for path, target in plan["links"]),
            "masks": tuple(plan["masks"]),
        }
    )
    return LaunchSpec(
        **wire
        | {
            "plan": mount_plan,
            "limits": Limits(**wire["limits"]),
            "environment": tuple((name, value) for name, value in wire["environment"]),
            "uid_ranges": tuple((first, count) for first, count in wire["uid_ranges"]),
            "gid_ranges": tuple((first, count) for first, count in wire["gid_ranges"]),
            "without": tuple(wire["without"]),
        }
    )
