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
