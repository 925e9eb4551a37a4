"""Sealing: only the owner's key at the same place opens a text, unchanged; what is looked up shows nothing."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chio.kernel.sealed import SealedVault, new_keys
from chio.kernel.vault import HOST, Unsealable

KEY, RUNTIME = b"k" * 32, "a" * 36
OWNERS = [HOST, "a", "b"]
VAULT = SealedVault(KEY, RUNTIME, new_keys(KEY, RUNTIME, OWNERS))
PLACES = st.text(max_size=40)


@given(st.sampled_from(OWNERS), PLACES, st.binary(max_size=300))
def test_what_is_sealed_opens_at_its_place_and_is_another_text_each_time(owner: str, place: str, data: bytes) -> None:
    sealed = VAULT.seal(owner, place, data)
    assert VAULT.open(owner, place, sealed) == data
    assert VAULT.seal(owner, place, data) != sealed
    assert len(sealed) == 12 + len(data) + 16  # nonce and tag (NIST SP 800-38D)


@given(st.sampled_from(OWNERS), PLACES, st.sampled_from(OWNERS), PLACES, st.binary(max_size=64))
def test_another_owner_or_place_does_not_open_it(owner: str, place: str, other: str, where: str, data: bytes) -> None:
    assume((owner, place) != (other, where))
    with pytest.raises(Unsealable):
        VAULT.open(other, where, VAULT.seal(owner, place, data))


@settings(max_examples=200)
@given(st.binary(max_size=64), st.data())
def test_a_changed_or_shortened_text_does_not_open(data: bytes, drawn: st.DataObject) -> None:
    sealed = VAULT.seal("a", "place", data)
    at = drawn.draw(st.integers(0, len(sealed) * 8 - 1))
    changed = bytearray(sealed)
    changed[at // 8] ^= 1 << at % 8
    for text in (bytes(changed), sealed[: at // 8], sealed + b"\0", b""):
        with pytest.raises(Unsealable):
            VAULT.open("a", "place", text)


@given(st.text(max_size=64))
def test_a_keyed_digest_is_the_same_for_its_owner_and_kind_alone(text: str) -> None:
    named = VAULT.digest("a", "blob", text)
    assert named == VAULT.digest("a", "blob", text)
    others = {VAULT.digest("b", "blob", text), VAULT.digest("a", "payload", text), sha256(text.encode()).hexdigest()}
    assert named not in others
    assert len(others) == 3


def test_a_destroyed_key_seals_opens_and_names_nothing() -> None:
    vault = SealedVault(KEY, RUNTIME, new_keys(KEY, RUNTIME, OWNERS))
    sealed = vault.seal("a", "place", b"data")
    vault.destroy("a")
    for use in (
        lambda: vault.open("a", "place", sealed),
        lambda: vault.seal("a", "place", b"data"),
        lambda: vault.digest("a", "blob", "text"),
    ):
        with pytest.raises(Unsealable, match="the data key of a was destroyed"):
            use()
    assert vault.open("b", "place", vault.seal("b", "place", b"data")) == b"data"


def test_data_keys_open_under_their_own_key_file_state_and_owner_alone() -> None:
    wrapped = new_keys(KEY, RUNTIME, OWNERS)
    for key, runtime, keys in (
        (b"K" * 32, RUNTIME, wrapped),
        (KEY, "b" * 36, wrapped),
        (KEY, RUNTIME, {**wrapped, "a": wrapped["b"]}),
        (KEY, RUNTIME, {**wrapped, "a": wrapped["a"][:-1]}),
        (KEY, RUNTIME, {**wrapped, "a": b""}),
    ):
        with pytest.raises(Unsealable):
            SealedVault(key, runtime, keys)
