"""What was spent, over the whole tree: every new call against every ceiling, every admission against its grants.

Two counts, kept by the rules of the contract and not by what anyone says of them:

    shares        each new call, refused ones too, is one for its process and one for each process above it; none may
                  come to more than its ceiling. A repeat, another dispatch and a replay are none
    invocations   each admission is one for the grant that admitted it and for each grant above that one, where they
                  have `max_invocations`. One that was provably not sent gives them back, and takes them again when it
                  is dispatched again. An unknown outcome keeps them, whatever the operator says of it later

Of several grants that cover a call, the first that is live and has invocations left along its chain admits it. Where
one of them has constraints, which are not evaluated here, it is not known which did; then that count is not judged.
"""

from verify.authority import Authority, Process
from verify.findings import Findings
from verify.history import NEW, CallTable, Event, Occurrence
from verify.verdict import Unchecked

_DEBITS = frozenset({Event.RAN, Event.ADMITTED, Event.REPEATED})


class Budget:
    """Counts each event of a call. Contradictions go to `findings`."""

    CHECKS = ("shares", "invocations")

    def __init__(self, authority: Authority, findings: Findings, table: CallTable) -> None:
        self._findings = findings
        self._table = table
        self._calls = dict.fromkeys(authority.processes, 0)
        self._used: dict[tuple[str, int], int] = {}
        self._undecided = 0

    def read(self, occurrence: Occurrence) -> None:
        if occurrence.event in NEW:
            self._debit_shares(occurrence)
        if occurrence.event in _DEBITS:
            self._debit_grants(occurrence)
        elif occurrence.event is Event.NOT_SENT:
            self._refund(occurrence)
        elif occurrence.event is Event.REFUSED:
            self._refused(occurrence)

    def spent(self) -> dict[str, int]:
        """New calls of each process's subtree."""
        return dict(self._calls)

    def left(self) -> Unchecked | None:
        """Why `invocations` was not judged, if it was not."""
        if not self._undecided:
            return None
        return Unchecked(
            f"{self._undecided} calls are covered by several grants, one of them with constraints; which of them "
            "admitted a call is not in the log"
        )

    def _debit_shares(self, occurrence: Occurrence) -> None:
        for process in occurrence.process.path:
            self._calls[process.id] += 1
            if self._calls[process.id] > process.ceiling:
                why = f"call {self._calls[process.id]} of `{process.id}` and below, whose ceiling is {process.ceiling}"
                self._findings.fail("shares", why, occurrence.leaf.place)

    def _debit_grants(self, occurrence: Occurrence) -> None:
        process = occurrence.process
        covering = process.covering(occurrence.server, occurrence.tool)
        since_ms = occurrence.leaf.since_ms
        # Where none is live any more, `expiry` says so; what was spent is spent all the same.
        live = [position for position in covering if since_ms < process.grants[position]["expires_ms"]] or covering
        counted = [position for position in covering if process.counted(position)]
        if not counted:
            return
        if len(covering) > 1 and any(process.grants[position]["constraints"] for position in covering):
            self._undecided += 1
            return
        admitting = next((position for position in live if self._left(process, position)), None)
        if admitting is None:
            why = f"no grant of `{process.id}` had invocations of {occurrence.server}/{occurrence.tool} left"
            self._findings.fail("invocations", why, occurrence.leaf.place)
            return
        for at, position, _ in process.counted(admitting):
            self._used[at, position] = self._used.get((at, position), 0) + 1
        row = self._table.get(occurrence.key)
        if row is not None:
            self._table.put(occurrence.key, {**row, "grant": admitting})

    def _refund(self, occurrence: Occurrence) -> None:
        row = self._table.get(occurrence.key)
        if row is not None and row["grant"] is not None:
            for at, position, _ in occurrence.process.counted(row["grant"]):
                self._used[at, position] -= 1
            self._table.put(occurrence.key, {**row, "grant": None})

    def _refused(self, occurrence: Occurrence) -> None:
        if occurrence.leaf.body["decision"].get("reason") != "invocations_exhausted":
            return
        process = occurrence.process
        covering = process.covering(occurrence.server, occurrence.tool)
        live = [
            position
            for position in covering
            if occurrence.leaf.body["time_ms"] < process.grants[position]["expires_ms"]
        ]
        constrained = any(process.grants[position]["constraints"] for position in covering)
        if not self._undecided and not constrained and any(self._left(process, position) for position in live):
            self._findings.fail("invocations", "refused as exhausted while some were left", occurrence.leaf.place)

    def _left(self, process: Process, grant: int) -> bool:
        return all(self._used.get((at, position), 0) < most for at, position, most in process.counted(grant))
