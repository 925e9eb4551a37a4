"""What a host that holds all its keys could sign and what is not true: changes of the good run, and what catches each.

Everything that can follow the lie does: ids, bindings, signatures, the root, the checkpoint, the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from tests.verify.bundled import Leaf, Run, call_ids
from tests.verify.leaf_changes import (
    ANSWER,
    SALT,
    allowed,
    at,
    both,
    denied,
    drop_field,
    intent_of,
    launch,
    not_sent,
    renamed,
)
from tests.verify.observed import STRANGER, sha
from tests.verify.signed import commitment, jcs

Lie = tuple[str, Callable[[Run], None], set[str]]
LIES: list[Lie] = []


def lie(*checks: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """A lie, by its function's name, and every check that it fails."""

    def keep(change: Callable[[Run], None]) -> Callable[[Run], None]:
        LIES.append((change.__name__, change, set(checks)))
        return change

    return keep


# --- calls -----------------------------------------------------------------------------------------------------------


@lie("dispatches")
def a_completed_call_dispatched_again(run: Run) -> None:
    receipt = run.one("receipt", operation_key="pay-1")
    again = renamed(run, receipt, dispatch=2)
    run.insert(run.index(receipt) + 1, intent_of(again), again)


@lie("dispatches")
def an_effect_of_unknown_outcome_dispatched_again(run: Run) -> None:
    late = run.all("incident", operation_key="lost-1")[-1]
    again = allowed(renamed(run, run.one("receipt", operation_key="lost-1"), dispatch=2))
    run.leaves.remove(run.one("reconciliation"))
    run.insert(run.index(late) + 1, intent_of(again), again)


@lie("dispatches")
def a_fourth_dispatch_of_a_read(run: Run) -> None:
    last = run.all("incident", operation_key="look-1")[-1]
    again = allowed(renamed(run, run.all("receipt", operation_key="look-1")[-1], dispatch=4))
    run.insert(run.index(last) + 1, intent_of(again), again)


@lie("dispatches")
def the_receipt_of_a_sent_call_left_out(run: Run) -> None:
    run.leaves.remove(run.one("receipt", operation_key="pay-2"))


@lie("dispatches")
def an_outcome_of_what_was_never_sent(run: Run) -> None:
    run.leaves.remove(run.one("intent", operation_key="balance-1"))


@lie("dispatches")
def one_key_used_for_two_calls(run: Run) -> None:
    receipt = run.one("receipt", operation_key="send-1")
    run.insert(run.index(receipt) + 1, deepcopy(receipt))


@lie("statements")
def the_incident_of_a_lost_call_left_out(run: Run) -> None:
    run.leaves.remove(run.one("incident", operation_key="big-1"))


@lie("statements")
def a_known_outcome_reconciled(run: Run) -> None:
    run.one("reconciliation").body["call"] = dict(run.one("receipt", operation_key="pay-1").call)


@lie("statements")
def an_incident_of_a_call_that_was_answered(run: Run) -> None:
    receipt = run.one("receipt", operation_key="pay-1")
    incident = deepcopy(run.one("incident", operation_key="lost-1"))
    incident.body["call"] = dict(receipt.call)
    run.insert(run.index(receipt) + 1, incident)


@lie("bindings")
def a_receipt_bound_to_other_arguments_than_its_intent(run: Run) -> None:
    receipt = run.one("receipt", operation_key="pay-1")
    other = jcs({"amount": 1000, "to": "eve"})
    receipt.body["action"]["parameter_hash"] = commitment(SALT.hex(), other)
    receipt.arguments = (SALT, other)
    receipt.call.update(call_ids(run.runtime_id, receipt))


@lie("bindings")
def a_response_of_another_process(run: Run) -> None:
    receipt = run.one("receipt", operation_key="ack-1")
    receipt.body["capability_id"] = run.one("receipt", operation_key="pay-1").body["capability_id"]
    receipt.call.update(call_ids(run.runtime_id, receipt))


@lie("bindings")
def a_binding_that_binds_nothing(run: Run) -> None:
    run.one("receipt", operation_key="send-1").call["binding"] = "5" * 64


@lie("decisions")
def a_call_allowed_against_its_own_evidence(run: Run) -> None:
    run.one("receipt", operation_key="pay-1").body["evidence"][3]["passed"] = False


@lie("decisions")
def a_mailbox_that_refuses_a_payment(run: Run) -> None:
    receipt = run.one("receipt", operation_key="p-4")
    receipt.body["decision"] = {"verdict": "deny", "reason": "invalid_arguments", "guard": "mailbox"}
    receipt.body["evidence"][-1]["passed"] = True
    receipt.body["evidence"].append({"guard": "mailbox", "passed": False})


@lie("decisions")
def an_output_of_a_refusal(run: Run) -> None:
    receipt = run.one("receipt", operation_key="bad")
    receipt.body["output"] = {"kind": "value", "hash": commitment(SALT.hex(), ANSWER)}
    receipt.output = (SALT, ANSWER)


# --- authority -------------------------------------------------------------------------------------------------------


@lie("grants")
def a_call_that_no_grant_covers(run: Run) -> None:
    receipt = allowed(run.one("receipt", operation_key="bad"))
    run.insert(run.index(receipt), intent_of(receipt))


@lie("refusals")
def a_call_refused_for_nothing(run: Run) -> None:
    denied(run.one("receipt", operation_key="ack-1"), "out_of_scope", "grant")


@lie("revocations")
def a_call_after_its_capability_was_revoked(run: Run) -> None:
    revocation = run.one("revocation")
    revocation.body["process_id"] = "packer"
    revocation.body["capability_id"] = run.one("receipt", operation_key="take-1").body["capability_id"]
    run.leaves.remove(revocation)
    run.insert(run.index(run.one("receipt", operation_key="ack-1")), revocation)


@lie("revocations")
def an_attempt_after_a_revocation_above_it(run: Run) -> None:
    revocation = run.one("revocation")
    revocation.body["process_id"] = "root"
    revocation.body["capability_id"] = run.bootstrap["processes"][0]["capability_id"]
    run.leaves.remove(revocation)
    run.insert(run.index(run.one("attempt", process_id="packer")), revocation)
    for key in ("p-1", "p-2", "p-3", "p-4", "take-1", "ack-1"):
        for leaf in [*run.all("intent", operation_key=key), *run.all("receipt", operation_key=key)]:
            run.leaves.remove(leaf)


@lie("cancellations")
def a_call_after_its_process_was_cancelled(run: Run) -> None:
    cancellation = run.one("cancellation")
    run.leaves.remove(cancellation)
    run.insert(run.index(run.one("receipt", operation_key="ack-1")), cancellation)


@lie("cancellations")
def a_cancellation_that_spares_a_child(run: Run) -> None:
    run.one("cancellation").body["processes"].remove("auditor")


@lie("expiry")
def a_call_after_its_grants_had_ended(run: Run) -> None:
    ended = run.time_before(run.index(run.one("intent", operation_key="pay-2")))

    def end(token: dict[str, Any]) -> None:
        for grant in token["grants"]:
            if grant["tool"] == "pay":
                grant["expires_ms"] = ended

    for process in ("root", "clerk", "courier"):
        run.retoken(process, end)
    for key in ("p-2", "p-3", "p-4"):
        denied(run.one("receipt", operation_key=key), "expired", "expiry")


@lie("capabilities")
def a_capability_wider_than_its_parents(run: Run) -> None:
    def widen(token: dict[str, Any]) -> None:
        token["grants"][0]["max_invocations"] = 1000

    run.retoken("courier", widen)


@lie("tree")
def a_capability_for_a_tool_that_the_config_does_not_give(run: Run) -> None:
    def widen(token: dict[str, Any]) -> None:
        above = run.token("clerk")["grants"]
        position = next(index for index, grant in enumerate(above) if grant["tool"] == "balance")
        token["grants"].append({**above[position], "parent_grant": position})

    run.retoken("courier", widen)


@lie("tree")
def a_ceiling_above_the_configs(run: Run) -> None:
    run.bootstrap["processes"][1]["ceiling"] += 1


@lie("bootstrap")
def another_authority(run: Run) -> None:
    run.keys["authority"] = STRANGER


@lie("bootstrap")
def another_log_key(run: Run) -> None:
    run.keys["log"] = STRANGER


@lie("documents", "tree")
def another_config_than_the_pinned_one(run: Run) -> None:
    document = run.document("config")
    document[1] = document[1].replace(b'"max_calls": 40', b'"max_calls": 41')


# --- budgets ---------------------------------------------------------------------------------------------------------


@lie("shares")
def one_call_more_than_the_share(run: Run) -> None:
    last = run.one("receipt", operation_key="p-4")
    run.insert(run.index(last) + 1, renamed(run, last, "p-5"))


@lie("invocations")
def one_payment_more_than_was_granted(run: Run) -> None:
    receipt = allowed(run.one("receipt", operation_key="p-2"))
    run.insert(run.index(receipt), intent_of(receipt))


@lie("invocations")
def a_refund_that_nobody_took_again(run: Run) -> None:
    """pay-1 was not sent and gives its invocation back; dispatched again, it is one more than there were."""
    first = run.one("receipt", operation_key="pay-1")
    again = renamed(run, first, dispatch=2)
    not_sent(first)
    run.insert(run.index(first) + 1, intent_of(again), again)
    more = allowed(run.one("receipt", operation_key="p-2"))
    run.insert(run.index(more), intent_of(more))


@lie("invocations")
def refused_as_exhausted_while_some_were_left(run: Run) -> None:
    receipt = run.one("receipt", operation_key="pay-2")
    run.leaves.remove(run.one("intent", operation_key="pay-2"))
    denied(receipt, "invocations_exhausted", "invocations")


# --- confinement -----------------------------------------------------------------------------------------------------


@lie("confinement")
def a_launch_without_a_filter(run: Run) -> None:
    both(launch(run), "seccomp", {"mode": 0, "filters": 0})


@lie("confinement")
def a_launch_that_says_nothing_of_its_filter(run: Run) -> None:
    drop_field(launch(run), "seccomp")


@lie("confinement")
def a_filter_of_another_list(run: Run) -> None:
    both(launch(run), "seccomp_program", {"list": "anything", "sha256": "6" * 64})


@lie("confinement")
def a_layer_absent_that_nobody_gave_up(run: Run) -> None:
    at(launch(run), "seccomp").update(asked=True, value=False, source="absent")


@lie("confinement")
def a_namespace_shared(run: Run) -> None:
    field = at(launch(run), "namespaces")
    both(launch(run), "namespaces", {**field["asked"], "net": "shared"})


@lie("confinement")
def a_network_that_the_profile_has_none_of(run: Run) -> None:
    both(launch(run), "local_addresses", ["10.0.0.2"])


@lie("confinement")
def a_capability_kept(run: Run) -> None:
    both(launch(run), "capabilities", [0, 1 << 21, 1 << 21, 1 << 21, 0])


@lie("confinement")
def root_outside(run: Run) -> None:
    both(launch(run), "uid", [0, 0, 0, 0])


@lie("confinement")
def a_folder_writable_that_the_plan_does_not_give(run: Run) -> None:
    field = at(launch(run), "mounts")
    both(launch(run), "mounts", {**field["asked"], "/usr": ["nodev", "nosuid", "rw"]})


@lie("confinement")
def more_memory_than_the_profile_allows(run: Run) -> None:
    field = at(launch(run), "cgroup_limits")
    both(launch(run), "cgroup_limits", {**field["asked"], "memory_bytes": 1 << 40})


@lie("confinement")
def what_has_to_be_observed_only_claimed(run: Run) -> None:
    at(launch(run), "no_new_privs")["source"] = "installed"


@lie("confinement")
def landlock_asked_to_govern_less(run: Run) -> None:
    field = at(launch(run), "landlock")
    rights = [right for right in field["asked"]["rights"] if right != "write_file"]
    both(launch(run), "landlock", {**field["asked"], "rights": rights})


@lie("confinement")
def a_secret_in_the_environment(run: Run) -> None:
    field = at(launch(run), "environment")
    both(launch(run), "environment", sorted([*field["asked"], "AWS_SECRET_ACCESS_KEY"]))


@lie("confinement")
def unconfined_under_the_name_of_a_profile(run: Run) -> None:
    launch(run).body["confined"] = False


@lie("confinement")
def a_tool_server_with_more_to_write_than_the_config_gives(run: Run) -> None:
    server = run.one("launch", server="bank")
    field = at(server, "mounts")
    both(server, "mounts", {**field["asked"], "/srv/orders/rogue": ["nodev", "nosuid", "rw"]})


@lie("confinement")
def a_folder_seen_that_the_plan_does_not_give(run: Run) -> None:
    field = at(launch(run), "mounts")
    both(launch(run), "mounts", {**field["asked"], "/root": ["nodev", "nosuid", "overlay", "ro"]})


@lie("confinement", "plan")
def a_tool_server_under_another_profile_than_the_configs(run: Run) -> None:
    run.one("launch", server="bank").body["asked"]["profile"] = "worker"


@lie("attempts")
def an_attempt_that_ran_without_what_was_asked_for(run: Run) -> None:
    at(launch(run), "capabilities")["value"] = [0, 1 << 21, 1 << 21, 1 << 21, 0]


@lie("profiles")
def a_profile_that_is_not_shown(run: Run) -> None:
    run.documents[:] = [document for document in run.documents if document[0] != "profile"]


@lie("profiles")
def one_profile_resolved_in_two_ways(run: Run) -> None:
    named = launch(run).body["asked"]["profile_resolved_sha256"]
    text = next(text for kind, text in run.documents if kind == "resolved-profile" and sha(text) == named)
    weaker = jcs({**json.loads(text), "network": "loopback"})
    run.documents.append(["resolved-profile", weaker])
    record = launch(run)
    record.body["asked"]["profile_resolved_sha256"] = sha(weaker)
    both(record, "local_addresses", ["127.0.0.1"])
    field = at(record, "landlock")
    rights = [right for right in field["asked"]["rights"] if not right.endswith("_tcp")]
    both(record, "landlock", {**field["asked"], "rights": rights})


@lie("plan")
def another_command_than_the_plans(run: Run) -> None:
    launch(run).body["asked"]["command"] = ["/usr/bin/curl", "https://example.org"]


@lie("plan")
def another_program_than_was_resolved(run: Run) -> None:
    record = launch(run)
    record.body["executable_sha256"] = "7" * 64
    field = at(record, "executable")
    both(record, "executable", {**field["asked"], "sha256": "7" * 64})


# --- attempts --------------------------------------------------------------------------------------------------------


@lie("attempts")
def a_call_in_the_name_of_another_launch(run: Run) -> None:
    receipt = run.one("receipt", operation_key="ack-1")
    receipt.body["attempt"]["launch_id"] = launch(run, "courier").id


@lie("attempts")
def an_exit_left_out(run: Run) -> None:
    run.leaves.remove(run.one("exit", process_id="packer"))


@lie("attempts")
def an_attempt_left_out(run: Run) -> None:
    for leaf in (run.one("attempt", process_id="clerk"), run.one("launch", process_id="clerk"),
                 run.one("exit", process_id="clerk")):  # fmt: skip
        run.leaves.remove(leaf)


@lie("attempts")
def two_attempts_at_once(run: Run) -> None:
    second = run.all("attempt", process_id="clerk")[1]
    run.leaves.remove(second)
    run.insert(run.index(run.one("exit", process_id="clerk")), second)


@lie("attempts")
def an_exit_record_of_another_attempt(run: Run) -> None:
    run.all("exit", process_id="clerk")[1].body["launch_id"] = run.all("launch", process_id="clerk")[0].id


@lie("attempts")
def a_tool_server_whose_launch_is_not_there(run: Run) -> None:
    run.leaves.remove(run.one("launch", server="bank"))


@lie("exports")
def an_export_of_another_attempt(run: Run) -> None:
    exported = run.one("exit", process_id="clerk").body["exports"]
    run.one("exit", process_id="packer").body["exports"] = exported


@lie("exports")
def an_export_that_the_plan_does_not_name(run: Run) -> None:
    run.one("exit", process_id="clerk").body["exports"][0]["file"] = "pins.json"


@lie("exits")
def an_outcome_that_its_status_does_not_bear_out(run: Run) -> None:
    run.one("exit", process_id="clerk").body["outcome"] = "exit_0"


# --- the log and what is shown of it ---------------------------------------------------------------------------------


@lie("leaves")
def a_time_that_runs_backwards(run: Run) -> None:
    leaf = run.one("receipt", operation_key="pay-2")
    leaf.body["time_ms"] -= 60_000


@lie("leaves")
def a_leaf_of_another_run(run: Run) -> None:
    run.one("incident", server="bank").body["runtime_id"] = "11111111-2222-4333-8444-555555555555"


@lie("epochs")
def an_epoch_on_another_log(run: Run) -> None:
    epoch = {
        "schema": "chio.epoch.v1", "runtime_id": run.runtime_id, "time_ms": 0, "epoch": 1, "event": "restored",
        "by": "A. Operator", "size": len(run.leaves), "root": "8" * 64,
    }  # fmt: skip
    run.insert(len(run.leaves), Leaf("epoch", epoch))


@lie("epochs")
def a_call_in_a_restored_state_that_nobody_accepted(run: Run) -> None:
    last = run.one("receipt", operation_key="ack-1")
    index = run.index(last)
    kept = Run(run.documents, run.tokens, run.leaves[:index], [])
    epoch = {
        "schema": "chio.epoch.v1", "runtime_id": run.runtime_id, "time_ms": 0, "epoch": 1, "event": "restored",
        "by": "A. Operator", "size": index, "root": kept.root().hex(),
    }  # fmt: skip
    run.insert(index, Leaf("epoch", epoch))
    accepted = deepcopy(run.leaves[index])
    accepted.body.update(event="accepted", size=len(run.leaves), root=run.root().hex())
    run.insert(len(run.leaves), accepted)


@lie("cancellations")
def the_data_of_a_running_process_erased(run: Run) -> None:
    tombstone = {
        "schema": "chio.tombstone.v1", "runtime_id": run.runtime_id, "time_ms": 0, "process_id": "clerk", "by": "ada",
    }  # fmt: skip
    run.insert(len(run.leaves), Leaf("tombstone", tombstone))


@lie("log")
def a_root_of_other_leaves(run: Run) -> None:
    run.manifest["log"] = {"size": len(run.leaves), "root": bytes(32)}


@lie("arguments")
def arguments_that_were_not_committed_to(run: Run) -> None:
    receipt = run.one("receipt", operation_key="pay-1")
    assert receipt.arguments is not None
    receipt.arguments = (receipt.arguments[0], jcs({"amount": 2, "to": "ada"}))


@lie("outputs")
def an_output_that_was_not_committed_to(run: Run) -> None:
    receipt = run.one("receipt", operation_key="pay-1")
    assert receipt.output is not None
    receipt.output = (receipt.output[0], ANSWER)


@lie("withheld")
def arguments_left_out_without_a_word(run: Run) -> None:
    run.one("receipt", operation_key="pay-1").arguments = None


@lie("withheld")
def an_output_left_out_under_a_rule_for_arguments(run: Run) -> None:
    run.one("receipt", operation_key="kept-1").output = None
