"""Linux confinement of one program at a time, refused rather than weakened. Imports nothing of chio.

The names are loaded when first used: the launcher process is forked for every worker, and every megabyte it does not
hold is time that a fork does not take.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from confine.cgroups import require_cgroups
    from confine.errors import (
        CommandRefused,
        ConfineError,
        ExportRefused,
        LauncherLost,
        LayerMissing,
        LimitRefused,
        ProfileError,
    )
    from confine.exports import Collected, collect_exports, discard_staged, publish_staged, stage_exports
    from confine.identities import Identity, claim_identity, runtime_directory
    from confine.launch import Launcher, launch_spec
    from confine.limits import check_limits
    from confine.plan import for_attempt, plan_mounts, plan_unconfined, resolve_executable
    from confine.profile import Profile, load_profile
    from confine.seccomp import list_text
    from confine.spec import (
        CAPTURE_BYTES,
        LAYERS,
        SOCKET_PATH,
        Bind,
        Event,
        Exited,
        Field,
        LaunchFailed,
        LaunchSpec,
        Limits,
        MountPlan,
        Observed,
        Usage,
    )

_MODULES = {
    "cgroups": ("require_cgroups",),
    "errors": (
        *("CommandRefused", "ConfineError", "ExportRefused", "LauncherLost", "LayerMissing", "LimitRefused"),
        "ProfileError",
    ),
    "exports": ("Collected", "collect_exports", "discard_staged", "publish_staged", "stage_exports"),
    "identities": ("Identity", "claim_identity", "runtime_directory"),
    "launch": ("Launcher", "launch_spec"),
    "limits": ("check_limits",),
    "plan": ("for_attempt", "plan_mounts", "plan_unconfined", "resolve_executable"),
    "profile": ("Profile", "load_profile"),
    "seccomp": ("list_text",),
    "spec": (
        *("CAPTURE_BYTES", "LAYERS", "SOCKET_PATH", "Bind", "Event", "Exited", "Field", "LaunchFailed", "LaunchSpec"),
        *("Limits", "MountPlan", "Observed", "Usage"),
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'confine' has no attribute {name!r}")
    return getattr(import_module(f"confine.{_HOME[name]}"), name)


__all__ = [
    "CAPTURE_BYTES",
    "LAYERS",
    "SOCKET_PATH",
    "Bind",
    "Collected",
    "CommandRefused",
    "ConfineError",
    "Event",
    "Exited",
    "ExportRefused",
    "Field",
    "Identity",
    "LaunchFailed",
    "LaunchSpec",
    "Launcher",
    "LauncherLost",
    "LayerMissing",
    "LimitRefused",
    "Limits",
    "MountPlan",
    "Observed",
    "Profile",
    "ProfileError",
    "Usage",
    "check_limits",
    "claim_identity",
    "collect_exports",
    "discard_staged",
    "for_attempt",
    "launch_spec",
    "list_text",
    "load_profile",
    "plan_mounts",
    "plan_unconfined",
    "publish_staged",
    "require_cgroups",
    "resolve_executable",
    "runtime_directory",
    "stage_exports",
]
