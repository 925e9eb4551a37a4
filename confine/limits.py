"""Limits by name: which exist, which this version can enforce, and in what range they make sense."""

from collections.abc import Mapping

from confine.errors import LimitRefused
from confine.spec import Limits

_PROGRAM_BYTES = 64 << 20  # what a program needs beside a full scratch directory, whose pages are its memory too
_RANGES = {
    "open_files": (16, 1_048_576),
    "file_bytes": (0, 1 << 40),
    "scratch_bytes": (4_096, 1 << 36),
    "output_bytes": (1_024, 1 << 36),
    "memory_bytes": (_PROGRAM_BYTES, 1 << 50),
    "pids": (1, 1 << 22),
    "cpu_seconds": (1, 10_000_000),
    "cpu_quota_percent": (1, 100_000),
}
CGROUP_LIMITS = ("memory_bytes", "pids", "cpu_seconds", "cpu_quota_percent")


def check_limits(asked: Mapping[str, object], defaults: Limits | None = None) -> Limits:
    """The defaults with what was asked put over them; all are asked for where there are no defaults.

    LimitRefused names the limit, why, and the fix. Whether the machine can enforce them is confine.cgroups' to say.
    """
    values = {} if defaults is None else {name: getattr(defaults, name) for name in _RANGES}
    for name, value in asked.items():
        if name not in _RANGES:
            raise LimitRefused(name, "no such limit", f"known are {', '.join(_RANGES)}")
        least, most = _RANGES[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise LimitRefused(name, f"{value!r} is not a whole number from {least} to {most}", "give one")
        values[name] = value
    memory, scratch = values["memory_bytes"], values["scratch_bytes"]
    if scratch + _PROGRAM_BYTES > memory:
        why = f"{memory} bytes cannot hold scratch_bytes, {scratch}, and {_PROGRAM_BYTES} for the program"
        raise LimitRefused("memory_bytes", why, "raise memory_bytes or lower scratch_bytes")
    return Limits(**values)
