"""Epochs of a state: each restore from a backup begins one, signed, so that what is lost between two lives shows.

A restored state may be older than what its host had acknowledged. Until the operator accepts it, it only replays: a
key that it does not know may have been called in the life that was lost.
"""

from __future__ import annotations

from typing import Any, Literal

from chio.kernel.log import Log


def members(number: int, event: Literal["restored", "accepted"], by: str, log: Log) -> dict[str, Any]:
    """What an epoch leaf says; `size` and `root` are of the log before it."""
    return {"epoch": number, "event": event, "by": by, "size": log.size, "root": log.root().hex()}
