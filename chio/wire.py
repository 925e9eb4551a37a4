"""Bounded frames over Unix sockets.

Two framings live here. Workers speak one JSON object per line (contract section 3): `request_frame` reads one and
`ok_frame` / `error_frame` write the answers. The host and the kernel speak `Channel` frames over their inherited
socket pair: a 4-byte length, a JSON object, and descriptors (SCM_RIGHTS) that arrive with the first byte.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import Any

import orjson

from chio import canonical
from chio.errors import HostFault, WireError

PROTOCOL = "chio.process.v1"
MAX_REQUEST_BYTES = 2 * 1024 * 1024
MAX_RESPONSE_BYTES = 8 * 1024 * 1024
FRAME_TIMEOUT_S = 5.0

_MAX_CONTROL_BYTES = 64 * 1024 * 1024
_MAX_CONTROL_FDS = 64
_LENGTH = struct.Struct(">I")


def request_frame(line: bytes) -> tuple[str, dict[str, Any], bool]:
    """(credential, operation, plain) of one request line. Raises `WireError` with the contract's code.

    `plain` is what `canonical.scan` said of the whole request: true when every part of it needs only the fast encoder.
    """
    try:
        frame, plain = canonical.parse_scanned(line)
    except canonical.NotCanonical as error:
        # A line that is no JSON text at all is a broken frame; JSON outside the profile is a bad request.
        code = "invalid_frame" if str(error).startswith(("not JSON", "not UTF-8")) else "invalid_request"
        raise WireError(code, str(error)) from error
    if type(frame) is not dict or frame.keys() != {"protocol", "credential", "operation"}:
        raise WireError("invalid_request", "a request has exactly protocol, credential and operation")
    credential, operation = frame["credential"], frame["operation"]
    if frame["protocol"] != PROTOCOL or type(credential) is not str or type(operation) is not dict:
        raise WireError("invalid_request", f"protocol is {PROTOCOL!r}, credential text, operation an object")
    if type(operation.get("op")) is not str:
        raise WireError("invalid_request", "operation.op names the operation")
    return credential, operation, plain


_OK_HEAD = b'{"protocol":"' + PROTOCOL.encode() + b'","ok":true,"result":'


def ok_frame(result: bytes) -> bytes:
    """The answer line around `result`, a JSON text."""
    if len(result) + len(_OK_HEAD) + 2 > MAX_RESPONSE_BYTES:
        return error_frame("response_too_large")
    return _OK_HEAD + result + b"}\n"


def error_frame(code: str) -> bytes:
    return b'{"protocol":"' + PROTOCOL.encode() + b'","ok":false,"error":{"code":"' + code.encode() + b'"}}\n'


class Channel:
    """One end of the control socket pair: whole frames out, whole frames in, each with its descriptors.

    `receive` never blocks past what has arrived when the socket is non-blocking; `send` always completes, so that a
    reply is never left half written. Raises `HostFault` when the peer is gone or breaks the framing.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._peer = peer
        self._buffer = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        body = orjson.dumps({**message, "fds": len(fds)} if fds else message)
        if len(body) > _MAX_CONTROL_BYTES:
            raise HostFault(f"a control message to the {self._peer} is larger than {_MAX_CONTROL_BYTES} bytes")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        self._sock.setblocking(True)
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sent = self._sock.sendmsg([data], ancillary)
            self._sock.sendall(data[sent:])
        except OSError as error:
            raise self._gone(os.strerror(error.errno or 0)) from error

    def receive(self, *, wait: bool) -> tuple[dict[str, Any], list[int]] | None:
        """The next frame and its descriptors; None when nothing whole is there and `wait` is false."""
        while (frame := self._take()) is None:
            self._sock.setblocking(wait)
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    1 << 18, socket.CMSG_SPACE(_MAX_CONTROL_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._gone(os.strerror(error.errno or 0)) from error
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                raise HostFault(f"the {self._peer} passed too many descriptors")
            if not data:
                raise self._gone("its end of the control socket is closed")
            self._buffer += data
        return frame

    def _take(self) -> tuple[dict[str, Any], list[int]] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > _MAX_CONTROL_BYTES:
            raise HostFault(f"the {self._peer} sent a control frame of {size} bytes")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        message = orjson.loads(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        wanted = message.pop("fds", 0)
        fds, self._fds = self._fds[:wanted], self._fds[wanted:]
        if len(fds) != wanted:
            raise HostFault(f"the {self._peer} announced {wanted} descriptors and passed {len(fds)}")
        return message, fds

    def _gone(self, why: str) -> HostFault:
        return HostFault(f"the {self._peer} is gone", why=why, fix="run the same command again")

    def close(self) -> None:
        self._sock.close()
