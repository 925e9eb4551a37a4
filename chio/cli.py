"""The command line: parse, one call, print, exit code. Nothing is imported before a command needs it.

stdout is one JSON document, indented on a terminal; diagnostics, tables and progress go to stderr. Exit 0 done, 1
refused, failed or incomplete, 2 usage, 3 (verify only) nothing failed but something required was not checked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from chio import __version__
from chio.command import PATH, errors, fail, keyed, opened, show

if TYPE_CHECKING:
    from pathlib import Path

    from chio.runner import Work


class Mounted(click.Group):
    """A group whose further commands live in other packages and are imported when they are named."""

    elsewhere: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - set once, below

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.elsewhere})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.elsewhere:
            module, name = self.elsewhere[cmd_name]
            command: click.Command = getattr(importlib.import_module(module), name)
            return command
        return super().get_command(ctx, cmd_name)


class Root(Mounted):
    elsewhere = {"verify": ("verify.cli", "main"), "confine": ("confine.cli", "main")}  # noqa: RUF012


class Receipt(Mounted):
    elsewhere = {  # noqa: RUF012
        "verify": ("verify.cli", "receipt_verify"),
        "verify-process-response": ("verify.cli", "receipt_verify_process_response"),
    }


class Process(Mounted):
    elsewhere = {  # noqa: RUF012
        "verify-call": ("verify.cli", "process_verify_call"),
        **{name: ("chio.cli_keeping", name) for name in ("key", "delete", "backup", "restore", "accept")},
        "evidence": ("chio.cli_evidence", "evidence"),
        "export-log": ("chio.cli_evidence", "export_log"),
    }


def _layers(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    if names:
        from confine import LAYERS

        for name in names:
            if name not in LAYERS:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(LAYERS)}")
    return names


def _launching(command: Callable[..., None]) -> Callable[..., None]:
    """The options of the verbs that launch something."""
    roots = click.option(
        "--runtime-root", "roots", multiple=True, metavar="DIR", help="A further place where interpreters may lie."
    )
    without = click.option(
        "--without",
        multiple=True,
        metavar="LAYER",
        callback=_layers,
        help="Do without a layer of confinement that is not to be had here; the launch records say so.",
    )
    return roots(without(command))


def _witnessed(command: Callable[..., None]) -> Callable[..., None]:
    """The option of the verbs that serve."""
    return click.option(
        "--checkpoint-to",
        metavar="FILE|'|COMMAND'",
        help="Hand out each checkpoint of the log: keep the newest in a file, or give each to a command's stdin.",
    )(command)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="chio", message="%(prog)s %(version)s")
def main() -> None:
    """Runs programs that nobody trusts; keeps their calls across crashes; signs what was decided."""


@main.group(cls=Process)
def process() -> None:
    """Hosts: make one, run a plan on it, look at it."""


@main.group(cls=Receipt)
def receipt() -> None:
    """Receipts: signed decisions of the Chio kernel."""


@process.command()
@click.option("--config", required=True, type=PATH, help="The host config, chio.process.host.v1 (JSON).")
@click.option("--state", required=True, type=PATH, help="Where the state shall be: absent, or an empty directory.")
@click.option("--allow-volatile", is_flag=True, help="Accept a file system that may lose acknowledged work.")
@click.option(
    "--key-file",
    type=PATH,
    metavar="FILE",
    envvar="CHIO_KEY_FILE",
    help="Encrypt the workers' data at rest under this key, made by `chio process key` and kept outside the state.",
)
@_launching
@errors
def init(
    config: Path,
    state: Path,
    allow_volatile: bool,
    key_file: Path | None,
    roots: tuple[str, ...],
    without: tuple[str, ...],
) -> int:
    """Make a host's state: keys, capabilities, database. Prints the Chio kernel's public key.

    Example: chio process init --config host.json --state .chio
    """
    from chio.host import initialize

    made = initialize(
        config, state, allow_volatile=allow_volatile, runtime_roots=roots, without=without, key_file=key_file
    )
    show(made)
    return 0


@process.command()
@click.option("--state", required=True, type=PATH, help="A state made by `chio process init`.")
@click.option("--plan", required=True, type=PATH, help="The run plan, chio.process.run.v2 (JSON).")
@click.option(
    "--allow-unconfined", is_flag=True, help="Let workers with the profile `none` run with this account's rights."
)
@click.option("--allow-volatile", is_flag=True, help="Accept a file system that may lose acknowledged work.")
@_witnessed
@keyed
@_launching
@errors
def run(
    state: Path,
    plan: Path,
    allow_unconfined: bool,
    allow_volatile: bool,
    checkpoint_to: str | None,
    key_file: Path | None,
    roots: tuple[str, ...],
    without: tuple[str, ...],
) -> int:
    """Run a plan, or resume it. Prints the run report; exit 0 only if every worker completed.

    Example: chio process run --state .chio --plan process.json
    """
    from chio.plans import PlanReader
    from chio.runner import Runner

    reader = PlanReader(plan, state, allow_unconfined=allow_unconfined, runtime_roots=roots, without=without)
    with opened(state, key_file, allow_volatile, checkpoint_to) as host, _table() as table:
        runner = Runner(host, reader, table, without)
        report = runner.run()
    show(report)
    if runner.refusal is not None:
        fail(runner.refusal)
    return 0 if report["complete"] and runner.refusal is None else 1


def _table() -> Any:
    """The live table of workers on stderr, when a person is looking."""
    if sys.stderr.isatty():
        from chio.live import live_table

        return live_table()
    from contextlib import nullcontext

    def nothing(_work: list[Work]) -> None:
        return None

    return nullcontext(nothing)


@process.command()
@click.option("--state", required=True, type=PATH)
@errors
def status(state: Path) -> int:
    """One snapshot of a host, live or stopped. Changes nothing.

    Example: chio process status --state .chio
    """
    from chio.kernel.reader import open_state

    with open_state(state) as reader:
        show(reader.status())
    return 0


@process.command()
@click.option("--state", required=True, type=PATH)
@click.option("--process", "name", metavar="ID", help="A process; then --attempt says which of its attempts.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N")
@click.option(
    "--server", metavar="ID", help="A tool server instead; --attempt is then the start, the newest if left out."
)
@keyed
@errors
def logs(state: Path, name: str | None, attempt: int | None, server: str | None, key_file: Path | None) -> int:
    """What one attempt wrote to stdout and stderr, or a tool server to stderr (at most 64 KiB each).

    Example: chio process logs --state .chio --process producer --attempt 1
    """
    from chio.kernel.reader import open_state

    if (name is None) == (server is None) or (name is not None and attempt is None):
        raise click.UsageError("name a --process and its --attempt, or a --server")
    with open_state(state, key_file) as reader:
        if server is not None:
            show(reader.server_log(server, attempt))
        elif name is not None and attempt is not None:
            show(reader.logs(name, attempt))
    return 0


@process.command()
@click.option("--state", required=True, type=PATH)
@click.option("--process", "name", required=True, metavar="ID")
@click.option("--blob", metavar="SHA256", help="Show this blob instead of the checkpoint.")
@keyed
@errors
def state(state: Path, name: str, blob: str | None, key_file: Path | None) -> int:
    """A worker's retained checkpoint, or one of its blobs. Starts nothing, writes nothing, renews nothing.

    Example: chio process state --state .chio --process consumer
    """
    from chio.kernel.reader import open_state

    with open_state(state, key_file) as reader:
        show(reader.state(name, blob))
    return 0


@process.command()
@click.option("--state", required=True, type=PATH)
@click.option("--socket", "socket_path", required=True, type=PATH, help="Where to listen: a path that does not exist.")
@click.option("--allow-volatile", is_flag=True, help="Accept a file system that may lose acknowledged work.")
@_witnessed
@keyed
@_launching
@errors
def serve(
    state: Path,
    socket_path: Path,
    allow_volatile: bool,
    checkpoint_to: str | None,
    key_file: Path | None,
    roots: tuple[str, ...],
    without: tuple[str, ...],
) -> int:
    """Serve workers that someone else launches, until SIGINT or SIGTERM. Prints one line when they can connect.

    Example: chio process serve --state .chio --socket chio.sock
    """
    from chio.serve import serve as run_server

    with opened(state, key_file, allow_volatile, checkpoint_to) as host:
        run_server(host, socket_path.absolute(), roots, without, _print_line)
    return 0


@process.command()
@click.option("--state", required=True, type=PATH)
@click.option("--process", "name", required=True, metavar="ID")
@click.option("--socket", "socket_path", required=True, type=PATH, help="The socket that `serve` will listen on.")
@click.option("--out", required=True, type=PATH, help="A new file for the connection descriptor, mode 0600.")
@keyed
@errors
def credential(state: Path, name: str, socket_path: Path, out: Path, key_file: Path | None) -> int:
    """Issue a credential for a worker that someone else launches. The host must be stopped.

    Example: chio process credential --state .chio --process producer --socket chio.sock --out producer.json
    """
    from chio.serve import credential as issue

    with opened(state, key_file) as host:
        show(issue(host, name, socket_path, out))
    return 0


def _tell(op: str, text: str, example: str) -> None:
    """The verbs that say one thing about one process."""

    @process.command(op.replace("_", "-"), help=f"{text} The host must be stopped.\n\nExample: {example}")
    @click.option("--state", required=True, type=PATH)
    @click.option("--process", "name", required=True, metavar="ID")
    @keyed
    @errors
    def command(state: Path, name: str, key_file: Path | None) -> int:
        from chio.serve import tell

        with opened(state, key_file) as host:
            show(tell(host, op, name))
        return 0


_tell("revoke", "Revoke every credential of a process.", "chio process revoke --state .chio --process producer")
_tell(
    "revoke_capability",
    "Revoke a process's capability, and so those of all below it.",
    "chio process revoke-capability --state .chio --process producer",
)
_tell("cancel", "Cancel a process and all below it, for good.", "chio process cancel --state .chio --process producer")


@process.command()
@click.option("--state", required=True, type=PATH)
@click.option("--process", "name", required=True, metavar="ID")
@click.option("--key", required=True, help="The operation key of the call whose outcome is unknown.")
@click.option("--outcome", required=True, type=click.Choice(["applied", "not_applied"]))
@click.option("--evidence", required=True, type=PATH, help="What the statement rests on; its digest is recorded.")
@click.option("--by", required=True, metavar="NAME", help="Who says so.")
@keyed
@errors
def reconcile(state: Path, name: str, key: str, outcome: str, evidence: Path, by: str, key_file: Path | None) -> int:
    """State what became of a call whose outcome is unknown. The host must be stopped.

    Example: chio process reconcile --state .chio --process producer --key publish-42 --outcome applied
    --evidence ledger.txt --by "A. Operator"
    """
    from chio.serve import reconcile as record

    with opened(state, key_file) as host:
        show(record(host, name, key, outcome, evidence, by))
    return 0


def _print_line(document: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(document))
    sys.stdout.flush()


@process.command("attest-call")
@click.option("--state", required=True, type=PATH, help="A stopped state.")
@click.option("--request", required=True, type=PATH, help="The request, as it was kept before it was sent.")
@click.option("--context", required=True, type=PATH, help="Run, process and capability, as they were kept with it.")
@click.option("--response", type=PATH, help="What the worker was answered, to be attested too.")
@click.option("--out", required=True, type=PATH, help="A new file: the signed observation.")
@click.option("--allow-volatile", is_flag=True, help="Accept a file system that may lose acknowledged work.")
@keyed
@errors
def attest(
    state: Path,
    request: Path,
    context: Path,
    response: Path | None,
    out: Path,
    allow_volatile: bool,
    key_file: Path | None,
) -> int:
    """Sign what became of one retained call, for a reviewer who will not open the state.

    Example: chio process attest-call --state .chio --request request.json --context context.json --out call.json
    """
    from chio.attest import attest_call

    show(attest_call(state, request, context, response, out, allow_volatile=allow_volatile, key_file=key_file))
    return 0


@receipt.command()
@click.option("--state", required=True, type=PATH)
@click.option("--out", required=True, type=PATH, help="A new file: one receipt per line.")
@keyed
@errors
def export(state: Path, out: Path, key_file: Path | None) -> int:
    """Every receipt of a state in log order, its original text.

    Example: chio receipt export --state .chio --out receipts.ndjson
    """
    import os

    from chio.errors import InputError, StateError
    from chio.kernel.reader import open_state
    from chio.statedir import sync_parent

    count = 0
    with open_state(state, key_file) as reader:
        receipts = reader.receipts()
        try:
            with open(out, "xb") as file:
                for text in receipts:
                    file.write(text + b"\n")
                    count += 1
                file.flush()
                os.fsync(file.fileno())
            sync_parent(out)  # an export that was told as written outlasts a power cut
        except StateError:
            out.unlink()  # half an export is none
            raise
        except OSError as error:
            raise InputError(
                "the export cannot be written",
                file=str(out),
                field="--out",
                why=error.strerror,
                fix="name a new file in a directory that exists",
            ) from error
    show({"schema": "chio.receipt.export.v1", "receipts": count, "file": str(out)})
    return 0


@main.command("schema")
@click.argument("name", required=False)
@errors
def schema_command(name: str | None) -> int:
    """The JSON Schema of one document; without a NAME, which there are.

    Example: chio schema chio.receipt.v1
    """
    from chio.schemas import names, published

    show({"schemas": names()} if name is None else published(name))
    return 0
