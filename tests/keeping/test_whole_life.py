"""The report project, encrypted: run, backed up, deleted from, restored, accepted and run again, by the commands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.report.walkthrough import ROOT, TEN, Project, finished

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="confining a worker needs root in this version"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("life") / "project"
    subprocess.run([ROOT / ".ci/report-env", folder], check=True, timeout=60)
    return Project(folder)


RUN = "chio process run --state .chio --plan process.json --key-file ../chio.key"


def test_a_state_lives_through_all_of_it(project: Project) -> None:
    assert project.json("chio process key --out ../chio.key") == {"key_file": "../chio.key"}
    project.run("chio process init --config host.json --state .chio --key-file ../chio.key")
    assert "the state is encrypted" in project.refused("chio process run --state .chio --plan process.json")
    finished(project.json(RUN), producer=1, consumer=1)
    lines = project.receipts(".chio")
    assert [json.loads(line)["disclosed"] for line in lines] == [{}, {}, {}]
    finished(project.json(RUN), producer=1, consumer=1)
    assert project.receipts(".chio") == lines

    verify = "chio receipt verify --trusted-kernel-pubkey .chio/kernel.pub --input"
    assert project.attempt(f"{verify} .chio/receipts.ndjson").returncode == 3
    project.run("chio receipt export --state .chio --out ../all.ndjson --key-file ../chio.key")
    assert project.json(f"{verify} ../all.ndjson")["receipts_verified"] == 3

    project.run("chio process backup --state .chio --out ../backup")
    project.run("chio process cancel --state .chio --process producer --key-file ../chio.key")
    delete = "chio process delete --state .chio --process producer --by me --key-file ../chio.key"
    tombstone = project.json(delete)["tombstone"]
    assert project.json(delete)["tombstone"] == tombstone
    shown = project.refused("chio process state --state .chio --process producer --key-file ../chio.key")
    assert f"leaf {tombstone} of the log" in shown
    finished(project.json(RUN), producer=1, consumer=1)  # complete, as it was
    project.run("chio receipt export --state .chio --out ../rest.ndjson --key-file ../chio.key")
    assert project.attempt(f"{verify} ../rest.ndjson").returncode == 3

    project.run("mv .chio ../lost")
    restore = "chio process restore --backup ../backup --state .chio --by me"
    assert "needs its signing keys" in project.refused(restore)
    project.run(f"{restore} --signing-key ../lost/keys.json --key-file ../chio.key")
    assert project.run("cat .chio/result.json") == TEN
    assert "chio process accept" in project.refused(RUN)
    assert project.json("chio process accept --state .chio --by me --key-file ../chio.key")["epoch"] == 1
    finished(project.json(RUN), producer=1, consumer=1)
    shown = project.json("chio process state --state .chio --process consumer --key-file ../chio.key")
    assert shown["data"]["checkpoint"] == {"revision": "1", "value": {"item_count": 3, "total": 10}}


def test_no_command_prints_the_key(project: Project, tmp_path: Path) -> None:
    project.run(f"chio process key --out {tmp_path}/k")
    key = (tmp_path / "k").read_text().strip()
    named = f"--state {tmp_path}/state --key-file {tmp_path}/k"
    commands = [
        f"chio process init --config host.json {named}", f"chio process init --config host.json {named}",
        f"chio process cancel {named} --process producer", f"chio process delete {named} --process producer --by me",
        f"chio process state {named} --process consumer",
    ]  # fmt: skip
    for command in commands:
        done = project.attempt(command)
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout + done.stderr != ""
        assert key not in (done.stdout + done.stderr).lower()
