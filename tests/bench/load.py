"""A load generator that costs little: one thread, one socket for each worker, one request in flight on each."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable


def drive(paths: list[str], frame: Callable[[int, int], bytes], seconds: float) -> float:
    """Answers per second over `seconds`. `frame(worker, n)` is the nth request line of a worker.

    Raises RuntimeError for the first answer that is not `"ok":true`.
    """
    sockets = []
    poll = select.epoll()
    by_fd: dict[int, tuple[socket.socket, int]] = {}
    for worker, path in enumerate(paths):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        sockets.append(sock)
        by_fd[sock.fileno()] = (sock, worker)
        poll.register(sock, select.EPOLLIN)
    sent = [0] * len(paths)
    partial: dict[int, bytes] = {}
    answered = 0
    start = time.perf_counter()
    deadline = start + seconds
    for sock, worker in by_fd.values():
        sock.sendall(frame(worker, 0))
    waiting = len(paths)
    while waiting:
        for fd, _ in poll.poll():
            sock, worker = by_fd[fd]
            data = partial.pop(fd, b"") + sock.recv(1 << 20)
            if not data.endswith(b"\n"):
                partial[fd] = data
                continue
            if b'"ok":true' not in data:
                raise RuntimeError(f"worker {worker}, request {sent[worker]}: {data[:300]!r}")
            answered += 1
            sent[worker] += 1
            if time.perf_counter() < deadline:
                sock.sendall(frame(worker, sent[worker]))
            else:
                waiting -= 1
    rate = answered / (time.perf_counter() - start)
    for sock in sockets:
        sock.close()
    return rate
