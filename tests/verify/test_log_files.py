"""`chio-verify log`: the files of one log, judged together. Every tampering names the check that must catch it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verify import logged
from tests.verify.logged import Logged, checkpoint, consistency, cosigned, inclusion
from tests.verify.observed import LOG, STRANGER, T0, key_of
from tests.verify.signed import jcs
from verify.export import LogTrust
from verify.keys import Pins, PublicKey
from verify.log_files import judge_log
from verify.notes import VerifierKey
from verify.verdict import Exit, State, Verdict, VerifyError

ALL = ["checkpoint", "leaves", "bootstrap", "runtime_pin", "leaf_signatures", "order", "epochs", "completeness"]


class Files:
    """Writes files and judges them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def write(self, content: str | bytes) -> str:
        self.count += 1
        path = self.folder / f"file-{self.count}"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def judge(self, *contents: str | bytes, witnesses: tuple[str, ...] = (), leaf: str | None = None) -> Verdict:
        pins = Pins.from_file(logged.pins(self.folder))
        named = tuple(VerifierKey.from_text(text) for text in witnesses)
        return judge_log([self.write(content) for content in contents], LogTrust.of_pins(pins, named), leaf)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


LEAVES = logged.log().leaves()
KINDS = [kind for kind, _ in logged.log().entries]


def export(leaves: list[bytes]) -> bytes:
    return b"".join(leaf + b"\n" for leaf in leaves)


def failed(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.failed]


def state(verdict: Verdict, name: str) -> State:
    return next(check.state for check in verdict.checks if check.name == name)


# --- what holds ---


def test_the_log_under_test_has_every_type_of_leaf() -> None:
    assert set(KINDS) == {
        "bootstrap", "intent", "receipt", "incident", "attempt", "launch", "exit", "revocation", "cancellation",
        "reconciliation", "tombstone", "epoch",
    }  # fmt: skip


def test_a_whole_export_under_its_checkpoint_passes_every_check_of_leaves(files: Files) -> None:
    verdict = files.judge(export(LEAVES), checkpoint(LEAVES))
    assert failed(verdict) == []
    assert [name for name in ALL if name not in verdict.passed] == []
    assert verdict.exit is Exit.VERIFIED
    assert verdict.figures == {"leaves": len(LEAVES), "checkpoint_size": len(LEAVES)}
    assert any("none missing and none more" in proof for proof in verdict.proved)


def test_earlier_checkpoints_are_of_a_beginning_of_the_export(files: Files) -> None:
    verdict = files.judge(export(LEAVES), checkpoint(LEAVES), *(checkpoint(LEAVES, size) for size in (1, 5, 8, 9)))
    assert (failed(verdict), state(verdict, "consistency")) == ([], State.PASSED)


def test_without_leaves_consistency_is_shown_by_proofs_in_a_chain(files: Files) -> None:
    notes = [checkpoint(LEAVES, size) for size in (3, 8, len(LEAVES))]
    proofs = [consistency(LEAVES[:8], 3, notes[1]), consistency(LEAVES, 8, notes[2])]
    assert state(files.judge(*notes, *proofs), "consistency") is State.PASSED
    # One step alone does not reach from the oldest to the newest.
    lacking = files.judge(*notes, proofs[1])
    assert state(lacking, "consistency") is State.UNCHECKED
    assert lacking.exit is Exit.UNCHECKED


def test_two_checkpoints_that_each_grew_from_the_same_one_are_not_thereby_consistent(files: Files) -> None:
    fork = [*LEAVES[:6], jcs({"body": logged.log().entries[1][1], "signature": None, "type": "attempt"}), *LEAVES[7:9]]
    notes = [checkpoint(LEAVES, 4), checkpoint(fork), checkpoint(LEAVES)]
    proofs = [consistency(fork, 4, notes[1]), consistency(LEAVES, 4, notes[2])]
    verdict = files.judge(*notes, *proofs)
    assert state(verdict, "consistency") is State.UNCHECKED
    assert verdict.exit is Exit.UNCHECKED


@pytest.mark.parametrize("index", range(len(LEAVES)))
def test_each_leaf_is_proved_by_a_file_that_carries_it(files: Files, index: int) -> None:
    verdict = files.judge(inclusion(LEAVES, index, checkpoint(LEAVES), LEAVES[index]))
    assert (failed(verdict), state(verdict, "inclusion")) == ([], State.PASSED)


def test_a_proof_without_its_leaf_takes_the_leaf_the_receipt_or_the_export(files: Files) -> None:
    index = len(LEAVES) - 1
    proof = inclusion(LEAVES, index, checkpoint(LEAVES))
    assert files.judge(proof).exit is Exit.UNCHECKED
    leaf = files.write(LEAVES[index] + b"\n")
    members = LEAVES[index].decode().replace(',"signature"', ',"disclosed":{},"signature"')
    receipt = files.write(members.replace(',"type":"receipt"', "") + "\n")
    given = files.judge(proof, leaf=leaf), files.judge(proof, leaf=receipt), files.judge(proof, export(LEAVES))
    for verdict in given:
        assert (failed(verdict), state(verdict, "inclusion")) == ([], State.PASSED)
    other = files.write(LEAVES[3])
    assert failed(files.judge(proof, leaf=other)) == ["inclusion"]


def test_a_named_witness_who_signed_the_newest_checkpoint_is_told(files: Files) -> None:
    verdict = files.judge(export(LEAVES), cosigned(checkpoint(LEAVES)), witnesses=(logged.vkey(),))
    assert verdict.exit is Exit.VERIFIED
    assert f"cosignature {logged.WITNESS_NAME}" in verdict.passed
    assert any("saw at 1795992600 s" in proof for proof in verdict.proved)


def test_a_witness_with_a_plain_signature_is_taken_too(files: Files) -> None:
    key = logged.WITNESS
    text = checkpoint(LEAVES).partition("\n\n")[0] + "\n"
    line = logged.b64(logged.vkey_hash("w", 1, key) + key.sign(text.encode()).signature)
    verdict = files.judge(f"{checkpoint(LEAVES)}— w {line}\n", witnesses=(logged.vkey("w", 1),))
    assert "cosignature w" in verdict.passed


def test_without_pins_the_logs_key_and_origin_still_show_completeness(files: Files) -> None:
    trust = LogTrust(PublicKey.from_hex(key_of(LOG)), logged.ORIGIN)
    verdict = judge_log([files.write(export(LEAVES)), files.write(checkpoint(LEAVES))], trust)
    assert verdict.exit is Exit.VERIFIED
    assert [check.name for check in verdict.unchecked] == ["runtime_pin", "leaf_signatures", "consistency", "inclusion"]


# --- what does not ---


def changed(position: int, **members: Any) -> list[bytes]:
    """The log with members of one body changed by a host that signs it, and everything after it, again."""
    made = logged.log()
    kind, body = made.entries[position]
    made.entries[position] = (kind, {**body, **members})
    return made.leaves()


def resigned(change: Callable[[Logged], None]) -> list[bytes]:
    made = logged.log()
    change(made)
    return made.leaves()


RECEIPT = KINDS.index("receipt")
EPOCH = KINDS.index("epoch")


@pytest.mark.parametrize(
    ("leaves", "check", "place"),
    [
        (changed(RECEIPT, log_index=0), "order", f"leaf {RECEIPT}"),
        (changed(RECEIPT + 2, time_ms=T0), "order", f"leaf {RECEIPT + 2}"),
        (changed(EPOCH, size=EPOCH, root="0" * 64), "epochs", f"leaf {EPOCH}"),
        (changed(0, log_key="a" * 64), "bootstrap", "leaf 0"),
        (changed(0, config_digest="a" * 64), "bootstrap", "leaf 0"),
        (changed(RECEIPT, runtime_id=logged.RUNTIME_ID[::-1]), "leaves", f"leaf {RECEIPT}"),
        (changed(RECEIPT, runtime_id=logged.RUNTIME_ID.replace("7", "8")), "runtime_pin", f"leaf {RECEIPT}"),
        (changed(RECEIPT, kernel_key=key_of(STRANGER)), "leaf_signatures", f"leaf {RECEIPT}"),
        (changed(RECEIPT, surprise=1), "leaves", f"leaf {RECEIPT}"),
        (resigned(lambda made: made.keys.update(exit=STRANGER)), "leaf_signatures", f"leaf {KINDS.index('exit')}"),
        (resigned(lambda made: made.keys.update(epoch=STRANGER)), "leaf_signatures", f"leaf {EPOCH}"),
        (LEAVES[1:], "bootstrap", "leaf 0"),
        ([*LEAVES, LEAVES[0]], "order", f"leaf {len(LEAVES)}"),
    ],
)
def test_a_lie_of_the_host_fails_its_own_check_at_its_place(
    files: Files, leaves: list[bytes], check: str, place: str
) -> None:
    verdict = files.judge(export(leaves), checkpoint(leaves))
    found = {row.name: row.place for row in verdict.failed}
    assert found[check].split(", ")[0] == place
    assert set(found) <= {check, "order", "epochs"} if leaves == LEAVES[1:] else {check}  # there every index is another


@pytest.mark.parametrize("position", range(len(LEAVES)))
def test_a_leaf_that_is_missing_doubled_or_swapped_breaks_completeness(files: Files, position: int) -> None:
    note = checkpoint(LEAVES)
    without = LEAVES[:position] + LEAVES[position + 1 :]
    doubled = LEAVES[: position + 1] + LEAVES[position:]
    swapped = [*LEAVES[:position], *LEAVES[position : position + 2][::-1], *LEAVES[position + 2 :]]
    for leaves in (without, doubled, swapped):
        if leaves != LEAVES:
            assert "completeness" in failed(files.judge(export(leaves), note))


@pytest.mark.parametrize("position", range(len(LEAVES)))
def test_a_changed_byte_in_a_leaf_is_never_passed_over(files: Files, position: int) -> None:
    leaf = bytearray(LEAVES[position])
    leaf[len(leaf) // 2] ^= 1
    verdict = files.judge(export([*LEAVES[:position], bytes(leaf), *LEAVES[position + 1 :]]), checkpoint(LEAVES))
    assert "completeness" in failed(verdict)


def test_leaves_after_the_newest_checkpoint_are_vouched_for_by_nobody(files: Files) -> None:
    verdict = files.judge(export(LEAVES), checkpoint(LEAVES, len(LEAVES) - 2))
    (check,) = verdict.failed
    assert (check.name, check.reason) == ("completeness", "2 leaves more than the 22 of the newest checkpoint")


def test_an_export_alone_is_not_verified(files: Files) -> None:
    verdict = files.judge(export(LEAVES))
    assert verdict.exit is Exit.UNCHECKED
    assert {check.name for check in verdict.missing} == {"checkpoint", "completeness"}


def test_a_checkpoint_of_another_log_or_key_is_refused(files: Files) -> None:
    for note in (checkpoint(LEAVES, key=STRANGER), checkpoint(LEAVES, origin="chio.invalid/another")):
        verdict = files.judge(export(LEAVES), note)
        assert failed(verdict) == ["checkpoint"]
        assert verdict.exit is Exit.REFUSED


def test_a_rewritten_log_does_not_go_with_a_checkpoint_that_was_kept(files: Files) -> None:
    kept = checkpoint(LEAVES, 9)
    rewritten = changed(3, event="ended", outcome="exit_0")
    verdict = files.judge(export(rewritten), checkpoint(rewritten), kept)
    assert failed(verdict) == ["consistency"]
    proof = consistency(rewritten, 9, checkpoint(rewritten))
    assert failed(files.judge(kept, proof)) == ["consistency"]


def test_two_roots_of_one_size_are_a_split_view(files: Files) -> None:
    other = changed(3, event="ended", outcome="exit_0")
    assert failed(files.judge(checkpoint(LEAVES), checkpoint(other))) == ["consistency"]


def test_a_witness_who_did_not_sign_leaves_the_verdict_incomplete_and_one_who_signed_badly_refuses_it(
    files: Files,
) -> None:
    named = (logged.vkey(),)
    name = f"cosignature {logged.WITNESS_NAME}"
    assert [check.name for check in files.judge(checkpoint(LEAVES), witnesses=named).missing] == [name]
    stale = files.judge(checkpoint(LEAVES), cosigned(checkpoint(LEAVES, 5)), witnesses=named)
    assert name in [check.name for check in stale.missing]
    before, space, blob = cosigned(checkpoint(LEAVES)).removesuffix("\n").rpartition(" ")
    raw = bytearray(base64.b64decode(blob))
    raw[11] ^= 1  # the last byte of the time, which is part of what was signed
    assert failed(files.judge(f"{before}{space}{logged.b64(bytes(raw))}\n", witnesses=named)) == [name]


def test_a_cosignature_made_for_another_checkpoint_is_refused(files: Files) -> None:
    line = cosigned(checkpoint(LEAVES, 5)).splitlines(keepends=True)[-1]
    assert failed(files.judge(checkpoint(LEAVES) + line, witnesses=(logged.vkey(),))) == [
        f"cosignature {logged.WITNESS_NAME}"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "", "witness", "witness+00000000+AAAA", "wit ness+00000000+" + "A" * 44,
        logged.vkey().replace("+", "-", 1), logged.vkey()[:-4], logged.vkey(kind=6), "o" + logged.vkey(),
    ],
)  # fmt: skip
def test_what_is_no_verifier_key_is_refused(text: str) -> None:
    with pytest.raises(VerifyError) as refused:
        VerifierKey.from_text(text)
    assert refused.value.check == "input"


PROOF = inclusion(LEAVES, 5, checkpoint(LEAVES), LEAVES[5])


@pytest.mark.parametrize(
    "bad",
    [
        PROOF.replace("index 5", "index 6"),
        PROOF.replace("index 5", "index 05"),
        PROOF.replace("index 5", "index -5"),
        PROOF.replace("index 5", "index notanumber"),
        PROOF.replace("index 5\n", ""),
        PROOF.replace("extra ", "extra !!"),
        PROOF.replace("index 5\n", f"index 5\n{logged.b64(bytes(64))}\n"),
        PROOF.replace("index 5\n", f"index 5\n{logged.b64(bytes(32))}\n"),
        PROOF.replace("index 5\n", "index 5\n!!notbase64!!\n"),
        PROOF.replace("index 5\n", "index 5\n" + f"{logged.b64(bytes(32))}\n" * 64),
        PROOF.replace("\n\n", "\n", 1),
        PROOF.replace("extra ", "extra é"),
        inclusion(LEAVES, 5, checkpoint(LEAVES), LEAVES[4]),
        inclusion(LEAVES[:9], 5, checkpoint(LEAVES), LEAVES[5]),
        inclusion(changed(RECEIPT, log_index=4), RECEIPT, checkpoint(changed(RECEIPT, log_index=4)),
                  changed(RECEIPT, log_index=4)[RECEIPT]),
    ],
)  # fmt: skip
def test_a_tampered_inclusion_proof_is_refused(files: Files, bad: str) -> None:
    assert set(failed(files.judge(bad))) & {"inclusion", "checkpoint"}
    assert files.judge(bad).exit is Exit.REFUSED


def test_every_file_that_cannot_be_read_is_named(files: Files) -> None:
    trust = LogTrust(PublicKey.from_hex(key_of(LOG)), logged.ORIGIN)
    export_path, huge = files.write(export(LEAVES)), files.write(b"x" * 2_000_000)
    for paths in ([str(files.folder)], [str(files.folder / "absent")], [export_path] * 2, [huge]):
        with pytest.raises(VerifyError) as refused:
            judge_log(paths, trust)
        assert (refused.value.check, refused.value.file) == ("input", paths[-1])


@pytest.mark.parametrize("content", [b"", b"{", b"{\n{", b"old ", b"old 1\n\n", b"\xff" * 100, b"\0"])
def test_rubbish_is_refused_and_never_verified(files: Files, content: bytes) -> None:
    assert files.judge(content, checkpoint(LEAVES)).exit is Exit.REFUSED
