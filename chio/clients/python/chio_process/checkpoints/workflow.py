"""A workflow's progress, step by step in one or several branches. Kind `chio.workflow`, schema version 2.

A branch stands before a step (`pending`), in it (`in_flight`), or behind its last one (`completed`):

    pending   --begin_step-->   in_flight
    in_flight --finish_step-->  pending, before the step that is named as next; or completed, if none is
    all branches completed      --complete--> the workflow is completed

Each step returns a new state; `advance` stores it. A step runs after it is stored as in flight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from chio_process.checkpoints.document import (
    JsonObject,
    JsonValue,
    checked_fields,
    checked_integer,
    checked_name,
    checked_object,
    checked_value,
    encode,
    invalid,
)
from chio_process.checkpoints.effects import Effect
from chio_process.checkpoints.progress import InFlight
from chio_process.checkpoints.usage import NONE_USED, Usage

_MEMBERS = ("workflow", "definition_version", "input", "branches", "result", "usage")


@dataclass(frozen=True, slots=True)
class WorkflowIdentity:
    """A workflow by its name and the version of its definition (from 0)."""

    KIND: ClassVar[str] = "chio.workflow"
    SCHEMA_VERSION: ClassVar[int] = 2

    workflow: str
    definition_version: int

    def __post_init__(self) -> None:
        checked_name(self.workflow, "workflow")
        checked_integer(self.definition_version, "definition_version")

    def decode(self, payload: JsonObject) -> "WorkflowState":
        return WorkflowState.from_payload(payload)


@dataclass(frozen=True, slots=True)
class Branch:
    """`step`: the active step's name, None behind the last. `results`: of the finished steps, by name."""

    step: str | None
    results: JsonObject = field(default_factory=dict)
    in_flight: InFlight | None = None

    def __post_init__(self) -> None:
        if self.step is not None:
            checked_name(self.step, "step")
        object.__setattr__(self, "results", checked_object(self.results, "results"))
        for name in self.results:
            checked_name(name, "step")
        if self.step is None and self.in_flight is not None:
            invalid("a completed branch has nothing in flight")
        if self.step in self.results:
            invalid(f"the step {self.step!r} has a result already")

    @property
    def status(self) -> str:
        """`pending`, `in_flight` or `completed`."""
        return "completed" if self.step is None else "in_flight" if self.in_flight else "pending"

    def check_follows(self, earlier: "Branch", name: str) -> None:
        new = self.results.keys() - earlier.results.keys()
        kept = {step: result for step, result in self.results.items() if step not in new}
        if encode(kept) != encode(earlier.results):
            invalid(f"branch {name!r} changes or forgets a step's result")
        if not new:
            if self.step != earlier.step:
                invalid(f"branch {name!r} leaves the step {earlier.step!r} without its result")
            if earlier.in_flight and not self.in_flight:
                invalid(f"branch {name!r} takes back that {earlier.step!r} is in flight")
        elif new != {earlier.step} or earlier.in_flight is None or self.in_flight:
            invalid(f"branch {name!r} has a result of a step that was not in flight")

    def to_document(self) -> JsonObject:
        in_flight = self.in_flight.to_document() if self.in_flight else None
        return {"status": self.status, "step": self.step, "results": self.results, "in_flight": in_flight}

    @classmethod
    def from_document(cls, document: object) -> Self:
        members = checked_fields(document, ("status", "step", "results", "in_flight"), "branch")
        in_flight = members["in_flight"]
        branch = cls(
            members["step"], members["results"], None if in_flight is None else InFlight.from_document(in_flight)
        )
        if branch.status != members["status"]:
            invalid(f"a branch's status is not {members['status']!r} with this step and this work in flight")
        return branch


@dataclass(frozen=True, slots=True)
class WorkflowState:
    """`input`: what the workflow was started with. Branches can be added, and are never removed."""

    identity: WorkflowIdentity
    input: JsonObject
    branches: Mapping[str, Branch]
    result: JsonObject | None = None
    usage: Usage = NONE_USED

    def __post_init__(self) -> None:
        object.__setattr__(self, "input", checked_object(self.input, "input"))
        object.__setattr__(self, "branches", dict(self.branches))
        for name in self.branches:
            checked_name(name, "branch")
        if not self.branches:
            invalid("a workflow has at least one branch")
        keys = [effect.key for effect in self.effects_in_flight]
        if len(set(keys)) != len(keys):
            invalid("two effects in flight have one key")
        if self.result is not None:
            object.__setattr__(self, "result", checked_object(self.result, "result"))
            self._all_completed()

    @classmethod
    def begin(cls, identity: WorkflowIdentity, input: Mapping[str, Any], first_steps: Mapping[str, str] | str) -> Self:
        """A new workflow: the first step of each branch, or of its one branch `main`."""
        steps = {"main": first_steps} if isinstance(first_steps, str) else first_steps
        return cls(identity, dict(input), {name: Branch(step) for name, step in steps.items()})

    # --- steps ---

    def begin_step(self, *effects: Effect, branch: str = "main") -> "WorkflowState":
        """Announces the external work of a branch's pending step."""
        at = self._branch(branch, "pending")
        return self._with(branch, replace(at, in_flight=InFlight.begin(*effects)))

    def finish_step(self, result: JsonValue, used: Usage, *, then: str | None, branch: str = "main") -> "WorkflowState":
        """Keeps the result of a branch's step in flight. `then` is the next step's name, None behind the last."""
        at = self._branch(branch, "in_flight")
        assert at.step is not None
        finished = Branch(then, {**at.results, at.step: checked_value(result, "step result")})
        return replace(self._with(branch, finished), usage=self.usage + used)

    def fork(self, name: str, step: str) -> "WorkflowState":
        """One more branch, before its first step."""
        if name in self.branches:
            invalid(f"there is a branch {name!r} already")
        return self._with(name, Branch(step))

    def complete(self, result: JsonObject) -> "WorkflowState":
        self._all_completed()
        return replace(self, result=result)

    # --- what `advance` and `resume` ask ---

    @property
    def effects_in_flight(self) -> tuple[Effect, ...]:
        return tuple(
            effect
            for _, branch in sorted(self.branches.items())
            if branch.in_flight
            for effect in branch.in_flight.effects
        )

    def with_usage(self, usage: Usage) -> "WorkflowState":
        return replace(self, usage=usage)

    def reclaimed(self) -> "WorkflowState":
        return replace(
            self,
            branches={
                name: replace(branch, in_flight=branch.in_flight.reclaimed()) if branch.in_flight else branch
                for name, branch in self.branches.items()
            },
        )

    def check_follows(self, earlier: "WorkflowState") -> None:
        if earlier.result is not None:
            invalid("nothing follows a completed workflow")
        if encode(self.input) != encode(earlier.input):
            invalid("the workflow's input is not the one that is stored")
        for name, branch in earlier.branches.items():
            if name not in self.branches:
                invalid(f"branch {name!r} is gone")
            self.branches[name].check_follows(branch, name)
        for name in self.branches.keys() - earlier.branches.keys():
            if self.branches[name] != Branch(self.branches[name].step) or self.branches[name].step is None:
                invalid(f"branch {name!r} does not begin before a step")

    # --- payload ---

    def to_payload(self) -> JsonObject:
        return {
            "workflow": self.identity.workflow,
            "definition_version": self.identity.definition_version,
            "input": self.input,
            "branches": {name: branch.to_document() for name, branch in self.branches.items()},
            "result": self.result,
            "usage": self.usage.to_document(),
        }

    @classmethod
    def from_payload(cls, payload: JsonObject) -> Self:
        """CheckpointError `invalid` for anything but a payload of schema version 2."""
        members = checked_fields(payload, _MEMBERS, "payload")
        if type(members["branches"]) is not dict:
            invalid("payload.branches is not an object")
        return cls(
            WorkflowIdentity(members["workflow"], members["definition_version"]),
            members["input"],
            {name: Branch.from_document(branch) for name, branch in members["branches"].items()},
            members["result"],
            Usage.from_document(members["usage"]),
        )

    def _with(self, name: str, branch: Branch) -> "WorkflowState":
        if self.result is not None:
            invalid("the workflow is completed")
        return replace(self, branches={**self.branches, name: branch})

    def _branch(self, name: str, status: str) -> Branch:
        if name not in self.branches:
            invalid(f"there is no branch {name!r}")
        if self.branches[name].status != status:
            invalid(f"branch {name!r} is {self.branches[name].status}, not {status}")
        return self.branches[name]

    def _all_completed(self) -> None:
        unfinished = [name for name, branch in self.branches.items() if branch.step is not None]
        if unfinished:
            invalid(f"branch {unfinished[0]!r} is not completed")
