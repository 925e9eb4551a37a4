"""`mcp-server-git`: commits are effects that must not happen twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.real_servers.driving import PYTHON, Answer, Drive

CHANGES = ["git_add", "git_commit"]
READS = ["git_status", "git_log"]


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", folder / "repository", *arguments],
        check=True, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a repository that has one commit and one new file."""
    folder = tmp_path_factory.mktemp("git")
    (folder / "repository").mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "user.name", "Somebody")
    git(folder, "config", "user.email", "somebody@example.invalid")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    (folder / "repository/notes.txt").write_text("one line\n")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[Answer]]:
    repository = str(folder / "repository")
    drive = Drive.make(
        folder,
        {
            "id": "git",
            "command": [str(PYTHON / "bin/mcp-server-git"), "--repository", repository],
            "confinement": {"read": [str(PYTHON)], "write": [repository]},
        },
        granted=[*CHANGES, *READS],
        children={"author": [*CHANGES, *READS], "reader": READS},
    )
    at = {"repo_path": repository}
    commit = ("commit", "git_commit", {**at, "message": "a note"})
    return drive.run(
        {
            "author": [
                ("status", "git_status", at),
                ("add", "git_add", {**at, "files": ["notes.txt"]}),
                commit,
                commit,
                ("throw away", "git_reset", at),
                ("elsewhere", "git_log", {"repo_path": "/usr"}),
            ],
            "reader": [("log", "git_log", at), commit],
        }
    )


def test_a_granted_commit_is_made_in_the_real_repository(folder: Path, answers: dict[str, list[Answer]]) -> None:
    status, added, committed, *_ = answers["author"]
    assert "notes.txt" in status.text
    assert "staged" in added.text
    assert "committed" in committed.text
    assert git(folder, "log", "--format=%s %an").splitlines() == ["a note Somebody", "first Somebody"]
    assert git(folder, "show", "HEAD:notes.txt") == "one line\n"
    assert git(folder, "status", "--porcelain") == ""


def test_a_repeated_commit_returns_the_first_ones_bytes_and_commits_nothing(
    folder: Path, answers: dict[str, list[Answer]]
) -> None:
    first, again = answers["author"][2:4]
    assert first.reply == again.reply
    assert git(folder, "rev-list", "--count", "HEAD") == "2\n"


def test_a_tool_outside_the_policy_and_one_outside_the_childs_grant_never_reach_the_server(
    answers: dict[str, list[Answer]],
) -> None:
    assert answers["author"][4].refusal == "out_of_scope"
    log, commit = answers["reader"]
    assert "a note" in log.text
    assert commit.refusal == "out_of_scope"


def test_the_servers_own_refusal_is_an_answer_of_an_allowed_call(answers: dict[str, list[Answer]]) -> None:
    assert answers["author"][5].result["isError"] is True


def test_what_the_server_wrote_belongs_to_the_folders_owner(folder: Path, answers: dict[str, list[Answer]]) -> None:
    assert answers["author"][2].text
    owner = (folder / "repository").stat().st_uid
    written = [path for path in (folder / "repository/.git").rglob("*") if path.is_file()]
    assert len(written) > 10
    assert {path.stat().st_uid for path in written} == {owner}
