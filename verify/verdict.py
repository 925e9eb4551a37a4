"""How a verification ends: the one error of a refusal, and the one verdict of all subcommands.

A check has a name and passed, failed or was left unchecked; the last two have a reason. None is skipped silently.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any, Self


class Exit(IntEnum):
    VERIFIED = 0
    REFUSED = 1
    USAGE = 2
    UNCHECKED = 3  # nothing failed, but something required could not be checked


# What a person should do about a refusal, by the check that refused.
_FIXES = {
    "input": "name a file that can be read",
    "text": "get the file again from its source, unchanged",
    "canonical": "get the file again from its source, unchanged; another tool has rewritten this one",
    "fields": "get the file again from its source, or use a verifier of the version that wrote it",
    "runtime_pin": "take the pins of the run that these files come from",
    "signer_pin": "take the key of the host that these files come from, from somebody who is not that host",
    "signature": "do not rely on it: these bytes are not what the key signed",
    "action_parameter_hash": "do not rely on the arguments shown: they are not the ones that were signed",
    "checkpoint": "do not rely on it: the log's key did not sign this checkpoint",
    "inclusion": "do not rely on it: this leaf is not in the log at this checkpoint",
    "leaf_signatures": "do not rely on the export: these leaves are not what the kernel signed",
    "order": "do not rely on the export: these leaves were not written in this order",
    "completeness": "do not rely on the export: leaves are missing, or there are some that nobody vouches for",
    "cosignature": "do not rely on this checkpoint: the witness did not sign it",
    "consistency": "keep both checkpoints: the log has been rewritten between them",
    "response_binding": "do not rely on it: this response does not answer the request and context that you kept",
    "original_request": "take the request and the context that were kept when this very call was made",
    "issued_capability": "do not rely on it: nobody whom this host certified granted this call",
    "worker_response": "do not rely on the response: it is not what this call was answered",
    "retained_operation": "do not rely on it: what is said of the call is not what the log holds",
    "continuation_custody": "do not rely on it: the log does not show that the call was kept from its start",
    "encoding": "get the file again from its source, unchanged; another tool has rewritten this one, or cut it",
    "sections": "get the file again from its source, unchanged",
    "bootstrap": "take the pins of the run that this file comes from; if they are, do not rely on it",
    "documents": "do not rely on it: config or policy are not the ones that were pinned",
    "capabilities": "do not rely on it: this authority does not come from whom it should",
    "tree": "do not rely on it: the run does not have the processes and shares that its config says",
    "log": "do not rely on it: leaves are missing, added or changed",
    "kept_checkpoints": "keep the checkpoint and the file: the log was rewritten, or cut, since it was made",
    "leaves": "do not rely on what this leaf says, or on anything that follows from it",
    "epochs": "keep the file: the state was put back to something that is not what the log says",
    "arguments": "do not rely on the arguments shown: they are not the ones that were signed",
    "outputs": "do not rely on the outputs shown: they are not the ones that were signed",
    "withheld": "ask for a bundle that has it, or that says that it was withheld",
    "bindings": "do not rely on this call: its leaves are of different calls",
    "dispatches": "ask the operator of the server: an effect may have happened more than once, or without a record",
    "decisions": "do not rely on this receipt: it contradicts itself",
    "statements": "do not rely on what is said of this call: the log does not bear it out",
    "grants": "do not rely on it: nobody allowed this call",
    "expiry": "do not rely on it: the authority had ended",
    "revocations": "do not rely on it: the authority had been taken away",
    "cancellations": "do not rely on it: the process had been cancelled",
    "refusals": "ask the operator why this call was refused",
    "shares": "do not rely on it: more calls were made than were allowed",
    "invocations": "do not rely on it: more calls were made than the grant allowed, or fewer",
    "attempts": "do not rely on who made these calls",
    "exits": "do not rely on how this attempt is said to have ended",
    "exports": "do not rely on these files",
    "profiles": "ask for a bundle that holds the profiles of its launches",
    "confinement": "do not rely on it: a program ran with less than its profile says",
    "plan": "do not rely on it: something else was run than was planned",
}


class VerifyError(Exception):
    """An artifact that was refused.

    `check` names the check that refused it, `file` and `place` (a line, a member) say where, `what` says what is wrong,
    `fix` what to do. A check that sees bytes alone leaves `file` and `place` empty for its caller to fill by `located`.
    """

    def __init__(self, what: str, *, check: str, file: str = "", place: str = "", fix: str = "") -> None:
        self.what = what
        self.check = check
        self.file = file
        self.place = place
        self.fix = fix or _FIXES[check]
        super().__init__(what)

    def located(self, file: str, place: str = "") -> Self:
        """The same refusal, with the file and the outer place known."""
        inner = f"{place}, {self.place}" if place and self.place else place or self.place
        return type(self)(self.what, check=self.check, file=file, place=inner, fix=self.fix)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), check=self.check, file=self.file, place=self.place, fix=self.fix), (self.what,)

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.file, self.place, f"check {self.check}") if part)
        return printable(f"{self.what} ({where}; {self.fix})")


class Unchecked(Exception):
    """Raised by a check that these files do not let anyone make. `required`: then the whole is not verified."""

    def __init__(self, reason: str, *, required: bool = False) -> None:
        self.reason = reason
        self.required = required
        super().__init__(reason)


class State(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, slots=True)
class Check:
    """One named check and what came of it. `reason`, `file`, `place` and `fix` are empty where it passed."""

    name: str
    state: State
    reason: str = ""
    file: str = ""
    place: str = ""
    fix: str = ""
    required: bool = False

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.file, self.place, f"check {self.name}") if part)
        return printable(f"{self.reason} ({where}; {self.fix})" if self.fix else f"{self.reason} ({where})")

    def document(self) -> dict[str, Any]:
        named = {"reason": self.reason, "file": self.file, "place": self.place}
        required = {"required": True} if self.required and self.state is State.UNCHECKED else {}
        return {"name": self.name, "state": self.state.value, **{k: v for k, v in named.items() if v}, **required}


@dataclass(frozen=True, slots=True)
class Condition:
    """What the files say truly and somebody may or may not want, such as that every attempt was confined."""

    name: str
    holds: bool
    reason: str


@dataclass(slots=True)
class Verdict:
    """What came of a list of named checks. Each runs, whatever became of the others, so every failure is named.

    `figures` are numbers and names for programs. `observed` holds conditions, which `require` makes into checks.
    """

    subject: str
    checks: list[Check] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    observed: list[Condition] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def run(self, name: str, check: Callable[[], None], *, file: str = "", proves: str = "") -> bool:
        """One check: it returns, or raises `VerifyError` or `Unchecked`. `proves` is what it shows, in plain words."""
        try:
            check()
        except VerifyError as error:
            self.fail(name, error, file=file)
        except Unchecked as left:
            self.leave(name, left.reason, required=left.required, file=file)
        else:
            self.passes(name, proves)
            return True
        return False

    def passes(self, name: str, proves: str = "") -> None:
        self.checks.append(Check(name, State.PASSED))
        if proves:
            self.proved.append(proves)

    def fail(self, name: str, error: VerifyError, *, file: str = "") -> None:
        inner = (error.place, error.check if error.check != name else "")
        place = ", ".join(part for part in inner if part)
        self.checks.append(Check(name, State.FAILED, error.what, error.file or file, place, error.fix))

    def leave(self, name: str, reason: str, *, required: bool = False, file: str = "", fix: str = "") -> None:
        """A check that could not be made, or that these files cannot show."""
        self.checks.append(Check(name, State.UNCHECKED, reason, file, fix=fix, required=required))

    def observe(self, name: str, holds: bool, reason: str) -> None:
        self.observed.append(Condition(name, holds, reason))

    def require(self, names: Iterable[str]) -> None:
        """Makes each name a must: an observed condition becomes a check; an unchecked check becomes required.

        Raises `KeyError` for a name that is neither.
        """
        for name in names:
            conditions = [condition for condition in self.observed if condition.name == name]
            if not conditions and name not in {check.name for check in self.checks}:
                raise KeyError(name)
            for condition in conditions:
                self.observed.remove(condition)
                state = State.PASSED if condition.holds else State.FAILED
                fix = "" if condition.holds else "do not rely on it: what you require does not hold"
                self.checks.append(Check(name, state, "" if condition.holds else condition.reason, fix=fix))
            self.checks = [replace(check, required=True) if check.name == name else check for check in self.checks]

    def names(self) -> set[str]:
        """Everything that `require` takes."""
        return {check.name for check in self.checks} | {condition.name for condition in self.observed}

    @property
    def passed(self) -> list[str]:
        return [check.name for check in self.checks if check.state is State.PASSED]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.state is State.FAILED]

    @property
    def unchecked(self) -> list[Check]:
        return [check for check in self.checks if check.state is State.UNCHECKED]

    @property
    def missing(self) -> list[Check]:
        """What is required and was not checked."""
        return [check for check in self.unchecked if check.required]

    @property
    def exit(self) -> Exit:
        if self.failed:
            return Exit.REFUSED
        return Exit.UNCHECKED if self.missing else Exit.VERIFIED

    def named(self) -> dict[str, Any]:
        """`checks` that passed, `failed` only where one did, `unchecked`: the form of the documents of one call."""
        failed = [{"check": check.name, "why": check.reason} for check in self.failed]
        unchecked = [check.name for check in self.unchecked]
        return {"checks": self.passed, **({"failed": failed} if failed else {}), "unchecked": unchecked}

    def document(self) -> dict[str, Any]:
        """`chio.verdict.v1`."""
        return {
            "schema": "chio.verdict.v1",
            "subject": self.subject,
            "result": RESULTS[self.exit],
            "proved": self.proved,
            "checks": [check.document() for check in self.checks],
            "observed": [{"name": it.name, "holds": it.holds, "reason": it.reason} for it in self.observed],
            "figures": self.figures,
        }

    def text(self) -> str:
        """For people: how it ended, what was proved in plain words, then the table."""
        lines = [f"{self.subject}: {RESULTS[self.exit]}"]
        lines += ["", "Proved:" if self.proved else "Nothing was proved.", *(f"  {proof}" for proof in self.proved)]
        width = max((len(name) for name in self.names()), default=0)
        lines += ["", "Checks:"]
        for check in self.checks:
            said = str(check) if check.state is State.FAILED else check.reason
            needed = " (required)" if check.required and check.state is State.UNCHECKED else ""
            lines.append(f"  {check.state.value:<9}  {check.name:<{width}}  {said}{needed}".rstrip())
        if self.observed:
            lines += ["", "Observed (no condition unless you --require it):"]
            for condition in self.observed:
                word = "holds" if condition.holds else "does not"
                lines.append(f"  {word:<9}  {condition.name:<{width}}  {condition.reason}".rstrip())
        return "\n".join(printable(line) for line in lines)


RESULTS = {Exit.VERIFIED: "verified", Exit.REFUSED: "refused", Exit.UNCHECKED: "incomplete"}


def printable(text: str) -> str:
    """One line that a terminal shows as it is: a hostile artifact's control characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unreadable(path: str, error: OSError | ValueError) -> VerifyError:
    """The refusal of a file that could not be opened or read (a `ValueError` is a name that no file can have)."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return VerifyError(f"cannot be read: {why}", check="input", file=path)
