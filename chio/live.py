"""The live table of workers on stderr (rich), shown only when stderr is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from chio.runner import Work


@contextmanager
def live_table() -> Iterator[Callable[[list[Work]], None]]:
    """Gives what shows the present state of the workers; the last one stays on the screen."""
    with Live(console=Console(stderr=True), auto_refresh=False) as live:

        def show(work: list[Work]) -> None:
            table = Table("worker", "state", "attempt", "outcome")
            for entry in work:
                number = entry.attempt.number if entry.attempt else len(entry.ended)
                table.add_row(entry.name, entry.state, str(number or ""), str(entry.report()["outcome"] or ""))
            live.update(table, refresh=True)

        yield show
