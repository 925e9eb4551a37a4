"""What a launch is asked to be, and what is reported back: frozen plain values, the same on both sides of the wire.

Paths are the same inside and outside: a folder appears in the new root where it is on the machine.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

JSON = Any  # a value that json can carry; the launch record's fields hold several shapes


@dataclass(frozen=True, slots=True)
class Bind:
    """`path` at the same path, read-only unless `writable`.

    `owner` is (uid, gid) of a single file when its mount is to be ID-mapped onto the attempt's identity, because others
    may not read it; None leaves ids alone. `system` is one of the machine's own folders (/usr, /lib, some of /etc),
    which no host keeps a state in that others could read. `writable` is a folder that a tool server owns: ID-mapped, so
    that what it writes there is the folder's owner's.
    """

    path: str
    directory: bool
    owner: tuple[int, int] | None = None
    system: bool = False
    writable: bool = False

    @property
    def overlaid(self) -> bool:
        """An operator's folder: mounted as an overlay, so that no socket or pipe in it leads out (confine.mounts)."""
        return self.directory and not self.system and not self.writable


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
    """Limits of one attempt. The last four are the cgroup's, in force where the layer is.

    pids counts processes and threads; cpu_quota_percent is of one processor, and slows down; cpu_seconds ends it.
    """

    open_files: int
    file_bytes: int
    scratch_bytes: int
    output_bytes: int
    memory_bytes: int
    pids: int
    cpu_seconds: int
    cpu_quota_percent: int


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled system call filter: `program` is the hex of its BPF instructions, `sha256` of the same bytes."""

    name: str
    program: str
    sha256: str


@dataclass(frozen=True, slots=True)
class LandlockRights:
    """What Landlock is to govern on this machine: bits of file rights, of TCP rights and of scopes (linux/landlock.h).

    `missing` names what was asked for and needs a higher ABI than the running Linux kernel's `abi`.
    """

    abi: int
    files: int
    tcp: int
    scopes: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One launch. `plan` says what to run in both cases; unconfined, only its argv, cwd and program are used.

    uid and gid are the attempt's own, outside; 0 when unconfined (it runs as the operator). `timeout_ms` counts from
    resume(). Sizes of /tmp and /dev/shm are the profile's, in bytes and inodes.

    uid_ranges, gid_ranges   (first, count) of the ids that exist in init's own user namespace, under the numbers they
                             have outside; empty for root, which needs no such namespace. See confine.identities
    without                  the layers (LAYERS) that the operator gave up by name
    network                  none, or loopback: 127.0.0.1 in the attempt's own network namespace
    seccomp, landlock        None for a layer that was given up; landlock also where it is best-effort and not to be had
    cgroup                   False likewise: the last four limits are then not in force
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
    network: str = "none"
    seccomp: Filter | None = None
    landlock: LandlockRights | None = None
    cgroup: bool = False

    @property
    def rootless(self) -> bool:
        """Confined by an ordinary user: init is in a user namespace of its own from its first instruction."""
        return bool(self.uid_ranges)

    @property
    def keeps_groups(self) -> bool:
        """Rootless with no other id than the user's own: its supplementary groups cannot be dropped."""
        return len(self.gid_ranges) == 1


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
    """peak_resident_source: vm_hwm (read at the exit stop) or wait4 (an upper bound: counts the image before exec).

    cpu_source: cgroup (everything of the attempt) or wait4 (the worker, and the children it waited for). The last
    three are the cgroup's; None without it, or where this Linux kernel does not count it.
    """

    peak_resident_bytes: int
    peak_resident_source: str
    cpu_ms: int
    cpu_source: str
    wall_ms: int
    memory_peak_bytes: int | None = None
    process_peak: int | None = None
    oom_kills: int | None = None


@dataclass(frozen=True, slots=True)
class Exited:
    """The attempt and everything it started is dead. Exactly one of exit_code and signal is set.

    killed_for: None (it ended by itself), "timeout", "output_limit", "memory_limit", "cpu_limit", "not_enforced", or
    the reason given to kill().
    limits_hit: names of limits that are known to have been met, whether they ended it or not.
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
    limits_hit: tuple[str, ...]
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
        "seccomp": None if spec.seccomp is None else asdict(spec.seccomp),
        "landlock": None if spec.landlock is None else asdict(spec.landlock),
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
            "seccomp": None if wire["seccomp"] is None else Filter(**wire["seccomp"]),
            "landlock": None
            if wire["landlock"] is None
            else LandlockRights(**wire["landlock"] | {"missing": tuple(wire["landlock"]["missing"])}),
        }
    )
