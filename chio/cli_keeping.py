"""The commands that keep a state: its key file, deletion, backup and restore. Mounted by `chio.cli`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from chio.command import PATH, errors, keyed, opened, show

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.option("--out", required=True, type=PATH, help="A new file, mode 0600; keep it outside every state.")
@errors
def key(out: Path) -> int:
    """Make a key file for `init`, to encrypt what workers store. Losing it loses their data.

    Example: chio process key --out chio.key
    """
    from chio.keyfile import make

    show(make(out))
    return 0


@click.command()
@click.option("--state", required=True, type=PATH)
@click.option("--process", "name", required=True, metavar="ID", help="A cancelled process.")
@click.option("--by", required=True, metavar="NAME", help="Who deletes it; the log keeps the name.")
@keyed
@errors
def delete(state: Path, name: str, by: str, key_file: Path | None) -> int:
    """Delete what a process stored, by destroying its key. Nothing brings it back.

    Its receipts, the log and the budgets still verify. The host must be stopped and the state encrypted.

    Example: chio process delete --state .chio --process producer --by "A. Operator" --key-file chio.key
    """
    from chio.serve import tell

    with opened(state, key_file) as host:
        show(tell(host, "delete", name, by=by))
    return 0


@click.command()
@click.option("--state", required=True, type=PATH, help="A stopped state.")
@click.option("--out", required=True, type=PATH, help="A new folder, outside the state.")
@click.option("--with-signing-key", is_flag=True, help="Copy the signing keys too: who has them can sign as this host.")
@errors
def backup(state: Path, out: Path, with_signing_key: bool) -> int:
    """Copy a stopped state to a new folder, without its signing keys unless asked. Checks its log on the way.

    Example: chio process backup --state .chio --out backup-2026-11-30
    """
    from chio.kernel.backup import back_up

    show(back_up(state, out, with_signing_key=with_signing_key))
    return 0


@click.command()
@click.option("--backup", required=True, type=PATH, help="A folder that `chio process backup` made.")
@click.option("--state", required=True, type=PATH, help="Where the state shall be: absent, or an empty directory.")
@click.option("--by", required=True, metavar="NAME", help="Who restores; the log keeps the name.")
@click.option("--signing-key", type=PATH, metavar="FILE", help="The state's keys.json, if the backup has none.")
@click.option(
    "--checkpoint",
    type=PATH,
    metavar="FILE",
    help="A log checkpoint that someone kept: the backup must hold it.",
)
@click.option("--allow-volatile", is_flag=True, help="Accept a file system that may lose acknowledged work.")
@keyed
@errors
def restore(
    backup: Path,
    state: Path,
    by: str,
    signing_key: Path | None,
    checkpoint: Path | None,
    allow_volatile: bool,
    key_file: Path | None,
) -> int:
    """Make a state from a backup. It begins a new epoch and only replays until `chio process accept`.

    Example: chio process restore --backup backup-2026-11-30 --state .chio --by "A. Operator" --signing-key keys.json
    """
    from chio.host import restore as from_backup
    from chio.serve import require_name

    require_name(by)
    show(
        from_backup(
            backup,
            state,
            by=by,
            signing_keys=signing_key,
            checkpoint=checkpoint,
            key_file=key_file,
            allow_volatile=allow_volatile,
        )
    )
    return 0


@click.command()
@click.option("--state", required=True, type=PATH, help="A restored state.")
@click.option("--by", required=True, metavar="NAME", help="Who accepts it; the log keeps the name.")
@keyed
@errors
def accept(state: Path, by: str, key_file: Path | None) -> int:
    """Take a restored state into service: what was done after its backup is known, or given up.

    The host must be stopped.

    Example: chio process accept --state .chio --by "A. Operator"
    """
    from chio.serve import accept as take

    with opened(state, key_file) as host:
        show(take(host, by))
    return 0
