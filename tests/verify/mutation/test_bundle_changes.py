"""The bundle of a whole run, changed in every place: as it stands, and signed anew by the right keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.verify import bundled
from tests.verify.bundled import Run
from tests.verify.mutation.bundles import subjects
from tests.verify.mutation.matrix import catchers, tally
from verify.audit import audit
from verify.foundation import Trust
from verify.keys import Pins

NAMES = ("bundle", "bundle signed anew")


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_bundle_is_refused_unless_the_change_is_a_word_that_nothing_contradicts(
    name: str, tmp_path: Path
) -> None:
    found = tally(subjects(tmp_path)[name])
    print(found.text())
    assert found.uncaught == []
    assert found.caught.total() > 40


# --- what the matrix once found -------------------------------------------------------------------------------------


def _a_server_of_another_time_limit(run: Run) -> None:
    _field(run, "timeout_ms", "bank")["value"] += 1


def _a_server_under_a_profile_of_another_name(run: Run) -> None:
    run.one("launch", server="bank").body["asked"]["profile"] = "worker"


def _landlock_of_no_rights_at_all(run: Run) -> None:
    _field(run, "landlock", "bank")["value"]["rights"] = None


def _landlock_with_a_right_twice(run: Run) -> None:
    _field(run, "landlock", "bank")["asked"]["rights"].append("execute")


def _one_file_exported_twice(run: Run) -> None:
    exports = next(leaf for leaf in run.all("exit") if leaf.body["exports"]).body["exports"]
    exports.append(dict(exports[0]))


def _a_root_with_more_than_all(run: Run) -> None:
    run.retoken("root", lambda token: token.update(budget_share_bps=10_001))


def _a_run_created_at_another_time(run: Run) -> None:
    run.bootstrap["created_ms"] -= 1


def _field(run: Run, name: str, server: str) -> dict[str, Any]:
    fields = run.one("launch", server=server).body["fields"]
    return next(field for field in fields if field["name"] == name)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (_a_server_of_another_time_limit, "confinement"),
        (_a_server_under_a_profile_of_another_name, "confinement"),
        (_landlock_of_no_rights_at_all, "confinement"),
        (_landlock_with_a_right_twice, "confinement"),
        (_one_file_exported_twice, "exports"),
        (_a_root_with_more_than_all, "capabilities"),
        (_a_run_created_at_another_time, "bootstrap"),
    ],
)
def test_a_lie_that_the_matrix_found_is_caught(change: Callable[[Run], None], check: str, tmp_path: Path) -> None:
    run = bundled.good()
    change(run)
    bundle, pins = bundled.written(run, tmp_path)
    assert check in catchers(lambda text: audit(bundle, Trust.of_pins(Pins.from_file(pins))), b"")
