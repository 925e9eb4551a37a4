"""Whatever holds of a state holds of an encrypted one: tests of the kernel, word for word, under a key file."""

from __future__ import annotations

import pytest

from tests.external.test_faults import (  # noqa: F401
    test_a_call_found_dispatched_at_start_is_unknown_and_a_second_start_finds_nothing,
)
from tests.external.test_repeats import (  # noqa: F401
    test_a_compensated_call_gives_its_invocation_back_along_the_whole_chain,
    test_a_reconciled_call_keeps_its_receipt_and_shows_the_statement_beside_it,
    test_a_repeat_that_a_check_refuses_replays_what_is_retained,
)
from tests.kernel.test_calls import (  # noqa: F401
    test_a_key_that_is_used_for_something_else_is_a_conflict_and_the_original_stays,
    test_a_repeat_is_the_first_answer_byte_for_byte_and_costs_nothing,
    test_a_replay_and_a_read_write_nothing_into_the_database,
    test_an_allowed_call_returns_its_output_and_a_receipt_that_commits_to_everything,
    test_arguments_in_another_spelling_are_the_same_call,
    test_max_invocations_is_debited_along_the_whole_chain,
)
from tests.kernel.test_mailboxes import (  # noqa: F401
    _boxes,
    box,
    small,
    test_a_full_mailbox_takes_no_key_and_has_room_again_after_an_acknowledgement,
    test_a_message_key_with_another_payload_or_sender_is_a_message_conflict,
    test_a_message_that_was_acknowledged_says_so_when_it_is_sent_again,
    test_a_waiting_receive_is_woken_by_a_send_and_everybody_else_is_served_meanwhile,
    test_messages_are_numbered_from_one_and_name_their_sender,
    test_pending_bytes_count_as_canonical_text_and_come_back_with_the_acknowledgement,
    test_receiving_consumes_nothing_and_pages_by_its_cursor,
    test_the_same_message_under_another_operation_key_is_the_original,
)
from tests.kernel.test_state import (  # noqa: F401
    test_a_blob_comes_back_as_it_went_in,
    test_a_blob_that_rotted_on_disk_is_never_handed_out,
    test_a_checkpoint_belongs_to_the_process_and_not_to_the_attempt,
    test_a_save_against_another_revision_is_a_conflict_and_changes_nothing,
    test_a_value_may_have_a_mebibyte_of_canonical_text_and_no_byte_more,
    test_each_save_names_the_revision_it_replaces_and_makes_the_next,
    test_many_puts_at_once_never_pass_the_quota,
    test_of_many_saves_at_once_against_one_revision_exactly_one_is_kept,
    test_revisions_go_on_beyond_every_machine_word,
    test_the_digest_of_somebody_elses_blob_opens_nothing,
    test_the_trees_quota_is_shared_and_a_repeated_put_is_free_even_when_it_is_full,
)

pytestmark = pytest.mark.timeout(120)
