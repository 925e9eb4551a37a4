"""A bundle that a host with all its keys signed and that is not true is caught, each by the check that is about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.verify.bundled import Run, good, written
from tests.verify.lies import LIES
from verify.audit import audit
from verify.foundation import Trust
from verify.keys import Pins
from verify.verdict import Exit, Verdict, VerifyError


def judged(run: Run, folder: Path, kept: Run | None = None) -> Verdict:
    """The verdict of an auditor who has the pins, and the checkpoint of `kept`."""
    bundle, pins = written(run, folder)
    checkpoints = () if kept is None else (("kept.txt", kept.checkpoint().encode()),)
    return audit(bundle, Trust.of_pins(Pins.from_file(pins), checkpoints))


def failed(run: Run, folder: Path, kept: Run | None = None) -> set[str]:
    try:
        return {check.name for check in judged(run, folder, kept).failed}
    except VerifyError as error:
        return {error.check}


def test_the_good_run_put_together_anew_is_verified(tmp_path: Path) -> None:
    verdict = judged(good(), tmp_path, good())
    assert verdict.exit is Exit.VERIFIED
    assert [check.name for check in verdict.unchecked] == ["arguments", "policy", "profile_texts", "physical_effects"]


@pytest.mark.parametrize(("change", "checks"), [(change, checks) for _, change, checks in LIES],
                         ids=[name for name, _, _ in LIES])  # fmt: skip
def test_a_lie_with_the_right_keys_is_caught_by_its_own_check(change, checks, tmp_path: Path) -> None:
    run = good()
    change(run)
    assert failed(run, tmp_path) == checks


def test_a_log_that_was_rewritten_does_not_have_the_root_that_was_kept(tmp_path: Path) -> None:
    run = good()
    run.one("reconciliation").body["by"] = "somebody else"
    assert failed(run, tmp_path) == set()
    assert failed(run, tmp_path, good()) == {"kept_checkpoints"}


def test_a_log_that_was_cut_is_shorter_than_the_checkpoint_that_was_kept(tmp_path: Path) -> None:
    run = good()
    del run.leaves[-1]
    assert failed(run, tmp_path) == set()
    assert failed(run, tmp_path, good()) == {"kept_checkpoints"}


def test_a_log_that_only_grew_has_the_root_that_was_kept(tmp_path: Path) -> None:
    earlier = good()
    del earlier.leaves[-3:]
    assert failed(good(), tmp_path, earlier) == set()


def test_what_is_caught_is_said_with_its_place_and_what_to_do(tmp_path: Path) -> None:
    run = good()
    run.one("receipt", operation_key="send-1").call["binding"] = "5" * 64
    (check,) = judged(run, tmp_path).failed
    assert (check.name, check.place) == ("bindings", "leaf 9")
    assert check.fix


def test_the_pins_are_never_taken_from_inside_the_bundle(tmp_path: Path) -> None:
    run = good()
    from tests.verify.observed import STRANGER

    run.keys["kernel"] = STRANGER
    run.manifest["kernel_key"] = STRANGER.verify_key.encode()
    assert failed(run, tmp_path) == {"signer_pin"}


def test_a_bundle_of_another_run_is_refused_by_the_pinned_run(tmp_path: Path) -> None:
    bundle, pins = written(good(), tmp_path)
    document = json.loads(Path(pins).read_text())
    document["runtime_id"] = "11111111-2222-4333-8444-555555555555"
    Path(pins).write_text(json.dumps(document))
    verdict = audit(bundle, Trust.of_pins(Pins.from_file(pins)))
    assert {"bootstrap", "leaves"} <= {check.name for check in verdict.failed}
