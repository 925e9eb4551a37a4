"""Every parser of the verifier against changed and random bytes: nothing but `VerifyError` comes out, and nothing that
was changed is accepted. `CHIO_FUZZ_EXAMPLES` makes it longer (200 of each otherwise).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.verify import logged, observed, signed
from verify import canonical, shape
from verify.calls import Observation
from verify.export import LogTrust
from verify.keys import Pins, PublicKey
from verify.leaves import BODIES, SIGNED, read_leaf_text
from verify.log import leaf_hash, verify_checkpoint, verify_inclusion
from verify.log_files import judge_log
from verify.notes import VerifierKey, read_note
from verify.proofs import ConsistencyProof, InclusionProof
from verify.receipts import LineChecker, verify_receipt
from verify.verdict import Exit, VerifyError

bounded = settings(
    max_examples=int(os.environ.get("CHIO_FUZZ_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

KEY = PublicKey.from_hex(signed.KERNEL_KEY)
LOG_KEY = PublicKey.from_hex(observed.key_of(observed.LOG))
LEAVES = logged.log().leaves()
NOTE = logged.cosigned(logged.checkpoint(LEAVES)).encode()
PROOF = logged.inclusion(LEAVES, 5, logged.checkpoint(LEAVES), LEAVES[5]).encode()
GROWTH = logged.consistency(LEAVES, 9, logged.checkpoint(LEAVES)).encode()
RECEIPT = signed.receipt()
OBSERVATION = observed.assemble(observed.parts("reconciled"))
EXPORT = b"".join(leaf + b"\n" for leaf in LEAVES)


@st.composite
def changed(draw: st.DrawFn, good: bytes) -> bytes:
    """A good text with one to three regions flipped, cut, doubled, moved, or replaced by what parsers stumble over."""
    text = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "truncate", "insert", "replace"]))
        if kind == "flip" and start < len(text):
            text[start] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del text[start:end]
        elif kind == "double":
            text[start:start] = text[start:end]
        elif kind == "truncate":
            del text[start:]
        elif kind == "insert":
            text[start:start] = draw(st.one_of(st.binary(max_size=8), st.sampled_from(STUMBLES)))
        else:
            text[start:end] = draw(st.sampled_from(STUMBLES))
    return bytes(text)


STUMBLES = [
    b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"9007199254740993", b"1.0", b'"\\ud800"', b"\xed\xa0\x80",
    b"\xff", b"\0", b"\r\n", b" ", b"[" * 70, b"{" * 70, b"{}", b"[]", b'"a":1,"a":2', b"\\u0000", "é".encode(),
    "😀".encode(), b"\n\n", "\n— a b\n".encode(), b"+", b"==", b",", b'"', b"\\",
]  # fmt: skip


def refuses_or(read: Callable[[bytes], Any], text: bytes) -> Any:
    """What was read, or None where it was refused. Any other exception fails the test."""
    try:
        return read(text)
    except VerifyError as error:
        if not (error.what and error.fix):
            pytest.fail(f"an error that says nothing: {error!r}")
        return None


# --- random bytes ---


@bounded
@given(st.one_of(st.binary(max_size=300), st.text(max_size=200).map(str.encode)))
def test_no_parser_crashes_on_random_bytes(text: bytes) -> None:
    for read in (
        lambda text: canonical.parse(text, canonical=True),
        lambda text: canonical.parse(text, canonical=False),
        lambda text: canonical.split(text, ("body", "signature")),
        read_leaf_text,
        lambda text: verify_receipt(text, KEY),
        lambda text: VerifierKey.from_text(text.decode("utf-8", "replace")),
        Observation.read,
    ):
        refuses_or(read, text)
    # What is random is signed by nobody.
    for read in (read_note, InclusionProof.read, ConsistencyProof.read):
        assert refuses_or(read, text) is None


# --- changed artifacts ---


@bounded
@given(changed(RECEIPT))
def test_a_changed_receipt_is_refused_or_is_the_same_signed_text(line: bytes) -> None:
    receipt = refuses_or(lambda text: verify_receipt(text, KEY), line)
    if receipt is not None:
        original = verify_receipt(RECEIPT, KEY)
        assert (receipt.body_text, receipt.signature) == (original.body_text, original.signature)
        if receipt.arguments_disclosed:
            assert receipt.disclosed["parameters"] == original.disclosed["parameters"]


@bounded
@given(st.integers(0, len(LEAVES) - 1), st.data())
def test_a_changed_leaf_is_never_the_leaf_that_a_proof_is_about(index: int, data: st.DataObject) -> None:
    text = data.draw(changed(LEAVES[index]))
    leaf = refuses_or(read_leaf_text, text)
    if leaf is not None and text != LEAVES[index]:
        assert leaf_hash(leaf.text) != leaf_hash(LEAVES[index])


@bounded
@given(changed(NOTE))
def test_a_changed_checkpoint_is_refused_or_says_the_same(text: bytes) -> None:
    checkpoint = refuses_or(lambda note: verify_checkpoint(note, LOG_KEY, logged.ORIGIN), text)
    if checkpoint is not None:
        assert checkpoint == verify_checkpoint(NOTE, LOG_KEY, logged.ORIGIN)


@bounded
@given(changed(PROOF))
def test_a_changed_proof_proves_nothing_new(text: bytes) -> None:
    proof = refuses_or(InclusionProof.read, text)
    if proof is None:
        return
    checkpoint = refuses_or(lambda note: verify_checkpoint(note, LOG_KEY, logged.ORIGIN), proof.checkpoint)
    if checkpoint is not None and proof.leaf is not None:
        proved = refuses_or(
            lambda leaf: (
                verify_inclusion(leaf_hash(leaf), proof.index, checkpoint.size, proof.nodes, checkpoint.root) or leaf
            ),
            proof.leaf,
        )
        assert proved is None or (proof.index, proved) == (5, LEAVES[5])


@bounded
@given(changed(GROWTH))
def test_a_changed_consistency_proof_is_read_or_refused(text: bytes) -> None:
    refuses_or(ConsistencyProof.read, text)


@bounded
@given(changed(OBSERVATION))
def test_a_changed_observation_is_read_or_refused(text: bytes) -> None:
    refuses_or(Observation.read, text)


@bounded
@given(changed(EXPORT))
def test_a_changed_export_is_not_verified(tmp_path: Path, text: bytes) -> None:
    export, note = tmp_path / "leaves.ndjson", tmp_path / "checkpoint"
    export.write_bytes(text)
    note.write_bytes(NOTE)
    trust = LogTrust.of_pins(Pins.from_file(logged.pins(tmp_path)))
    verdict = refuses_or(lambda _: judge_log([str(export), str(note)], trust), text)
    # The last newline is nobody's.
    if verdict is not None and text.removesuffix(b"\n") != EXPORT.removesuffix(b"\n"):
        assert verdict.exit is Exit.REFUSED


@bounded
@given(changed(json.dumps({"schema": "chio.pins.v1", "runtime_id": signed.RUNTIME_ID}).encode()))
def test_pins_that_lack_something_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "pins.json"
    path.write_bytes(text)
    assert refuses_or(lambda _: Pins.from_file(str(path)), text) is None


# --- the quick way and the long way ---

_numbers = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False, width=32)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@bounded
@given(_values, st.booleans(), st.booleans(), st.data())
def test_text_is_canonical_exactly_if_rfc8785_writes_it(
    value: Any, in_order: bool, escaped: bool, data: st.DataObject
) -> None:
    spellings = [json.dumps(value, sort_keys=in_order, separators=(",", ":"), ensure_ascii=escaped).encode()]
    try:
        spellings.append(rfc8785.dumps(value))
        spellings.append(data.draw(changed(spellings[-1])))
    except rfc8785.CanonicalizationError:
        pass
    for text in spellings:
        try:
            read = canonical.parse(text, canonical=False)
            expected = rfc8785.dumps(read) == text
        except (VerifyError, rfc8785.CanonicalizationError):
            expected = False
        assert canonical.is_canonical(text) == expected
        assert (refuses_or(lambda text: [canonical.parse(text, canonical=True)], text) is not None) == expected


_names = st.text(min_size=1, max_size=12)


@bounded
@given(_names, _names, _values, st.sampled_from([None, "reason", 'quoted "reason"', "é"]), st.data())
def test_lines_are_judged_alike_the_quick_way_and_the_long_way(
    key: str, tool: str, parameters: Any, reason: str | None, data: st.DataObject
) -> None:
    body = signed.a_body()
    body["call"]["operation_key"], body["tool_name"] = key, tool
    body["decision"] = {"verdict": "allow", **({"reason": reason} if reason is not None else {})}
    try:
        text = rfc8785.dumps(parameters)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError):
        return
    body["action"]["parameter_hash"] = signed.commitment(signed.PARAMETER_SALT, text)
    body_text = rfc8785.dumps(body)
    shown = b'{"output_salt":null,"parameter_salt":"%s","parameters":%s}' % (signed.PARAMETER_SALT.encode(), text)
    line = signed.line_of(body_text, shown, signed.sign(body_text))
    for each in (line, data.draw(changed(line))):
        assert quick(each) == slow(each)


def quick(line: bytes) -> tuple[Any, ...]:
    try:
        return LineChecker(KEY, signed.RUNTIME_ID).check(line)
    except VerifyError as error:
        return (error.check, error.what, error.place)


def slow(line: bytes) -> tuple[Any, ...]:
    try:
        receipt = verify_receipt(line, KEY, signed.RUNTIME_ID)
    except VerifyError as error:
        return (error.check, error.what, error.place)
    return receipt.id, receipt.arguments_disclosed


@pytest.mark.parametrize("index", range(len(LEAVES)))
@settings(bounded, max_examples=max(20, bounded.max_examples // 10))
@given(data=st.data())
def test_leaves_are_read_alike_the_quick_way_and_the_long_way(index: int, data: st.DataObject) -> None:
    for text in (LEAVES[index], data.draw(changed(LEAVES[index]))):
        leaf = refuses_or(read_leaf_text, text)
        read = refuses_or(long_way, text)
        assert (leaf is None) == (read is None)
        if leaf is not None:
            assert (leaf.kind, leaf.body, leaf.body_text, leaf.signature) == read


def long_way(text: bytes) -> tuple[str, Any, bytes, str | None]:
    """A leaf by its members and shapes alone."""
    members = canonical.split(text, ("body", "signature", "type"))
    kind, signature = members["type"].value, members["signature"].value
    shape.one_of(*BODIES)(kind, "type")
    BODIES[kind](members["body"].value, "body")
    (shape.signature if kind in SIGNED else shape.null)(signature, "signature")
    return kind, members["body"].value, members["body"].received, signature
