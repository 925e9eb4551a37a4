"""What a dead host left outside its state: the next start of that state removes it, whatever there is left to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from chio.sockets import SocketDirectory
from tests.host.commands import accepted
from tests.kernel.serving import State

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's workers need layers given up by name"),
]


def test_a_complete_run_still_removes_the_sockets_of_the_host_that_died_after_it(tmp_path: Path) -> None:
    """Killed after the last attempt's end was committed, and before its socket was removed."""
    state = State.make(tmp_path / "folder")
    worker: dict[str, Any] = {"process": "a", "command": ["true"], "timeout_seconds": 30}
    plan = state.folder / "plan.json"
    plan.write_text(json.dumps({"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker]}))
    command = ("process", "run", "--state", state.path, "--plan", plan)
    assert accepted(*command)["complete"] is True
    left = Path(SocketDirectory(state.pins.runtime_id).path)
    left.mkdir(mode=0o700)
    (left / "a-1.sock").touch()
    report = accepted(*command)
    assert (report["complete"], report["abandoned_socket_intents"]) == (True, 1)
    assert not left.exists()
