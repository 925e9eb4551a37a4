"""What every command of `chio` shares: paths, the one document on stdout, the one line on stderr, the opened host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from chio.errors import ChioError

if TYPE_CHECKING:
    from pathlib import Path

    from chio.host import Host


class _Path(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A file name as a `Path`, whose module loads only when a command takes one."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from pathlib import Path

        return Path(value)


PATH = _Path()


def show(document: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(document, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def fail(error: Exception) -> None:
    click.echo(f"chio: {error}", err=True)


def _expected() -> tuple[type[Exception], ...]:
    """What is told in one line. Confinement's errors are among them once its module is loaded, and not before."""
    confine = sys.modules.get("confine.errors")
    return (ChioError, confine.ConfineError) if confine is not None else (ChioError,)


def errors(command: Callable[..., int | None]) -> Callable[..., None]:
    """Turn what is raised into one line on stderr and an exit code."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs) or 0
        except _expected() as error:
            fail(error)
            code = 1
        sys.exit(code)

    return run


def keyed(command: Callable[..., None]) -> Callable[..., None]:
    """The option of the verbs that may meet an encrypted state."""
    return click.option(
        "--key-file",
        type=PATH,
        metavar="FILE",
        envvar="CHIO_KEY_FILE",
        help="The key file of an encrypted state (or CHIO_KEY_FILE).",
    )(command)


@contextmanager
def opened(
    state: Path, key_file: Path | None, allow_volatile: bool = False, checkpoint_to: str | None = None
) -> Iterator[Host]:
    from chio.handout import handing_out
    from chio.host import Host

    with handing_out(checkpoint_to, state) as checkpointed:
        host = Host(state, allow_volatile=allow_volatile, key_file=key_file, checkpointed=checkpointed)
        try:
            yield host
        finally:
            host.close()
