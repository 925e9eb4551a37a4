"""Opening what an auditor names, which may be anything: a folder, a device, a pipe that nobody writes into."""

import os
import stat
from io import FileIO

from verify.verdict import VerifyError, unreadable


def open_file(path: str, *, pipe: bool = False) -> FileIO:
    """A regular file, unbuffered; with `pipe` also a pipe, read from wherever it is. Raises `VerifyError` (`input`).

    A pipe is opened without waiting for somebody to write into it (fifo(7)): if there is nobody, it is at its end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode))):
        os.close(fd)
        raise VerifyError("not a regular file", check="input", file=path)
    os.set_blocking(fd, True)
    return FileIO(fd, "rb")
