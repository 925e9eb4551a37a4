"""A worker that is killed at one of its boundaries: before and after each save, before and after each effect.

`python -m tests.clients.checkpoints.crashing` reads one JSON object a line, forks a process that does it, waits for
that one's end, and prints {"status", "report"}: its exit status, negative for a signal, and what it said. An order:

    kind      "agent" or "workflow"
    store     {"file"} or {"socket_path", "credential"}
    effects   the file of what was performed; with `tools` "kernel", tools are calls of the kernel's `bank` instead
    log       a file that gets a line for each effect that really happens
    policy    what resuming may repeat: "conservative", or names of `ResumePolicy.retry`
    cut       the number of the boundary, from 1, at which SIGKILL comes; 0 for none

A report: {"outcome", "result" or "error", "boundaries"}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from chio_process import ProcessClient
from chio_process.checkpoints import (
    AgentIdentity,
    AgentState,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Completed,
    Effect,
    EffectsByWork,
    EffectStore,
    KernelEffects,
    ProcessStateStore,
    ResumePolicy,
    Retried,
    SqliteEffects,
    SqliteStore,
    Usage,
    Work,
    WorkflowIdentity,
    WorkflowState,
    advance,
    resume,
    start,
)

AGENT = AgentIdentity("researcher", "model-1", 3)
WORKFLOW = WorkflowIdentity("publish", 7)
ID, RUN = "work-42", "run-1"
USED = Usage(model_calls=1, input_tokens=10, output_tokens=5, cost_micro_units=2)


class Boundaries:
    """Numbers the places where a crash can fall between two durable writes, and dies at one."""

    def __init__(self, cut: int) -> None:
        self.cut = cut
        self.passed = 0

    def __call__(self) -> None:
        self.passed += 1
        if self.passed == self.cut:
            os.kill(os.getpid(), signal.SIGKILL)


class CutStore:
    """A store with a boundary before and after each save."""

    def __init__(self, store: CheckpointStore, boundary: Boundaries) -> None:
        self._store = store
        self._boundary = boundary

    def load(self, id: str) -> Checkpoint:
        return self._store.load(id)

    def compare_and_swap(self, checkpoint: Checkpoint, expected: int | None) -> None:
        self._boundary()
        self._store.compare_and_swap(checkpoint, expected)
        self._boundary()


class CutKernelEffects(KernelEffects):
    """The kernel's effects, with a boundary before and after each call."""

    def __init__(self, client: ProcessClient, boundary: Boundaries) -> None:
        super().__init__(client)
        self._boundary = boundary

    def perform(self, effect: Effect, *, repeat: bool = False) -> Any:
        self._boundary()
        response = super().perform(effect, repeat=repeat)
        self._boundary()
        return {"paid": response["output"]["value"]["structuredContent"]["effect"]}


def agent_step(state: AgentState, results: list[Any], tools: list[Effect]) -> AgentState:
    """Turn 0: the model asks for two tools. Turn 1: the model answers."""
    if not results:
        return state.begin_turn(Effect(f"turn-{state.turn}", Work.MODEL, "model-1", {"turn": state.turn}))
    if state.turn == 1:
        return state.complete(results, USED, {"answer": [*state.transcript, *results]})
    if state.effects_in_flight[0].work is Work.MODEL:
        return state.continue_turn(results, USED, *tools)
    return state.finish_turn(results, Usage())


def workflow_step(state: WorkflowState, results: list[Any], tools: list[Effect]) -> WorkflowState:
    """`left` has two steps, `right` one beside the first of them; a third branch follows both."""
    if results:
        for name in [name for name, branch in sorted(state.branches.items()) if branch.in_flight]:
            at = state.branches[name]
            then = "store" if at.step == "fetch" else None
            count = len(at.in_flight.effects) if at.in_flight else 0
            state = state.finish_step(results[:count], USED, then=then, branch=name)
            results = results[count:]
        return state
    pending = [(name, branch.step) for name, branch in sorted(state.branches.items()) if branch.status == "pending"]
    for name, step in pending:
        state = state.begin_step(Effect(f"{name}/{step}", Work.STEP, str(step), {"input": state.input}), branch=name)
    if pending:
        return state
    if "last" not in state.branches:
        return state.fork("last", "close")
    return state.complete({name: branch.results for name, branch in state.branches.items()})


def policy_of(name: str) -> ResumePolicy:
    if name == "conservative":
        return ResumePolicy.conservative()
    return ResumePolicy.retry(**{allowed: True for allowed in name.split() if allowed != "nothing"})


def open_store(place: dict[str, str]) -> tuple[CheckpointStore, ProcessClient | None]:
    if "file" in place:
        return SqliteStore(place["file"]), None
    client = ProcessClient(place["socket_path"], place["credential"])
    return ProcessStateStore(client), client


def work(order: dict[str, Any], boundary: Boundaries) -> dict[str, Any]:
    inner, client = open_store(order["store"])
    store = CutStore(inner, boundary)

    def happen(effect: Effect) -> dict[str, Any]:
        boundary()
        with open(order["log"], "a") as log:
            log.write(effect.key + "\n")
            log.flush()
            os.fsync(log.fileno())
        boundary()
        return {"of": effect.key}

    effects: EffectStore = SqliteEffects(order["effects"], happen)
    tools = [Effect(name, Work.TOOL, name, {}) for name in ("search", "read")]
    if order.get("tools") == "kernel":
        assert client is not None
        effects = EffectsByWork({Work.MODEL: effects, Work.TOOL: CutKernelEffects(client, boundary)})
        tools = [
            Effect(key, Work.TOOL, "pay", {"server": "bank", "tool": "pay", "arguments": {"to": key, "cents": 5}})
            for key in ("pay-1", "pay-2")
        ]
    state: Any
    identity: Any
    if order["kind"] == "agent":
        identity, step, state = AGENT, agent_step, AgentState(AGENT)
    else:
        first = {"left": "fetch", "right": "notify"}
        identity, step, state = WORKFLOW, workflow_step, WorkflowState.begin(WORKFLOW, {"n": 1}, first)
    results: list[Any] = []
    try:
        resumed = resume(store, ID, RUN, identity, policy_of(order["policy"]), effects)
    except CheckpointError as error:
        if error.kind != "not_found":
            raise
        checkpoint = start(store, ID, RUN, state)
    else:
        checkpoint, state = resumed.checkpoint, resumed.state
        if isinstance(resumed, Completed):
            return {"outcome": "replayed", "result": resumed.result}
        if isinstance(resumed, Retried):
            results = [planned.outcome() for planned in resumed.effects]
    while state.result is None:
        state = step(state, results, tools)
        checkpoint = advance(store, checkpoint, state)
        results = [effects.perform(effect) for effect in state.effects_in_flight]
    return {"outcome": "completed", "result": state.result, "usage": state.usage.to_document()}


def perform(order: dict[str, Any]) -> dict[str, Any]:
    boundary = Boundaries(order["cut"])
    try:
        report = work(order, boundary)
    except CheckpointError as error:
        report = {"outcome": "refused", "error": str(error.kind)}
    return {**report, "boundaries": boundary.passed}


def main() -> None:
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(perform(json.loads(line))).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, "report": json.loads(said) if said else None}), flush=True)


if __name__ == "__main__":
    main()
