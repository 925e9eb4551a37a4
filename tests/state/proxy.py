"""A socket between one worker and the kernel that can lose what passes through it, at a chosen point."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from tests.kernel.serving import Line


class Loss(Enum):
    """What becomes of a request of which the worker hears nothing. In each case its connection is cut."""

    REQUEST = auto()  # the kernel never sees it
    REPLY = auto()  # it is done and answered, and the answer is lost
    HALF_THE_REPLY = auto()  # the same, with the answer's first half let through
    LATE = auto()  # the kernel sees it after the cut, just before the next request of its kind


@dataclass(frozen=True, slots=True)
class Fault:
    op: str
    loss: Loss
    meanwhile: Callable[[], object] | None


class Proxy:
    """`reached` is every operation that came to the kernel, in order. One worker at a time, one request in flight."""

    def __init__(self, path: Path, kernel: str) -> None:
        self.path = path
        self.reached: list[str] = []
        self._kernel = kernel
        self._faults: list[Fault] = []
        self._held: bytes | None = None
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(8)
        self._connections: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def lose(self, op: str, loss: Loss, meanwhile: Callable[[], object] | None = None) -> None:
        """Do that to the next request of this kind; `meanwhile` happens before its connection is cut."""
        self._faults.append(Fault(op, loss, meanwhile))

    @property
    def all_lost(self) -> bool:
        return not self._faults and self._held is None

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it was shut down
                return
            threading.Thread(target=self._pass, args=(connection,), daemon=True).start()

    def _pass(self, connection: socket.socket) -> None:
        with connection, Line(self._kernel) as kernel, connection.makefile("rb") as requests:
            for request in requests:
                op = json.loads(request)["operation"]["op"]
                fault = self._faults.pop(0) if self._faults and self._faults[0].op == op else None
                if fault is None:
                    self._deliver_held(op)
                    connection.sendall(self._forward(kernel, op, request))
                    continue
                if fault.loss is Loss.LATE:
                    self._held = request
                elif fault.loss is not Loss.REQUEST:
                    reply = self._forward(kernel, op, request)
                    if fault.loss is Loss.HALF_THE_REPLY:
                        connection.sendall(reply[: len(reply) // 2])
                if fault.meanwhile is not None:
                    fault.meanwhile()
                return

    def _forward(self, kernel: Line, op: str, request: bytes) -> bytes:
        self.reached.append(op)
        kernel.send(request)
        return kernel.read()

    def _deliver_held(self, op: str) -> None:
        held = self._held
        if held is not None and json.loads(held)["operation"]["op"] == op:
            self._held = None
            with Line(self._kernel) as kernel:
                self._forward(kernel, op, held)
