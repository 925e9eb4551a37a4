"""Whether what was admitted could be admitted: the caller's authority at that place in the log.

An admission stands for a decision that was made after every leaf before it and, for a receipt, no later than the
receipt's own time. So what is judged needs no clock: a revocation or cancellation that stands before it was known, and
an end of validity that lies before the newest time in the log had passed.

Constraints are JSON Schemas over the arguments. They are not evaluated here.
"""

from typing import Any

from verify.authority import Authority, Process
from verify.findings import Findings
from verify.history import ADMISSIONS, NEW, Event, Leaf, Occurrence


class Admissions:
    """Judges each event of a call, and keeps what revocations and cancellations have taken away so far."""

    CHECKS = ("grants", "expiry", "revocations", "cancellations", "refusals")

    def __init__(self, authority: Authority, findings: Findings) -> None:
        self._authority = authority
        self._findings = findings
        self._revoked: set[str] = set()
        self._cancelled: set[str] = set()
        self._epoch = 0
        self._replays = False  # restored and not yet accepted
        self.constrained = 0

    def read(self, leaf: Leaf, occurrence: Occurrence | None) -> None:
        match leaf.kind:
            case "revocation":
                self._revocation(leaf)
            case "cancellation":
                self._cancellation(leaf)
            case "epoch":
                self._begin(leaf)
            case "tombstone" if leaf.body["process_id"] not in self._cancelled:
                self._findings.fail(
                    "cancellations", "the data of a process was erased that was not cancelled", leaf.place
                )
            case "attempt" if leaf.body["event"] == "reserved":
                self._reserved(leaf)
        if occurrence is not None and self._replays and occurrence.event in ADMISSIONS | NEW:
            self._findings.fail("epochs", "a call was decided in a restored state that nobody had accepted", leaf.place)
        if occurrence is not None and occurrence.event in ADMISSIONS:
            self._admitted(occurrence)
        elif occurrence is not None and occurrence.event is Event.REFUSED:
            self._refused(occurrence)

    def is_revoked(self, process: Process) -> bool:
        return any(at.capability.id in self._revoked for at in process.path)

    def is_cancelled(self, process: Process) -> bool:
        return process.id in self._cancelled

    # --- what takes authority away -------------------------------------------------------------------------------

    def _revocation(self, leaf: Leaf) -> None:
        body = leaf.body
        process = self._authority.processes.get(body["process_id"])
        if process is None or body.get("capability_id", process.capability.id) != process.capability.id:
            self._findings.fail("revocations", "a revocation of what is not in this run", leaf.place)
        elif body["what"] == "capability":
            self._revoked.add(process.capability.id)

    def _cancellation(self, leaf: Leaf) -> None:
        """It covers the subtree, for good: the log names whoever was still running in it, and no one else."""
        body = leaf.body
        running = sorted(set(self._authority.below(body["process_id"])) - self._cancelled)
        if sorted(body["processes"]) != running:
            self._findings.fail("cancellations", "it does not cancel exactly what was running below", leaf.place)
        self._cancelled.update(running, body["processes"])

    def _begin(self, leaf: Leaf) -> None:
        """Each restore is the next epoch, and is accepted at most once."""
        number, restored = leaf.body["epoch"], leaf.body["event"] == "restored"
        if number != self._epoch + restored or (not restored and not self._replays):
            self._findings.fail("epochs", f"epoch {number} {leaf.body['event']} after epoch {self._epoch}", leaf.place)
        self._epoch, self._replays = number, restored

    def _reserved(self, leaf: Leaf) -> None:
        process = self._authority.processes.get(leaf.body["process_id"])
        if process is None:
            return  # `attempts` says so
        if self.is_revoked(process):
            self._findings.fail(
                "revocations", f"an attempt of `{process.id}` after its capability was revoked", leaf.place
            )
        ends = [grant["expires_ms"] for grant in process.grants] or [process.capability.body["expires_ms"]]
        if leaf.since_ms >= min(max(ends), process.capability.body["expires_ms"]):
            self._findings.fail("expiry", f"an attempt of `{process.id}` after its last grant had ended", leaf.place)

    # --- what was decided ----------------------------------------------------------------------------------------

    def _admitted(self, occurrence: Occurrence) -> None:
        process, place, since_ms = occurrence.process, occurrence.leaf.place, occurrence.leaf.since_ms
        if self.is_cancelled(process):
            self._findings.fail("cancellations", f"a call of `{process.id}` was admitted after it was cancelled", place)
        if self.is_revoked(process):
            self._findings.fail("revocations", f"a call of `{process.id}` was admitted after a revocation", place)
        covering = self._covering(occurrence)
        if not covering:
            why = f"no grant of `{process.id}` covers {occurrence.server}/{occurrence.tool}"
            self._findings.fail("grants", why, place)
            return
        if any(since_ms >= at.capability.body["expires_ms"] for at in process.path) or all(
            since_ms >= grant["expires_ms"] for grant in covering
        ):
            self._findings.fail("expiry", f"a call of `{process.id}` was admitted after its grants had ended", place)
        if any(grant["constraints"] for grant in covering):
            self.constrained += 1

    def _refused(self, occurrence: Occurrence) -> None:
        """A refusal has its reason in what came before, too: nobody is turned away for nothing."""
        process, leaf = occurrence.process, occurrence.leaf
        if self.is_cancelled(process):
            self._findings.fail("cancellations", f"a receipt of a new call of the cancelled `{process.id}`", leaf.place)
        decision = leaf.body["decision"]
        reason, time_ms = decision.get("reason"), leaf.body["time_ms"]
        covering = self._covering(occurrence)
        revoked = self.is_revoked(process)
        ends = [at.capability.body["expires_ms"] for at in process.path]
        ends += [max(grant["expires_ms"] for grant in covering)] if covering else []
        due = {
            "revoked": revoked,
            "expired": not revoked and any(time_ms >= end for end in ends),
            "out_of_scope": not revoked and not covering,
            "constraint_violated": not revoked and any(grant["constraints"] for grant in covering),
        }
        # Whether invocations were left is the budget's to say; what a mailbox refused, the mailbox's.
        if not due.get(str(reason), not revoked and bool(covering)):
            self._findings.fail("refusals", f"refused as {reason}, which nothing before it explains", leaf.place)

    def _covering(self, occurrence: Occurrence) -> list[dict[str, Any]]:
        """The grants that cover a call of a tool that there is."""
        if occurrence.tool not in self._authority.tools.get(occurrence.server, {}):
            return []
        process = occurrence.process
        return [process.grants[position] for position in process.covering(occurrence.server, occurrence.tool)]
