"""The probes: none starts unconfined, each sees what is open when it is open, and the profiles hold against them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from confine.probe import Report, run_probes
from confine.probes import World, load
from tests.confine.launching import WITHOUT

ROOT = Path(__file__).parents[2]
ENTRY = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from confine.probes.inside import main; main()"
NOBODY = 65_534
REQUIRED = """
tcp_to_the_hosts_loopback udp_to_the_hosts_loopback tcp_over_ipv6 vsock netlink packet alg abstract_socket
socket_in_a_read_folder io_uring descriptors_over_the_kernel_socket binding_over_the_kernel_socket shadow
root_of_process_1 descriptors_of_other_processes open_by_handle fsopen open_tree mount_setattr unmount_of_masks
chroot_escape mknod devices write_through_a_read_only_bind links_and_renames_out race_on_a_link_in_cwd race_on_a_mask
race_on_exports overlay state_directory another_attempts_scratch another_attempts_socket a_process_of_the_host ptrace
reading_the_memory_of_init taking_a_descriptor_of_init killing_everything files_of_init survivors stopping_itself
setns setuid_files user_namespace setgroups capabilities add_key bpf perf_event_open userfaultfd core_pattern
release_agent own_cgroup own_program sysrq oom_score int_0x80 x32 clone3 tiocsti_with_high_bits fork_bomb threads
memory memory_files bytes_of_tmp inodes_of_tmp descriptors output standard_output_held_by_a_grandchild file_size
processor_time deadline descriptor_7 environment arguments_of_the_host names_of_the_machine accounts keys
"""


def results(report: Report, result: str) -> set[str]:
    return {outcome.name for outcome in report.probes if outcome.result == result}


@pytest.mark.parametrize("around", [[], ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]])
def test_a_probe_does_not_start_where_it_is_not_confined(tmp_path: Path, around: list[str]) -> None:
    """As an ordinary user, never as root, and with a probe that would do no more than write into an own folder."""
    tmp_path.chmod(0o777)
    values = {field.name: {"int": 0, "bool": False}.get(str(field.type), "") for field in fields(World)}
    world = values | {"hostname": os.uname().nodename, "exports": str(tmp_path)}
    command = [*around, "/usr/bin/python3", "-I", "-B", "-c", ENTRY, "bytes_of_scratch", json.dumps(world)]
    done = subprocess.run(
        command,
        cwd="/usr",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
        timeout=60,
        **({"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}),
    )
    assert done.returncode == 3, done.stderr
    reasons = json.loads(done.stdout)["refused_to_start"]
    assert {"no_new_privs is not set", "the root is not a read-only tmpfs"} <= set(reasons)
    assert list(tmp_path.iterdir()) == []


def test_every_probe_that_is_asked_for_exists() -> None:
    assert set(REQUIRED.split()) - set(load()) == set()


def test_every_probe_is_refused_or_contained() -> None:
    report = run_probes("worker", without=WITHOUT)
    assert {outcome.name: outcome.detail for outcome in report.probes if outcome.result == "ESCAPED"} == {}
    skipped = {outcome.name: outcome.detail for outcome in report.probes if outcome.result == "skipped"}
    assert all("--without" in reason or "no setuid program" in reason for reason in skipped.values()), skipped
    assert sum(report.summary.values()) == len(load())


def test_with_a_loopback_of_its_own_a_worker_reaches_no_more_of_the_machine() -> None:
    names = [probe.name for probe in load().values() if probe.group == "network"]
    report = run_probes("loopback", only=names, without=WITHOUT)
    assert results(report, "ESCAPED") == set()
    details = {outcome.name: outcome.detail for outcome in report.probes}
    assert details["tcp_to_the_hosts_loopback"].startswith("ECONNREFUSED")
    assert details["udp_to_the_hosts_loopback"].startswith("sent")


def test_what_the_filter_closes_is_seen_to_be_open_without_it() -> None:
    """The control: the same probes, still confined by everything else."""
    probes = ["vsock", "netlink", "ptrace", "user_namespace", "clone3", "tiocsti", "tiocsti_with_high_bits", "io_uring"]
    report = run_probes("worker", only=probes, without=["seccomp", *WITHOUT])
    assert results(report, "ESCAPED") >= {"netlink", "ptrace", "user_namespace", "clone3"}
    held = run_probes("worker", only=probes, without=WITHOUT)
    assert results(held, "refused") == set(probes)


def test_masks_stay_where_they_are_for_a_worker_that_has_a_user_namespace() -> None:
    report = run_probes("worker", only=["unmount_of_masks_in_a_user_namespace"], without=["seccomp", *WITHOUT])
    (outcome,) = report.probes
    assert (outcome.result, outcome.detail.split(":")[0]) == ("refused", "EINVAL")


def test_a_limit_whose_layer_was_given_up_is_skipped_with_the_reason() -> None:
    report = run_probes("worker", only=["fork_bomb"], without=["cgroup", *WITHOUT])
    (outcome,) = report.probes
    assert outcome.result == "skipped"
    assert "--without cgroup" in outcome.detail


def test_the_command_prints_the_report_and_says_by_its_status_that_nothing_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "confine.cli", "probe", "--only", "shadow", "--only", "deadline"]
    command += [item for layer in WITHOUT for item in ("--without", layer)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=60)
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["kernel"] == os.uname().release
    assert report["summary"] == {"refused": 1, "contained": 1, "escaped": 0, "skipped": 0}
    deadline = next(probe for probe in report["probes"] if probe["name"] == "deadline")
    assert deadline == {
        "name": "deadline",
        "group": "resources",
        "expected": "contained",
        "result": "contained",
        "detail": "ended by timeout",
        "cve": None,
    }
    refused = subprocess.run([*command, "--only", "none"], env=environment, capture_output=True, check=False)
    assert refused.returncode == 1
    assert b"no probe is called none" in refused.stderr


def test_nothing_of_the_probes_is_left() -> None:
    def left() -> set[Path]:
        return {path for parent in ("/tmp", "/var/tmp") for path in Path(parent).glob("chio-probe-*")}

    before = left()
    report = run_probes("worker", only=["survivors", "race_on_a_mask"], without=WITHOUT)
    assert asdict(report)["summary"]["escaped"] == 0
    assert left() == before
