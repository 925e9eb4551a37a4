"""The error tree, split by whose fault it is.

    ChioError                  carries one line: <what> (<file, field, why>; <fix>)
    +-- InputError             the operator's: a document or option that cannot be accepted
    +-- StateError             the operator's: a state directory that cannot be used as asked
    +-- HostFault              ours: a process of the host died or broke its protocol
    +-- WireError              a peer's: a frame that breaks the protocol; carries the contract's code

A refusal by the kernel is not an error: it is data and has a receipt (`chio.kernel.admission`).
"""

from __future__ import annotations


class ChioError(Exception):
    """One line for a person. `file` and `field` say where, `why` what is wrong there, `fix` what to do."""

    def __init__(
        self,
        what: str,
        *,
        file: str | None = None,
        field: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.file = file
        self.field = field
        self.why = why
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.file, self.field, self.why) if part)
        inside = "; ".join(part for part in (where, self.fix) if part)
        return _one_line(f"{self.what} ({inside})" if inside else self.what)

    def as_wire(self) -> dict[str, str | None]:
        """The members, to cross the control socket."""
        return {"what": self.what, "file": self.file, "field": self.field, "why": self.why, "fix": self.fix}


def _one_line(text: str) -> str:
    """Names come from documents that anyone may have written: a terminal must show them, not obey them."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class InputError(ChioError):
    """A document or an option that cannot be accepted; nothing was changed."""


class StateError(ChioError):
    """A state directory that cannot be used as asked; nothing was changed."""


class HostFault(ChioError):
    """A process of the host died or broke its protocol."""


class WireError(ChioError):
    """A frame that breaks the protocol. `code` is one of the contract's server codes (section 3)."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code = code
