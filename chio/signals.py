"""SIGINT and SIGTERM as a readable socket, for loops that wait on descriptors."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """Readable once one came. A second one changes nothing: stopping is bounded anyway."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    old = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
