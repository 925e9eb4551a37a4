"""The fixtures of `fixtures/vectors/snapshots`: documents, their references and their indexes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.drive import ROOT
from tests.clients.snapshots.documents import read_index
from tests.clients.snapshots.driving import Snapshots
from tests.kernel.serving import Worker

pytestmark = pytest.mark.timeout(60)

FILES = sorted((ROOT / "fixtures/vectors/snapshots").glob("*.json"))
CASES = [case for path in FILES for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]


def test_there_are_vectors_with_every_kind_of_part() -> None:
    parts = [part for case in CASES for part in case["index"]]
    assert {type(part) for part in parts} == {str, dict}
    assert max(len(case["index"]) for case in CASES) >= 8


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_document_has_the_reference_and_the_index_of_its_vector(
    snapshots: Snapshots, worker: Worker, case: dict[str, Any]
) -> None:
    reference = snapshots.write(case["document"])
    assert reference == case["reference"]
    assert read_index(worker, reference) == case["index"]
    assert snapshots.read(case["reference"]) == case["document"]
