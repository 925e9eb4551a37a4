"""A uid and gid of its own for each live attempt on the machine, whoever's host it belongs to.

Each uid of the range has a lock file; the one who holds its lock has the uid. The lock goes with the descriptor, so a
dead host leaves nothing to clean, and init holds it too until the last process with that uid is gone.
"""

import fcntl
import os

from confine.errors import ConfineError

# Above every range that systemd, /etc/login.defs and subordinate ids use (systemd's "Users, Groups, UIDs and GIDs").
FIRST_UID = 0x7000_0000
COUNT = 4_096
LOCKS = "/run/chio/uids"


class Identity:
    """uid and gid (equal numbers), and the descriptor of the lock that makes them ours until close()."""

    __slots__ = ("fd", "gid", "uid")

    def __init__(self, uid: int, fd: int) -> None:
        self.uid = self.gid = uid
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def claim_identity(locks: str = LOCKS, first: int = FIRST_UID, count: int = COUNT) -> Identity:
    """The lowest free uid of the range. ConfineError when all are taken, or the lock folder is not root's alone."""
    os.makedirs(locks, mode=0o700, exist_ok=True)
    status = os.stat(locks, follow_symlinks=False)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfineError("the folder of uid locks is open to others", path=locks, fix=f"chmod 700 {locks}")
    for uid in range(first, first + count):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(f"{locks}/{uid}", flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return Identity(uid, fd)
    raise ConfineError(f"all {count} uids of the range are in use", path=locks, fix="wait for attempts to end")
