"""The report project in a copy beside the tree's environment: the document's commands, word for word."""

from __future__ import annotations

import pytest

from tests.report import walkthrough
from tests.report.walkthrough import Project


@pytest.fixture(scope="module")
def after_first_run(project: Project) -> Project:
    walkthrough.first_run(project)
    return project


def test_the_first_run_hands_one_batch_over_and_exports_its_total(after_first_run: Project) -> None:
    assert after_first_run.run("cat .chio/result.json") == walkthrough.TEN


def test_the_same_command_again_adds_no_attempt_and_no_receipt(after_first_run: Project) -> None:
    walkthrough.second_run_of_the_same(after_first_run)


def test_the_consumer_s_checkpoint_holds_the_result_for_an_offline_reader(after_first_run: Project) -> None:
    walkthrough.checkpoint_is_the_recovery_record(after_first_run)


def test_a_producer_that_dies_after_its_send_is_given_the_original_receipt(project: Project) -> None:
    walkthrough.recovery(project)


def test_a_new_batch_is_a_new_run_with_its_own_state(project: Project) -> None:
    walkthrough.changed_batch(project)


def test_the_state_lies_in_the_copy_and_the_copy_does_not_point_back_at_the_tree(project: Project) -> None:
    tree = str(walkthrough.ROOT)
    for path in project.folder.rglob("*"):
        assert not (path.is_symlink() and str(path.readlink()).startswith(tree)), path
    site = next((project.folder / ".venv/lib").glob("python3*/site-packages"))
    imported = project.run(".venv/bin/python -c 'import chio_process; print(chio_process.__file__)'")
    assert imported.startswith(str(site))
