"""Shares of `max_calls`, pure: ceilings at init, exhaustion at admission.

A share is a ceiling on the new logical calls of a subtree, `floor(root max_calls * share / 10000)`, debited at every
ancestor. It is a ceiling, not a reservation: siblings may together be promised no more than their parent has.
"""

from __future__ import annotations

from chio.errors import InputError
from chio.schema import ROOT, HostConfig

WHOLE_BPS = 10_000


def ceilings(config: HostConfig, file: str) -> dict[str, int]:
    """The ceiling of every process, root included. Raises `InputError` for a share that cannot be kept."""
    shares = {ROOT: WHOLE_BPS}
    given: dict[str, int] = {}
    found = {ROOT: config.limits.max_calls}
    for position, child in enumerate(config.children):
        field = f"children[{position}].budget_share_bps"
        parent_share = shares[child.parent]
        given[child.parent] = given.get(child.parent, 0) + child.budget_share_bps
        if given[child.parent] > parent_share:
            raise InputError(
                "shares are over-allocated",
                file=file,
                field=field,
                why=f"the children of `{child.parent}` sum to {given[child.parent]}, it has {parent_share}",
                fix="lower the shares of these children",
            )
        ceiling = config.limits.max_calls * child.budget_share_bps // WHOLE_BPS
        if ceiling == 0:
            raise InputError(
                "a share vanishes",
                file=file,
                field=field,
                why=f"{child.budget_share_bps} bps of {config.limits.max_calls} calls is less than one",
                fix="raise the share or limits.max_calls",
            )
        shares[child.id] = child.budget_share_bps
        found[child.id] = ceiling
    return found


def exhausted(path: list[tuple[int, int]]) -> bool:
    """Whether one more call would pass a ceiling; `path` is (calls, ceiling) from the caller up to root."""
    return any(calls >= ceiling for calls, ceiling in path)
