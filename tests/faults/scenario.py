"""What the tool is told about a program: how to prepare it, what to run, what must hold afterwards.

Nothing here is Chio's own. A scenario for another program gives its commands, its folders, its roles and its checks
(README.md has one).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.boundaries import Boundary, Role
from tests.faults.roles import by_script


@dataclass(frozen=True, slots=True)
class Case:
    """One place where a scenario runs, over and over: everything of it lies below `folder`, which is put back each time
    as `prepare` left it. `chio` is the command under test, for scenarios of Chio's."""

    folder: Path
    chio: tuple[str, ...]

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def owner(self) -> Path:
        """What the owner of an effect records by itself."""
        return self.folder / "owner"

    @property
    def output(self) -> Path:
        """Standard output and error of the commands, and what checks need; outside `folder`."""
        return self.folder.parent / "output"

    @property
    def template(self) -> Path:
        return self.folder.parent / "template"

    def prepared(self, scenario: Scenario) -> None:
        """The folder as new, made once and copied from then on."""
        if not self.template.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            scenario.prepare(self)
            _copy(self.folder, self.template)
        shutil.rmtree(self.folder)
        _copy(self.template, self.folder)
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


@dataclass(slots=True)
class History:
    """What was seen over the runs of one case: the one before, the faulty one, those after."""

    made: list[list[Boundary]] = field(default_factory=list)  # of each run, what was let through
    stdout: list[list[bytes]] = field(default_factory=list)  # of each run, of each of its commands
    exit_codes: list[list[int]] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    mounts: str = ""
    more: dict[str, Any] = field(default_factory=dict)  # what a scenario's own checks keep between runs


Check = Callable[["Scenario", Case, History], list[str]]
"""What is wrong, in words; empty when the invariant holds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`commands` run one after another, and each must end with 0 in a run without a fault; the same commands resume.

    `roots` are folders below the case whose files count as boundaries by these names (others count too, by their path).
    `checks` are the invariants by name. `cut` leaves boundaries out that
    another scenario cuts at. `home` is the module whose `ALL` has the scenario, for the processes
    that run its cases. `after_fault` is asked once the faulty run is over and before the resumption.
    """

    name: str
    about: str
    prepare: Callable[[Case], None]
    commands: Callable[[Case], list[list[str]]]
    checks: dict[str, Check]
    roots: tuple[str, ...] = ("state", "project", "owner")
    role: Role = by_script
    environment: Callable[[Case], dict[str, str]] = lambda _: dict(os.environ)
    after_fault: dict[str, Check] = field(default_factory=dict)
    cut: Callable[[Boundary], bool] = lambda _: True
    timeout_s: float = 60.0
    home: str = "tests.faults.scenarios"
    more: dict[str, Any] = field(default_factory=dict)
