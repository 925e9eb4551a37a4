"""`--checkpoint-to`: what reaches a file or a command of a real host, held against the log that the host kept."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chio import handout
from chio.handout import handing_out
from tests.host.commands import accepted, contents, refused, run_chio
from tests.kernel.serving import Line, Serving, State, child, config, result_of
from tests.state.served import Served
from verify.log import Checkpoint, verify_checkpoint

pytestmark = pytest.mark.timeout(60)

LOST = "chio: a checkpoint was not handed out ("

# Says that it runs, waits until it may go on, and keeps what it was given.
STEPPED = """
import sys
started, go, out = sys.argv[1:]
note = sys.stdin.buffer.read()
open(started, "w").close()
open(go).close()
with open(out, "ab") as file:
    file.write(note + b"|")
"""


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State.make(tmp_path / "made", config(child("a", share=9000)))


def checked(state: State, note: bytes | str) -> Checkpoint:
    """A note that the state's log key signed."""
    text = note if isinstance(note, bytes) else note.encode()
    return verify_checkpoint(text, state.pins.log_key, f"chio.invalid/{state.pins.runtime_id}")


def require_whole_log(state: State, folder: Path, notes: list[bytes]) -> None:
    """An auditor who kept these notes, the newest last: each of one log that only grew, the last of all of it."""
    checkpoints = [checked(state, note) for note in notes]
    assert checkpoints[-1].size == len(state.log().leaves)
    files = [folder / "leaves.ndjson"]
    accepted("process", "export-log", "--state", state.path, "--out", files[0])
    for note, checkpoint in zip(notes, checkpoints, strict=True):
        kept, proof = folder / f"kept-{checkpoint.size}", folder / f"since-{checkpoint.size}"
        kept.write_bytes(note)
        accepted("process", "export-log", "--state", state.path, "--out", proof, "--since", checkpoint.size)
        accepted("verify", "log", kept, proof, "--pins", state.path / "pins.json")
        files.append(kept)
    accepted("verify", "log", *files, "--pins", state.path / "pins.json")


def refused_calls(served: Served, first: int, count: int) -> None:
    """So many new calls of a tool that nobody has: one leaf, and one commit, each."""
    with Line(served.path) as line:
        for number in range(first, first + count):
            line.send(
                served.frame("invoke", operation_key=f"k{number}", server_id="far", tool_name="transfer", arguments={})
            )
            assert result_of(line.read())["verdict"] == "deny"


def command(*words: object) -> str:
    return "|" + " ".join(f"'{word}'" for word in words)


def fifo(folder: Path, name: str) -> Path:
    os.mkfifo(folder / name)
    return folder / name


def unconfined_run(folder: Path, target: object) -> tuple[State, list[object]]:
    """A state, and the command that runs a plan of one worker on it, which needs no privilege."""
    made = State.make(folder / "made", config(child("a"), max_calls=10))
    worker = {"process": "a", "command": ["true"], "timeout_seconds": 5, "confinement": {"profile": "none"}}
    plan = {"schema": "chio.process.run.v2", "max_parallel": 1, "workers": [worker]}
    (made.folder / "plan.json").write_text(json.dumps(plan))
    where = ("--state", made.path, "--plan", made.folder / "plan.json")
    return made, ["process", "run", *where, "--allow-unconfined", "--checkpoint-to", target]


# --- what is handed out, and when ---


def test_a_command_is_given_the_checkpoint_of_the_start_one_each_1000_leaves_and_the_last(
    state: State, tmp_path: Path
) -> None:
    pipe = fifo(tmp_path, "pipe")
    with Served(state, "a", ("--checkpoint-to", command("dd", f"of={pipe}", "status=none"))) as served:
        served.start()
        notes = [pipe.read_bytes()]
        first = checked(state, notes[0]).size
        for more in (1000, 2000):
            refused_calls(served, more, 1000)
            notes.append(pipe.read_bytes())
            assert checked(state, notes[-1]).size == first + more
        refused_calls(served, 0, 3)
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        notes.append(pipe.read_bytes())
        stopping.join()
        assert checked(state, notes[-1]).size == first + 2003
    require_whole_log(state, tmp_path, notes)


def test_a_run_leaves_the_checkpoint_of_its_whole_log_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"")
    made, arguments = unconfined_run(tmp_path, tmp_path / "kept")
    before = checked(made, made.rows("SELECT note FROM log_checkpoint")[0][0])
    done = run_chio(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["complete"] is True
    note = (tmp_path / "kept").read_bytes()
    assert checked(made, note).size > before.size
    require_whole_log(made, tmp_path, [note])
    assert run_chio(*arguments).returncode == 0  # the file is a checkpoint now, and may be replaced
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_the_checkpoint_that_the_kernel_commits_as_it_ends_is_told_too(state: State) -> None:
    notes: list[str] = []
    with Serving(state, notes.append) as serving:
        serving.worker("a")
    sizes = [checked(state, note).size for note in notes]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == len(state.log().leaves)


def test_a_checkpoint_that_a_dead_host_told_nobody_is_told_by_the_next(state: State) -> None:
    with Serving(state) as serving:
        serving.worker("a")
    notes: list[str] = []
    Serving(state, notes.append).kill()
    assert checked(state, notes[0]).size >= 2


def test_of_checkpoints_that_wait_for_a_command_the_newest_is_given(state: State, tmp_path: Path) -> None:
    started, go, out = fifo(tmp_path, "started"), fifo(tmp_path, "go"), tmp_path / "out"
    (tmp_path / "stepped.py").write_text(STEPPED)
    with handing_out(command(sys.executable, tmp_path / "stepped.py", started, go, out), state.path) as give:
        give("one")
        started.read_bytes()
        for note in ("two", "three", "four"):
            give(note)
        go.write_bytes(b"")
        started.read_bytes()
        go.write_bytes(b"")
    assert out.read_bytes() == b"one|four|"


# --- what fails ---


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("false",), "it ended with status 1"),
        (("/no/such/command",), "No such file or directory"),
        (("sh", "-c", "kill -9 $$"), "it was ended by signal 9"),
    ],
    ids=["failing", "missing", "killed"],
)
def test_a_command_that_fails_is_told_and_changes_nothing_about_the_run(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    _, arguments = unconfined_run(tmp_path, command(*words))
    done = run_chio(*arguments)
    assert done.returncode == 0
    assert json.loads(done.stdout)["complete"] is True
    lines = done.stderr.splitlines()
    assert lines
    for line in lines:
        assert line.startswith(f"{LOST}{words[0]}, --checkpoint-to, {why}; ")


def test_a_command_that_hangs_is_ended_at_its_time_limit_with_all_that_it_started(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handout, "COMMAND_S", 0.5)
    alive = fifo(tmp_path, "alive")
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    with handing_out(command("sh", "-c", f"exec 3>{alive}; echo >&3; sleep 1000 & sleep 1000"), state.path) as give:
        give("note")
    os.set_blocking(reader, True)
    assert os.read(reader, 10) == b"\n"
    assert os.read(reader, 10) == b""  # nobody holds its other end any more
    os.close(reader)
    assert capsys.readouterr().err.startswith(f"{LOST}sh, --checkpoint-to, it took longer than 0.5 s; ")


def test_a_command_that_does_not_read_its_input_has_been_given_it(
    state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    with handing_out("|true", state.path) as give:
        give("n" * 1_000_000)
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_replaced_is_told_and_changes_nothing_about_the_run(tmp_path: Path) -> None:
    (tmp_path / ".kept.new").mkdir()
    _, arguments = unconfined_run(tmp_path, tmp_path / "kept")
    done = run_chio(*arguments)
    assert done.returncode == 0
    assert done.stderr.startswith(f"{LOST}{tmp_path}/kept, --checkpoint-to, {tmp_path}: ")
    assert not (tmp_path / "kept").exists()


# --- whole at every moment ---


def test_whoever_reads_the_file_at_any_moment_finds_one_whole_checkpoint(state: State, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("chio.invalid/")
    given = {"chio.invalid/"} | {f"{number}\n" * 100_000 for number in range(5)}
    with handing_out(str(kept), state.path) as give:
        for note in sorted(given) * 10:
            give(note)
            for _ in range(5):
                assert kept.read_text() in given
    assert kept.read_text() == max(given)


def test_after_a_kill_of_the_host_the_file_is_whole_and_the_next_host_goes_on_with_it(
    state: State, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    notes: list[bytes] = []
    with Served(state, "a", ("--checkpoint-to", str(kept))) as served:
        for turn in range(3):
            served.start()
            refused_calls(served, turn * 20, 20)
            served.kill("host")
            if kept.exists():
                notes.append(kept.read_bytes())
        served.start()
    notes.append(kept.read_bytes())
    require_whole_log(state, tmp_path, list(dict.fromkeys(notes)))


# --- what is refused before anything starts ---


def a_folder(folder: Path) -> str:
    (folder / "sub").mkdir()
    return str(folder / "sub")


def a_link(folder: Path) -> str:
    (folder / "link").symlink_to(folder / "elsewhere")
    return str(folder / "link")


def somebodys_file(folder: Path) -> str:
    (folder / "thesis.txt").write_text("chapter 1")
    return str(folder / "thesis.txt")


def through_a_link(folder: Path) -> str:
    (folder / "way").symlink_to(folder / "made" / "state")
    return str(folder / "way" / "kept")


TARGETS: dict[str, tuple[Callable[[Path], str], str]] = {
    "a file in the state": (lambda folder: str(folder / "made/state/kept"), "it is in the state"),
    "a file below the state": (lambda folder: str(folder / "made/state/.chio-blobs/kept"), "it is in the state"),
    "a file in the state, through a link": (through_a_link, "it is in the state"),
    "a reserved name": (lambda folder: str(folder / "keys.json"), "a host keeps a file of that name"),
    "a reserved prefix": (lambda folder: str(folder / ".chio-kept"), "a host keeps a file of that name"),
    "a folder that does not exist": (lambda folder: str(folder / "none/kept"), "No such file or directory"),
    "a folder": (a_folder, "what is there is no checkpoint"),
    "a link": (a_link, "what is there is no checkpoint"),
    "a pipe": (lambda folder: str(fifo(folder, "pipe")), "what is there is no checkpoint"),
    "somebody's file": (somebodys_file, "what is there is no checkpoint"),
    "nothing": (lambda _: "", "it names no file"),
    "no command": (lambda _: "| ", "there is no command after the |"),
    "a quotation without an end": (lambda _: "|tee 'kept", "No closing quotation"),
}


@pytest.mark.parametrize(("target", "why"), TARGETS.values(), ids=TARGETS)
def test_what_cannot_be_handed_to_is_refused_and_nothing_is_started(
    state: State, tmp_path: Path, target: Callable[[Path], str], why: str
) -> None:
    named = target(tmp_path)
    before = contents(tmp_path)
    line = refused("process", "serve", "--state", state.path, "--socket", tmp_path / "socket", "--checkpoint-to", named)
    assert line.startswith("chio: checkpoints cannot be handed out there (")
    assert "--checkpoint-to" in line
    assert why in line
    assert contents(tmp_path) == before
