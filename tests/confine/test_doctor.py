"""The doctor: what it says is what a launch then does, as root, as an ordinary user, and where something is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from confine.doctor import examine
from tests.confine.launching import WITHOUT

ROOT = Path(__file__).parents[2]
NOBODY = 65_534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody else")


def doctor(*arguments: str, around: tuple[str, ...] = (), user: int | None = None) -> tuple[int, Any]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*around, sys.executable, "-m", "confine.cli", "doctor", *arguments]
    identity: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(
        command, cwd="/usr", env=environment, capture_output=True, check=False, timeout=60, **identity
    )
    assert done.stdout, done.stderr.decode()
    return done.returncode, json.loads(done.stdout)


def finding(report: Any, layer: str) -> Any:
    return next(finding for finding in report["findings"] if finding["layer"] == layer)


def test_this_machine_is_examined_layer_by_layer_and_a_launch_is_made() -> None:
    report = examine(without=WITHOUT)
    assert report.ready, [finding for finding in report.findings if finding.state != "ok"]
    layers = [finding.layer for finding in report.findings]
    expected = {"user namespaces", "namespace pid", "fresh /proc", "overlay", "ptrace", "seccomp", "landlock", "cgroup"}
    assert expected <= set(layers)
    assert layers[-1] == "launch"
    assert "observed" in report.findings[-1].detail


def test_everything_that_is_not_ok_comes_with_what_to_do() -> None:
    report = examine(without=WITHOUT)
    assert all(finding.fix for finding in report.findings if finding.state != "ok")


@AS_ROOT
def test_an_ordinary_user_is_told_what_has_to_be_given_up_by_name_and_then_can_launch() -> None:
    status, report = doctor(user=NOBODY)
    assert (status, report["ready"], report["user"]) == (1, False, str(NOBODY))
    assert "--without distinct-uids" in finding(report, "distinct-uids")["fix"]
    assert finding(report, "filter read back")["state"] == "limited"
    given_up = ["--without", "distinct-uids"]
    if finding(report, "cgroup")["state"] == "missing":
        assert "--without cgroup" in finding(report, "cgroup")["fix"]
        given_up += ["--without", "cgroup"]
    status, report = doctor(*given_up, user=NOBODY)
    assert (status, report["ready"]) == (0, True)


@AS_ROOT
def test_where_user_namespaces_are_used_up_the_setting_to_change_is_named() -> None:
    """In a user namespace of the test's own, whose limit for those below it is set to none."""
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    status, report = doctor(around=("unshare", "--user", "--map-root-user", "sh", "-c", script), user=NOBODY)
    assert status == 1
    found = finding(report, "user namespaces")
    assert (found["state"], "max_user_namespaces" in found["fix"]) == ("missing", True)


@AS_ROOT
def test_where_proc_is_covered_as_in_a_container_the_fix_names_it() -> None:
    """In namespaces of the test's own; what the first pair covers is locked in the second (mount_namespaces(7))."""
    new = "unshare --user --map-root-user --mount"
    script = f'mount --bind /dev/null /proc/uptime && exec {new} "$0" "$@"'
    around = (*new.split(), "sh", "-c", script)
    _, report = doctor(around=around, user=NOBODY)
    found = finding(report, "fresh /proc")
    assert (found["state"], "systempaths=unconfined" in found["fix"]) == ("missing", True)


def test_a_profile_that_is_not_there_is_one_line_and_status_1() -> None:
    command = [sys.executable, "-m", "confine.cli", "doctor", "--profile", "absent"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
