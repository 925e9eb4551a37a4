"""What the simulation found, each made again as small as it is."""

from __future__ import annotations

import sqlite3

from tests.faults.simulation.world import World, template

_INVOKE = {
    "op": "invoke", "operation_key": "k", "server_id": "pay", "tool_name": "pay",
    "arguments": {"process": "a", "key": "k"},
}  # fmt: skip


def test_a_repeat_that_a_full_disk_refused_is_not_answered_again_at_the_servers_deadline() -> None:
    """A dispatch and its repeat in one group that is rolled back, and then each of them refused alone."""
    with template() as made:
        world = World(made)
        world.open()

        def drain() -> None:
            while world.loop.busy:
                world.loop.turn()

        def full(statement: str) -> None:
            if statement.startswith("INSERT INTO worker_checkpoint"):
                world.trap = fuller
                fuller(statement)

        def fuller(statement: str) -> None:
            if statement.startswith(("INSERT", "UPDATE")):
                raise sqlite3.OperationalError("database or disk is full")

        world.tell("reserve", process="a", confined=False)
        drain()
        world.start_server()
        drain()
        world.ask("a", _INVOKE)
        world.ask("a", _INVOKE)
        world.ask("a", {"op": "checkpoint", "expected_revision": "0", "value": 1})
        world.trap = full
        drain()
        world.trap = None
        refused = [exchange.answer for exchange in world.exchanges[-3:]]
        assert [answer["error"]["code"] for answer in refused] == ["runtime_error"] * 3
        world.loop.pass_time(11)  # over the server's deadline
        drain()
        assert world.wrong == []
