"""A file of receipts, one per line, judged as a whole.

Every line is verified (`verify.receipts`), the first that is refused is named, and distinct receipts are counted by
their ids, since a replay repeats one. Where a response is given, what it released is held against its receipt.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from verify.distinct import ID_BYTES, DistinctIds
from verify.keys import PublicKey
from verify.lines import judge_lines
from verify.receipts import LineChecker
from verify.responses import ResponseVerdict, judge_outcome
from verify.verdict import Check, State, Verdict, VerifyError

CHECKS = ("text", "canonical", "fields", "signer_pin", "runtime_pin", "signature", "action_parameter_hash")


@dataclass(frozen=True, slots=True)
class ReceiptsVerdict:
    """What holds of one file. `withheld_line` is the first whose arguments could not be checked.

    `absent` is what is left of the ids that were looked for.
    """

    file: str
    trusted_kernel_key: str
    lines: int
    distinct: int
    withheld: int
    withheld_line: int | None
    absent: frozenset[bytes]

    def document(self) -> dict[str, Any]:
        """`chio.receipt.signatures.v1`."""
        checks = ["signature", "signer_pin", "action_parameter_hash"]
        return {
            "schema": "chio.receipt.signatures.v1",
            "receipts_verified": self.distinct,
            "trusted_kernel_key": self.trusted_kernel_key,
            "checks": checks[:2] if self.withheld else checks,
        }

    def judged(self) -> Verdict:
        """The same as one of the verdicts of `chio-verify`."""
        verdict = Verdict("receipts", figures={"receipts_verified": self.distinct, "lines": self.lines})
        for name in ("text", "canonical", "fields"):
            verdict.passes(name)
        verdict.passes("signer_pin", f"Every line names the pinned key {self.trusted_kernel_key}.")
        verdict.passes("signature", f"{self.distinct} receipts in {self.lines} lines are signed by it, byte for byte.")
        if self.withheld:
            verdict.leave(
                "action_parameter_hash",
                f"the arguments of {self.withheld} of {self.lines} lines are withheld, line {self.withheld_line} first",
                required=True,
                file=self.file,
                fix="to check it, ask for the receipts with their arguments",
            )
        else:
            verdict.passes("action_parameter_hash", "The arguments shown are the ones that were signed.")
        return verdict


def judge_receipts(
    path: str, kernel_key: PublicKey, runtime_id: str | None = None, responses: Sequence[str] = ()
) -> Verdict:
    """A file of receipts, and responses that were given for some of them. Raises `VerifyError` for what is no file."""
    answers = [judge_outcome(response, kernel_key) for response in responses]
    wanted = frozenset(bytes.fromhex(answer.receipt.id) for answer in answers if answer.receipt is not None)
    try:
        found = check_receipts(path, kernel_key, runtime_id, wanted=wanted)
    except VerifyError as error:
        if error.check == "input":
            raise
        verdict = Verdict("receipts")
        for name in CHECKS:
            if name == error.check:
                verdict.fail(name, error)
            else:
                verdict.leave(name, f"the file was read up to {error.place.partition(',')[0]} only")
    else:
        verdict = found.judged()
        if runtime_id is not None:
            verdict.passes("runtime_pin", f"Every line is of the pinned run {runtime_id}.")
        else:
            verdict.leave("runtime_pin", "no run was pinned")
        _judge_answers(verdict, answers, found)
    verdict.leave("receipt_log_inclusion", "receipts alone do not show that none is missing; `chio-verify log` does")
    return verdict


def _judge_answers(verdict: Verdict, answers: Sequence[ResponseVerdict], found: ReceiptsVerdict) -> None:
    if not answers:
        verdict.leave("output", "no response was given")
        return
    for answer in answers:
        if answer.receipt is not None and bytes.fromhex(answer.receipt.id) in found.absent:
            what = "the response's receipt is not in the file of receipts"
            answer.findings.fail("response_receipt", VerifyError(what, check="response_binding"), file=answer.file)
    checks = [replace(check, file=check.file or answer.file) for answer in answers for check in answer.findings.checks]
    verdict.checks += [check for check in checks if check.state is not State.PASSED]
    for name in dict.fromkeys(check.name for check in checks if check.state is State.PASSED):
        if all(check.state is State.PASSED for check in checks if check.name == name):
            verdict.checks.append(Check(f"response_{name}" if name in CHECKS else name, State.PASSED))
    if all(not answer.findings.failed and not answer.findings.missing for answer in answers):
        verdict.proved.append("What each given response released is what its receipt commits to, and nothing more.")


def verify_receipts(path: str, kernel_key: str) -> dict[str, Any]:
    """`check_receipts` for a key in hex, as a `chio.receipt.signatures.v1` document."""
    return check_receipts(path, PublicKey.from_hex(kernel_key)).document()


def check_receipts(
    path: str,
    kernel_key: PublicKey,
    runtime_id: str | None = None,
    *,
    wanted: frozenset[bytes] = frozenset(),
    processes: int | None = None,
) -> ReceiptsVerdict:
    """Verifies every line of a file. Raises `VerifyError` at the first that is refused, or when there is none.

    Memory does not grow with the file. `wanted` are ids to look for; `processes` is how many judge the file, by
    default as many as there are processors.
    """
    lines = withheld = 0
    withheld_line = None
    absent = set(wanted)
    chunks = judge_lines(path, partial(_check_chunk, kernel_key, runtime_id), processes)
    with closing(DistinctIds()) as distinct, closing(chunks):
        for chunk in chunks:
            if chunk.withheld:
                withheld += chunk.withheld
                withheld_line = withheld_line or lines + chunk.withheld_line
            lines += chunk.lines
            if chunk.refused is not None:
                raise chunk.refused.located(path, f"line {lines}")
            for start in range(0, len(chunk.ids), ID_BYTES):
                identity = chunk.ids[start : start + ID_BYTES]
                distinct.add(identity)
                absent.discard(identity)
        if lines == 0:
            raise VerifyError("no receipt, so nothing was verified", check="input", file=path, fix="name another file")
        return ReceiptsVerdict(
            path, kernel_key.hex, lines, distinct.count(), withheld, withheld_line, frozenset(absent)
        )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What came of some lines, up to and with the one that was refused. Lines are numbered from 1."""

    lines: int
    ids: bytes
    withheld: int
    withheld_line: int
    refused: VerifyError | None


def _check_chunk(kernel_key: PublicKey, runtime_id: str | None, chunk: bytes) -> _Chunk:
    checker = LineChecker(kernel_key, runtime_id)
    ids: list[bytes] = []
    lines = withheld = withheld_line = 0
    for line in chunk.removesuffix(b"\n").split(b"\n"):
        lines += 1
        try:
            receipt_id, shown = checker.check(line)
        except VerifyError as error:
            return _Chunk(lines, b"".join(ids), withheld, withheld_line, error)
        ids.append(bytes.fromhex(receipt_id))
        if not shown:
            withheld += 1
            withheld_line = withheld_line or lines
    return _Chunk(lines, b"".join(ids), withheld, withheld_line, None)
