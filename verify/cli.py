"""The command `chio-verify`, and `receipt_verify`, which `chio receipt verify` mounts as it is.

click only: options in, one call, the verdict out, an exit status. The packages that verify are imported by the
command that needs them, so that no other command of `chio` pays for them.
"""

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from verify.verdict import Exit, VerifyError

if TYPE_CHECKING:
    from verify.receipts import ReceiptsVerdict


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Check what a Chio host has signed, from files and pinned keys alone.

    Exit status: 0 verified, 1 refused, 2 wrong usage, 3 nothing failed but something required was not checked.
    """


@main.command()
@click.argument("file")
@click.option("--trusted-kernel-pubkey", metavar="KEY|FILE", help="The Chio kernel's key: 64 hex digits, or a file.")
@click.option("--pins", metavar="FILE", help="The pins.json that came with the run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on a terminal too.")
def receipts(file: str, trusted_kernel_pubkey: str | None, pins: str | None, as_json: bool) -> None:
    """Verify every receipt in FILE, one JSON text per line.

    Example: chio-verify receipts receipts.ndjson --pins pins.json
    """
    if (trusted_kernel_pubkey is None) == (pins is None):
        raise click.UsageError("Give one of --trusted-kernel-pubkey and --pins.")
    verdict = _verify("chio-verify", file, trusted_kernel_pubkey, pins)
    if as_json or not sys.stdout.isatty():
        _print_json(verdict.document())
    else:
        click.echo(_people(verdict))
    _finish("chio-verify", file, verdict)


@click.command("verify")
@click.option("--input", "file", required=True, metavar="FILE", help="Receipts, one JSON text per line.")
@click.option(
    "--trusted-kernel-pubkey",
    required=True,
    metavar="KEY|FILE",
    help="The Chio kernel's key: 64 hex digits, or a file that holds them.",
)
def receipt_verify(file: str, trusted_kernel_pubkey: str) -> None:
    """Verify the signatures of receipts against a pinned key.

    Example: chio receipt verify --input receipts.ndjson --trusted-kernel-pubkey kernel.pub
    """
    verdict = _verify("chio", file, trusted_kernel_pubkey, None)
    _print_json(verdict.document())
    _finish("chio", file, verdict)


def _verify(program: str, file: str, key: str | None, pins_file: str | None) -> "ReceiptsVerdict":
    from verify.keys import Pins, PublicKey
    from verify.receipts import check_receipts

    try:
        if key is not None:
            return check_receipts(file, PublicKey.from_option(key))
        pins = Pins.from_file(str(pins_file))
        return check_receipts(file, pins.kernel_key, pins.runtime_id)
    except VerifyError as error:
        _fail(program, error)


def _finish(program: str, file: str, verdict: "ReceiptsVerdict") -> None:
    if verdict.withheld:
        click.echo(
            f"{program}: the arguments of {verdict.withheld} of {verdict.lines} lines are withheld ({file}, "
            f"line {verdict.withheld_line} first, action_parameter_hash not checked; "
            "to check it, ask for the receipts with their arguments)",
            err=True,
        )
        sys.exit(Exit.UNCHECKED)


def _people(verdict: "ReceiptsVerdict") -> str:
    checked = "arguments match what was signed" if not verdict.withheld else "arguments withheld, not checked"
    return "\n".join(
        [
            f"Verified {verdict.distinct} receipts in {verdict.lines} lines.",
            "  signature              each holds over the received bytes",
            f"  signer_pin             {verdict.trusted_kernel_key}",
            f"  action_parameter_hash  {checked}",
            "Not shown by receipts alone: that none is missing.",
        ]
    )


def _print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2 if sys.stdout.isatty() else None))


def _fail(program: str, error: VerifyError) -> NoReturn:
    click.echo(f"{program}: {error}", err=True)
    sys.exit(Exit.REFUSED)
