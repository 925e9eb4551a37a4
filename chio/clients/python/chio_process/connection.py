"""One connection to the kernel: one line out, one line in, before one deadline."""

import select
import socket
import time

from chio_process.errors import WorkerError

MAX_RESPONSE_BYTES = 8 * 1024 * 1024  # including the newline
_READ_BYTES = 64 * 1024
# The kernel gives a frame 5 s. A connection that was idle for less than that cannot be one that it is about to drop.
_MAX_IDLE_SECONDS = 2.0


class Connection:
    """A connected Unix stream socket. Any error leaves it of no use: close it."""

    def __init__(self, path: str, deadline: float) -> None:
        """`deadline` is a `time.monotonic()` instant, here and below."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._used_at = time.monotonic()
        try:
            self._arm(deadline)
            self._socket.connect(path)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise WorkerError("transport_error", f"cannot connect to {path}: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def is_fresh(self) -> bool:
        """Whether another request may go out here.

        Bytes or an end of file that arrived while nothing was asked mean that the peer is done with this connection.
        """
        if time.monotonic() - self._used_at > _MAX_IDLE_SECONDS:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def exchange(self, frame: bytes, deadline: float) -> bytes:
        """Sends one frame and returns the reply line without its newline."""
        try:
            self._arm(deadline)
            self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError):
            # A kernel that refuses a connection answers and closes without reading: the answer may be there to read.
            pass
        except OSError as error:
            raise WorkerError("transport_error", f"the request could not be sent: {error}") from error
        reply = self._read_line(deadline)
        self._used_at = time.monotonic()
        return reply

    def _read_line(self, deadline: float) -> bytes:
        received = bytearray()
        while True:
            try:
                self._arm(deadline)
                chunk = self._socket.recv(_READ_BYTES)
            except ConnectionResetError:
                chunk = b""  # a peer that closed with our bytes unread
            except OSError as error:
                raise WorkerError("transport_error", f"no reply: {error}") from error
            if not chunk:
                if received:
                    raise WorkerError("truncated_response", f"the reply ended after {len(received)} bytes")
                raise WorkerError("transport_error", "the connection was closed without a reply")
            received += chunk
            if len(received) > MAX_RESPONSE_BYTES:
                raise WorkerError("response_too_large", f"the reply is over {MAX_RESPONSE_BYTES} bytes")
            end = chunk.find(b"\n")
            if end == len(chunk) - 1:
                return bytes(received[:-1])
            if end >= 0:
                raise WorkerError("invalid_response", "bytes follow the reply's newline")

    def _arm(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining)
