"""The package as it is given away: its page, its door, its dependencies, and what it tells the host."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import chio_process.checkpoints as package
from chio_process import ProcessClient, WorkerError
from chio_process.checkpoints import AgentIdentity, AgentState, CheckpointErrorKind, ProcessStateStore, errors, start
from chio_process.checkpoints.resume import ResumePolicy, resume
from tests.kernel.serving import Worker

FOLDER = Path(package.__file__).parent
PAGE = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text(encoding="utf-8")


def test_the_examples_of_the_page_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"example {number}", "exec"), names)
    names["store"].close()
    names["effects"].close()
    assert (tmp_path / "progress.db").exists()


def test_the_command_of_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chio_process.checkpoints.__main__ import main

    monkeypatch.chdir(tmp_path)
    package.SqliteStore("progress.db").close()
    (command,) = re.findall(r"python -m chio_process\.checkpoints (.*)", PAGE)
    assert main(command.split()) == 0


def test_the_page_and_the_docstring_name_every_kind_of_error() -> None:
    assert errors.__doc__ is not None
    for kind in CheckpointErrorKind:
        assert f"`{kind}`" in PAGE
        assert re.search(rf"\b{kind}\b", errors.__doc__)


def test_the_door_shows_every_name_that_it_imports() -> None:
    (imports,) = [
        {alias.name for node in ast.parse((FOLDER / "__init__.py").read_text()).body if isinstance(node, ast.ImportFrom)
         for alias in node.names}
    ]  # fmt: skip
    assert imports == set(package.__all__)


def test_the_package_stands_on_the_standard_library_alone() -> None:
    paths = list(FOLDER.glob("*.py"))
    assert len(paths) > 10
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "chio_process"}, path.name


# --- what the host is told ---


class Told(ProcessClient):
    """A client that can count, and the answer it gets."""

    def __init__(self, worker: Worker, code: str | None = None) -> None:
        super().__init__(worker.path, worker.credential)
        self.code = code
        self.notes: list[Any] = []

    def note(self, event: str, **fields: int) -> None:
        self.notes.append((event, fields))
        if self.code:
            raise WorkerError(self.code, "refused by the kernel")


def resume_ready(client: ProcessClient) -> None:
    store = ProcessStateStore(client)
    agent = AgentIdentity("researcher", "model-1", 3)
    start(store, "a", "run-1", AgentState(agent), now=1_000)
    resume(store, "a", "run-1", agent, ResumePolicy.conservative(), now=1_250)


def test_a_resume_over_the_process_state_is_noted_at_the_host(worker: Worker) -> None:
    with Told(worker) as client:
        resume_ready(client)
        assert client.notes == [("resumed", {"age_ms": 250})]


@pytest.mark.parametrize("code", ["invalid_request", "runtime_error"])
def test_a_kernel_that_takes_no_notes_does_not_keep_anybody_from_resuming(worker: Worker, code: str) -> None:
    with Told(worker, code) as client:
        resume_ready(client)
        assert len(client.notes) == 1


def test_a_note_that_fails_otherwise_is_not_passed_over(worker: Worker) -> None:
    with Told(worker, "unauthenticated") as client, pytest.raises(package.CheckpointError, match="unavailable"):
        resume_ready(client)
