"""chio-confine as a command: exit statuses, streams, and one line of diagnosis."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chio_confine(cwd: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
    command = [sys.executable, "-m", "confine.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, input=stdin, capture_output=True, timeout=60, check=False)


pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can confine in this version")


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["true"], 0, b""),
        (["sh", "-c", "exit 7"], 7, b""),
        (["sh", "-c", "kill -TERM $$"], 143, b""),
        (["no-such-command"], 127, b"not there"),
        (["./plain"], 126, b"not executable"),
        (["--timeout", "1", "sleep", "100"], 124, b"timeout"),
        (["--limit", "output_bytes=2000", "yes"], 137, b"output_limit"),
        (["--limit", "cpu_seconds=1", "sh", "-c", "while :; do :; done"], 137, b"cpu_limit"),
        (["--limit", "memory_bytes=100000000", "true"], 125, b"cannot hold scratch_bytes"),
        (["--limit", "pids=5", "--without", "cgroup", "true"], 125, b"given up"),
        (["--profile", "absent", "true"], 125, b"no profile"),
        (["--read", "/etc", "true"], 125, b"folder of the machine"),
    ],
)
def test_the_exit_status_says_how_it_ended(cwd: Path, command: list[str], status: int, message: bytes) -> None:
    (cwd / "plain").touch()
    done = chio_confine(cwd, "run", *command)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


def test_streams_pass_through_whole(cwd: Path) -> None:
    done = chio_confine(cwd, "run", "--", "sh", "-c", "cat; head -c 300000 /dev/zero; echo e >&2", stdin=b"in")
    assert (done.stdout, done.stderr) == (b"in" + bytes(300_000), b"e\n")


def test_a_profile_is_shown_and_checked(tmp_path: Path) -> None:
    shown = json.loads(chio_confine(tmp_path, "profile", "show", "worker").stdout)
    checked = chio_confine(tmp_path, "profile", "check", "worker")
    assert checked.stdout.decode() == f"worker: {shown['digest']}\n"
    (tmp_path / "bad.yaml").write_text("schema: chio.profile.v1\nwrong: 1\n")
    refused = chio_confine(tmp_path, "profile", "check", "./bad.yaml")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"unknown key wrong" in refused.stderr


def test_an_ordinary_user_is_told_what_to_do() -> None:
    """Of each layer that takes root, or a machine that is set up for it; here of the one that no machine gives."""
    command = [sys.executable, "-m", "confine.cli", "run", "--without", "cgroup", "true"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        cwd="/usr",
        env=environment,
        user=65_534,
        group=65_534,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"--without distinct-uids" in done.stderr


def test_a_write_path_can_be_changed_and_belongs_to_the_folders_owner(cwd: Path) -> None:
    (cwd / "out").mkdir(mode=0o700)
    done = chio_confine(cwd, "run", "--write", "out", "--", "sh", "-c", "echo kept > out/file; echo lost > file")
    assert b"Read-only file system" in done.stderr
    made = os.stat(cwd / "out" / "file")
    assert ((cwd / "out" / "file").read_text(), made.st_uid, made.st_gid) == ("kept\n", os.geteuid(), os.getegid())
    assert not (cwd / "file").exists()


def test_a_record_holds_what_was_observed_and_how_it_ended(cwd: Path) -> None:
    done = chio_confine(cwd, "run", "--record", "record.json", "--", "sh", "-c", "echo said; exit 3")
    record = json.loads((cwd / "record.json").read_text())
    assert (done.returncode, record["end"]["exit_code"], record["end"]["stdout_bytes"]) == (3, 3, 5)
    observed = {field["name"]: field for field in record["launch"]["fields"]}
    assert record["launch"]["satisfied"] is True
    assert observed["no_new_privs"] == {
        "name": "no_new_privs", "asked": 1, "value": 1, "source": "observed", "detail": None,
    }  # fmt: skip


def test_a_record_that_exists_is_not_written_over_and_nothing_runs(cwd: Path) -> None:
    (cwd / "record.json").write_text("mine")
    done = chio_confine(cwd, "run", "--record", "record.json", "--", "true")
    assert (done.returncode, (cwd / "record.json").read_text()) == (125, "mine")
