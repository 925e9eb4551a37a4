"""What a worker's data reaches is on disk in no form that can be read without the key file, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.host.commands import accepted
from tests.keeping.planting import Ground, found
from tests.kernel.serving import State
from tests.report.test_experiments import descendants
from tests.state.served import Served

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="confining a server that writes needs root in this version"),
]

# What a plain state holds when the kernel was killed in the middle of the last call.
HOT = {
    "overwritten checkpoint", "checkpoint", "small blob", "large blob", "arguments", "arguments out of scope",
    "constrained arguments", "arguments of no message", "message key", "payload", "arguments in flight",
    "input", "output", "digest of payload", "digest of small blob", "digest of large blob",
}  # fmt: skip
COLD = {"stdout", "stderr", "stderr of the server"}  # kept when an attempt or a server has ended


def start(ground: Ground) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "chio", "process", "run", "--state", str(ground.state)]
    return subprocess.Popen(
        [*command, "--plan", str(ground.folder / "plan.json")], text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def kernel_of(host: int) -> int:
    (kernel,) = [pid for pid in descendants(host) if b"chio.kernel" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return kernel


def killed_in_flight(ground: Ground, look: Any = None) -> None:
    """Run the plan until its last call is on its way; then SIGKILL to the kernel."""
    host = start(ground)
    try:
        (ground.folder / "gates" / "hang.reached").read_text()  # opens when the server has been asked
        if look is not None:
            look(host.pid)
        os.kill(kernel_of(host.pid), signal.SIGKILL)
        host.communicate(timeout=60)
        assert host.returncode == 1
    finally:
        host.kill()
        host.wait()


def run_through(ground: Ground) -> None:
    (ground.folder / "gates" / "hang.reached").unlink()
    host = start(ground)
    out, err = host.communicate(timeout=60)
    assert host.returncode == 0, err
    assert json.loads(out)["complete"]


def received_elsewhere(ground: Ground) -> None:
    """Another process takes the message, under `serve`, and passes on what it was told."""
    with Served(State(ground.folder.parent), "r") as served:
        served.start()
        arguments = {"after_sequence": "0", "limit": 16}
        told = served.ask("invoke", operation_key="receive", server_id="chio-ipc", tool_name="receive_jobs",
                          arguments=arguments)  # fmt: skip
        assert told["output"]["value"]["messages"][0]["payload"] == {"text": ground.planted.texts["payload"]}
        served.save({"text": ground.planted.text("checkpoint under serve")})
        assert served.host is not None
        os.kill(kernel_of(served.host.pid), signal.SIGKILL)
        assert served.host.wait(30) == 1
        served.host.stdout.close()  # type: ignore[union-attr]
        served.host = None


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground.make(tmp_path / "project")


def init(ground: Ground) -> None:
    accepted("process", "init", "--config", ground.folder / "host.json", "--state", ground.state)


def test_a_plain_state_shows_all_of_it(ground: Ground) -> None:
    """The search finds what there is to find."""
    init(ground)
    killed_in_flight(ground)
    assert (ground.state / "authority.db-wal").stat().st_size > 0
    assert found(ground.state, ground.planted) >= HOT - COLD
    run_through(ground)
    assert found(ground.state, ground.planted) >= HOT | COLD


def test_an_encrypted_state_shows_nothing_of_it_hot_or_cold(ground: Ground, keyed: Path) -> None:
    init(ground)
    killed_in_flight(ground, lambda host: hides_the_key(host, keyed))
    assert (ground.state / "authority.db-wal").stat().st_size > 0
    assert found(ground.state, ground.planted) == set()
    run_through(ground)
    assert found(ground.state, ground.planted) == set()
    of_worker = ("--state", ground.state, "--process", "w")
    logs = accepted("process", "logs", *of_worker, "--attempt", 2)
    assert logs["stdout"] == ground.planted.texts["stdout"] + "\n"
    assert logs["stderr"] == ground.planted.texts["stderr"] + "\n"
    told = accepted("process", "logs", "--state", ground.state, "--server", "telling")["stderr"]
    assert told == ground.planted.texts["stderr of the server"] + "\n"
    kept = accepted("process", "state", *of_worker)["data"]["checkpoint"]
    assert kept == {"revision": "2", "value": {"text": ground.planted.texts["checkpoint"]}}
    received_elsewhere(ground)
    assert found(ground.state, ground.planted) == set()
    status = accepted("process", "status", "--state", ground.state)
    assert status["calls"] == {"completed": 4, "refused": 3, "unknown": 1}


def hides_the_key(host: int, key_file: Path) -> None:
    """No process that a host started has the key in its arguments or environment, nor its file open."""
    text = key_file.read_text().strip()
    forms = [text.encode(), bytes.fromhex(text)]
    started = list(descendants(host))
    assert len(started) >= 5  # kernel, launcher, the server and its init, the worker and its init
    for pid in started:
        for name in ("environ", "cmdline"):
            data = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not [form for form in forms if form in data], (pid, name)
        opened = [os.path.realpath(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        assert str(key_file) not in opened, Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in started:
        if b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            assert b"CHIO_KEY_FILE" not in Path(f"/proc/{pid}/environ").read_bytes()
            return
    raise AssertionError("there was no worker")
