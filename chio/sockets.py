"""The attempts' listening sockets: one private directory for each state, one socket for each attempt.

The directory (mode 0700) is the barrier; a worker sees one bind mount of its own socket. A name fits sun_path
(unix(7): 108 bytes) for every allowed process id.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from types import TracebackType

from chio.errors import StateError
from confine import runtime_directory

_BACKLOG = 64


class SocketDirectory:
    """`/run/chio/<id>` for root; see confine.runtime_directory. `abandoned` counts what a dead host left in it.

    ConfineError when this user has no private place for it.
    """

    def __init__(self, runtime_id: str) -> None:
        self.path = os.path.join(runtime_directory(), runtime_id.replace("-", "")[:16])
        self.abandoned = 0

    def sweep(self) -> None:
        """Remove what a dead host left: the state's lock is ours, so whoever made these is dead."""
        if os.path.lexists(self.path):
            self.abandoned = len(os.listdir(self.path))
            shutil.rmtree(self.path)

    def __enter__(self) -> SocketDirectory:
        os.mkdir(self.path, 0o700)
        made = os.stat(self.path, follow_symlinks=False)
        if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid() or made.st_mode & 0o077:
            raise StateError("the socket directory is not private", file=self.path, fix="remove it and try again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def bind(self, name: str) -> tuple[socket.socket, str]:
        """A listening socket and its path. Mode 0666: the directory is what keeps others out."""
        path = f"{self.path}/{name}.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(path)
        os.chmod(path, 0o666)
        listening.listen(_BACKLOG)
        return listening, path

    def remove(self, name: str) -> None:
        try:
            os.unlink(f"{self.path}/{name}.sock")
        except FileNotFoundError:
            pass
