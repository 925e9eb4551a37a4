"""The commands that give an auditor something to take away: a signed bundle, the log. Mounted by `chio.cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from chio.command import PATH, errors, keyed, show

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.option("--state", required=True, type=PATH, help="A stopped state.")
@click.option("--out", required=True, type=PATH, help="A new file: the signed bundle.")
@click.option(
    "--withhold",
    multiple=True,
    metavar="WHAT[:PATTERN]",
    help="Leave out arguments or outputs, of all calls or of those of a process or a server/tool. The bundle says so.",
)
@click.option("--allow-volatile", is_flag=True, help="Accept a file system that may lose acknowledged work.")
@keyed
@errors
def evidence(state: Path, out: Path, withhold: tuple[str, ...], allow_volatile: bool, key_file: Path | None) -> int:
    """Sign a whole run into one file, for an auditor who will not open the state.

    Example: chio process evidence --state .chio --out run.chio --withhold outputs:reports/*
    """
    from chio.evidence import write_evidence

    show(write_evidence(state, out, withhold, allow_volatile=allow_volatile, key_file=key_file))
    return 0


@click.command("export-log")
@click.option("--state", required=True, type=PATH, help="A state, live or stopped.")
@click.option("--out", required=True, type=PATH, help="A new file: every leaf, one per line; or a proof.")
@click.option("--leaf", type=click.IntRange(min=0), metavar="N", help="Prove that leaf N is in it.")
@click.option("--since", type=click.IntRange(min=0), metavar="N", help="Prove that it only grew since N leaves.")
@click.option("--checkpoint", type=PATH, metavar="FILE", help="Write the checkpoint that it stands on to a new file.")
@errors
def export_log(state: Path, out: Path, leaf: int | None, since: int | None, checkpoint: Path | None) -> int:
    """The log of a state as files, up to its newest checkpoint. Opens nothing that is encrypted.

    Example: chio process export-log --state .chio --out leaves.ndjson --checkpoint checkpoint.txt
    """
    from chio.kernel.log_export import export_log as write

    if leaf is not None and since is not None:
        raise click.UsageError("name a --leaf or --since, not both")
    show(write(state, out, leaf, since, checkpoint))
    return 0
