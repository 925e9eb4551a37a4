"""The parsers of a bundle against changed and random bytes, and against leaves that a host with its keys made up.

`CHIO_FUZZ_EXAMPLES` makes it longer (as for `tests.verify.test_fuzz`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify import bundled
from tests.verify.bundled import decode, encode
from tests.verify.mutation.bundles import Lies
from tests.verify.mutation.changes import text_of
from tests.verify.observed import AUTHORITY, key_of, signed_text
from tests.verify.test_fuzz import bounded, changed, refuses_or
from verify import cbor
from verify.audit import audit
from verify.bundle import Bundle
from verify.capabilities import verify_capability
from verify.documents import Documents
from verify.foundation import Trust
from verify.keys import Pins, PublicKey
from verify.verdict import Exit

RUN = bundled.good()
GOOD = RUN.assemble()
MANIFEST = decode(decode(GOOD)[0][2])[0]
TOKEN = signed_text("capability", RUN.tokens[0], AUTHORITY).encode()
LIES = Lies(RUN, bundled.good())
LEAVES = [json.loads(decode(item)[0]) for item in RUN.sections()["leaves"]]

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**40) | st.text(max_size=6) | st.just("5" * 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Trust:
    path = tmp_path_factory.mktemp("kept") / "pins.json"
    path.write_text(json.dumps(RUN.pins()))
    return Trust.of_pins(Pins.from_file(str(path)))


@bounded
@given(st.binary(max_size=300))
def test_no_parser_of_a_bundle_crashes_on_random_bytes(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "run.chio"
    path.write_bytes(text)
    assert refuses_or(lambda _: Bundle.open(str(path)), text) is None
    refuses_or(cbor.whole, text)
    assert refuses_or(lambda token: verify_capability(token, PublicKey.from_hex(key_of(AUTHORITY))), text) is None


@bounded
@given(changed(encode(MANIFEST)))
def test_a_changed_manifest_is_refused_or_says_something_else(text: bytes) -> None:
    read = refuses_or(cbor.whole, text)
    if read is not None and text != encode(MANIFEST):
        assert read != MANIFEST


@bounded
@given(changed(GOOD))
def test_a_changed_bundle_is_not_verified(tmp_path: Path, trust: Trust, text: bytes) -> None:
    path = tmp_path / "run.chio"
    path.write_bytes(text)
    verdict = refuses_or(lambda _: audit(str(path), trust), text)
    assert verdict is None or text == GOOD or verdict.exit is Exit.REFUSED


@bounded
@given(changed(TOKEN))
def test_a_changed_token_is_no_token(text: bytes) -> None:
    read = refuses_or(lambda token: verify_capability(token, PublicKey.from_hex(key_of(AUTHORITY))), text)
    assert read is None or text == TOKEN


@bounded
@given(st.lists(st.tuples(st.sampled_from(["config", "policy", "plan", "profile", "other"]), st.binary(max_size=9))))
def test_documents_of_any_kind_are_read_or_refused(items: list[tuple[str, bytes]]) -> None:
    refuses_or(lambda _: Documents.read([list(item) for item in items]), b"")


@bounded
@given(index=st.integers(0, len(LEAVES) - 1), data=st.data())
def test_a_leaf_that_a_host_made_up_is_judged_without_a_crash(
    index: int, data: st.DataObject, tmp_path: Path, trust: Trust
) -> None:
    """Signed by the right keys, and of the right form but for one member, whatever that is."""
    body: Any = json.loads(json.dumps(LEAVES[index]["body"]))
    place = body
    while True:
        name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[name], dict | list) and place[name] and data.draw(st.booleans())):
            break
        place = place[name]
    place[name] = data.draw(_json)
    path = tmp_path / "run.chio"
    path.write_bytes(LIES.with_leaf(index, text_of(body)))
    refuses_or(lambda _: audit(str(path), trust), b"")
