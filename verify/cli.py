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
    from verify.verdict import Findings


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


@click.command("verify-process-response")
@click.option("--response", required=True, metavar="FILE", help="What the worker was answered (JSON).")
@click.option("--request", required=True, metavar="FILE", help="The request, as you kept it.")
@click.option("--context", required=True, metavar="FILE", help="Run, process and capability, as you kept them.")
@click.option("--trusted-kernel-pubkey", required=True, metavar="KEY|FILE", help="The Chio kernel's key: hex or file.")
def receipt_verify_process_response(response: str, request: str, context: str, trusted_kernel_pubkey: str) -> None:
    """Check that one response answers your own request, in your own context.

    Example: chio receipt verify-process-response --response response.json --request request.json
    --context context.json --trusted-kernel-pubkey kernel.pub
    """
    from verify.keys import PublicKey
    from verify.requests import Context, Request
    from verify.responses import check_response

    try:
        key = PublicKey.from_option(trusted_kernel_pubkey)
        verdict = check_response(response, Request.from_file(request), Context.from_file(context), key)
    except VerifyError as error:
        _fail("chio", error)
    _print_json(verdict.document())
    _end(response, verdict.findings, verdict.withheld)


@click.command("verify-call")
@click.option("--artifact", required=True, metavar="FILE", help="What `chio process attest-call` wrote.")
@click.option("--request", required=True, metavar="FILE", help="The request, as you kept it.")
@click.option("--context", required=True, metavar="FILE", help="Run, process and capability, as you kept them.")
@click.option("--trusted-kernel-pubkey", required=True, metavar="KEY|FILE", help="The Chio kernel's key: hex or file.")
@click.option("--runtime-id", required=True, metavar="UUID", help="The run, as you know it.")
def process_verify_call(artifact: str, request: str, context: str, trusted_kernel_pubkey: str, runtime_id: str) -> None:
    """Check what a host attested of one call, against your own request and context. Opens no state.

    Example: chio process verify-call --artifact call.json --request request.json --context context.json
    --trusted-kernel-pubkey kernel.pub --runtime-id 7a2d4c1e-0f3b-4d5e-8a6b-9c0d1e2fe815
    """
    from verify.calls import Observation, check_call
    from verify.keys import PublicKey
    from verify.requests import Context, Request

    try:
        key = PublicKey.from_option(trusted_kernel_pubkey)
        asked, caller = Request.from_file(request), Context.from_file(context)
        verdict = check_call(Observation.from_file(artifact), asked, caller, key, runtime_id)
    except VerifyError as error:
        _fail("chio", error)
    _print_json(verdict.document())
    _end(artifact, verdict.findings, verdict.incomplete)


def _end(file: str, findings: "Findings", incomplete: list[str]) -> None:
    """One line on stderr for each check that failed, or could not be made; the exit status."""
    for name, error in findings.failed:
        place = error.place if error.check == name else ", ".join(part for part in (error.place, error.check) if part)
        located = VerifyError(error.what, check=name, file=file, place=place, fix=error.fix)
        click.echo(f"chio: {located}", err=True)
    if findings.failed:
        sys.exit(Exit.REFUSED)
    if incomplete:
        click.echo(
            f"chio: what it takes to check this is withheld ({file}, {' and '.join(incomplete)} not checked; "
            "to check it, ask for the receipt with its salts)",
            err=True,
        )
        sys.exit(Exit.UNCHECKED)


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
