"""The namespaces of a launch, and ID maps for mounts.

A folder that others may not read (mode 0700, say) is mounted ID-mapped: its owner's uid and gid appear as the
attempt's, on that one mount (mount_setattr(2), "ID-mapped mounts"). The maps come from a user namespace that no
process lives in; the launcher keeps a few of them, since making one costs a fork.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence

from confine import syscalls
from confine.errors import StepFailed

ROOTLESS = syscalls.CLONE_NEWUSER  # for an ordinary user, in the same clone: it owns all the others then
CONFINED = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)
OBSERVED = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")  # names below /proc/PID/ns
INNER_ID = 1000  # what the worker's one uid and gid are called inside its user namespace
_KEPT_MAPS = 64


def map_own_user(uid: int, gid: int) -> None:
    """Maps the caller's one uid and gid into the user namespace it has just made (user_namespaces(7)).

    setgroups must be denied before an unprivileged writer may set the gid map (CVE-2014-8989).
    """
    for name, content in (
        ("setgroups", "deny"),
        ("gid_map", f"{INNER_ID} {gid} 1"),
        ("uid_map", f"{INNER_ID} {uid} 1"),
    ):
        path = f"/proc/self/{name}"
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, content.encode())
        finally:
            os.close(fd)


def map_ranges(
    pid: int, uids: Sequence[tuple[int, int]], gids: Sequence[tuple[int, int]], mappers: Sequence[str]
) -> None:
    """Gives a process in a new user namespace its ids, each (first, count) under the number that it has outside.

    An ordinary user may map one own id alone; more is done by the machine's setuid `mappers` (newuidmap(1),
    newgidmap(1)), which look into subuid(5) first. StepFailed("identity maps").
    """
    for name, mapper, ranges in (("gid", mappers[1], gids), ("uid", mappers[0], uids)):
        if len(ranges) > 1:
            import subprocess  # which loads threading and more: not for the launchers that never need it

            arguments = [str(number) for first, count in ranges for number in (first, first, count)]
            done = subprocess.run([mapper, str(pid), *arguments], capture_output=True, check=False)
            if done.returncode != 0:
                raise StepFailed("identity maps", 0, mapper, done.stderr.decode(errors="replace").strip())
            continue
        ((only, count),) = ranges
        if name == "gid":
            _write(f"/proc/{pid}/setgroups", "deny")  # first, as below
        _write(f"/proc/{pid}/{name}_map", f"{only} {only} {count}")


def _write(path: str, content: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(content)
    except OSError as error:
        raise StepFailed("identity maps", error.errno or 0, path) from None


class MountIdMaps:
    """User namespaces to ID-map mounts with, by (source uid, source gid, attempt's uid, attempt's gid)."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int, int, int], int] = OrderedDict()

    def namespace(self, owner: tuple[int, int], uid: int, gid: int) -> int:
        """A descriptor that stays this object's. OSError when the maps cannot be written."""
        key = (*owner, uid, gid)
        fd = self._kept.get(key)
        if fd is None:
            fd = _user_namespace(owner, uid, gid)
            self._kept[key] = fd
            if len(self._kept) > _KEPT_MAPS:
                os.close(self._kept.popitem(last=False)[1])
        else:
            self._kept.move_to_end(key)
        return fd


def _user_namespace(owner: tuple[int, int], uid: int, gid: int) -> int:
    alive, until = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = syscalls.clone(syscalls.CLONE_NEWUSER)
    if pid == 0:
        os.close(until)
        os.read(alive, 1)
        os._exit(0)
    try:
        for name, inside, outside in (("uid_map", owner[0], uid), ("gid_map", owner[1], gid)):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
                file.write(f"{inside} {outside} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(until)
        os.close(alive)
        os.close(pidfd)
        os.waitpid(pid, 0)
