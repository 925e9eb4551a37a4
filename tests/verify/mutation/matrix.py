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
_WANTED = os.environ.get("CHIO_MUTATIONS", "")  # `all`, or at most so many of each way to change an artifact
ALL = _WANTED == "all"


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
    """What came of the changes of one artifact. A change that several checks refuse counts for each of them."""

    name: str
    caught: Counter[str] = field(default_factory=Counter)  # by how it was changed
    checks: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)  # by a check that nothing else stood behind
    excused: Counter[str] = field(default_factory=Counter)
    uncaught: list[str] = field(default_factory=list)

    def count(self, how: str, checks: list[str]) -> None:
        self.caught[how] += 1
        self.checks.update(checks)
        if len(checks) == 1:
            self.alone.update(checks)

    def text(self) -> str:
        total = self.caught.total() + self.excused.total() + len(self.uncaught)
        ways = ", ".join(f"{how} {count}" for how, count in self.caught.most_common())
        lines = [f"{self.name}: {total} changes, {self.caught.total()} caught ({ways})"]
        lines += [f"  {count:6}  {check} (alone: {self.alone[check]})" for check, count in self.checks.most_common()]
        lines += [f"  {count:6}  means nothing: {reason}" for reason, count in self.excused.most_common()]
        lines += [f"  NOT CAUGHT  {uncaught}" for uncaught in self.uncaught[:200]]
        return "\n".join(lines)


def catchers(judge: Judge, text: bytes) -> list[str]:
    """The checks that refuse an artifact, or that it takes and that cannot be made; none if it passes."""
    try:
        verdict = judge(text)
    except VerifyError as error:
        return [error.check]
    if verdict.exit is Exit.VERIFIED:
        return []
    return [check.name for check in verdict.failed] or [f"{check.name} (unchecked)" for check in verdict.missing]


def tally(subject: Subject, *, everything: bool = ALL) -> Tally:
    """Judges the changes, all of them or so many of each way as the subject draws."""
    assert catchers(subject.judge, subject.good) == [], f"{subject.name} itself is refused"
    found = Tally(subject.name)
    mutations = subject.mutations() if everything else _drawn(subject)
    for mutation in mutations:
        changed = mutation.make()
        if changed == subject.good:
            continue
        checks = catchers(subject.judge, changed)
        if checks:
            found.count(mutation.how, checks)
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
    draw = min(subject.draw, int(_WANTED)) if _WANTED.isdigit() else subject.draw
    for group in ways.values():
        dice.shuffle(group)
        firsts = {mutation.pattern: mutation for mutation in group}
        rest = [mutation for mutation in group if firsts[mutation.pattern] is not mutation]
        yield from [*firsts.values(), *rest][:draw]
