"""Events as messages between launcher and host. Output and the scratch directory travel as descriptors."""

import os
from typing import Any

from confine.frames import memory_file, read_memory_file
from confine.spec import Event, Exited, Field, LaunchFailed, Observed, Usage


def event_to_wire(event: Event) -> tuple[dict[str, Any], list[int]]:
    """(message, descriptors). The sender closes the descriptors after sending."""
    if isinstance(event, Observed):
        fields = [[f.name, f.asked, f.value, f.source, f.detail] for f in event.fields]
        return {"event": "observed"} | _plain(event) | {"fields": fields}, []
    if isinstance(event, LaunchFailed):
        return {"event": "launch_failed"} | _plain(event), []
    wire = {"event": "exited"} | _plain(event)
    wire["usage"] = {name: getattr(event.usage, name) for name in Usage.__slots__}
    fds = [memory_file(event.stdout), memory_file(event.stderr)]
    for name in ("stdout", "stderr", "exports_fd"):
        del wire[name]
    return wire, fds if event.exports_fd is None else [*fds, event.exports_fd]


def event_from_wire(wire: dict[str, Any], fds: list[int]) -> Event:
    """The inverse. Takes the descriptors: they are read and closed, but for the exports directory."""
    kind = wire.pop("event")
    if kind == "observed":
        return Observed(**wire | {"fields": tuple(Field(*field) for field in wire["fields"])})
    if kind == "launch_failed":
        return LaunchFailed(**wire)
    stdout, stderr = (read_memory_file(fd) for fd in fds[:2])
    for fd in fds[:2]:
        os.close(fd)
    exports_fd = fds[2] if len(fds) > 2 else None
    wire |= {"usage": Usage(**wire["usage"]), "limits_hit": tuple(wire["limits_hit"])}
    return Exited(**wire | {"stdout": stdout, "stderr": stderr, "exports_fd": exports_fd})


def _plain(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in type(event).__slots__}
