"""A launcher's own folder in each cgroup hierarchy, and what launchers that were killed have left.

The folder has a random name, and a file of that name that lists where it is. The launcher holds a POSIX record lock on
the file (fcntl(2)): unlike an open descriptor such a lock passes to no child, so a lock that can be had is proof that
its launcher is dead. Whoever starts next then removes the folders, and the file. Never those of a live one, and never
a folder without a file, which is another container's.
"""

import fcntl
import json
import os
from contextlib import suppress

from confine.cgroups import Group, remove_all, try_to_remove, write_setting
from confine.hierarchies import UNIFIED, Layout
from confine.identities import runtime_directory
from confine.spec import Limits

_START = "chio-"


def locks_directory() -> str:
    """Where this user's launchers have their files; made if it is not there. ConfineError if it cannot be."""
    path = f"{runtime_directory()}/cgroups"  # nobody else can write in that one, nor make this one
    os.makedirs(path, 0o700, exist_ok=True)
    return path


class Prefix:
    """Makes the groups of one launcher. OSError from the constructor when the folders cannot be made.

    `left` are the cgroups of ended attempts that could not be removed yet, for retry().
    """

    def __init__(self, layout: Layout, locks: str) -> None:
        self._locks = locks
        self._count = 0
        self.left: list[str] = []
        self.version = layout.version
        self.name, self._lock = self._claim()
        self._places = {name: place.below(self.name) for name, place in layout.places.items()}
        paths = list(dict.fromkeys(place.path for place in self._places.values()))
        try:
            os.write(self._lock, json.dumps(paths).encode())
            for path in paths:
                os.mkdir(path, 0o755)
            if layout.version == "v2":
                write_setting(f"{self._places[UNIFIED].path}/cgroup.subtree_control", "+cpu +memory +pids")
        except OSError:
            self.close()
            raise

    def _claim(self) -> tuple[str, int]:
        while True:
            name = _START + os.urandom(6).hex()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(f"{self._locks}/{name}", flags, 0o600)
            # Between the two calls another's sweep may have come: then it has the lock, or the file is gone.
            with suppress(BlockingIOError):
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return name, fd
            os.close(fd)

    def group(self, limits: Limits) -> Group:
        """The cgroups of one more attempt. StepFailed."""
        self._count += 1
        places = {name: place.below(str(self._count)) for name, place in self._places.items()}
        return Group(self.version, places, limits, self.left)

    def retry(self) -> None:
        """Removes what can be removed by now of what is left; waits for nothing."""
        self.left[:] = [path for path in self.left if not try_to_remove(path)]

    def close(self) -> None:
        """Removes the folders; if one stays (a process that cannot die), the file stays too, for the next sweep."""
        if remove_all(place.path for place in self._places.values()):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._locks}/{self.name}")
        os.close(self._lock)


def sweep(locks: str, own: str | None = None) -> None:
    """Removes what dead launchers left. Not their own: closing any descriptor of a file gives up one's lock on it."""
    for name in os.listdir(locks):
        if name == own or not name.startswith(_START):
            continue
        try:
            fd = os.open(f"{locks}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another sweep's
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove_all(_folders(fd, name)):
                os.unlink(f"{locks}/{name}")
        except BlockingIOError:
            pass  # its launcher is alive
        except FileNotFoundError:
            pass  # swept by another between our open and our lock
        finally:
            os.close(fd)


def _folders(fd: int, name: str) -> list[str]:
    """The folders a dead launcher may have made. A file cut short says that it had made none yet."""
    try:
        paths = json.loads(os.pread(fd, 65_536, 0))
    except ValueError:
        return []
    return [path for path in paths if os.path.basename(path) == name]
