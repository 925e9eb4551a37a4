"""Plans: what is resolved and found, and what is refused before anything starts."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from confine import (
    CommandRefused,
    ConfineError,
    MountPlan,
    for_attempt,
    plan_mounts,
    plan_unconfined,
    resolve_executable,
)
from confine.programs import elf_loader
from tests.confine.launching import PYTHON, Runner


def plan(cwd: Path, *argv: str, **options: Any) -> MountPlan:
    return plan_mounts(argv=argv or ("/bin/true",), cwd=str(cwd), state_dir=options.pop("state_dir", None), **options)


def executable(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(cwd: Path) -> Path:
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", cwd / ".venv"], check=True)
    return cwd / ".venv"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A Python that lives in a folder closed to others, as pyenv's below /root does: a copy small enough for a test."""
    top = tmp_path / "closed" / "versions" / "3"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(os.__file__).parent
    (top / "lib" / version).mkdir(parents=True)
    for name in ("encodings", "collections", "importlib", "json", "lib-dynload", "re"):
        shutil.copytree(library / name, top / "lib" / version / name, symlinks=True)
    for file in library.glob("*.py"):
        shutil.copy(file, top / "lib" / version / file.name)
    executable(top / "bin" / version, Path(os.path.realpath(PYTHON)).read_bytes())
    (top / "bin" / "python3").symlink_to(version)
    (tmp_path / "closed").chmod(0o700)
    return top


# --- what runs ------------------------------------------------------------------------------------------------------


def test_a_virtual_environment_below_cwd_runs_with_its_own_prefix(runner: Runner, cwd: Path, venv: Path) -> None:
    script = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    assert runner.run([".venv/bin/python", "-c", script], cwd).json() == [str(venv), "/usr"]


def test_an_interpreter_below_a_closed_folder_runs_when_it_is_named_as_a_root(
    runner: Runner, cwd: Path, prefix: Path
) -> None:
    script = "import json, sys; print(json.dumps(sys.prefix))"
    command = [str(prefix / "bin" / "python3"), "-I", "-c", script]
    assert runner.run(command, cwd, runtime_roots=[str(prefix)]).json() == str(prefix)


def test_a_bare_command_brings_its_own_interpreter(runner: Runner, cwd: Path, prefix: Path) -> None:
    command = ["python3", "-I", "-c", "import json, sys; print(json.dumps(sys.prefix))"]
    assert runner.run(command, cwd, path_env=str(prefix / "bin")).json() == str(prefix)


def test_a_virtual_environment_of_a_closed_interpreter_needs_it_as_a_root(
    runner: Runner, cwd: Path, prefix: Path
) -> None:
    top = cwd / ".venv"
    (top / "bin").mkdir(parents=True)
    (top / "pyvenv.cfg").write_text(f"home = {prefix}/bin\ninclude-system-site-packages = false\n")
    (top / "bin" / "python").symlink_to(prefix / "bin" / "python3")
    command = [".venv/bin/python", "-I", "-c", "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"]
    with pytest.raises(ConfineError, match=r"--runtime-root") as refused:
        plan(cwd, *command)
    assert str(prefix) in str(refused.value)
    ended = runner.run(command, cwd, runtime_roots=[str(prefix)])
    assert ended.json() == [str(top), str(prefix)]


def test_node_runs(runner: Runner, cwd: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    (cwd / "a.mjs").write_text("console.log(JSON.stringify([2 + 3, process.env.HOME]))")
    assert runner.run(["node", "a.mjs"], cwd).json() == [5, "/tmp"]


def test_a_script_runs_by_its_first_line(runner: Runner, cwd: Path) -> None:
    executable(cwd / "script", "#!/bin/sh\necho $0 $1\n")
    ended = runner.run(["./script", "x"], cwd)
    assert ended.exited.stdout == f"{cwd}/script x\n".encode()
    assert ended.field("executable").value["path"] == os.path.realpath("/bin/sh")


# --- what a plan holds ----------------------------------------------------------------------------------------------


def test_visible_files_among_the_arguments_are_digested(cwd: Path) -> None:
    (cwd / "a.py").write_text("pass")
    made = plan(cwd, PYTHON, "a.py", "absent.py", "/etc/shadow", str(cwd / "a.py"), "--flag")
    digest = hashlib.sha256(b"pass").hexdigest()
    assert made.visible_files == {"a.py": digest, str(cwd / "a.py"): digest}
    assert made.executable_sha256 == hashlib.sha256(Path(PYTHON).read_bytes()).hexdigest()


def test_a_changed_executable_changes_the_plan(cwd: Path) -> None:
    executable(cwd / "run", "#!/bin/sh\ntrue\n")
    before = plan(cwd, "./run")
    executable(cwd / "run", "#!/bin/sh\nfalse\n")
    after = plan(cwd, "./run")
    assert before.executable_sha256 != after.executable_sha256
    assert before.program_sha256 == after.program_sha256


def test_an_operators_folder_is_an_overlay_and_never_shown_with_its_owners_rights(cwd: Path) -> None:
    for mode in (0o755, 0o700):
        cwd.chmod(mode)
        bind = next(bind for bind in plan(cwd).binds if bind.path == str(cwd))
        assert (bind.overlaid, bind.owner) == (True, None)
    assert not any(bind.overlaid for bind in plan(cwd).binds if bind.path.startswith(("/usr", "/etc")))


def test_a_single_file_that_others_may_not_read_is_shown_with_its_owners_rights(cwd: Path, tmp_path: Path) -> None:
    owners = {}
    for mode in (0o644, 0o600):
        file = tmp_path / f"{mode:o}"
        file.touch()
        file.chmod(mode)
        bind = next(bind for bind in plan(cwd, read=[str(file)]).binds if bind.path == str(file))
        owners[mode] = (bind.overlaid, bind.owner)
    assert owners == {0o644: (False, None), 0o600: (False, (os.getuid(), os.getgid()))}


def test_a_read_path_that_the_cwd_shows_as_well_is_not_mounted_again(cwd: Path) -> None:
    for folder in ("open", "closed"):
        (cwd / folder / "below").mkdir(parents=True)
    (cwd / "closed").chmod(0o700)

    def mounted(path: str) -> bool:
        return any(bind.path == str(cwd / path) for bind in plan(cwd, read=[path]).binds)

    assert [mounted(path) for path in ("open", "open/below", "closed", "closed/below")] == [False, False, True, True]


def test_states_are_found_at_any_depth_and_in_read_paths(cwd: Path, tmp_path: Path) -> None:
    for folder in (cwd / "a" / "b" / "c", tmp_path / "data" / "state", cwd / "a" / "b" / "c" / "inner"):
        folder.mkdir(parents=True)
        (folder / "authority.db").touch()
    masks = plan(cwd, read=[str(tmp_path / "data")]).masks
    assert masks == tuple(sorted([str(cwd / "a" / "b" / "c"), str(tmp_path / "data" / "state")]))


def test_a_state_made_after_the_plan_is_hidden_from_the_next_attempt(cwd: Path) -> None:
    (cwd / "out").mkdir()
    frozen = plan(cwd, state_dir=str(cwd / "own"), exports_directory="out")
    (cwd / "later").mkdir()
    (cwd / "later" / "authority.db").touch()
    now = for_attempt(frozen, "/run/s")
    assert frozen.masks == (str(cwd / "own"),)
    assert now.masks == (str(cwd / "later"), str(cwd / "own"))
    assert (now.socket, now.binds, now.scratch) == ("/run/s", frozen.binds, frozen.scratch)
    (cwd / "authority.db").touch()
    with pytest.raises(ConfineError, match="inside a host's state"):
        for_attempt(frozen, "/run/s")


def test_the_own_state_that_takes_exports_is_not_hidden_twice(cwd: Path) -> None:
    (cwd / "own").mkdir()
    (cwd / "own" / "authority.db").touch()
    frozen = plan(cwd, state_dir=str(cwd / "own"), exports_directory="own")
    assert (frozen.masks, for_attempt(frozen, "/run/s").masks, frozen.scratch) == ((), (), str(cwd / "own"))


def test_an_unconfined_plan_takes_any_folder_and_any_program(cwd: Path, tmp_path: Path) -> None:
    outside = executable(tmp_path / "outside" / "bin" / "tool", Path("/bin/true").read_bytes())
    (cwd / "a").write_text("pass")
    made = plan_unconfined(argv=[str(outside), "a", "/etc/passwd"], cwd=str(cwd))
    assert (made.program, made.binds, set(made.visible_files)) == (str(outside), (), {"a", "/etc/passwd"})
    assert plan_unconfined(argv=["true"], cwd="/").cwd == "/"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "status"), [("./absent", 127), ("no-such-command-anywhere", 127), ("./plain", 126), ("plain", 126)]
)
def test_a_command_that_cannot_be_run_is_refused_as_a_shell_would(cwd: Path, command: str, status: int) -> None:
    (cwd / "plain").write_text("text")
    with pytest.raises(CommandRefused) as refused:
        resolve_executable(command, str(cwd), str(cwd))
    assert refused.value.status == status


@pytest.mark.parametrize("folder", ["/", "/etc", "/root", "/tmp", "/proc/self", "/run/chio/x", "/absent"])
def test_a_folder_of_the_machine_is_no_cwd(folder: str) -> None:
    with pytest.raises(ConfineError) as refused:
        plan(Path(folder))
    assert refused.value.path == folder
    assert refused.value.fix


def test_a_cwd_inside_a_state_is_refused(cwd: Path) -> None:
    (cwd / "state" / "sub").mkdir(parents=True)
    (cwd / "state" / "authority.db").touch()
    for folder in (cwd / "state", cwd / "state" / "sub"):
        with pytest.raises(ConfineError, match="inside a host's state"):
            plan(folder)
    with pytest.raises(ConfineError, match="inside a host's state"):
        plan(cwd, state_dir=str(cwd))


@pytest.mark.parametrize("kind", ["link", "below a link", "fifo", "absent"])
def test_a_read_path_is_a_plain_file_or_folder_where_it_says(cwd: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    (cwd / "link").symlink_to(tmp_path / "data")
    os.mkfifo(cwd / "fifo")
    path = {"link": "link", "below a link": "link/file", "fifo": "fifo", "absent": "absent"}[kind]
    with pytest.raises(ConfineError) as refused:
        plan(cwd, read=[path])
    assert refused.value.path == str(cwd / path)
    assert refused.value.fix


def test_a_virtual_environment_whose_home_holds_no_python_is_refused(cwd: Path) -> None:
    executable(cwd / ".venv" / "bin" / "python", Path("/bin/true").read_bytes())
    (cwd / ".venv" / "pyvenv.cfg").write_text("home = /etc\n")
    with pytest.raises(ConfineError, match="holds no Python") as refused:
        plan(cwd, ".venv/bin/python")
    assert refused.value.path == str(cwd / ".venv" / "pyvenv.cfg")


def test_a_workers_file_cannot_choose_what_is_mounted(cwd: Path, tmp_path: Path) -> None:
    """A link, a #! line and a pyvenv.cfg that lead to a folder nobody allowed."""
    outside = executable(tmp_path / "outside" / "bin" / "tool", Path("/bin/true").read_bytes())
    (cwd / "link").symlink_to(outside)
    executable(cwd / "script", f"#!{outside}\n")
    for command in ("./link", "./script", str(outside)):
        with pytest.raises(ConfineError, match=r"not in a folder that the worker sees.*--runtime-root"):
            plan(cwd, command)


def test_a_shim_is_refused_with_what_to_name_instead(tmp_path: Path, cwd: Path) -> None:
    executable(tmp_path / "shims" / "python3", "#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfineError, match="shim"):
        plan(cwd, "python3", path_env=str(tmp_path / "shims"))


@pytest.mark.parametrize(
    ("first", "message"), [("#!python3\n", "names no absolute path"), ("#!/no/such/thing\n", "is not there")]
)
def test_a_script_without_a_usable_interpreter_is_refused(cwd: Path, first: str, message: str) -> None:
    executable(cwd / "script", first)
    with pytest.raises(ConfineError, match=message):
        plan(cwd, "./script")


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("absent", "not a folder that exists"),
        (".", "would hide the cwd"),
        ("/usr/lib", "in a folder made new"),
        ("other", "inside a host's state"),
        ("other/sub", "inside a host's state"),
        ("own/sub", "inside a host's state"),
        ("data", "would hide"),
        ("holder", "holds a host's state"),
    ],
)
def test_exports_into_or_over_a_state_are_refused(cwd: Path, directory: str, message: str) -> None:
    for state in ("other", "own", "holder/state"):
        (cwd / state / "sub").mkdir(parents=True)
        (cwd / state / "authority.db").touch()
    (cwd / "data" / "in").mkdir(parents=True)
    (cwd / "data" / "in").chmod(0o700)
    with pytest.raises(ConfineError, match=message):
        plan(cwd, exports_directory=directory, state_dir=str(cwd / "own"), read=["data/in"])


def test_a_state_is_not_given_by_naming_it_or_what_is_in_it(cwd: Path, tmp_path: Path) -> None:
    state = tmp_path / "elsewhere" / "state"
    (state / "blobs").mkdir(parents=True)
    (state / "authority.db").touch()
    for path in (state, state / "blobs", state / "authority.db"):
        with pytest.raises(ConfineError, match="inside a host's state"):
            plan(cwd, read=[str(path)])
    for path in (state, state / "blobs"):
        with pytest.raises(ConfineError, match="inside a host's state"):
            plan(cwd, exports_directory=str(path))


def test_the_loader_of_a_program_is_read_from_its_header(tmp_path: Path) -> None:
    assert elf_loader("/bin/true") is not None
    assert elf_loader(__file__) is None
    (tmp_path / "cut").write_bytes(Path("/bin/true").read_bytes()[:40])
    assert elf_loader(str(tmp_path / "cut")) is None
