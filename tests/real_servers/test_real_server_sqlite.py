"""`mcp-server-sqlite`, on the MCP library before 2: writes into a database that the server owns."""

from __future__ import annotations

import ast
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.real_servers.driving import SQLITE, Answer, Drive


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sqlite")
    (folder / "data").mkdir()
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, list[Answer]]:
    drive = Drive.make(
        folder,
        {
            "id": "sqlite",
            "command": [str(SQLITE / "bin/mcp-server-sqlite"), "--db-path", str(folder / "data/orders.db")],
            "confinement": {"read": [str(SQLITE)], "write": [str(folder / "data")]},
        },
        granted=["create_table", "write_query", "read_query", "list_tables"],
        children={"clerk": ["create_table", "write_query", "read_query"], "auditor": ["read_query", "list_tables"]},
    )
    insert = ("insert", "write_query", {"query": "INSERT INTO orders (item) VALUES ('tea')"})
    other = ("insert", "write_query", {"query": "INSERT INTO orders (item) VALUES ('coffee')"})
    select = ("select", "read_query", {"query": "SELECT item FROM orders"})
    return drive.run(
        {
            "clerk": [
                ("create", "create_table", {"query": "CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)"}),
                insert,
                insert,
                other,
                select,
                ("broken", "write_query", {"query": "INSERT INTO nowhere VALUES (1)"}),
                ("insight", "append_insight", {"insight": "tea sells"}),
            ],
            "auditor": [("tables", "list_tables", {}), select, insert],
        }
    )


def rows(folder: Path) -> list[Any]:
    with closing(sqlite3.connect(folder / "data/orders.db")) as database:
        return database.execute("SELECT id, item FROM orders").fetchall()


def test_a_row_is_written_once_however_often_its_key_is_repeated(
    folder: Path, answers: dict[str, list[Answer]]
) -> None:
    _, first, again, *_ = answers["clerk"]
    assert first.text == "[{'affected_rows': 1}]"
    assert first.reply == again.reply
    assert rows(folder) == [(1, "tea")]


def test_the_same_key_with_other_arguments_is_a_conflict_and_writes_nothing(
    folder: Path, answers: dict[str, list[Answer]]
) -> None:
    assert answers["clerk"][3].error == "conflict"
    assert len(rows(folder)) == 1


def test_both_children_read_what_was_written(answers: dict[str, list[Answer]]) -> None:
    for reader in (answers["clerk"][4], answers["auditor"][1]):
        assert ast.literal_eval(reader.text) == [{"item": "tea"}]
    assert ast.literal_eval(answers["auditor"][0].text) == [{"name": "orders"}]


def test_what_the_database_refuses_is_the_servers_answer(answers: dict[str, list[Answer]]) -> None:
    assert "no such table" in str(answers["clerk"][5].result)


def test_neither_the_policys_nor_the_childs_forbidden_tool_reaches_the_server(
    folder: Path, answers: dict[str, list[Answer]]
) -> None:
    assert answers["clerk"][6].refusal == "out_of_scope"
    assert answers["auditor"][2].refusal == "out_of_scope"
    assert len(rows(folder)) == 1
