"""A worker killed at every write-ahead boundary, then resumed by another process under each policy.

What is expected of a resume follows from three things that are read after the crash: what the record has in flight,
which effects have a recorded result, and which really happened.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chio_process import ProcessClient
from chio_process.checkpoints import CheckpointError, Effect, ProcessStateStore, SqliteEffects, SqliteStore, Standing
from tests.clients.checkpoints.crashing import AGENT, ID, WORKFLOW, policy_of
from tests.kernel.external import Gate, ToolServing, ToolState, child, effects, host_config, server, tool
from tests.kernel.serving import Serving, Worker, grant, policy

ROOT = Path(__file__).parents[3]
POLICIES = {
    "agent": ["conservative", "nothing", "model", "tools", "model tools"],
    "workflow": ["conservative", "nothing", "model tools delegation", "steps"],
}
EFFECTS = {
    "agent": {"turn-0", "search", "read", "turn-1"},
    "workflow": {"left/fetch", "right/notify", "left/store", "last/close"},
}


class Workers:
    """Starts worker processes, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clients.checkpoints.crashing"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def begin(self, order: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any] | None:
        """What the worker reported; None if it was killed."""
        assert self._process.stdout
        ended = json.loads(self._process.stdout.readline())
        if ended["status"] == -signal.SIGKILL:
            return None
        assert ended["status"] == 0
        return dict(ended["report"])

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@dataclass(frozen=True, slots=True)
class Scene:
    """One piece of work: where its record is, and a folder for what it does."""

    workers: Workers
    kind: str
    folder: Path
    worker: Worker | None = None
    tools: str = "file"

    def run(self, policy_name: str, cut: int = 0) -> dict[str, Any] | None:
        """What the worker reported; None if it was killed."""
        self.workers.begin(self.order(policy_name, cut))
        return self.workers.end()

    def order(self, policy_name: str, cut: int = 0) -> dict[str, Any]:
        store = {"file": str(self.folder / "checkpoints.db")}
        if self.worker:
            store = {"socket_path": self.worker.path, "credential": self.worker.credential}
        return {
            "kind": self.kind, "store": store, "effects": str(self.folder / "effects.db"), "tools": self.tools,
            "log": str(self.folder / "log"), "policy": policy_name, "cut": cut,
        }  # fmt: skip

    def stored(self) -> str | None:
        """The record as it is stored, whole."""
        try:
            if self.worker:
                with ProcessClient(self.worker.path, self.worker.credential) as client:
                    return ProcessStateStore(client).load(ID).encoded()
            with SqliteStore(self.folder / "checkpoints.db") as store:
                return store.load(ID).encoded()
        except CheckpointError as error:
            if error.kind != "not_found":
                raise
            return None

    def in_flight(self) -> tuple[Effect, ...]:
        stored = self.stored()
        payload = json.loads(stored)["payload"] if stored else None
        if payload is None:
            return ()
        return (AGENT if self.kind == "agent" else WORKFLOW).decode(payload).effects_in_flight

    def happened(self) -> Counter[str]:
        log = self.folder / "log"
        return Counter(log.read_text().split()) if log.exists() else Counter()

    def recorded(self, effect: Effect) -> bool:
        with SqliteEffects(str(self.folder / "effects.db"), lambda effect: None) as store:
            return store.standing(effect) is Standing.COMPLETED

    def copy(self, folder: Path) -> Scene:
        shutil.copytree(self.folder, folder)
        return Scene(self.workers, self.kind, folder)


def check_resume(scene: Scene, policy_name: str) -> bool:
    """Resumes after a crash; whether that completed the work."""
    before, in_flight, happened = scene.stored(), scene.in_flight(), scene.happened()
    open_ones = [effect for effect in in_flight if not scene.recorded(effect)]
    allowed = policy_of(policy_name)
    report = scene.run(policy_name)
    assert report is not None
    if in_flight and not allowed.explicit:
        assert report["error"] == "ambiguous_in_flight"
    elif any(not allowed.repeats(effect) for effect in open_ones):
        assert report["error"] == "repeat_refused"
    else:
        again = {effect.key for effect in open_ones if happened[effect.key]}
        assert scene.happened() == Counter(dict.fromkeys(EFFECTS[scene.kind], 1)) + Counter(again)
        assert report["outcome"] in ("completed", "replayed")
        replay = scene.run("conservative")
        assert replay is not None
        assert (replay["outcome"], replay["result"]) == ("replayed", report["result"])
        assert replay["boundaries"] == 0
        return True
    assert (scene.stored(), scene.happened()) == (before, happened)
    return False


def boundaries(scene: Scene) -> int:
    report = scene.run("conservative")
    assert report is not None
    assert report["outcome"] == "completed"
    assert set(scene.happened()) == EFFECTS[scene.kind]
    return int(report["boundaries"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["agent", "workflow"])
def test_a_worker_killed_at_any_boundary_over_a_file_resumes_as_its_policy_says(
    workers: Workers, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    refusals = completions = 0
    for cut in range(1, boundaries(Scene(workers, kind, tmp_path / "whole")) + 1):
        crashed = Scene(workers, kind, tmp_path / f"cut-{cut}")
        crashed.folder.mkdir()
        assert crashed.run("conservative", cut) is None
        assert max(crashed.happened().values(), default=0) <= 1
        for policy_name in POLICIES[kind]:
            completed = check_resume(crashed.copy(tmp_path / f"cut-{cut}-{policy_name}"), policy_name)
            completions += completed
            refusals += not completed
    assert refusals > 0
    assert completions > refusals


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["agent", "workflow"])
def test_a_worker_killed_at_any_boundary_over_the_kernel_resumes_as_its_policy_says(
    serving: Serving, workers: Workers, kind: str, tmp_path: Path
) -> None:
    """A refused resume leaves everything as it was, so the policies take turns until one completes the work."""
    processes = iter(range(60))
    base = 30 if kind == "agent" else 0

    def scene(name: str) -> Scene:
        (tmp_path / name).mkdir()
        return Scene(workers, kind, tmp_path / name, serving.worker(f"p{base + next(processes)}"))

    for cut in range(1, boundaries(scene("whole")) + 1):
        crashed = scene(f"cut-{cut}")
        assert crashed.run("conservative", cut) is None
        assert any(check_resume(crashed, policy_name) for policy_name in POLICIES[kind])


@pytest.fixture
def tool_serving(tmp_path: Path) -> Any:
    kin = [child(f"p{n}", "bank/pay", share=100) for n in range(30)]
    host = host_config([server("bank", "resource.py", tmp_path / "bank")], *kin, max_processes=31)
    return ToolState.make(tmp_path / "state", host, policy(tool("bank"), grant()))


def paid(folder: Path) -> Counter[str]:
    return Counter(effect["arguments"]["to"] for effect in effects(folder / "bank"))


@pytest.mark.timeout(300)
def test_a_tool_that_the_kernel_calls_happens_once_wherever_the_worker_is_killed(
    tool_serving: ToolState, workers: Workers, tmp_path: Path
) -> None:
    """The policy names the model and no tool: the kernel replays a call, or makes it for the first time."""
    with tool_serving.serve() as serving:
        whole = _tool_scene(workers, serving, tmp_path, 0)
        report = whole.run("conservative")
        assert report is not None
        for cut in range(1, report["boundaries"] + 1):
            before = paid(tmp_path)
            crashed = _tool_scene(workers, serving, tmp_path, cut)
            assert crashed.run("conservative", cut) is None
            resumed = crashed.run("model")
            assert resumed is not None
            assert resumed["outcome"] in ("completed", "replayed")
            assert paid(tmp_path) - before == Counter(["pay-1", "pay-2"]), cut


@pytest.mark.timeout(120)
def test_a_tool_whose_outcome_the_kernel_does_not_know_is_never_run_again_whatever_the_policy_allows(
    tool_serving: ToolState, workers: Workers, tmp_path: Path
) -> None:
    """The kernel dies after the effect and before its answer: the middle window."""
    gate = Gate(tmp_path / "bank", "after_effect")
    serving = tool_serving.serve()
    scene = _tool_scene(workers, serving, tmp_path, 1)
    assert scene.worker is not None
    workers.begin(scene.order("conservative"))
    gate.reached()
    gate.disarm()
    serving.kill()
    lost = workers.end()
    assert lost is not None
    assert lost["error"] == "ambiguous"
    with tool_serving.serve() as again:
        after = Scene(workers, "agent", scene.folder, again.worker(scene.worker.process), "kernel")
        before = after.stored()
        refused = after.run("conservative")
        assert refused is not None
        assert (refused["error"], after.stored()) == ("ambiguous_in_flight", before)
        for _ in range(2):
            unknown = after.run("model tools delegation steps")
            assert unknown is not None
            assert unknown["error"] == "effect_unknown"
        assert paid(tmp_path) == Counter(["pay-1"])


def _tool_scene(workers: Workers, serving: ToolServing, folder: Path, number: int) -> Scene:
    place = folder / f"tools-{number}"
    place.mkdir()
    return Scene(workers, "agent", place, serving.worker(f"p{number}"), "kernel")
