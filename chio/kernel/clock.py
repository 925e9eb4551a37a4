"""One clock: the wall clock at start plus CLOCK_BOOTTIME, never backwards (design rule 8)."""

from __future__ import annotations

import time

from chio.errors import StateError

_MAX_BACK_MS = 60_000
_MAX_AHEAD_MS = 5 * 366 * 24 * 3600 * 1000


class Clock:
    """Unix milliseconds that follow the newest time of the log. Raises `StateError` for an implausible step."""

    def __init__(self, newest_ms: int) -> None:
        wall = time.time_ns() // 1_000_000
        if newest_ms and not newest_ms - _MAX_BACK_MS <= wall <= newest_ms + _MAX_AHEAD_MS:
            raise StateError(
                "the clock of this machine is implausible",
                field="time",
                why=f"it says {wall}, the log's newest record says {newest_ms}",
                fix="set the clock and start again",
            )
        self._wall = wall
        self._boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._last = newest_ms

    def now_ms(self) -> int:
        now = self._wall + (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self._boot) // 1_000_000
        self._last = max(self._last, now)
        return self._last
