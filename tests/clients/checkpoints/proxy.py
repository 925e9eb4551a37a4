"""A socket between a worker and its kernel that loses what it is told to lose."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path


class Proxy:
    """Passes frames on. `losses` are for the saves to come, in order:

    "request"  the save never reaches the kernel
    "reply"    the save reaches the kernel, and its reply goes nowhere
    "late"     as "request", and the frame is kept: `deliver()` sends it on
    "pass"     nothing is lost

    After a loss the worker's connection is closed. `deaf` closes every connection from then on.
    """

    def __init__(self, path: Path, kernel: str) -> None:
        self.path = str(path)
        self.losses: list[str] = []
        self.deaf = False
        self.saves = 0
        self.on_loss: Callable[[], object] = lambda: None  # after something was lost, before the worker knows
        self.on_save: Callable[[int], object] = lambda number: None  # before save `number` from 1 goes anywhere
        self._kernel = kernel
        self._late: bytes = b""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def deliver(self) -> None:
        """The late frame arrives at last."""
        self._ask(self._late)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                while self._serve(connection):
                    pass

    def _serve(self, connection: socket.socket) -> bool:
        """One frame; whether the connection is still of use."""
        frame = _line(connection)
        if self.deaf or not frame:
            return False
        loss = "pass"
        if json.loads(frame)["operation"]["op"] == "checkpoint":
            self.saves += 1
            self.on_save(self.saves)
            loss = self.losses.pop(0) if self.losses else "pass"
        if loss in ("pass", "reply"):
            reply = self._ask(frame)
        if loss == "late":
            self._late = frame
        if loss == "pass":
            connection.sendall(reply)
        else:
            self.on_loss()
        return loss == "pass"

    def _ask(self, frame: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as kernel:
            kernel.connect(self._kernel)
            kernel.sendall(frame)
            return _line(kernel)


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        chunk = connection.recv(1 << 20)
        if not chunk:
            return b""
        received += chunk
    return received
