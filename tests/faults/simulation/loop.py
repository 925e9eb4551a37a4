"""An event loop whose time stands still until it is let pass: what the kernel uses of asyncio's, and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Timer:
    """asyncio.TimerHandle, as far as the kernel goes: cancelled even when its time has come and its turn has not."""

    __slots__ = ("arguments", "callback", "cancelled", "when")

    def __init__(self, when: float, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.when, self.callback, self.arguments, self.cancelled = when, callback, arguments, False

    def cancel(self) -> None:
        self.cancelled = True


class Future:
    """The one that `Control` keeps to say that the host has gone."""

    def done(self) -> bool:
        return True


class Loop:
    """Callbacks run first in, first out, one at each `turn`; timers when `pass_time` is called."""

    def __init__(self) -> None:
        self._ready: deque[Timer] = deque()
        self._timers: list[Timer] = []
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self._ready.append(Timer(self._now, callback, arguments))

    def call_later(self, delay: float, callback: Callable[..., Any], *arguments: Any) -> Timer:
        timer = Timer(self._now + delay, callback, arguments)
        self._timers.append(timer)
        return timer

    def create_future(self) -> Future:
        return Future()

    @property
    def busy(self) -> bool:
        return bool(self._ready)

    def turn(self) -> None:
        """The next callback."""
        due = self._ready.popleft()
        if not due.cancelled:
            due.callback(*due.arguments)

    def pass_time(self, seconds: float) -> None:
        """Every timer whose time comes is made ready, earliest first."""
        self._now += seconds
        due = sorted((timer for timer in self._timers if timer.when <= self._now), key=lambda timer: timer.when)
        self._timers = [timer for timer in self._timers if timer.when > self._now]
        self._ready.extend(due)
