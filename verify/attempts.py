"""The life of every attempt and of every start of a tool server, and who made each call.

    reserved -> launched -> ended       a launch has its record, an end its exit record
    reserved -> ended                   the launch failed, or the host died: `ended` says that no exit was observed
    reserved -> launched -> ended       likewise, where the host died after the launch

One attempt of a process lives at a time, and they are numbered from 1. What an attempt calls stands between its launch
and its end; what was on its way at its end is settled later, in its name.
"""

import fnmatch
from dataclasses import dataclass
from typing import Any

from verify import shape
from verify.authority import BUILT_IN_SERVERS, Authority
from verify.findings import Findings
from verify.history import NEW, Event, Leaf, Occurrence
from verify.verdict import VerifyError

_RESERVED, _LAUNCHED, _ENDED = "reserved", "launched", "ended"
_CALLING = NEW | {Event.REPEATED, Event.REPEATED_READ}
_KILLED = frozenset({
    "timeout", "memory_limit", "cpu_limit", "output_limit", "launch_failed", "host_interrupted", "process_cancelled",
})  # fmt: skip
_REFUSED_EXPORT = "export_refused"


@dataclass(slots=True)
class Attempt:
    """The newest attempt of one process. `held` is false for a launch that did not have what was asked for."""

    number: int
    phase: str
    launch_id: str | None = None
    held: bool = True


@dataclass(slots=True)
class Start:
    """The newest start of one tool server."""

    number: int = 0
    held: bool = True


_USAGE = shape.record(
    {
        "peak_resident_bytes": shape.at_least(0),
        "peak_resident_source": shape.one_of("vm_hwm", "wait4"),
        "cpu_ms": shape.at_least(0),
        "cpu_source": shape.one_of("cgroup", "wait4"),
        "wall_ms": shape.at_least(0),
        "memory_peak_bytes": shape.nullable(shape.at_least(0)),
        "process_peak": shape.nullable(shape.at_least(0)),
        "oom_kills": shape.nullable(shape.at_least(0)),
    }
)


class Attempts:
    """Reads the leaves of attempts, and holds each call against them. Contradictions go to `findings`."""

    CHECKS = ("attempts", "exits", "exports")

    def __init__(self, authority: Authority, plan: dict[str, Any] | None, findings: Findings) -> None:
        """`plan` as it was frozen (`verify.documents`); None if none was ever run."""
        self._authority = authority
        workers = plan["plan"]["workers"] if plan else []
        self._workers: dict[str, dict[str, Any]] = {worker["process"]: worker for worker in workers}
        self._findings = findings
        self._newest: dict[str, Attempt] = {}
        self._starts: dict[str, Start] = {}
        self.launched = self.exits = self.unobserved = self.starts = self.served = 0

    def read(self, leaf: Leaf, held: bool) -> None:
        """One leaf; `held` says of a launch whether everything asked for held."""
        match leaf.kind:
            case "attempt" if leaf.body["event"] == "reserved":
                self._reserve(leaf)
            case "attempt":
                self._end(leaf, None)
            case "launch" if leaf.body["process_id"] is None:
                self._start(leaf, held)
            case "incident" if "server" in leaf.body:
                self._server_incident(leaf)
            case "launch":
                self._launch(leaf, held)
            case "exit":
                self._end(leaf, leaf.body["launch_id"])

    def called(self, occurrence: Occurrence) -> None:
        """A call is made by a live attempt of its own process, by the launch that it names."""
        leaf, named = occurrence.leaf, occurrence.attempt
        if occurrence.event in _CALLING:
            if occurrence.server not in BUILT_IN_SERVERS and occurrence.event is not Event.REFUSED:
                self._served_by(occurrence)
            if named is None:
                self.served += 1
                return
            attempt = self._newest.get(occurrence.process.id)
            if attempt is None or attempt.number != named["number"] or attempt.phase != _LAUNCHED:
                self._fail(
                    leaf, f"a call by attempt {named['number']} of `{occurrence.process.id}`, which did not live"
                )
            elif attempt.launch_id != named["launch_id"]:
                self._fail(leaf, "a call in the name of another launch")
            elif not attempt.held:
                self._fail(leaf, "a call by an attempt whose confinement did not hold")

    def close(self, size: int) -> None:
        """Whoever wrote the bundle had recorded the end of each attempt."""
        for process, attempt in self._newest.items():
            if attempt.phase != _ENDED:
                why = f"attempt {attempt.number} of `{process}` has no end in the log"
                self._findings.fail("attempts", why, f"leaf {size}")

    # --- leaves --------------------------------------------------------------------------------------------------

    def _reserve(self, leaf: Leaf) -> None:
        process, number = leaf.body["process_id"], leaf.body["attempt"]
        before = self._newest.get(process)
        if process not in self._authority.processes:
            self._fail(leaf, f"an attempt of `{process}`, which is no process here")
        if before is not None and before.phase != _ENDED:
            self._fail(leaf, f"a second attempt of `{process}` while attempt {before.number} lived")
        if number != (before.number + 1 if before else 1):
            self._fail(leaf, f"attempt {number} of `{process}` follows attempt {before.number if before else 0}")
        self._newest[process] = Attempt(number, _RESERVED)

    def _launch(self, leaf: Leaf, held: bool) -> None:
        process, number = leaf.body["process_id"], leaf.body["attempt"]
        attempt = self._newest.get(process)
        if attempt is None or (attempt.number, attempt.phase) != (number, _RESERVED):
            self._fail(leaf, f"a launch of attempt {number} of `{process}`, which was not reserved")
            return
        self.launched += 1
        attempt.phase, attempt.launch_id, attempt.held = _LAUNCHED, leaf.id, held

    def _start(self, leaf: Leaf, held: bool) -> None:
        server, number = leaf.body["server"], leaf.body["attempt"]
        before = self._starts.get(server, Start())
        if server not in self._authority.tools or server in BUILT_IN_SERVERS:
            self._fail(leaf, f"a start of `{server}`, which is no tool server here")
        if number != before.number + 1:
            self._fail(leaf, f"start {number} of `{server}` follows start {before.number}")
        self._starts[server] = Start(number, held)
        self.starts += 1

    def _server_incident(self, leaf: Leaf) -> None:
        server, number = leaf.body["server"], leaf.body.get("start", 1)
        if leaf.body["detail"].startswith("ended: ") and "start" not in leaf.body:
            self._fail(leaf, f"an end of no start of `{server}`")
        if number > self._starts.get(server, Start()).number:
            self._fail(leaf, f"an end of start {number} of `{server}`, whose launch is not in the log")

    def _served_by(self, occurrence: Occurrence) -> None:
        start = self._starts.get(occurrence.server)
        if start is None:
            self._fail(occurrence.leaf, f"a call was sent to `{occurrence.server}`, whose launch is not in the log")
        elif not start.held:
            self._fail(occurrence.leaf, f"a call was sent to `{occurrence.server}`, whose confinement did not hold")

    def _end(self, leaf: Leaf, launch_id: str | None) -> None:
        process, number = leaf.body["process_id"], leaf.body["attempt"]
        attempt = self._newest.get(process)
        if attempt is None or attempt.number != number or attempt.phase == _ENDED:
            self._fail(leaf, f"an end of attempt {number} of `{process}`, which did not live")
            return
        if launch_id is None:
            self.unobserved += 1
        else:
            self.exits += 1
            if attempt.launch_id != launch_id:
                self._fail(leaf, f"the exit record of attempt {number} of `{process}` is of another launch")
            self._exit(leaf)
        if not attempt.held and leaf.body["outcome"] != "launch_failed":
            self._fail(leaf, "an attempt whose confinement did not hold ended in another way")
        attempt.phase = _ENDED

    def _exit(self, leaf: Leaf) -> None:
        """How it ended goes with the status; what it exported, with what the plan let it export."""
        body = leaf.body
        outcome, status = body["outcome"], body["status"]
        try:
            _USAGE(body["usage"], "usage")
        except VerifyError as error:
            self._findings.refused("exits", error, leaf.place)
        word, number = next(iter(status.items()))
        if outcome not in (*_KILLED, _REFUSED_EXPORT, f"{word}_{number}"):
            self._findings.fail("exits", f"the outcome {outcome} with the status {word} {number}", leaf.place)
        if not body["exports"]:
            return
        worker = self._workers.get(body["process_id"])
        declared = worker["confinement"]["exports"] if worker else None
        if declared is None:
            self._findings.fail("exports", f"exports of `{body['process_id']}`, which the plan has none of", leaf.place)
            return
        for entry in body["exports"]:
            if not any(_matches(entry["file"], pattern) for pattern in declared["files"]):
                why = f"`{entry['file'][:80]}` matches no pattern of the plan for `{body['process_id']}`"
                self._findings.fail("exports", why, leaf.place)
        if len({entry["file"] for entry in body["exports"]}) < len(body["exports"]):
            self._findings.fail("exports", "a file twice", leaf.place)
        if sum(entry["bytes"] for entry in body["exports"]) > declared["max_bytes"]:
            self._findings.fail("exports", "more bytes than the plan allows", leaf.place)
        if outcome in _KILLED or outcome == _REFUSED_EXPORT:
            self._findings.fail("exports", f"exports of an attempt that ended as {outcome}", leaf.place)

    def _fail(self, leaf: Leaf, why: str) -> None:
        self._findings.fail("attempts", why, leaf.place)


def _matches(name: str, pattern: str) -> bool:
    """Part by part, as exports are matched."""
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
