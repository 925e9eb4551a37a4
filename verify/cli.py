"""The command `chio-verify`, and `receipt_verify`, which `chio receipt verify` mounts as it is.

click only: options in, one call, the verdict out, an exit status. The packages that verify are imported by the
command that needs them, so that no other command of `chio` pays for them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from verify.verdict import Exit, VerifyError

if TYPE_CHECKING:
    from verify.foundation import Trust
    from verify.inquiry import Kept
    from verify.verdict import Verdict

_Told = TypeVar("_Told")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Check what a Chio host has signed, from files and pinned keys alone.

    Exit status: 0 verified, 1 refused, 2 wrong usage, 3 nothing failed but something required was not checked.
    """


def _judging(command: Callable[..., "Verdict"]) -> Callable[..., None]:
    """A subcommand of `chio-verify`: it returns a `Verdict`, which is printed and becomes the exit status."""

    @click.option("--require", multiple=True, metavar="NAME", help="A check or an observed condition that must hold.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON on a terminal too.")
    @wraps(command)
    def run(*args: Any, require: tuple[str, ...], as_json: bool, **options: Any) -> None:
        try:
            verdict = command(*args, **options)
        except VerifyError as error:
            _fail("chio-verify", error)
        try:
            verdict.require(require)
        except KeyError as unknown:
            known = ", ".join(sorted(verdict.names()))
            raise click.UsageError(f"--require {unknown.args[0]}: there is {known}.") from None
        if as_json or not sys.stdout.isatty():
            _print_json(verdict.document())
            _complain("chio-verify", verdict)
        else:
            click.echo(verdict.text())
        sys.exit(verdict.exit)

    return run


@main.command()
@click.argument("file")
@click.option("--trusted-kernel-pubkey", metavar="KEY|FILE", help="The Chio kernel's key: 64 hex digits, or a file.")
@click.option("--pins", metavar="FILE", help="The pins.json that came with the run.")
@click.option("--response", "responses", multiple=True, metavar="FILE", help="A response that one of them answers for.")
@_judging
def receipts(file: str, trusted_kernel_pubkey: str | None, pins: str | None, responses: tuple[str, ...]) -> "Verdict":
    """Verify every receipt in FILE, one JSON text per line.

    Example: chio-verify receipts receipts.ndjson --pins pins.json
    """
    from verify.keys import Pins, PublicKey
    from verify.receipt_file import judge_receipts

    if (trusted_kernel_pubkey is None) == (pins is None):
        raise click.UsageError("Give one of --trusted-kernel-pubkey and --pins.")
    if pins is None:
        return judge_receipts(file, PublicKey.from_option(str(trusted_kernel_pubkey)), None, responses)
    pinned = Pins.from_file(pins)
    return judge_receipts(file, pinned.kernel_key, pinned.runtime_id, responses)


@main.command("log")
@click.argument("files", nargs=-1, required=True)
@click.option("--pins", metavar="FILE", help="The pins.json that came with the run.")
@click.option("--log-key", metavar="KEY|FILE", help="Without pins: the log's key.")
@click.option("--origin", metavar="NAME", help="Without pins: the log's name, the first line of its checkpoints.")
@click.option("--witness", "witnesses", multiple=True, metavar="NAME+HASH+KEY", help="Who must have signed the newest.")
@click.option("--leaf", metavar="FILE", help="The leaf, or the receipt, that an inclusion proof is about.")
@_judging
def log_command(
    files: tuple[str, ...],
    pins: str | None,
    log_key: str | None,
    origin: str | None,
    witnesses: tuple[str, ...],
    leaf: str | None,
) -> "Verdict":
    """Verify what belongs to one log: leaves (one per line), checkpoints, inclusion and consistency proofs.

    Example: chio-verify log leaves.ndjson kept-checkpoint.txt newest-checkpoint.txt --pins pins.json
    """
    from verify.export import LogTrust
    from verify.keys import Pins, PublicKey
    from verify.log_files import judge_log
    from verify.notes import VerifierKey

    if (pins is None) == (log_key is None) or (log_key is None) != (origin is None):
        raise click.UsageError("Give --pins, or --log-key and --origin.")
    named = tuple(VerifierKey.from_text(text) for text in witnesses)
    if pins is not None:
        return judge_log(files, LogTrust.of_pins(Pins.from_file(pins), named), leaf)
    trust = LogTrust(PublicKey.from_option(str(log_key)), str(origin), None, named)
    return judge_log(files, trust, leaf)


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
    from verify.keys import PublicKey
    from verify.receipt_file import check_receipts

    try:
        verdict = check_receipts(file, PublicKey.from_option(trusted_kernel_pubkey))
    except VerifyError as error:
        _fail("chio", error)
    _print_json(verdict.document())
    _end("chio", verdict.judged())


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
    _end("chio", verdict.findings, response)


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
    _end("chio", verdict.findings, artifact)


def _trusting(command: Callable[..., _Told]) -> Callable[..., _Told]:
    """The options by which an auditor says whom to trust. The command gets `trust`, a `verify.foundation.Trust`."""

    @click.option("--pins", metavar="FILE", help="The pins.json that was copied away when the run was made.")
    @click.option("--trusted-kernel-pubkey", metavar="KEY|FILE", help="Without pins: the Chio kernel's key.")
    @click.option("--runtime-id", metavar="UUID", help="Without pins: the run.")
    @wraps(command)
    def run(
        *args: Any, pins: str | None, trusted_kernel_pubkey: str | None, runtime_id: str | None, **options: Any
    ) -> _Told:
        from verify.foundation import Trust
        from verify.keys import Pins, PublicKey

        if (pins is None) == (trusted_kernel_pubkey is None) or (pins is None) == (runtime_id is None):
            raise click.UsageError("Give --pins, or both --trusted-kernel-pubkey and --runtime-id.")
        try:
            if pins is not None:
                trust = Trust.of_pins(Pins.from_file(pins))
            else:
                trust = Trust(PublicKey.from_option(str(trusted_kernel_pubkey)), str(runtime_id))
        except VerifyError as error:
            _fail("chio-verify", error)
        return command(*args, trust=trust, **options)

    return run


@main.command()
@click.argument("file")
@click.option("--request", required=True, metavar="FILE", help="The request, as you kept it.")
@click.option("--context", required=True, metavar="FILE", help="Run, process and capability, as you kept them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on a terminal too.")
@_trusting
def call(file: str, request: str, context: str, as_json: bool, trust: "Trust") -> None:
    """Check what a host attested of one call (FILE), against your own request and context.

    Example: chio-verify call call.json --request request.json --context context.json --pins pins.json
    """
    from verify.calls import Observation, check_call
    from verify.requests import Context, Request

    try:
        asked, caller = Request.from_file(request), Context.from_file(context)
        verdict = check_call(Observation.from_file(file), asked, caller, trust.kernel_key, trust.runtime_id)
    except VerifyError as error:
        _fail("chio-verify", error)
    if as_json or not sys.stdout.isatty():
        _print_json(verdict.document())
    else:
        click.echo(verdict.findings.text())
    _end("chio-verify", verdict.findings, file)


def _of_a_bundle(scope: str, text: str, example: str) -> None:
    """The verbs that judge a whole run from its bundle, each by some of the checks."""

    @main.command(scope, help=f"{text}\n\nExample: chio-verify {scope} run.chio {example}")
    @click.argument("file")
    @click.option(
        "--checkpoint", "checkpoints", multiple=True, metavar="FILE", help="A checkpoint that you or a witness kept."
    )
    @_judging
    @_trusting
    def command(file: str, checkpoints: tuple[str, ...], trust: "Trust") -> "Verdict":
        return _audited(file, scope, checkpoints, trust, None)


def _audited(file: str, scope: str, checkpoints: tuple[str, ...], trust: "Trust", asked: "Kept | None") -> "Verdict":
    from verify.audit import audit
    from verify.keys import read_small

    kept = tuple((name, read_small(name)) for name in checkpoints)
    return audit(file, replace(trust, checkpoints=kept), scope, asked)


@main.command()
@click.argument("file")
@click.option("--request", metavar="FILE", help="A request that you kept: what became of it?")
@click.option("--context", metavar="FILE", help="The run, process and capability that you kept with it.")
@click.option("--response", metavar="FILE", help="What the worker was answered, if you kept that.")
@click.option(
    "--checkpoint", "checkpoints", multiple=True, metavar="FILE", help="A checkpoint that you or a witness kept."
)
@_judging
@_trusting
def custody(
    file: str,
    request: str | None,
    context: str | None,
    response: str | None,
    checkpoints: tuple[str, ...],
    trust: "Trust",
) -> "Verdict":
    """Check every call of a run: who made it, by what authority, that it was sent no more often than allowed.

    With a request and its context, also that this one call is in it, and what became of it.

    Example: chio-verify custody run.chio --pins pins.json --request request.json --context context.json
    """
    from verify.inquiry import Kept
    from verify.keys import read_small
    from verify.requests import Context, Request
    from verify.responses import MAX_RESPONSE_BYTES

    if (request is None) != (context is None) or (response is not None and request is None):
        raise click.UsageError("Give --request and --context together, and --response only with them.")
    asked = None
    if request is not None and context is not None:
        answered = (response, read_small(response, MAX_RESPONSE_BYTES)) if response is not None else None
        asked = Kept(Request.from_file(request), Context.from_file(context), answered)
    return _audited(file, "custody", checkpoints, trust, asked)


_of_a_bundle(
    "bundle",
    "Check a whole run from one FILE that `chio process evidence` wrote.",
    "--pins pins.json --checkpoint checkpoint.txt --require confined",
)
_of_a_bundle(
    "budget", "Check that no share, ceiling or number of invocations of a run was overspent.", "--pins pins.json"
)
_of_a_bundle(
    "confinement",
    "Check that every attempt of a run had the confinement that its profile asks for.",
    "--pins pins.json --require confined",
)


def _end(program: str, verdict: "Verdict", file: str = "") -> NoReturn:
    """The exit status of a document that has a form of its own; what is wrong is on stderr."""
    _complain(program, verdict, file)
    sys.exit(verdict.exit)


def _complain(program: str, verdict: "Verdict", file: str = "") -> None:
    """One line on stderr for each check that failed; if none did, for each that is required and was not made."""
    for check in verdict.failed or verdict.missing:
        click.echo(f"{program}: {replace(check, file=check.file or file)}", err=True)


def _print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2 if sys.stdout.isatty() else None))


def _fail(program: str, error: VerifyError) -> NoReturn:
    click.echo(f"{program}: {error}", err=True)
    sys.exit(Exit.REFUSED)
