"""SHA-256 of files, remembered while nothing about the file changed."""

import hashlib
import os
import time
from collections import OrderedDict

_CHUNK_BYTES = 1 << 20
_KEPT = 256
# A write in the same clock tick as our read could leave the ctime as it was: younger files are not remembered.
_SETTLED_NS = 2_000_000_000

FileState = tuple[int, int, int, int, int]
_known: OrderedDict[FileState, str] = OrderedDict()


def file_state(status: os.stat_result) -> FileState:
    """What changes when a file's identity or content does: device, inode, size, mtime and ctime in ns."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def file_digest(fd: int) -> str:
    """Lower-case hex SHA-256 of the whole file, from its start, leaving the read position alone. OSError."""
    state = file_state(os.fstat(fd))
    if state in _known:
        _known.move_to_end(state)
        return _known[state]
    digest = hashlib.sha256()
    offset = 0
    while chunk := os.pread(fd, _CHUNK_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    if file_state(os.fstat(fd)) == state and time.time_ns() - state[4] > _SETTLED_NS:
        _known[state] = digest.hexdigest()
        if len(_known) > _KEPT:
            _known.popitem(last=False)
    return digest.hexdigest()


def path_digest(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return file_digest(fd)
    finally:
        os.close(fd)
