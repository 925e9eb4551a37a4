"""A program that is not Chio's, and what the tool has to be told about it.

    python -m tests.faults --from tests.faults.example

`journal.py` takes orders and says for each that it is booked. Its promise: what it said is in its book, once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults.order import told_too_early
from tests.faults.scenario import Case, History, Scenario

PROGRAM = Path(__file__).with_name("journal.py")
ORDERS = ["one", "two", "three"]


def prepare(case: Case) -> None:
    case.state.mkdir()


def commands(case: Case) -> list[list[str]]:
    """Run again, the same command goes on where the last one was cut off."""
    return [[sys.executable, str(PROGRAM), str(case.state), *ORDERS]]


def booked(_: Scenario, case: Case, history: History) -> list[str]:
    """Whatever was acknowledged, to a client that reads standard output, is in the book; nothing is there twice."""
    book = case.state / "book"
    lines = book.read_text().splitlines() if book.exists() else []
    told = {
        line.removeprefix("booked ") for run in history.stdout for text in run for line in text.decode().splitlines()
    }
    wrong = [f"{order}: acknowledged, and not in the book" for order in sorted(told - set(lines))]
    return wrong + [
        f"{order}: booked {lines.count(order)} times" for order in sorted(set(lines)) if lines.count(order) > 1
    ]


def complete(_: Scenario, case: Case, __: History) -> list[str]:
    lines = (case.state / "book").read_text().splitlines()
    return [] if lines == ORDERS else [f"the book holds {lines}"]


def synced(scenario: Scenario, case: Case, history: History) -> list[str]:
    roots = [str(case.folder / name) for name in scenario.roots]
    promising = frozenset({"journal"})
    return [what for made in history.made for what in told_too_early(made, roots, promising)]


SCENARIO = Scenario(
    name="journal",
    about="a book of orders, each acknowledged on standard output",
    prepare=prepare,
    commands=commands,
    checks={"booked": booked, "complete": complete, "synced": synced},
    after_fault={"booked": booked},
    roots=("state",),
    home=__name__,
)
ALL = {SCENARIO.name: SCENARIO}
