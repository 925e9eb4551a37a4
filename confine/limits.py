"""Limits by name: which exist, which this version can enforce, and in what range they make sense."""

from collections.abc import Mapping

from confine.errors import LimitRefused
from confine.spec import Limits

_RANGES = {
    "open_files": (16, 1_048_576),
    "file_bytes": (0, 1 << 40),
    "scratch_bytes": (4_096, 1 << 36),
    "output_bytes": (1_024, 1 << 36),
}
_NEED_CGROUPS = ("memory_bytes", "pids", "cpu_seconds", "cpu_quota_percent")
NAMES = (*_RANGES, *_NEED_CGROUPS)


def check_limits(asked: Mapping[str, object], defaults: Limits) -> Limits:
    """The defaults with what was asked put over them. LimitRefused names the limit, why, and the fix."""
    values = {name: getattr(defaults, name) for name in _RANGES}
    for name, value in asked.items():
        if name in _NEED_CGROUPS:
            raise LimitRefused(name, "needs the cgroup layer, which this version does not have", "leave it out")
        if name not in _RANGES:
            raise LimitRefused(name, "no such limit", f"known are {', '.join(NAMES)}")
        least, most = _RANGES[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise LimitRefused(name, f"{value!r} is not a whole number from {least} to {most}", "give one")
        values[name] = value
    return Limits(**values)
