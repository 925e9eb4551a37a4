"""`attest-call` of an encrypted state: what it signs is verified by a reviewer who has no key file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernel import test_attest
from tests.kernel.test_attest import Calls, Kept, make_calls

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Calls:
    return make_calls(tmp_path_factory.mktemp("attested"), key_file)


@pytest.mark.parametrize("key", ["completed", "reconciled", "built-in"])
def test_a_call_is_attested_under_the_key_file_and_verified_without_it(
    calls: Calls, tmp_path: Path, keyed: Path, key: str
) -> None:
    def keep(kept_key: str) -> Kept:
        return calls.keep(kept_key, tmp_path)

    test_attest.test_what_a_kernel_attests_of_a_call_is_verified_against_what_a_reviewer_kept(key, calls, keep)
    os.environ.pop("CHIO_KEY_FILE")
    assert keep(key).verify().returncode == 0
    (tmp_path / "call.json").unlink()
    refused = keep(key).attest()
    assert refused.returncode == 1
    assert "the state is encrypted" in refused.stderr
