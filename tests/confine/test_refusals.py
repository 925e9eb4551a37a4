"""Launches that do not come to their exec, or not as asked: named, and nothing left."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from confine import Observed, claim_identity
from confine.digests import FileState, file_state
from confine.observe import Expected, _executable
from tests.confine.launching import PYTHON, WITHOUT, Runner, needs_distinct_uids


def test_a_program_that_changed_since_the_plan_is_refused(runner: Runner, cwd: Path) -> None:
    program = cwd / "program"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o755)
    spec, lock_fd = runner.spec(["./program"], cwd)
    program.write_bytes(Path("/bin/false").read_bytes())
    runner.start(spec, lock_fd)
    failed = runner.finish().failed
    assert (failed.step, failed.path) == ("executable", str(program))


def test_a_program_in_an_overlay_is_known_by_its_content_and_by_the_mount_it_runs_from(
    runner: Runner, cwd: Path, tmp_path: Path
) -> None:
    program = cwd / "program"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o755)
    spec, lock_fd = runner.spec(["./program"], cwd, read=[str(tmp_path)])
    hashed = file_state(program.stat())
    digests = {}

    def look(event: Observed) -> None:
        def digest(state: FileState, **changes: Any) -> str:
            plan = replace(spec.plan, **changes)
            return _executable(event.pid, replace(spec, plan=plan), Expected(state, "digest", ()))[1]

        digests["hashed"] = digest(hashed)
        digests["written to since"] = digest((*hashed[:4], hashed[4] + 1))
        digests["another file"] = digest((hashed[0], hashed[1] + 1, *hashed[2:]))
        digests["by another mount"] = digest(
            hashed, binds=tuple(bind for bind in spec.plan.binds if bind.path != str(cwd))
        )
        digests["by no overlay"] = digest(hashed, binds=tuple(replace(bind, system=True) for bind in spec.plan.binds))

    runner.start(spec, lock_fd)
    ended = runner.finish(look)
    assert (ended.exited.exit_code, ended.field("executable").value["path"]) == (0, str(program))
    assert {name for name, found in digests.items() if found == "digest"} == {"hashed"}, digests


@needs_distinct_uids
def test_a_private_folder_on_the_way_to_the_program_is_named_with_what_to_do(runner: Runner, cwd: Path) -> None:
    (cwd / "bin").mkdir(mode=0o700)
    (cwd / "bin" / "program").write_bytes(Path("/bin/true").read_bytes())
    (cwd / "bin" / "program").chmod(0o755)
    failed = runner.run(["bin/program"], cwd).failed
    assert (failed.step, failed.errno, failed.path) == ("exec", errno.EACCES, f"{cwd}/bin/program")
    assert "chmod -R go+rX" in (failed.hint or "")


def test_a_folder_that_became_a_link_is_refused_and_not_followed(runner: Runner, cwd: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    spec, lock_fd = runner.spec(["/bin/true"], cwd, read=[str(tmp_path / "data")])
    (tmp_path / "data").rmdir()
    (tmp_path / "data").symlink_to("/root")
    runner.start(spec, lock_fd)
    failed = runner.finish().failed
    assert (failed.step, failed.errno, failed.path) == ("mount sources", errno.ELOOP, str(tmp_path / "data"))
    assert failed.hint is not None


def test_a_step_that_fails_inside_says_which_and_why(runner: Runner, cwd: Path) -> None:
    failed = runner.changed(["/bin/true"], cwd, cwd="/nowhere").failed
    assert (failed.step, failed.errno, failed.path) == ("cwd", errno.ENOENT, "/nowhere")


def test_a_mount_point_that_cannot_be_made_fails_the_mounts(runner: Runner, cwd: Path) -> None:
    failed = runner.changed(["/bin/true"], cwd, scratch=f"{cwd}/not-there").failed
    assert (failed.step, failed.errno, failed.path) == ("mounts", errno.EROFS, f"{cwd}/not-there")
    assert failed.hint is not None


def test_an_exec_that_fails_is_the_last_step(runner: Runner, cwd: Path) -> None:
    script = cwd / "script"
    script.write_text("not a program\n")
    script.chmod(0o755)
    failed = runner.run(["./script"], cwd).failed
    assert (failed.step, failed.errno, failed.path) == ("exec", errno.ENOEXEC, str(script))


def test_what_was_asked_and_is_not_so_kills_the_worker_before_its_first_instruction(runner: Runner, cwd: Path) -> None:
    """A hostile cwd that leads elsewhere by the time of the launch stands for any difference."""
    (cwd / "below").mkdir()
    ended = runner.changed(["/bin/echo", "ran"], cwd, cwd=f"{cwd}/below/..")
    assert ended.observed is not None
    assert not ended.observed.satisfied
    assert ended.field("cwd").value == str(cwd)
    assert (ended.exited.killed_for, ended.exited.stdout) == ("not_enforced", b"")


def test_every_layer_of_this_version_is_observed_and_the_others_are_absent(runner: Runner, cwd: Path) -> None:
    ended = runner.run([PYTHON, "-c", ""], cwd)
    assert ended.observed is not None
    assert ended.observed.satisfied
    sources = {field.name: field.source for field in ended.observed.fields}
    observed = {name for name, source in sources.items() if source == "observed"}
    assert observed >= {"uid", "gid", "groups", "capabilities", "namespaces", "mounts", "descriptors", "environment"}
    assert observed >= {"executable", "no_new_privs", "network_interfaces", "rlimits", "cwd", "id_maps", "seccomp"}
    absent = {name for name, source in sources.items() if source == "absent"}
    assert absent == set(WITHOUT)
    installed = {name for name, source in sources.items() if source == "installed"}
    assert installed >= {"landlock", "securebits", "hostname"}
    assert ended.field("namespaces").value == dict.fromkeys(
        ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"), "own"
    )
    assert ended.observed.executable_sha256 == ended.field("executable").value["sha256"]


@needs_distinct_uids
def test_a_failed_launch_leaves_its_identity_free(runner: Runner, cwd: Path) -> None:
    spec, lock_fd = runner.spec(["/bin/true"], cwd)
    assert lock_fd is not None
    os.close(lock_fd)
    again = claim_identity()
    assert again.uid == spec.uid
    again.close()
