"""Messages between the host and its launcher: one JSON object and some descriptors per SEQPACKET message.

A packet has a size limit of its own (net.core.wmem_max), so a body over INLINE_BYTES travels as a sealed memfd, the
first of the descriptors. The two ends are of one program; nothing here faces a worker.
"""

import fcntl
import json
import os
import socket
from typing import Any

INLINE_BYTES = 32_768
_MAX_DESCRIPTORS = 64  # the kernel's own limit is 253 (SCM_MAX_FD)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def memory_file(content: bytes) -> int:
    """A sealed memfd holding `content`, read position at the start. The caller closes it."""
    fd = os.memfd_create("chio", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(content):
            written += os.write(fd, memoryview(content)[written:])
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_memory_file(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    content = bytearray()
    while len(content) < size:
        chunk = os.pread(fd, size - len(content), len(content))
        if not chunk:
            break
        content += chunk
    return bytes(content)


def send(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    """Sends one message. BlockingIOError on a full non-blocking socket, with nothing sent."""
    body = json.dumps(message).encode()
    if len(body) <= INLINE_BYTES:
        socket.send_fds(sock, [b"I" + body], fds)
        return
    body_fd = memory_file(body)
    try:
        socket.send_fds(sock, [b"M"], [body_fd, *fds])
    finally:
        os.close(body_fd)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One message and its descriptors (the caller's to close, all CLOEXEC), or None when the peer is gone."""
    try:
        data, fds, flags, _ = socket.recv_fds(sock, INLINE_BYTES + 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    if not data:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError("a message between host and launcher was cut short")
    if data[:1] == b"M":
        body_fd = fds.pop(0)
        try:
            return json.loads(read_memory_file(body_fd)), fds
        finally:
            os.close(body_fd)
    return json.loads(data[1:]), fds
