"""A run plan made concrete: what each worker's command resolves to, what it sees, where its exports go.

Everything a worker depends on is decided here, before any state is written, and frozen with the first run: the plan
itself, the executables, every argument that names a visible file, profiles and mounts. A later run that differs in
any of it is refused by name (`first_difference`).
"""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from chio import canonical, schema, statedir
from chio.errors import InputError
from chio.host import read_document
from confine import (
    ConfineError,
    Limits,
    MountPlan,
    Profile,
    check_limits,
    load_profile,
    plan_mounts,
    plan_unconfined,
    require_cgroups,
)

UNCONFINED = "none"
# The field of a worker that an error of confine's is about; any other is about its command.
_FIELDS = {
    "LimitRefused": "limits",
    "ProfileError": "confinement.profile",
    "LayerMissing": "confinement.profile",
}


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Where declared files go, and how many bytes they may have in all."""

    directory: str
    patterns: tuple[str, ...]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """One worker, ready to be launched. `profile` is None for an unconfined one."""

    worker: schema.Worker
    profile: Profile
    confined: bool
    limits: Limits
    mounts: MountPlan
    exports: ExportTarget | None

    def resolved(self) -> dict[str, Any]:
        """What is frozen beside the plan. Masks are not: state directories may come and go."""
        mounts = self.mounts
        return {
            "process": self.worker.process,
            "executable": mounts.executable,
            "executable_sha256": mounts.executable_sha256,
            "program": mounts.program,
            "program_sha256": mounts.program_sha256,
            "files": dict(mounts.visible_files),
            "binds": [bind.path for bind in mounts.binds],
            "profile": self.profile.name if self.confined else UNCONFINED,
            "profile_sha256": self.profile.digest if self.confined else None,
        }


class PlanReader:
    """Reads and prepares one plan for one state."""

    def __init__(
        self,
        file: Path,
        state: Path,
        *,
        allow_unconfined: bool,
        runtime_roots: tuple[str, ...],
        without: tuple[str, ...] = (),
    ) -> None:
        """`without`: the layers of confinement that the operator gave up by name."""
        self.file = file
        self.text = read_document(file, schema.MAX_PLAN_BYTES + 1)
        self.plan = schema.run_plan(self.text, str(file))
        self._folder = Path(os.path.realpath(file)).parent
        self._state = Path(os.path.realpath(state))
        self._allow_unconfined = allow_unconfined
        self.runtime_roots = runtime_roots
        self._without = without

    def require_processes(self, known: list[str]) -> None:
        for position, worker in enumerate(self.plan.workers):
            if worker.process not in known:
                raise self._refused(
                    position,
                    "process",
                    "the host has no such process",
                    f"`{worker.process}`",
                    f"one of {', '.join(known[:20])}",
                )

    def forget_inputs(self, deleted: list[str]) -> None:
        """Of processes whose data was deleted: nothing is left to hold their inputs against."""
        workers = [
            msgspec.structs.replace(worker, input=None) if worker.process in deleted else worker
            for worker in self.plan.workers
        ]
        self.plan = msgspec.structs.replace(self.plan, workers=workers)

    def prepare(self, frozen: dict[str, Any] | None) -> list[Prepared]:
        """Every worker of the plan. `frozen` is what an earlier run kept: bare commands resolve as they did then."""
        if frozen:
            self._require_same(frozen["plan"], msgspec.to_builtins(self.plan))
        before = {entry["process"]: entry for entry in frozen["resolved"]} if frozen else {}
        return [
            self._worker(position, worker, before.get(worker.process))
            for position, worker in enumerate(self.plan.workers)
        ]

    def frozen_text(self, prepared: list[Prepared]) -> str:
        """JCS of the plan and of what it resolved to."""
        return canonical.encode(
            {"plan": msgspec.to_builtins(self.plan), "resolved": [entry.resolved() for entry in prepared]}
        ).decode()

    def require_same_resolution(self, mine: str, frozen: str) -> None:
        """Refuse executables, files, mounts or profiles that are not what the first run froze."""
        if mine != frozen:
            self._require_same(orjson.loads(frozen), orjson.loads(mine))

    def _require_same(self, before: Any, now: Any) -> None:
        where = first_difference(before, now, "")
        if before != now:
            raise InputError(
                "the plan was changed since its first run",
                file=str(self.file),
                field=where or "(everything)",
                why="the state keeps the frozen one",
                fix="restore it; a changed request is new work: give it a state of its own",
            )

    # --- one worker ----------------------------------------------------------------------------------------------

    def _worker(self, position: int, worker: schema.Worker, before: dict[str, Any] | None) -> Prepared:
        confinement = worker.confinement
        confined = confinement.profile != UNCONFINED
        if not confined and not self._allow_unconfined:
            raise self._refused(
                position,
                "confinement.profile",
                "an unconfined worker was not allowed",
                "`none`",
                "name a profile, or pass --allow-unconfined to run it with this account's rights",
            )
        if not confined and (confinement.read or confinement.exports):
            raise self._refused(
                position,
                "confinement",
                "an unconfined worker has no read paths or exports",
                "it sees and writes what this account can",
                "remove them, or name a profile",
            )
        cwd = os.path.normpath(self._folder / worker.cwd)
        exports = self._exports(position, worker, cwd)
        try:
            profile = load_profile(self._profile_name(confinement.profile) if confined else "worker")
            limits = check_limits(worker.limits, profile.limits)
            require_cgroups(profile.cgroup if confined else "best-effort", worker.limits, self._without)
            looked_up = os.path.dirname(before["executable"]) if before else None
            if confined:
                mounts = plan_mounts(
                    argv=worker.command,
                    cwd=cwd,
                    state_dir=str(self._state),
                    read=confinement.read,
                    runtime_roots=self.runtime_roots,
                    exports_directory=exports.directory if exports else None,
                    path_env=looked_up,
                )
            else:
                mounts = plan_unconfined(argv=worker.command, cwd=cwd, path_env=looked_up)
        except ConfineError as error:
            field = _FIELDS.get(type(error).__name__, "command")
            raise self._refused(position, field, error.what, error.path, error.fix) from error
        return Prepared(worker, profile, confined, limits, mounts, exports)

    def _profile_name(self, name: str) -> str:
        """A profile given by path is relative to the plan's folder; a bare name is one of the project's."""
        return str(self._folder / name) if "/" in name or name.endswith(".yaml") else name

    def _exports(self, position: int, worker: schema.Worker, cwd: str) -> ExportTarget | None:
        declared = worker.confinement.exports
        if declared is None:
            return None
        field = "confinement.exports"
        named = os.path.join(cwd, declared.directory)
        directory = os.path.realpath(named)
        if not os.path.isdir(directory):
            raise self._refused(
                position, f"{field}.directory", "exports need a directory that exists", named, "make it first"
            )
        own = directory == str(self._state)
        for above in (directory, *map(str, Path(directory).parents)):
            if os.path.lexists(os.path.join(above, statedir.DATABASE)) and not (own and above == directory):
                raise self._refused(
                    position,
                    f"{field}.directory",
                    "exports may not go into a state",
                    above,
                    "only this state's own directory, or one outside every state",
                )
        for index, pattern in enumerate(declared.files):
            where = f"{field}.files[{index}]"
            if pattern.startswith("/") or ".." in pattern.split("/"):
                raise self._refused(
                    position, where, "an export leaves its directory", f"`{pattern}`", "name files below it"
                )
            taken = reserved_match(pattern) if own else None
            if taken is not None:
                raise self._refused(
                    position,
                    where,
                    "an export could take a reserved name",
                    f"`{pattern}` matches `{taken}`",
                    "name the files more closely",
                )
        return ExportTarget(directory, tuple(declared.files), declared.max_bytes)

    def _refused(self, position: int, field: str, what: str, why: str | None, fix: str | None) -> InputError:
        return InputError(what, file=str(self.file), field=f"workers[{position}].{field}", why=why, fix=fix)


def reserved_match(pattern: str) -> str | None:
    """A name that the host keeps in its state directory and that the pattern (or name) would take."""
    if pattern.startswith(statedir.RESERVED_PREFIX):
        return pattern
    return next((name for name in sorted(statedir.RESERVED_NAMES) if fnmatch.fnmatchcase(name, pattern)), None)


def first_difference(before: Any, after: Any, path: str) -> str:
    """The path of the first member in which two JSON values differ, with what it was and is when that is short."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after or before[name] != after[name]:
                return first_difference(before.get(name), after.get(name), f"{path}.{name}" if path else name)
    if isinstance(before, list) and isinstance(after, list):
        for index in range(max(len(before), len(after))):
            pair = [items[index] if index < len(items) else None for items in (before, after)]
            if pair[0] != pair[1]:
                return first_difference(pair[0], pair[1], f"{path}[{index}]")
    return path
