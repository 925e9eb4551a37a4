"""The launcher process: a selector loop between the host's socket and the attempts it started.

It forks every confined process, traces it and waits for it. It has one thread (a raw clone() and ptrace both need
that), imports only confine, holds no secret but a worker's bootstrap, and ends when the host's socket does: its death
takes everything it started with it.
"""

import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress

from confine import frames, syscalls
from confine.cgroups import Group
from confine.errors import ConfineError, LayerMissing, StepFailed
from confine.events import event_to_wire
from confine.hierarchies import LAYER, find_layout
from confine.namespaces import MountIdMaps
from confine.prefixes import Prefix, locks_directory, sweep
from confine.spec import Event, Limits, spec_from_wire
from confine.supervise import Attempt, launch_failed

# A terminal's signals go to the whole foreground process group; what to do about them is the host's decision.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGTSTP)
_RETRY_SECONDS = 0.05  # for cgroups that were not empty yet


class LauncherProcess:
    def __init__(self, host: socket.socket, kept: tuple[int, ...]) -> None:
        self._host = host
        self._kept = kept
        self._selector = selectors.DefaultSelector()
        self._attempts: dict[str, Attempt] = {}
        self._outgoing: deque[tuple[dict[str, object], list[int]]] = deque()
        self._id_maps = MountIdMaps()
        self._prefix: Prefix | None = None
        self._retry_at = 0.0
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._signals = syscalls.child_signals_fd()
        self._open = True
        host.setblocking(False)
        self._selector.register(host, selectors.EVENT_READ, self._on_host)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)

    def run(self) -> None:
        """Until the host is gone and everything started is dead."""
        while self._open or self._attempts:
            for key, mask in self._selector.select(self._timeout()):
                if mask & selectors.EVENT_WRITE:
                    self._flush()
                # An earlier handler of this round may have closed the descriptor, and another attempt taken its number.
                watched = self._selector.get_map().get(key.fd)
                if mask & selectors.EVENT_READ and watched is not None and watched.data == key.data:
                    key.data()
            now = time.monotonic()
            for attempt in list(self._attempts.values()):
                if attempt.deadline is not None and attempt.deadline <= now:
                    attempt.on_deadline()
            if self._prefix is not None and self._prefix.left and self._retry_at <= now:
                self._prefix.retry()
                self._retry_at = now + _RETRY_SECONDS
        if self._prefix is not None:
            self._prefix.close()

    def _timeout(self) -> float | None:
        deadlines = [attempt.deadline for attempt in self._attempts.values() if attempt.deadline is not None]
        if self._prefix is not None and self._prefix.left:
            deadlines.append(self._retry_at)
        # epoll takes at most 24 days; a tool server's deadline is never.
        return min(3600.0, max(0.0, min(deadlines) - time.monotonic())) if deadlines else None

    def _on_signal(self) -> None:
        os.read(self._signals, 128)
        for name, attempt in list(self._attempts.items()):
            attempt.on_child_change()
            if attempt.finished:
                del self._attempts[name]

    def _on_host(self) -> None:
        received = frames.receive(self._host)
        if received is None:
            self._lose_host()
            return
        message, fds = received
        attempt = self._attempts.get(message["attempt"])
        if message["op"] == "launch":
            self._launch(message["attempt"], message["spec"], fds, message["echo"], message["stdout"])
        elif attempt is None:
            pass  # it ended while the message was on its way
        elif message["op"] == "resume":
            attempt.resume()
        else:
            attempt.end(message["reason"])

    def _launch(self, name: str, wire: dict[str, object], fds: list[int], echoes: bool, given: bool) -> None:
        stdin, fds = fds[0], fds[1:]
        stdout, fds = (fds[0], fds[1:]) if given else (None, fds)
        echo, held = (tuple(fds[:2]), fds[2:]) if echoes else ((), fds)
        attempt = Attempt(name, spec_from_wire(wire), self._selector, self._emit)
        try:
            attempt.start(self._id_maps, self._group, stdin, self._null, (*self._kept, *held), echo, stdout)
        except StepFailed as failure:
            self._emit(launch_failed(name, failure))
        else:
            self._attempts[name] = attempt
        finally:
            _close_all([stdin, *held] + ([stdout] if stdout is not None else []))

    def _group(self, limits: Limits) -> Group:
        """The cgroups of one attempt, in this launcher's own folders. StepFailed."""
        try:
            if self._prefix is None:
                self._prefix = Prefix(find_layout(), locks_directory())
        except LayerMissing as missing:
            raise StepFailed(LAYER, 0, missing.path, f"{missing.what}; {missing.fix}") from None
        except OSError as error:
            raise StepFailed(LAYER, error.errno or 0, error.filename) from None
        return self._prefix.group(limits)

    def _lose_host(self) -> None:
        self._open = False
        self._selector.unregister(self._host)
        self._host.close()
        self._outgoing.clear()
        for attempt in self._attempts.values():
            attempt.end("host_gone")

    def _emit(self, event: Event) -> None:
        wire, fds = event_to_wire(event)
        if not self._open:
            _close_all(fds)
            return
        self._outgoing.append((wire, fds))
        self._flush()

    def _flush(self) -> None:
        """Never blocks: the host may be writing to us just now."""
        while self._open and self._outgoing:
            wire, fds = self._outgoing[0]
            try:
                frames.send(self._host, wire, fds)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                break  # the end of the socket is read, and handled, in its turn
            self._outgoing.popleft()
            _close_all(fds)
        if self._open:
            writing = selectors.EVENT_WRITE if self._outgoing else 0
            self._selector.modify(self._host, selectors.EVENT_READ | writing, self._on_host)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def main(host_fd: int, kept: tuple[int, ...]) -> None:
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit("confine: the launcher must have one thread")
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    for fd in (host_fd, *kept):
        os.set_inheritable(fd, False)
    with suppress(ConfineError):  # a folder that is not ours: who wants something of it says so
        sweep(locks_directory())
    gc.freeze()  # what is here now is shared with every fork, never written by a collection
    LauncherProcess(socket.socket(fileno=host_fd), kept).run()
