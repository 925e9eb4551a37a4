"""How a verification ends: an exit status, and the one error that says what was refused, where and by which check."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
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
    "consistency": "keep both checkpoints: the log has been rewritten between them",
    "response_binding": "do not rely on it: this response does not answer the request and context that you kept",
    "original_request": "take the request and the context that were kept when this very call was made",
    "issued_capability": "do not rely on it: nobody whom this host certified granted this call",
    "worker_response": "do not rely on the response: it is not what this call was answered",
    "retained_operation": "do not rely on it: what is said of the call is not what the log holds",
    "continuation_custody": "do not rely on it: the log does not show that the call was kept from its start",
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

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.file, self.place, f"check {self.check}") if part)
        return f"{self.what} ({where}; {self.fix})"


@dataclass(slots=True)
class Findings:
    """What came of a list of named checks. Each runs, whatever became of the others, so every failure is named."""

    passed: list[str] = field(default_factory=list)
    failed: list[tuple[str, VerifyError]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], None]) -> None:
        """One check: it returns, or raises `VerifyError`."""
        try:
            check()
        except VerifyError as error:
            self.failed.append((name, error))
        else:
            self.passed.append(name)

    def document(self) -> dict[str, Any]:
        """`checks` that passed, `failed` only where one did, `unchecked`."""
        failed = [{"check": name, "why": error.what} for name, error in self.failed]
        return {"checks": self.passed, **({"failed": failed} if failed else {}), "unchecked": self.unchecked}


def unreadable(path: str, error: OSError | ValueError) -> VerifyError:
    """The refusal of a file that could not be opened or read (a `ValueError` is a name that no file can have)."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return VerifyError(f"cannot be read: {why}", check="input", file=path)
