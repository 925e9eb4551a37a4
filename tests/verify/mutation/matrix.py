"""Makes changes of a good artifact, judges each, and counts which check caught how many."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.verify.mutation.changes import Mutation
from verify.verdict import Exit, Verdict, VerifyError

Judge = Callable[[bytes], Verdict]
ALL = os.environ.get("CHIO_MUTATIONS") == "all"


@dataclass(frozen=True, slots=True)
class Harmless:
    """A change that nothing catches, and the reason why it means nothing.

    `where` and `how` are regular expressions. `same` says of (good, changed) that they say the same; with it, nothing
    else that was changed in that place is excused.
    """

    reason: str
    where: str = ".*"
    how: str = ".*"
    same: Callable[[bytes, bytes], bool] = lambda good, changed: True

    def excuses(self, mutation: Mutation, good: bytes, changed: bytes) -> bool:
        return bool(
            re.fullmatch(self.where, mutation.pattern)
            and re.fullmatch(self.how, mutation.how)
            and self.same(good, changed)
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """One good artifact. `judge` says what an auditor says of an artifact in its place."""

    name: str
    good: bytes
    judge: Judge
    mutations: Callable[[], Iterable[Mutation]]
    harmless: tuple[Harmless, ...] = ()
    draw: int = 100  # of each way to change it, in the suite


@dataclass(slots=True)
class Tally:
    """What came of the changes of one artifact."""

    name: str
    caught: Counter[tuple[str, str]] = field(default_factory=Counter)  # (how, check)
    excused: Counter[str] = field(default_factory=Counter)
    uncaught: list[str] = field(default_factory=list)

    def text(self) -> str:
        total = self.caught.total() + self.excused.total() + len(self.uncaught)
        lines = [f"{self.name}: {total} changes, {self.caught.total()} caught"]
        checks: Counter[str] = Counter()
        for (_, check), count in self.caught.items():
            checks[check] += count
        lines += [f"  {count:6}  {check}" for check, count in checks.most_common()]
        lines += [f"  {count:6}  not caught: {reason}" for reason, count in self.excused.most_common()]
        lines += [f"  NOT CAUGHT  {uncaught}" for uncaught in self.uncaught[:200]]
        return "\n".join(lines)


def catcher(judge: Judge, text: bytes) -> str:
    """The first check that refuses an artifact, or that it takes and that cannot be made; nothing if it passes."""
    try:
        verdict = judge(text)
    except VerifyError as error:
        assert error.what, error
        assert error.fix, error
        return error.check
    if verdict.exit is Exit.VERIFIED:
        return ""
    return verdict.failed[0].name if verdict.failed else f"{verdict.missing[0].name} (unchecked)"


def tally(subject: Subject, *, everything: bool = ALL) -> Tally:
    """Judges the changes, all of them or so many of each way as the subject draws."""
    assert catcher(subject.judge, subject.good) == "", f"{subject.name} itself is refused"
    found = Tally(subject.name)
    mutations = subject.mutations() if everything else _drawn(subject)
    for mutation in mutations:
        changed = mutation.make()
        if changed == subject.good:
            continue
        check = catcher(subject.judge, changed)
        if check:
            found.caught[mutation.how, check] += 1
            continue
        excuse = next((it for it in subject.harmless if it.excuses(mutation, subject.good, changed)), None)
        if excuse is not None:
            found.excused[excuse.reason] += 1
        else:
            found.uncaught.append(f"{mutation.how}: {mutation.where}")
    if everything:
        found.uncaught += [f"stale: {it.reason}" for it in subject.harmless if not found.excused[it.reason]]
    return found


def _drawn(subject: Subject) -> Iterator[Mutation]:
    """By a fixed seed: first one of each way and place, then others."""
    dice = random.Random(subject.name)
    ways: dict[str, list[Mutation]] = {}
    for mutation in subject.mutations():
        ways.setdefault(mutation.how, []).append(mutation)
    for group in ways.values():
        dice.shuffle(group)
        firsts = {mutation.pattern: mutation for mutation in group}
        rest = [mutation for mutation in group if firsts[mutation.pattern] is not mutation]
        yield from [*firsts.values(), *rest][: subject.draw]
