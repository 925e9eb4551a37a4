"""What a pass over a whole log comes to: every check by name, in the order of trust, and what each proves."""

from typing import TYPE_CHECKING

from verify import inquiry
from verify.admissions import Admissions
from verify.attempts import Attempts
from verify.budget import Budget
from verify.bundle import Bundle
from verify.confinement import Confinement
from verify.disclosure import Disclosure
from verify.history import History
from verify.keys import PublicKey
from verify.log import verify_checkpoint
from verify.verdict import Unchecked, Verdict, VerifyError

if TYPE_CHECKING:
    from verify.audit import Pass

# What each check proves where it passes, in the order of trust; the figures are the verdict's.
PROVES = {
    "signer_pin": "These are the bytes that the pinned Chio kernel signed.",
    "bootstrap": "It is the pinned run, its keys, config and policy those that were pinned or its kernel certified.",
    "documents": "The config and the policy shown are the texts that were pinned at init.",
    "capabilities": "Each process's token comes from the authority key, and none is wider than its parent's.",
    "tree": "Processes, shares, ceilings and tools are those of the config.",
    "log": "The log's key signed the root over exactly these {log_size} leaves: up to the last, none is missing.",
    "kept_checkpoints": "The log only grew since the checkpoints that were kept elsewhere were made.",
    "leaves": "Each leaf is of this run, in the order of time, and signed where its type is.",
    "epochs": "Each restore is an epoch that stands on the log before it; nothing was decided before it was accepted.",
    "arguments": "All arguments are what was committed to.",
    "outputs": "All outputs are what was committed to.",
    "withheld": "What is not shown was withheld or erased by name.",
    "bindings": "Each leaf of a call is of that call, its caller, its route and its arguments.",
    "dispatches": "No call was dispatched or settled more often than the table allows, and none is left open.",
    "decisions": "Each receipt's outcome and evidence are those of its decision.",
    "statements": "Each unknown outcome has its incident; only unknown outcomes were reconciled.",
    "grants": "Each admitted call was covered by a grant of its caller.",
    "expiry": "Nothing was admitted after its authority had ended.",
    "revocations": "Nothing was admitted after a revocation of its capability, or of one above it.",
    "cancellations": "Nothing was admitted after its process was cancelled.",
    "refusals": "Each refusal has its reason in what came before it.",
    "shares": "No process and its subtree made more new calls than its ceiling.",
    "invocations": "No grant admitted more calls than its max_invocations.",
    "attempts": "Each attempt was reserved, launched and ended in order, and each call was made by one that lived.",
    "exits": "Each exit record's outcome is that of its status.",
    "exports": "Each export matches what the plan lets its worker export.",
    "profiles": "Each profile that a launch names by digest is here.",
    "confinement": "Each launch record has what its profile asks for, each field known as it has to be.",
    "plan": "Each launch is of what plan and config say.",
    "original_request": "The call that you kept the request and context of is in the log, as you meant it.",
    "worker_response": "The response that you kept is what the log says became of that call.",
}

_OF_THE_PASS = tuple(PROVES)[7:-2]
# What every judgement stands on, and what each of the narrower ones is about.
_FOUNDATION = tuple(PROVES)[:9]
_CALLS = History.CHECKS
SCOPES: dict[str, tuple[str, ...]] = {
    "custody": (
        *_FOUNDATION, *Disclosure.CHECKS, *_CALLS, *Admissions.CHECKS, "constraints", "policy", "attempts",
        *inquiry.CHECKS, "outcomes_known",
    ),
    "budget": (*_FOUNDATION, *_CALLS, *Budget.CHECKS),
    "confinement": (
        *_FOUNDATION, *Attempts.CHECKS, "profiles", *Confinement.CHECKS, "profile_texts", "confined", "exits_observed",
    ),
}  # fmt: skip


def within(verdict: Verdict, scope: str) -> Verdict:
    """The verdict without the checks that the scope is not about. All of them were made."""
    named = SCOPES.get(scope)
    if named is not None:
        verdict.checks = [check for check in verdict.checks if check.name in named]
        verdict.observed = [condition for condition in verdict.observed if condition.name in named]
    passed = set(verdict.passed)
    verdict.proved = [said.format(**verdict.figures) for name, said in PROVES.items() if name in passed]
    return verdict


def tell(verdict: Verdict, passed: "Pass") -> None:
    """Every check by name, in the order of trust; then what was observed, what cannot be shown, and the figures."""
    bundle, findings, base, disclosure = passed.bundle, passed.findings, passed.foundation, passed.disclosure
    path = bundle.path
    verdict.run("log", lambda: _rooted(bundle, passed), file=path)
    _tell_kept(verdict, passed)
    attempts, budget = passed.attempts, passed.budget
    left = {what: disclosure.left(what) for what in ("arguments", "outputs")} | {"invocations": budget.left()}
    findings.tell(verdict, path, _OF_THE_PASS, left)
    if passed.inquiry is not None:
        passed.inquiry.tell(verdict)
    _observe(verdict, passed)
    _leave(verdict, passed)
    sections = {name: section.items for name, section in bundle.sections.items()}
    verdict.figures.update(
        {
            "runtime_id": passed.trust.runtime_id,
            "log_size": passed.tree.size,
            "root": passed.tree.root().hex(),
            "sections": sections,
            "withheld": list(bundle.manifest["withheld"]),
            "hidden": disclosure.hidden,
            "calls": budget.spent(),
            "ceilings": {process.id: process.ceiling for process in base.authority.processes.values()},
            "unknown_outcomes": passed.history.unknown,
            "reconciled": passed.history.reconciled,
            "attempts": {
                "launched": attempts.launched,
                "exits": attempts.exits,
                "no_exit_observed": attempts.unobserved,
            },
            "server_starts": attempts.starts,
            "layers": {source: sorted(names) for source, names in passed.confinement.sources.items()},
            "weaker": passed.confinement.weaker,
        }
    )


def _rooted(bundle: Bundle, passed: "Pass") -> None:
    log, tree, bootstrap = bundle.manifest["log"], passed.tree, passed.foundation.bootstrap
    if (log["size"], log["root"]) != (tree.size, tree.root()):
        raise VerifyError("the manifest's size and root are not those of the leaves", check="log", place="manifest")
    note = bundle.manifest["checkpoint"].encode()
    checkpoint = verify_checkpoint(note, PublicKey.from_hex(bootstrap["log_key"]), bootstrap["log_origin"])
    if (checkpoint.size, checkpoint.root) != (tree.size, tree.root()):
        raise VerifyError("the checkpoint is not over these leaves", check="log", place="manifest")


def _tell_kept(verdict: Verdict, passed: "Pass") -> None:
    findings = passed.findings
    for entry in passed.checkpoints:
        if entry.found is None:
            findings.fail(
                "kept_checkpoints", f"{entry.size} leaves were there once, and the log is shorter", entry.file
            )
        elif entry.found != entry.root:
            findings.fail("kept_checkpoints", f"the first {entry.size} leaves are not those it was made of", entry.file)
    unmade = Unchecked("none was given: whether the log was rewritten before it was shown is not known")
    findings.tell(
        verdict, "", ("kept_checkpoints",), {"kept_checkpoints": None if passed.trust.checkpoints else unmade}
    )


def _observe(verdict: Verdict, passed: "Pass") -> None:
    """What the files say truly, and whoever relies on it may want or not."""
    attempts, weaker, storage = passed.attempts, passed.confinement.weaker, passed.foundation.bootstrap["storage"]
    named = ", ".join(f"{what} in {count}" for what, count in sorted(weaker.items()))
    said = [f"{passed.confinement.launches} launches"]
    said += [f"without {named}"] if weaker else ["every layer in each"]
    said += [f"{attempts.served} calls of workers that somebody else launched"] if attempts.served else []
    verdict.observe("confined", not weaker and not attempts.served, "; ".join(said))
    durable = storage["journal_mode"] == "wal" and storage["synchronous"] == "full" and not storage["volatile"]
    verdict.observe("durable", durable, f"{storage['filesystem']}, {storage['journal_mode']}, {storage['synchronous']}"
                    + (", volatile: acknowledged work may be lost" if storage["volatile"] else ""))  # fmt: skip
    verdict.observe(
        "exits_observed", not attempts.unobserved, f"{attempts.unobserved} attempts ended with no exit observed"
    )
    verdict.observe("outcomes_known", not passed.history.unknown, f"{passed.history.unknown} calls of unknown outcome")


def _leave(verdict: Verdict, passed: "Pass") -> None:
    """What no file can show, or what takes a reader of YAML, of JSON Schema or of BPF."""
    if passed.admissions.constrained:
        reason = f"{passed.admissions.constrained} admitted calls had constraints, which are not evaluated here"
        verdict.leave("constraints", reason)
    verdict.leave("policy", "that root's grants follow from the policy's text (YAML) is for a reader of both")
    verdict.leave("profile_texts", "that resolved profiles and filters follow from their texts is for a reader of both")
    verdict.leave("physical_effects", "what happened in the world, and that the host observed truly, no file shows")
