"""`@modelcontextprotocol/server-filesystem`: told that it may use more than its confinement gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_servers.driving import NODE, Answer, Drive, module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`own` is the server's, `shown` it may only read, `hidden` its confinement does not show."""
    top = tmp_path_factory.mktemp("files")
    for name in ("project", "project/own", "project/shown", "hidden"):
        (top / name).mkdir()
    (top / "project/shown/read.txt").write_text("seen")
    (top / "hidden/secret.txt").write_text("unseen")
    return top


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[Answer]]:
    project = folder / "project"
    drive = Drive.make(
        project,
        {
            "id": "files",
            # "/" as the one folder that it may use: what keeps it in is not its own goodwill.
            "command": ["node", module("server-filesystem"), "/"],
            "confinement": {"read": [str(NODE)], "write": [str(project / "own")]},
        },
        granted=["write_file", "read_text_file", "list_directory"],
        children={"writer": ["write_file", "read_text_file"], "reader": ["read_text_file", "list_directory"]},
    )
    write = ("write", "write_file", {"path": f"{project}/own/new.txt", "content": "first"})
    return drive.run(
        {
            "writer": [
                write,
                ("over", "write_file", {"path": f"{project}/shown/read.txt", "content": "changed"}),
                ("shown", "read_text_file", {"path": f"{project}/shown/read.txt"}),
                ("hidden", "read_text_file", {"path": f"{folder}/hidden/secret.txt"}),
                ("keys", "read_text_file", {"path": f"{project}/.chio/authority.db"}),
                ("shadow", "read_text_file", {"path": "/etc/shadow"}),
                ("move", "move_file", {"source": f"{project}/own/new.txt", "destination": f"{project}/own/old.txt"}),
            ],
            "reader": [
                ("list", "list_directory", {"path": f"{project}/own"}),
                ("new", "read_text_file", {"path": f"{project}/own/new.txt"}),
                ("state", "list_directory", {"path": f"{project}/.chio"}),
                write,
            ],
        }
    )


def test_a_file_is_written_where_the_host_config_lets_the_server_write(
    folder: Path, answers: dict[str, list[Answer]]
) -> None:
    assert answers["writer"][0].text
    written = folder / "project/own/new.txt"
    assert written.read_text() == "first"
    assert written.stat().st_uid == (folder / "project/own").stat().st_uid
    assert answers["reader"][1].text == "first"
    assert answers["reader"][0].text == "[FILE] new.txt"


def test_what_is_only_shown_can_be_read_and_not_written(folder: Path, answers: dict[str, list[Answer]]) -> None:
    over, shown = answers["writer"][1:3]
    assert over.result["isError"] is True
    assert shown.text == "seen"
    assert (folder / "project/shown/read.txt").read_text() == "seen"


@pytest.mark.parametrize(
    ("position", "error"), [(3, "ENOENT"), (4, "EACCES"), (5, "ENOENT")], ids=["outside", "state", "machine"]
)
def test_a_server_that_believes_it_owns_the_root_reads_only_what_is_shown(
    answers: dict[str, list[Answer]], position: int, error: str
) -> None:
    refused = answers["writer"][position].result
    assert refused["isError"] is True
    assert error in refused["content"][0]["text"]


def test_the_state_cannot_even_be_listed(answers: dict[str, list[Answer]]) -> None:
    listed = answers["reader"][2].result
    assert listed["isError"] is True
    assert "EACCES" in listed["content"][0]["text"]


def test_a_tool_outside_the_grant_changes_nothing(folder: Path, answers: dict[str, list[Answer]]) -> None:
    assert answers["writer"][6].refusal == "out_of_scope"
    assert answers["reader"][3].refusal == "out_of_scope"
    assert [path.name for path in (folder / "project/own").iterdir()] == ["new.txt"]
