"""`@modelcontextprotocol/server-everything`: progress, notifications, every kind of content, answers that take long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real_servers.driving import NODE, Answer, Drive, module

GRANTED = [
    "echo", "get-env", "get-structured-content", "get-sum", "get-tiny-image", "toggle-simulated-logging",
    "trigger-long-running-operation",
]  # fmt: skip


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return Drive.make(
        tmp_path_factory.mktemp("everything"),
        {
            "id": "everything",
            "command": ["node", module("server-everything"), "stdio"],
            "request_timeout_seconds": 3,
            "confinement": {"read": [str(NODE)]},
        },
        granted=GRANTED,
        children={"asker": [tool for tool in GRANTED if tool != "get-sum"], "adder": ["get-sum"]},
    )


@pytest.fixture(scope="module")
def answers(drive: Drive) -> dict[str, list[Answer]]:
    long = ("too long", "trigger-long-running-operation", {"duration": 3600, "steps": 3600})
    return drive.run(
        {
            "asker": [
                ("log", "toggle-simulated-logging", {}),
                ("echo", "echo", {"message": "größer 😀"}),
                ("short", "trigger-long-running-operation", {"duration": 0.2, "steps": 4}),
                ("structured", "get-structured-content", {"location": "Chicago"}),
                ("image", "get-tiny-image", {}),
                ("environment", "get-env", {}),
                ("sum", "get-sum", {"a": 2, "b": 3}),
                long,
                ("after", "echo", {"message": "still here"}),
            ],
            "adder": [
                ("sum", "get-sum", {"a": 2, "b": 3}),
                ("no number", "get-sum", {"a": "two", "b": 3}),
                ("archive", "gzip-file-as-resource", {"name": "a.gz", "data": "data:,a"}),
            ],
        }
    )


def test_every_kind_of_content_arrives_as_the_server_sent_it(answers: dict[str, list[Answer]]) -> None:
    _, echo, short, structured, image, *_ = answers["asker"]
    assert "größer 😀" in echo.text
    assert "completed" in short.text
    assert set(structured.result["structuredContent"]) == {"temperature", "conditions", "humidity"}
    assert [part["mimeType"] for part in image.result["content"] if part["type"] == "image"] == ["image/png"]


def test_the_server_sees_the_profiles_environment_and_nothing_of_the_hosts(
    answers: dict[str, list[Answer]],
) -> None:
    environment = json.loads(answers["asker"][5].text)
    assert environment == {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TMPDIR": "/tmp",
    }  # fmt: skip


def test_an_answer_after_the_deadline_is_an_unknown_outcome_and_the_server_goes_on(
    answers: dict[str, list[Answer]],
) -> None:
    late, after = answers["asker"][7:]
    assert late.reply["verdict"] == "deny"
    assert late.reply["terminal_state"] == {"state": "incomplete", "reason": "outcome_unknown_after_dispatch"}
    assert late.reply["output"] is None
    assert late.receipt is not None
    assert late.receipt["body"]["decision"]["verdict"] == "incomplete"
    assert "still here" in after.text


def test_each_child_has_its_own_tools(answers: dict[str, list[Answer]]) -> None:
    assert answers["asker"][6].refusal == "out_of_scope"
    total, no_number, archive = answers["adder"]
    assert "5" in total.text
    assert no_number.result["isError"] is True
    assert archive.refusal == "out_of_scope"


def test_the_servers_stderr_is_kept_with_its_end(drive: Drive, answers: dict[str, list[Answer]]) -> None:
    assert answers["adder"]
    database = drive.project.folder / ".chio/authority.db"
    assert server_log(database) == [("host_stopping", "Starting default (STDIO) server...\n")]


def server_log(database: Path) -> list[tuple[str, str]]:
    """(outcome, stderr) of each start of a stopped host's server."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        rows = opened.execute("SELECT outcome, kept FROM server_start WHERE server = 'everything'").fetchall()
    return [(outcome, kept.decode()) for outcome, kept in rows]
