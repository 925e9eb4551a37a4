"""The Merkle log against known vectors and against the definition of RFC 9162 written out."""

import base64
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify import signed
from verify import log, notes
from verify.keys import PublicKey
from verify.receipts import verify_receipt
from verify.verdict import VerifyError

ORIGIN = f"chio.invalid/{signed.RUNTIME_ID}"
LOG_KEY = PublicKey.from_hex(signed.OTHER_KEY)

# The inputs and roots that Certificate Transparency implementations have tested with since RFC 6962.
_LEAVES = [bytes.fromhex(text) for text in (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f",
)]
_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


# --- RFC 9162, section 2.1, as it is written there ---


def naive_root(leaves: list[bytes]) -> bytes:
    if len(leaves) < 2:
        return hashlib.sha256(b"\0" + leaves[0] if leaves else b"").digest()
    half = _split_point(len(leaves))
    return hashlib.sha256(b"\1" + naive_root(leaves[:half]) + naive_root(leaves[half:])).digest()


def naive_inclusion(index: int, leaves: list[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    half = _split_point(len(leaves))
    if index < half:
        return [*naive_inclusion(index, leaves[:half]), naive_root(leaves[half:])]
    return [*naive_inclusion(index - half, leaves[half:]), naive_root(leaves[:half])]


def naive_consistency(old: int, leaves: list[bytes], complete: bool = True) -> list[bytes]:
    if old == len(leaves):
        return [] if complete else [naive_root(leaves)]
    half = _split_point(len(leaves))
    if old <= half:
        return [*naive_consistency(old, leaves[:half], complete), naive_root(leaves[half:])]
    return [*naive_consistency(old - half, leaves[half:], False), naive_root(leaves[:half])]


def _split_point(size: int) -> int:
    half = 1
    while half * 2 < size:
        half *= 2
    return half


def leaves_of(size: int) -> list[bytes]:
    return [b"leaf %d" % number for number in range(size)]


def checkpoint_of(leaves: list[bytes], origin: str = ORIGIN) -> log.Checkpoint:
    return log.Checkpoint(origin, len(leaves), naive_root(leaves))


# --- roots ---


@pytest.mark.parametrize("size", range(9))
def test_roots_are_those_of_the_known_vectors(size: int) -> None:
    found, root = log.root_of(log.leaf_hash(leaf) for leaf in _LEAVES[:size])
    assert (found, root.hex()) == (size, _ROOTS[size])


@pytest.mark.parametrize("size", [*range(70), 127, 128, 129, 1000])
def test_roots_are_those_of_the_definition(size: int) -> None:
    leaves = leaves_of(size)
    assert log.root_of(map(log.leaf_hash, leaves)) == (size, naive_root(leaves))


def test_the_leaf_of_a_receipt_leaves_out_what_may_be_withheld() -> None:
    receipt = verify_receipt(signed.receipt(), PublicKey.from_hex(signed.KERNEL_KEY))
    bare = verify_receipt(signed.receipt(shown={}), PublicKey.from_hex(signed.KERNEL_KEY))
    expected = signed.jcs({"body": receipt.body, "signature": receipt.signature, "type": "receipt"})
    assert log.receipt_leaf(receipt) == log.receipt_leaf(bare) == expected


# --- inclusion ---


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33])
def test_every_leaf_is_proved_at_its_place_and_at_no_other(size: int) -> None:
    leaves = leaves_of(size)
    root = naive_root(leaves)
    for index, leaf in enumerate(leaves):
        proof = naive_inclusion(index, leaves)
        log.verify_inclusion(log.leaf_hash(leaf), index, size, proof, root)
        for other in (*range(size), -1, size):
            if other != index:
                with pytest.raises(VerifyError) as refused:
                    log.verify_inclusion(log.leaf_hash(leaf), other, size, proof, root)
                assert refused.value.check == "inclusion"


@settings(max_examples=300)
@given(st.integers(1, 40), st.data())
def test_a_changed_inclusion_proof_is_refused(size: int, data: st.DataObject) -> None:
    leaves = leaves_of(size)
    index = data.draw(st.integers(0, size - 1))
    proof = naive_inclusion(index, leaves)
    changed = _change(proof, data)
    with pytest.raises(VerifyError) as refused:
        log.verify_inclusion(log.leaf_hash(leaves[index]), index, size, changed, naive_root(leaves))
    assert refused.value.check == "inclusion"


def test_an_inner_node_does_not_pass_as_a_leaf() -> None:
    leaves = leaves_of(4)
    left = log.leaf_hash(leaves[0]) + log.leaf_hash(leaves[1])
    with pytest.raises(VerifyError):
        log.verify_inclusion(log.leaf_hash(left), 0, 2, [naive_root(leaves[2:])], naive_root(leaves))


# --- consistency ---


@pytest.mark.parametrize("new", range(1, 34))
def test_every_earlier_tree_is_proved_to_be_a_beginning(new: int) -> None:
    leaves = leaves_of(new)
    for old in range(1, new + 1):
        proof = naive_consistency(old, leaves)
        log.verify_consistency(checkpoint_of(leaves[:old]), checkpoint_of(leaves), proof)


@pytest.mark.parametrize("old", [1, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("new", [13, 16, 21])
def test_a_rewritten_beginning_is_refused_with_any_proof_there_is(old: int, new: int) -> None:
    kept = checkpoint_of(leaves_of(old))
    rewritten = [b"another", *leaves_of(new)[1:]]
    with pytest.raises(VerifyError) as refused:
        log.verify_consistency(kept, checkpoint_of(rewritten), naive_consistency(old, rewritten))
    assert refused.value.check == "consistency"
    with pytest.raises(VerifyError):
        log.verify_consistency(kept, checkpoint_of(rewritten), naive_consistency(old, leaves_of(new)))


@settings(max_examples=300)
@given(st.integers(2, 40), st.data())
def test_a_changed_consistency_proof_is_refused(new: int, data: st.DataObject) -> None:
    leaves = leaves_of(new)
    old = data.draw(st.integers(1, new - 1))
    changed = _change(naive_consistency(old, leaves), data)
    with pytest.raises(VerifyError) as refused:
        log.verify_consistency(checkpoint_of(leaves[:old]), checkpoint_of(leaves), changed)
    assert refused.value.check == "consistency"


@pytest.mark.parametrize("old", [1, 3, 4])
def test_no_proof_at_all_is_refused(old: int) -> None:
    with pytest.raises(VerifyError) as refused:
        log.verify_consistency(checkpoint_of(leaves_of(old)), checkpoint_of(leaves_of(5)), [])
    assert refused.value.check == "consistency"


def test_a_log_that_shrank_or_is_another_is_refused() -> None:
    small, large = checkpoint_of(leaves_of(3)), checkpoint_of(leaves_of(5))
    proof = naive_consistency(3, leaves_of(5))
    with pytest.raises(VerifyError, match="shrank"):
        log.verify_consistency(large, small, proof)
    with pytest.raises(VerifyError, match="different logs"):
        log.verify_consistency(checkpoint_of(leaves_of(3), "chio.invalid/other"), large, proof)


def test_one_size_has_one_root() -> None:
    log.verify_consistency(checkpoint_of(leaves_of(3)), checkpoint_of(leaves_of(3)), [])
    with pytest.raises(VerifyError, match="two roots"):
        log.verify_consistency(checkpoint_of(leaves_of(3)), checkpoint_of([b"x", b"y", b"z"]), [])
    with pytest.raises(VerifyError):
        log.verify_consistency(checkpoint_of(leaves_of(3)), checkpoint_of(leaves_of(3)), [bytes(32)])


def test_a_checkpoint_of_no_leaves_shows_nothing() -> None:
    for new in ([], leaves_of(3)):
        with pytest.raises(VerifyError, match="no leaves"):
            log.verify_consistency(checkpoint_of([]), checkpoint_of(new), [])


def _change(proof: list[bytes], data: st.DataObject) -> list[bytes]:
    """The proof with one node changed, dropped, added, shortened or swapped with a different one."""
    kinds = ["added in front", "added at the end"] + (["changed", "dropped", "shortened"] if proof else [])
    kind = data.draw(st.sampled_from(kinds))
    if kind == "added in front":
        return [bytes(32), *proof]
    if kind == "added at the end":
        return [*proof, bytes(32)]
    at = data.draw(st.integers(0, len(proof) - 1))
    if kind == "dropped":
        return proof[:at] + proof[at + 1 :]
    node = proof[at][:-1] if kind == "shortened" else bytes([proof[at][0] ^ 1]) + proof[at][1:]
    return [*proof[:at], node, *proof[at + 1 :]]


# --- checkpoints ---


def note_key_id(name: str, key: str) -> bytes:
    return hashlib.sha256(name.encode() + b"\n\x01" + bytes.fromhex(key)).digest()[:4]


def note(text: str, name: str = ORIGIN, key: str = signed.OTHER_KEY, signature: bytes | None = None) -> bytes:
    made = signed.OTHER.sign(text.encode()).signature if signature is None else signature
    return f"{text}\n— {name} {base64.b64encode(note_key_id(name, key) + made).decode()}\n".encode()


ROOT = base64.b64encode(hashlib.sha256(b"root").digest()).decode()
TEXT = f"{ORIGIN}\n42\n{ROOT}\n"


def test_a_checkpoint_under_the_log_key_is_read() -> None:
    checkpoint = log.verify_checkpoint(note(TEXT), LOG_KEY, ORIGIN)
    assert checkpoint == log.Checkpoint(ORIGIN, 42, hashlib.sha256(b"root").digest())


def test_signatures_of_witnesses_stand_beside_the_logs_own_and_are_left_alone() -> None:
    witness = "— witness.example/w " + base64.b64encode(b"\1\2\3\4" + bytes(72)).decode() + "\n"
    log.verify_checkpoint(note(TEXT) + witness.encode(), LOG_KEY, ORIGIN)
    same_name = f"— {ORIGIN} " + base64.b64encode(b"\1\2\3\4" + bytes(64)).decode() + "\n"
    log.verify_checkpoint(note(TEXT) + same_name.encode(), LOG_KEY, ORIGIN)


def test_a_note_of_another_implementation_verifies() -> None:
    """The signed note in the documentation of Go's golang.org/x/mod/sumdb/note."""
    text = (
        "If you think cryptography is the answer to your problem,\n"
        "then you don't know what your problem is.\n"
    )
    line = (
        "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
    )
    vkey = base64.b64decode("ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
    key = PublicKey.from_hex(vkey[1:].hex())
    note = notes.read_note(f"{text}\n{line}".encode())
    notes.VerifierKey("PeterNeumann", notes.ED25519, key).verify(note)
    assert note.text == text.encode()


@pytest.mark.parametrize(
    "bad",
    [
        note(TEXT)[:-1],
        note(TEXT).replace(b"42", b"43"),
        note(TEXT).replace(b"\n\n", b"\n"),
        note(TEXT).replace("—".encode(), b"--"),
        note(TEXT).replace(b"\n", b"\r\n"),
        note(TEXT) + b"\n",
        note(TEXT) + b"trailing\n",
        b"\xff" + note(TEXT),
        note(TEXT, signature=bytes(64)),
        note(TEXT, signature=b""),
        note(TEXT) + note(TEXT, signature=bytes(64)).split(b"\n\n")[1],
        note(TEXT, name="chio.invalid/other"),
        note(TEXT, key=signed.KERNEL_KEY),
        note(f"chio.invalid/other\n42\n{ROOT}\n"),
        note(f"{ORIGIN}\n042\n{ROOT}\n"),
        note(f"{ORIGIN}\n-1\n{ROOT}\n"),
        note(f"{ORIGIN}\n+42\n{ROOT}\n"),
        note(f"{ORIGIN}\n٤٢\n{ROOT}\n"),
        note(f"{ORIGIN}\n\n{ROOT}\n"),
        note(f"{ORIGIN}\n9223372036854775808\n{ROOT}\n"),
        note(f"{ORIGIN}\n42\n{ROOT[:-2]}==\n"),
        note(f"{ORIGIN}\n42\n{ROOT[:-1]}\n"),
        note(f"{ORIGIN}\n42\n{ROOT.replace('+', '-').replace('/', '_')}\n") if set("+/") & set(ROOT) else b"",
        note(f"{ORIGIN}\n42\n{base64.b64encode(bytes(31)).decode()}\n"),
        note(f"{ORIGIN}\n42\n{ROOT}\nextension\n"),
        note(f"{ORIGIN}\n42\n"),
        b"",
        b"\n\n",
        b"x" * (notes.MAX_NOTE_BYTES + 1),
    ],
)
def test_what_is_not_a_checkpoint_of_this_log_is_refused(bad: bytes) -> None:
    with pytest.raises(VerifyError) as refused:
        log.verify_checkpoint(bad, LOG_KEY, ORIGIN)
    assert refused.value.check == "checkpoint"


@pytest.mark.parametrize("character", ["\0", "\t", "\r", "\x1f"])
def test_a_control_character_in_a_signed_text_is_refused(character: str) -> None:
    notes.read_note(note("one\n"))
    with pytest.raises(VerifyError, match="control character"):
        notes.read_note(note(f"o{character}ne\n"))


def test_a_root_with_stray_low_bits_in_its_base64_is_refused() -> None:
    """Four spellings decode to the same root; a note must have one text (RFC 4648, section 3.5)."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    stray = ROOT[:-2] + alphabet[alphabet.index(ROOT[-2]) + 1] + "="
    assert base64.b64decode(stray) == base64.b64decode(ROOT)
    with pytest.raises(VerifyError, match="canonical base64"):
        log.verify_checkpoint(note(f"{ORIGIN}\n42\n{stray}\n"), LOG_KEY, ORIGIN)
