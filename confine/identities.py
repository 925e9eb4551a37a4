"""A uid and gid for each live attempt, whoever's host on the machine it belongs to.

root             a uid of its own from a range of the project's, unknown to the machine otherwise
ordinary user    a uid of its own from the range that /etc/subuid gives the user (subuid(5)); newuidmap(1) and
                 newgidmap(1) put it into init's user namespace. Without such a range every attempt has the user's own
                 uid, which is weaker, so it has to be accepted by name: `--without distinct-uids`

Each uid has a lock file; the one who holds its lock has the uid. The lock goes with the descriptor, so a dead host
leaves nothing to clean, and init holds it too until the last process with that uid is gone.
"""

import fcntl
import os
import pwd
import stat
from collections.abc import Sequence

from confine.errors import ConfineError

# Above every range that systemd, /etc/login.defs and subordinate ids use (systemd's "Users, Groups, UIDs and GIDs").
FIRST_UID = 0x7000_0000
COUNT = 4_096
LAYER = "distinct-uids"
ID_MAPPERS = ("/usr/bin/newuidmap", "/usr/bin/newgidmap")
_SUBORDINATE = ("/etc/subuid", "/etc/subgid")
_Ranges = tuple[tuple[int, int], ...]


class Identity:
    """uid and gid, and the descriptor of the lock that makes them ours until close().

    The ranges are empty for root; for an ordinary user they are the ids that exist in init's user namespace, each as
    (first, count) under the same numbers as outside: the user's own, and the attempt's if it is another.
    """

    __slots__ = ("fd", "gid", "gid_ranges", "uid", "uid_ranges")

    def __init__(self, uid: int, gid: int, fd: int, uid_ranges: _Ranges = (), gid_ranges: _Ranges = ()) -> None:
        self.uid = uid
        self.gid = gid
        self.fd = fd
        self.uid_ranges = uid_ranges
        self.gid_ranges = gid_ranges

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def runtime_directory() -> str:
    """The folder of this user's sockets and locks, which only this user writes: /run/chio for root, otherwise chio in
    XDG_RUNTIME_DIR, or /tmp/chio-UID where no session made one. Made if it is not there.

    ConfineError when it is not this user's own, as a folder in /tmp may turn out to be.
    """
    uid = os.geteuid()
    if uid == 0:
        return _own_directory("/run/chio", 0o755)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return _own_directory(f"{session}/chio" if session else f"/tmp/chio-{uid}", 0o700)


def claim_identity(without: Sequence[str] = (), first: int = FIRST_UID, count: int = COUNT) -> Identity:
    """The lowest free uid of the range that this user may give. ConfineError with the fix when there is none."""
    user, group = os.geteuid(), os.getegid()
    locks = _own_directory(f"{runtime_directory()}/uids", 0o700)
    if user == 0:
        uid, fd = _claim(locks, first, count)
        return Identity(uid, uid, fd)
    if LAYER in without:
        return Identity(user, group, _share(locks, user), ((user, 1),), ((group, 1),))
    (first_uid, uids), (first_gid, gids) = _subordinate_ranges(user)
    uid, fd = _claim(locks, first_uid, min(uids, gids, count))
    gid = first_gid + uid - first_uid
    return Identity(uid, gid, fd, ((user, 1), (uid, 1)), ((group, 1), (gid, 1)))


def _own_directory(path: str, mode: int) -> str:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except OSError as error:
        fix = "make it, or correct XDG_RUNTIME_DIR"
        raise ConfineError(f"no folder for sockets and locks: {error.strerror}", path=path, fix=fix) from None
    status = os.stat(path, follow_symlinks=False)
    # Whoever else could write there could put a lock or a socket of his own in our place.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o777 & ~mode:
        raise ConfineError("the folder of sockets and locks is open to others", path=path, fix=f"chmod {mode:o} {path}")
    return path


def _claim(locks: str, first: int, count: int) -> tuple[int, int]:
    for uid in range(first, first + count):
        fd = _lock_file(locks, uid)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return uid, fd
    raise ConfineError(f"all {count} uids of the range are in use", path=locks, fix="wait for attempts to end")


def _share(locks: str, uid: int) -> int:
    """One uid for all: locked by as many as ask."""
    fd = _lock_file(locks, uid)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _lock_file(locks: str, uid: int) -> int:
    return os.open(f"{locks}/{uid}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _subordinate_ranges(user: int) -> list[tuple[int, int]]:
    """The first range of uids and of gids that the machine gives this user."""
    try:
        names = {str(user), pwd.getpwuid(user).pw_name}
    except KeyError:
        names = {str(user)}
    ranges = [found for file in _SUBORDINATE for found in _ranges_of(names, file)[:1]]
    if len(ranges) == 2 and all(map(os.path.exists, ID_MAPPERS)):
        return ranges
    given = "--add-subuids 200000-265535 --add-subgids 200000-265535"
    raise ConfineError(
        "this user has no uids to give to attempts",
        fix=f"as root: apt-get install uidmap && usermod {given} {max(names)}; or accept one uid for all: "
        f"--without {LAYER}",
    )


def _ranges_of(names: set[str], file: str) -> list[tuple[int, int]]:
    try:
        with open(file, encoding="utf-8") as opened:
            lines = [line.strip().split(":") for line in opened]
    except OSError:
        return []
    return [(int(first), int(count)) for name, first, count in (at for at in lines if len(at) == 3) if name in names]
