"""What a pass over a whole log finds wrong: of each named check its first contradiction, and how many more there were.

A log may be long and may contradict itself everywhere. Every check goes on whatever became of the others and of itself,
so that each is named, and what is kept of it does not grow.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from verify.verdict import Unchecked, Verdict, VerifyError


class Findings:
    """The contradictions of one pass, by the name of the check."""

    def __init__(self) -> None:
        self._first: dict[str, VerifyError] = {}
        self._count: Counter[str] = Counter()

    def fail(self, name: str, why: str, place: str) -> None:
        """One contradiction; `place` says where in the artifact."""
        self._count[name] += 1
        if name not in self._first:
            self._first[name] = VerifyError(why, check=name, place=place)

    def refused(self, name: str, error: VerifyError, place: str) -> None:
        """One contradiction that another check found."""
        inner = f"{place}, {error.place}" if error.place else place
        self.fail(name, error.what, inner)

    def __contains__(self, name: str) -> bool:
        return name in self._first

    def tell(self, verdict: Verdict, file: str, names: Iterable[str], left: Mapping[str, Unchecked | None]) -> None:
        """Each of the named checks, in order: contradicted, left unmade for a reason, or passed."""
        for name in names:
            unmade = left.get(name)
            if name in self._first:
                error, more = self._first[name], self._count[name] - 1
                what = f"{error.what} (and {more} more)" if more else error.what
                verdict.fail(name, VerifyError(what, check=name, place=error.place), file=file)
            elif unmade is not None:
                verdict.leave(name, unmade.reason, required=unmade.required, file=file)
            else:
                verdict.passes(name)
