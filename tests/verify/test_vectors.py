"""Public test vectors of other projects (fixtures/vectors/README.md)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from verify import log
from verify.keys import PublicKey
from verify.verdict import VerifyError

VECTORS = Path(__file__).parents[2] / "fixtures" / "vectors"


def holds(key: str, message: bytes, signature: bytes) -> bool:
    """Whether a reviewer who was given this key and this signature would come to believe the message."""
    try:
        PublicKey.from_hex(key).verify(message, signature)
    except VerifyError as error:
        return error.check not in ("input", "signature")
    return True


# --- Ed25519 ---

CCTV = json.loads((VECTORS / "cctv-ed25519.json").read_text(encoding="utf-8"))
WYCHEPROOF = json.loads((VECTORS / "wycheproof-ed25519.json").read_text(encoding="utf-8"))


def test_every_low_order_and_non_canonical_case_of_cctv_is_refused_and_the_good_one_taken() -> None:
    taken = [
        vector["number"]
        for vector in CCTV
        if holds(vector["key"], vector["msg"].encode(), bytes.fromhex(vector["sig"]))
    ]
    assert taken == [vector["number"] for vector in CCTV if not vector["flags"]]
    assert (len(CCTV), len(taken)) == (914, 1)


def test_every_valid_case_of_wycheproof_is_taken_and_every_other_refused() -> None:
    """`acceptable` there are keys of small or mixed order, which cannot be pinned here."""
    cases = [(group["publicKey"]["pk"], case) for group in WYCHEPROOF["testGroups"] for case in group["tests"]]
    wrong = [
        case["tcId"]
        for key, case in cases
        if holds(key, bytes.fromhex(case["msg"]), bytes.fromhex(case["sig"])) != (case["result"] == "valid")
    ]
    assert wrong == []
    assert sorted({case["result"] for _, case in cases}) == ["acceptable", "invalid", "valid"]
    assert len(cases) == WYCHEPROOF["numberOfTests"] == 210


# --- Merkle proofs ---


def rows(name: str) -> list[Any]:
    return [json.loads(line) for line in (VECTORS / name).read_text(encoding="utf-8").splitlines()]


def decoded(values: list[str]) -> list[bytes]:
    return [base64.b64decode(value) for value in values]


def accepted(vector: dict[str, Any]) -> bool:
    proof = decoded(vector["proof"])
    try:
        if vector["kind"] == "inclusion":
            leaf, root = decoded([vector["leafHash"], vector["root"]])
            log.verify_inclusion(leaf, vector["leafIdx"], vector["treeSize"], proof, root)
        else:
            old, new = decoded([vector["root1"], vector["root2"]])
            log.verify_consistency(
                log.Checkpoint("log", vector["size1"], old), log.Checkpoint("log", vector["size2"], new), proof
            )
    except VerifyError as error:
        return error.check != vector["kind"]
    return True


@pytest.mark.parametrize("kind", ["inclusion", "consistency"])
def test_proofs_of_transparency_dev_are_taken_and_refused_as_they_say(kind: str) -> None:
    vectors = [vector for vector in rows("transparency-dev-merkle.ndjson") if vector["kind"] == kind]
    assert [vector["name"] for vector in vectors if accepted(vector) == vector["wantErr"]] == []
    assert len(vectors) == 98


def test_roots_and_proofs_of_gos_tlog_hold_and_no_other_leaf_fits_them() -> None:
    made = rows("go-sumdb-tlog.ndjson")
    hashes = [log.leaf_hash(b"leaf %d" % number) for number in range(1000)]
    roots = {size: bytes.fromhex(root) for kind, size, root in (row for row in made if row[0] == "root")}
    for size, root in roots.items():
        assert log.root_of(hashes[:size]) == (size, root)
    proofs = [row for row in made if row[0] in ("inclusion", "consistency")]
    for kind, first, size, nodes in proofs:
        proof = [bytes.fromhex(node) for node in nodes]
        new = log.Checkpoint("log", size, roots[size])
        if kind == "inclusion":
            log.verify_inclusion(hashes[first], first, size, proof, new.root)
            with pytest.raises(VerifyError):
                log.verify_inclusion(hashes[first - 1], first, size, proof, new.root)
        else:
            old_size, old_root = log.root_of(hashes[:first])
            log.verify_consistency(log.Checkpoint("log", old_size, old_root), new, proof)
            with pytest.raises(VerifyError):
                log.verify_consistency(log.Checkpoint("log", old_size, hashes[0][::-1]), new, proof)
    assert len(proofs) > 350


def test_checkpoints_signed_by_gos_note_are_read() -> None:
    made = rows("go-sumdb-tlog.ndjson")
    (vkey,) = [row[1] for row in made if row[0] == "vkey"]
    name, _, encoded = vkey.split("+", 2)
    key = PublicKey.from_hex(base64.b64decode(encoded)[1:].hex())
    notes = [(row[1], row[2]) for row in made if row[0] == "note"]
    for size, text in notes:
        checkpoint = log.verify_checkpoint(text.encode(), key, name)
        assert (checkpoint.size, checkpoint.root) == log.root_of(log.leaf_hash(b"leaf %d" % n) for n in range(size))
    assert len(notes) == 8
