"""One good artifact of each kind that an auditor may be handed, its counterpart of another run, and the auditor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tests.verify import logged, observed, signed
from tests.verify.mutation import harmless
from tests.verify.mutation.changes import Mutation, lines, members, regions, rewritten, text_of
from tests.verify.mutation.matrix import Judge, Subject
from tests.verify.signed import jcs
from verify.calls import Observation, check_call
from verify.export import LogTrust
from verify.keys import Pins, PublicKey
from verify.log_files import judge_log
from verify.notes import VerifierKey
from verify.receipt_file import judge_receipts
from verify.requests import Context, Request
from verify.verdict import Verdict

OTHER_RUN = "00000000-0000-4000-8000-000000000000"
SIZE = 9  # of an older tree


def subjects(folder: Path) -> dict[str, Subject]:
    """By name. Their files stand in `folder`."""
    made = [receipt(folder), receipts(folder), *log_files(folder), *calls(folder)]
    return {subject.name: subject for subject in made}


def _placed(folder: Path, name: str, judge: Callable[[str], Verdict]) -> Judge:
    """Judges what is put into a file."""

    def place(text: bytes) -> Verdict:
        path = folder / name
        path.write_bytes(text)
        return judge(str(path))

    return place


# --- receipts ---------------------------------------------------------------------------------------------------------


def _receipt(index: int, runtime_id: str = signed.RUNTIME_ID) -> bytes:
    return signed.receipt({**signed.a_body(index), "runtime_id": runtime_id})


def _auditor_of_receipts(folder: Path, name: str) -> Judge:
    key = PublicKey.from_hex(signed.KERNEL_KEY)
    return _placed(folder, name, lambda path: judge_receipts(path, key, signed.RUNTIME_ID))


def receipt(folder: Path) -> Subject:
    good, other = _receipt(3) + b"\n", _receipt(4, OTHER_RUN)
    document, foreign = json.loads(good), json.loads(other)

    def mutations() -> Iterator[Mutation]:
        yield from chain(members(document, foreign), regions(good), rewritten(document))
        yield from members(document["body"], None, lambda body: _resigned_receipt(body, document), "signed anew")

    return Subject("receipt", good, _auditor_of_receipts(folder, "one.ndjson"), mutations, harmless.RECEIPT, draw=400)


def _resigned_receipt(body: Any, document: Any) -> bytes:
    text = text_of(body)
    return signed.line_of(text, jcs(document["disclosed"]), signed.sign(text))


def receipts(folder: Path) -> Subject:
    good = b"".join(_receipt(index) + b"\n" for index in range(1, 6))
    other = b"".join(_receipt(index, OTHER_RUN) + b"\n" for index in range(1, 6))
    judge = _auditor_of_receipts(folder, "receipts.ndjson")
    return Subject("receipts file", good, judge, lambda: chain(lines(good, other), regions(good)), harmless.RECEIPTS)


# --- the log's files --------------------------------------------------------------------------------------------------


def _another_log() -> list[bytes]:
    """The same log as another run has it, under the same keys."""
    made = logged.log()
    text = json.dumps(made.entries).replace(observed.RUNTIME_ID, OTHER_RUN)
    made.entries = [(kind, body) for kind, body in json.loads(text)]
    return made.leaves()


def log_files(folder: Path) -> Iterator[Subject]:
    leaves, others = logged.log().leaves(), _another_log()
    origin = f"chio.invalid/{OTHER_RUN}"
    newest, foreign = logged.checkpoint(leaves), logged.checkpoint(others, origin=origin)
    witness = VerifierKey.from_text(logged.vkey())
    pins = Pins.from_file(logged.pins(folder))
    export, note, older = (str(folder / name) for name in ("leaves.ndjson", "newest.txt", "older.txt"))
    Path(export).write_bytes(_export(leaves))
    Path(note).write_text(newest)
    Path(older).write_text(logged.checkpoint(leaves, SIZE))
    trust, watched = LogTrust.of_pins(pins), LogTrust.of_pins(pins, (witness,))

    def small(name: str, good: str, other: str, judge: Callable[[str], Verdict], draw: int) -> Subject:
        text, foreign = good.encode(), other.encode()
        return Subject(
            name, text, _placed(folder, f"{name}.txt", judge),
            lambda: chain(lines(text, foreign), regions(text)), harmless.NOTE, draw,
        )  # fmt: skip

    yield _leaves(folder, leaves, others, lambda path: judge_log([path, note], trust))
    yield small("checkpoint", newest, foreign, lambda path: judge_log([export, path], trust), 60)
    yield small(
        "cosigned checkpoint", logged.cosigned(newest), logged.cosigned(foreign),
        lambda path: judge_log([path], watched), 200,
    )  # fmt: skip
    yield small(
        "tlog-proof", logged.inclusion(leaves, 5, newest, leaves[5]), logged.inclusion(others, 5, foreign, others[5]),
        lambda path: judge_log([path], trust), 200,
    )  # fmt: skip
    yield small(
        "consistency proof", logged.consistency(leaves, SIZE, newest), logged.consistency(others, SIZE, foreign),
        lambda path: judge_log([older, path], trust), 200,
    )  # fmt: skip
    yield _pins(folder, lambda pins: judge_log([export, note], LogTrust.of_pins(pins)))


def _export(leaves: list[bytes]) -> bytes:
    return b"".join(leaf + b"\n" for leaf in leaves)


def _leaves(folder: Path, leaves: list[bytes], others: list[bytes], judge: Callable[[str], Verdict]) -> Subject:
    good = _export(leaves)

    def put(index: int) -> Callable[[Any], bytes]:
        return lambda leaf: _export([*leaves[:index], text_of(leaf), *leaves[index + 1 :]])

    def mutations() -> Iterator[Mutation]:
        yield from chain(lines(good, _export(others)), regions(good))
        for index, text in enumerate(leaves):
            leaf = json.loads(text)
            yield from members(leaf, json.loads(others[index]), put(index), leaf["type"])

    return Subject("export of leaves", good, _placed(folder, "changed.ndjson", judge), mutations, harmless.LAST_NEWLINE)


def _pins(folder: Path, judge: Callable[[Pins], Verdict]) -> Subject:
    good = Path(logged.pins(folder)).read_bytes()
    document = json.loads(good)
    other = {**document, "runtime_id": OTHER_RUN, **{
        name: observed.key_of(observed.STRANGER) for name in ("kernel_key", "log_key", "authority_key")
    }}  # fmt: skip
    return Subject(
        "pins", good, _placed(folder, "changed-pins.json", lambda path: judge(Pins.from_file(path))),
        lambda: chain(members(document, other), regions(good), rewritten(document)), harmless.PINS,
    )  # fmt: skip


# --- an attested call -------------------------------------------------------------------------------------------------


def calls(folder: Path) -> Iterable[Subject]:
    for case, another in (("reconciled", "unknown"), ("completed", "redispatched")):
        made, other = observed.parts(case), json.loads(observed.assemble(observed.parts(another)))
        (folder / f"{case}-request.json").write_bytes(jcs(made.request))
        (folder / f"{case}-context.json").write_bytes(jcs(made.context))
        good = observed.assemble(made) + b"\n"
        judge = _auditor_of_a_call(folder, case)
        yield Subject(f"call observation ({case})", good, judge, _of_observation(good, other), harmless.CALL)


def _of_observation(good: bytes, other: Any) -> Callable[[], Iterator[Mutation]]:
    document = json.loads(good)

    def resigned(body: Any) -> bytes:
        text = text_of(body)
        signature = observed.KERNEL.sign(b"chio/observation/v1\0" + text).signature.hex()
        return b'{"body":' + text + b',"signature":"' + signature.encode() + b'"}'

    def mutations() -> Iterator[Mutation]:
        yield from chain(members(document, other), regions(good), rewritten(document))
        yield from members(document["body"], other["body"], resigned, "signed anew")

    return mutations


def _auditor_of_a_call(folder: Path, case: str) -> Judge:
    asked = Request.from_file(str(folder / f"{case}-request.json"))
    caller = Context.from_file(str(folder / f"{case}-context.json"))
    key = PublicKey.from_hex(observed.key_of(observed.KERNEL))
    return _placed(
        folder,
        f"{case}.json",
        lambda path: check_call(Observation.from_file(path), asked, caller, key, observed.RUNTIME_ID).findings,
    )
