"""`mcp-server-time`: two reads, of which a worker is granted one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.real_servers.driving import PYTHON, Answer, Drive

CONVERT = {"source_timezone": "Europe/Berlin", "time": "16:30", "target_timezone": "Asia/Kolkata"}


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return Drive.make(
        tmp_path_factory.mktemp("time"),
        {
            "id": "time",
            "command": [str(PYTHON / "bin/mcp-server-time"), "--local-timezone", "UTC"],
            "confinement": {"read": [str(PYTHON)]},
        },
        granted=["convert_time", "get_current_time"],
        children={"converter": ["convert_time"], "clock": ["get_current_time"]},
    )


@pytest.fixture(scope="module")
def answers(drive: Drive) -> dict[str, list[Answer]]:
    unknown: dict[str, Any] = {**CONVERT, "source_timezone": "Europe/Atlantis"}
    now = ("now", "get_current_time", {"timezone": "UTC"})
    return drive.run(
        {
            "converter": [("convert", "convert_time", CONVERT), ("unknown", "convert_time", unknown), now],
            "clock": [now, now],
        }
    )


def test_a_granted_conversion_is_the_servers_own(answers: dict[str, list[Answer]]) -> None:
    converted = json.loads(answers["converter"][0].text)
    assert converted["source"]["timezone"] == "Europe/Berlin"
    assert "T16:30:00" in converted["source"]["datetime"]
    # Berlin is an hour or two behind Kolkata's five and a half, by the season.
    assert converted["time_difference"] in ("+4.5h", "+3.5h")


def test_an_argument_that_the_server_refuses_is_an_answer_with_a_receipt(answers: dict[str, list[Answer]]) -> None:
    refused = answers["converter"][1]
    assert refused.result["isError"] is True
    assert refused.receipt is not None
    assert refused.receipt["body"]["decision"] == {"verdict": "allow"}


def test_the_sibling_may_ask_for_the_time_and_the_converter_may_not(answers: dict[str, list[Answer]]) -> None:
    assert answers["converter"][2].refusal == "out_of_scope"
    assert json.loads(answers["clock"][0].text)["timezone"] == "UTC"


def test_the_time_of_a_repeated_key_is_the_first_answers(answers: dict[str, list[Answer]]) -> None:
    first, again = answers["clock"]
    assert first.reply == again.reply


def test_the_pinned_definitions_say_which_tools_are_free_of_side_effects(drive: Drive) -> None:
    bootstrap = json.loads((drive.project.folder / ".chio/bootstrap.json").read_text())
    (server,) = bootstrap["body"]["servers"]
    assert {tool["name"]: tool["read_only"] for tool in server["tools"]} == {
        "convert_time": True, "get_current_time": True,
    }  # fmt: skip


def test_a_server_outside_every_shown_folder_is_refused_with_a_fix_that_works(tmp_path: Path) -> None:
    """Its environment is in no read path here. What the refusal says to give, `init` and `run` both take."""
    server = {"id": "time", "command": [str(PYTHON / "bin/mcp-server-time"), "--local-timezone", "UTC"]}

    def make(name: str, options: str) -> Drive:
        (tmp_path / name).mkdir()
        return Drive.make(
            tmp_path / name, server, granted=["convert_time"], children={"converter": ["convert_time"]}, options=options
        )

    with pytest.raises(AssertionError, match="the virtual environment is not in a folder") as refused:
        make("without", "")
    assert not (tmp_path / "without/.chio").exists()
    fix = re.search(r"give (--runtime-root \S+)\)", str(refused.value))
    assert fix is not None
    (converted,) = make("with", fix[1]).run({"converter": [("convert", "convert_time", CONVERT)]})["converter"]
    assert json.loads(converted.text)["target"]["timezone"] == "Asia/Kolkata"
