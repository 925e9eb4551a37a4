"""Why something was not confined, by whose fault.

ConfineError                 what was asked cannot be done; carries the path and the fix
├── ProfileError             a profile document that is wrong
├── LayerMissing             this machine, or this user here, cannot have a layer
├── LimitRefused             a limit that is nonsense, does not fit, or whose layer is missing
└── ExportRefused            a declared export that may not be published (name, why)
LauncherLost                 the launcher process ended under us; everything it started is dead
StepFailed                   inside a launch: the step, errno, path and hint that cross back to the parent
"""

import os


class ConfineError(Exception):
    """`what` names the thing and why, `path` the file if there is one, `fix` what to do about it."""

    def __init__(self, what: str, *, path: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.path = path
        self.fix = fix
        details = "; ".join(part for part in (path, fix) if part)
        super().__init__(f"{what} ({details})" if details else what)


class ProfileError(ConfineError):
    """A profile that cannot be read as one: unknown or duplicate keys, wrong types, a chain of `extends`."""


class CommandRefused(ConfineError):
    """`status` is what a shell would exit with: 127 not found, 126 found but not executable."""

    def __init__(self, what: str, status: int, *, path: str | None = None, fix: str | None = None) -> None:
        self.status = status
        super().__init__(what, path=path, fix=fix)


class LayerMissing(ConfineError):
    """One layer, by the name that --without takes."""

    def __init__(self, layer: str, why: str, path: str, fix: str) -> None:
        self.layer = layer
        super().__init__(f"layer {layer}: {why}", path=path, fix=fix)


class LimitRefused(ConfineError):
    """One limit, by name."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.name = name
        super().__init__(f"limit {name}: {why}", fix=fix)


class ExportRefused(ConfineError):
    """One file that matched a declared pattern and may not leave the scratch directory."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why
        super().__init__(f"export {name}: {why}")


class LauncherLost(ConfineError):
    """The launcher is gone. Its death killed every process it had started (ptrace EXITKILL, PDEATHSIG, pid 1)."""


class StepFailed(Exception):
    """A launch step that did not hold. `number` is an errno, 0 where no system call failed."""

    def __init__(self, step: str, number: int, path: str | None = None, hint: str | None = None) -> None:
        self.step = step
        self.number = number
        self.path = path
        self.hint = hint
        reason = os.strerror(number) if number else "failed"
        super().__init__(f"{step}: {reason}" + (f" ({path})" if path else "") + (f"; {hint}" if hint else ""))
