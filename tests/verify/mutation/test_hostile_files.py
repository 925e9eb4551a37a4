"""Files that no auditor wants to be handed, through the real commands: each ends with one line that names the file and
the check, in bounded memory and time, and never with a traceback or a verdict that it is good."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.verify import artifacts, bundled, logged, observed, signed
from tests.verify.mutation.subjects import OTHER_RUN

ROOT = Path(__file__).parents[3]
MEMORY_BYTES = 1 << 30  # of address space, for each process; the good files take a fraction of it
SECONDS = 60
CALL = artifacts.FOLDER / "valid" / "calls" / "completed"
KEY, RUN = observed.key_of(observed.KERNEL), observed.RUNTIME_ID
_CODE = "import sys; sys.path.insert(0, {root!r}); from verify.cli import {name}; {name}()"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `FILE` in its arguments is the file that is hostile; `good` is what it takes."""

    name: str
    arguments: tuple[str, ...]
    good: bytes
    other: bytes  # of another run
    program: str = "main"


def run(command: Command, file: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(file) if word == "FILE" else word for word in command.arguments]
    return subprocess.run(
        [sys.executable, "-c", _CODE.format(root=str(ROOT), name=command.program), *arguments],
        capture_output=True, text=True, timeout=2 * SECONDS, check=False, preexec_fn=_bounded,
    )  # fmt: skip


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def refusal(command: Command, file: Path) -> str:
    """The check that refuses a file; the rest of what a refusal has to be is held here."""
    done = run(command, file)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[0]
    assert line.startswith(("chio-verify: ", "chio: "))
    assert str(file) in line
    if done.stdout and command.program == "main" and command.name != "call":
        assert json.loads(done.stdout)["result"] == "refused"
    found = re.search(r"check ([a-z_]+);", line)
    assert found is not None, line
    return found[1]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "bundle").mkdir()
    leaves = logged.log().leaves()
    (folder / "note.txt").write_text(logged.checkpoint(leaves))
    other = bundled.good()
    other.rename(other.runtime_id, OTHER_RUN)
    other.rebind()
    other_call = artifacts.FOLDER / "valid" / "calls" / "unknown"
    bundle_pins = bundled.written(bundled.good(), folder / "bundle")[1]
    log_pins = ("--pins", logged.pins(folder))
    foreign = signed.receipt(signed.changed("kernel_key", signed.OTHER_KEY))
    made = [
        Command("receipts", ("receipts", "FILE", "--trusted-kernel-pubkey", signed.KERNEL_KEY),
                signed.receipt() + b"\n", foreign),
        Command("log", ("log", "FILE", str(folder / "note.txt"), *log_pins),
                b"".join(leaf + b"\n" for leaf in leaves), b"".join(leaf + b"\n" for leaf in leaves[1:])),
        Command("checkpoint", ("log", "FILE", *log_pins), logged.checkpoint(leaves).encode(),
                logged.checkpoint(leaves, origin="chio.invalid/x").encode()),
        Command("tlog-proof", ("log", "FILE", *log_pins),
                logged.inclusion(leaves, 5, logged.checkpoint(leaves), leaves[5]).encode(),
                logged.inclusion(leaves, 5, logged.checkpoint(leaves), leaves[6]).encode()),
        *(Command(name, (name, "FILE", "--pins", bundle_pins), bundled.good().assemble(), other.assemble())
          for name in ("bundle", "custody", "budget", "confinement")),
        Command("call", ("call", "FILE", "--request", str(CALL / "request.json"), "--context",
                         str(CALL / "context.json"), "--trusted-kernel-pubkey", KEY, "--runtime-id", RUN),
                (CALL / "call.json").read_bytes(), (other_call / "call.json").read_bytes()),
        Command("verify-call", ("--artifact", "FILE", "--request", str(CALL / "request.json"), "--context",
                                str(CALL / "context.json"), "--trusted-kernel-pubkey", KEY, "--runtime-id", RUN),
                (CALL / "call.json").read_bytes(), (other_call / "call.json").read_bytes(), "process_verify_call"),
        Command("receipt verify", ("--input", "FILE", "--trusted-kernel-pubkey", signed.KERNEL_KEY),
                signed.receipt() + b"\n", foreign, "receipt_verify"),
    ]  # fmt: skip
    return {command.name: command for command in made}


NAMES = (
    "receipts", "log", "checkpoint", "tlog-proof", "bundle", "custody", "budget", "confinement", "call", "verify-call",
    "receipt verify",
)  # fmt: skip
# The others read their file in the same way as one of these.
READERS = ("receipts", "log", "checkpoint", "tlog-proof", "bundle", "call")
UNREADABLE = {"input", "text", "canonical", "fields", "encoding", "sections", "checkpoint", "inclusion", "leaves"}


@pytest.mark.parametrize("name", NAMES)
def test_the_good_file_is_verified_in_that_memory(name: str, commands: dict[str, Command], tmp_path: Path) -> None:
    file = tmp_path / "good"
    file.write_bytes(commands[name].good)
    done = run(commands[name], file)
    assert (done.returncode, done.stderr) == (0, "")


def deep(good: bytes) -> bytes:
    """What the artifact begins with, and then ten thousand levels."""
    if good.startswith(b"{"):
        return good[: good.index(b":") + 1] + b"[" * 10_000 + b"]" * 10_000 + b"}"
    return (b"\x81" if good[0] > 127 else b"[") * 10_000 + b"\n\n" + good


def versioned(good: bytes) -> bytes:
    """Every `v1` or `v2` a `v7`, in base64 or not at all where it is not written so."""
    return re.sub(rb"(chio\.[a-z.-]+\.v|tlog-proof@v)[0-9]|^chio\.invalid", rb"\g<1>7", good)


HOSTILE: dict[str, Callable[[Command], bytes]] = {
    "empty": lambda command: b"",
    "truncated": lambda command: command.good[: len(command.good) * 2 // 3],
    "concatenated": lambda command: command.good.rstrip(b"\n") + command.good,
    "re-encoded": lambda command: command.good.decode("latin-1").encode("utf-16"),
    "nested ten thousand deep": lambda command: deep(command.good),
    "of the wrong type": lambda command: b"[]\n",
    "of another version": lambda command: versioned(command.good),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_hostile_bytes_is_refused(name: str, commands: dict[str, Command], tmp_path: Path) -> None:
    command, file = commands[name], tmp_path / "hostile"
    for what, make in HOSTILE.items():
        file.write_bytes(make(command))
        assert make(command) != command.good, what
        found = refusal(command, file)
        assert found in UNREADABLE, (what, found)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_run_is_refused(name: str, commands: dict[str, Command], tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_bytes(commands[name].other)
    refusal(commands[name], file)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_or_too_much_of_one_is_refused(name: str, commands: dict[str, Command], tmp_path: Path) -> None:
    """A pipe that nobody writes into holds nobody up; 4 GiB of nothing, or of nothing after a good beginning."""
    command, pipe, sparse = commands[name], tmp_path / "pipe", tmp_path / "sparse"
    os.mkfifo(pipe)
    assert refusal(command, tmp_path) == "input"
    assert refusal(command, tmp_path / "absent") == "input"
    assert refusal(command, pipe) in UNREADABLE
    for beginning in (b"", command.good):
        sparse.write_bytes(beginning)
        os.truncate(sparse, 4 << 30)
        assert refusal(command, sparse) in UNREADABLE
        sparse.unlink()


@pytest.mark.parametrize("what", ["no key", "no point", "a folder", "a pipe", "nested", "another's", "huge"])
@pytest.mark.parametrize("name", ["receipts", "bundle"])
def test_pins_that_pin_nothing_are_refused(name: str, what: str, commands: dict[str, Command], tmp_path: Path) -> None:
    command, pins, file = commands[name], tmp_path / "pins", tmp_path / "good"
    file.write_bytes(command.good)
    good = json.loads(Path(logged.pins(tmp_path)).read_text())
    match what:
        case "no key" | "no point":
            pins.write_text(json.dumps({**good, "kernel_key": "7" * 63 if what == "no key" else "2" * 64}))
        case "a folder":
            pins.mkdir()
        case "a pipe":
            os.mkfifo(pins)
        case "nested":
            pins.write_text("[" * 10_000)
        case "another's":
            pins.write_text(signed.receipt().decode())
        case _:
            pins.touch()
            os.truncate(pins, 4 << 30)
    arguments = command.arguments
    before = arguments.index("--pins") if "--pins" in arguments else arguments.index("--trusted-kernel-pubkey")
    pinned = Command(name, (*arguments[:before], "--pins", str(pins)), b"", b"")
    done = run(pinned, file)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("chio-verify: ")
    assert f"({pins}, " in done.stderr
    assert "Traceback" not in done.stderr
