"""README and docs against what is there: links, commands and their options, quoted refusals, decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from chio.cli import main as chio
from confine.cli import main as chio_confine
from verify.cli import main as chio_verify

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them: lower case, spaces as hyphens, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        leads_to = (page.parent / name).resolve() if name else page
        assert leads_to.exists(), target
        if anchor:
            assert anchor in anchors(leads_to), target


def commands(group: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what is typed; commands mounted from other packages are theirs."""
    if not isinstance(group, click.Group):
        yield name, group
        return
    context = click.Context(group)
    for below in group.list_commands(context):
        command = group.get_command(context, below)
        if command is not None and (name, below) not in {("chio", "verify"), ("chio", "confine")}:
            yield from commands(command, f"{name} {below}")


def every_command() -> list[tuple[str, click.Command]]:
    groups = ((chio, "chio"), (chio_confine, "chio-confine"), (chio_verify, "chio-verify"))
    return [found for group, name in groups for found in commands(group, name)]


@pytest.mark.parametrize(("name", "command"), every_command(), ids=lambda value: value if type(value) is str else "")
def test_operating_documents_a_command_with_each_of_its_options(name: str, command: click.Command) -> None:
    row = next((row for row in OPERATING.split("\n") if row.startswith(f"| `{name} ")), None)
    assert row, f"docs/operating.md has no row for {name}"
    options = [option for param in command.params if isinstance(param, click.Option) for option in param.opts]
    assert [option for option in options if option.startswith("--") and option not in row and option != "--help"] == []


def test_operating_documents_no_option_that_no_command_has() -> None:
    known = {option for _, command in every_command() for param in command.params for option in param.opts}
    written = set(re.findall(r"(?<![\w-])--[a-z-]+", "\n".join(row for row in OPERATING.split("\n") if "`chio" in row)))
    assert {"--allow-volatile", "--runtime-root", "--pins"} <= written
    assert written - known - {"--"} == set()


def test_every_refusal_that_operating_quotes_is_one_that_the_product_makes() -> None:
    section = OPERATING.partition("## Refusals")[2].partition("\n## ")[0]
    cells = [row.split(" | ")[0] for row in section.split("\n") if row.startswith("| ")]
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    source = "\n".join(
        path.read_text(encoding="utf-8") for folder in ("chio", "confine") for path in (ROOT / folder).rglob("*.py")
    )
    assert len(quoted) > 20
    parts = [part.strip() for message in quoted for part in message.split("…") if part.strip()]
    assert [part for part in parts if part not in source] == []


def test_decisions_are_numbered_without_a_gap_and_say_why_what_and_what_follows() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    for page in DECISIONS:
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {page.name[:4]} "), page.name
        for part in ("**Context.**", "**Decision.**", "**Consequences.**"):
            assert part in text, f"{page.name} lacks {part}"
