"""What runs after clone(): init, and the worker up to its exec. Flat lists of steps, in the order they run.

Init is process 1 of the new pid namespace: it builds the file system, gives its privileges up, forks the worker and
then only reaps and watches. A step that fails is sent to the launcher as (step, errno, path, hint) and ends the
process; with init ends everything in its pid namespace. Nothing is imported here after the clone.
"""

import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import prctl

from confine import landlock, mounts, namespaces, syscalls
from confine.errors import StepFailed
from confine.spec import LaunchSpec

_LAST_CAPABILITY = int(open("/proc/sys/kernel/cap_last_cap", encoding="ascii").read())  # noqa: SIM115


@dataclass(slots=True)
class Child:
    """Everything the two processes need, made by the launcher before the clone.

    control is init's socket to the launcher (liveness, reports), sync the worker's up to its exec. held are
    descriptors that only have to stay open as long as init lives: the state's lock, the identity's. cgroup_tasks are
    the files that the worker joins its v1 cgroups with.
    """

    spec: LaunchSpec
    sources: mounts.Sources
    control: socket.socket
    sync: socket.socket
    stdin: int
    stdout: int
    stderr: int
    null: int
    held: tuple[int, ...]
    cgroup_tasks: tuple[int, ...] = ()
    root: int = field(default=-1)
    ruleset: int = field(default=-1)


def run_init(child: Child) -> NoReturn:
    """Never returns and never raises: a process that fell through would be a second launcher."""
    gc.disable()
    try:
        if child.spec.rootless:
            _run(ROOTLESS_INIT, child, child.control)
        _run(CONFINED_INIT if child.spec.confined else UNCONFINED_INIT, child, child.control)
        # Not os.fork(), whose hooks in the child (a new lock for this, a new seed for that) touch many shared pages.
        worker, pidfd = syscalls.clone(0)
        if worker == 0:
            _run_worker(child)
        os.close(pidfd)
        _guard(child, worker)
    finally:
        _report_fault(child.control)
        os._exit(1)


def _run_worker(child: Child) -> NoReturn:
    try:
        child.control.close()
        _run(CONFINED_WORKER if child.spec.confined else UNCONFINED_WORKER, child, child.sync)
    finally:
        _report_fault(child.sync)
        os._exit(127)


def _run(steps: tuple[tuple[str, Callable[[Child], None]], ...], child: Child, report_to: socket.socket) -> None:
    for name, step in steps:
        try:
            step(child)
        except OSError as error:
            _report(report_to, name, error)
            os._exit(1)
        except StepFailed as failed:
            _send_failure(
                report_to,
                {"step": failed.step, "errno": failed.number, "path": failed.path, "hint": failed.hint},
            )
            os._exit(1)


def _report(to: socket.socket, step: str, error: OSError) -> None:
    hint = _HINTS.get((step, error.errno or 0)) or _HINTS.get((step, 0))
    path = os.fsdecode(error.filename) if error.filename else None
    _send_failure(to, {"step": step, "errno": error.errno or 0, "path": path, "hint": hint})


def _send_failure(to: socket.socket, failure: dict[str, str | int | None]) -> None:
    try:
        to.send(json.dumps({"failed": failure}).encode())
    except OSError:
        pass  # the launcher is gone, and so are we


def _report_fault(to: socket.socket) -> None:
    """An exception that no step is known to raise is our mistake; it ends the launch all the same, and says so."""
    error = sys.exception()
    if error is not None:
        hint = f"a fault in confine: {type(error).__name__}: {error}"
        _send_failure(to, {"step": "fault", "errno": 0, "path": None, "hint": hint})


# --- init -----------------------------------------------------------------------------------------------------------


def _wait_for_maps(child: Child) -> None:
    """In a new user namespace nobody has a uid, or a file, until the launcher has written the maps."""
    if child.control.recv(16) != b"go":
        os._exit(1)


def _descriptors_of_init(child: Child) -> None:
    for standard in (0, 1, 2):
        os.dup2(child.null, standard, inheritable=False)
    sources = child.sources
    keep = [0, 1, 2, child.control.fileno(), child.sync.fileno(), child.stdin, child.stdout, child.stderr]
    keep += [*child.held, *child.cgroup_tasks, *sources.binds]
    keep += [sources.socket] if sources.socket is not None else []
    syscalls.close_all_except(keep)


def _session(_: Child) -> None:
    os.setsid()
    os.umask(0)


def _loopback(child: Child) -> None:
    if child.spec.network == "loopback":
        from confine import loopback  # imported by the launcher before the clone

        loopback.bring_up()


def _build_root(child: Child) -> None:
    """An ordinary user can clone no mount of the machine's, only of the copies in init's own mount namespace."""
    sources = mounts.open_sources(child.spec, None) if child.spec.rootless else child.sources
    child.root = mounts.build_root(child.spec, sources)


def _pivot_root(child: Child) -> None:
    mounts.enter_root(child.root)
    os.close(child.root)


def _hostname(child: Child) -> None:
    syscalls.sethostname(child.spec.hostname)


def _hand_scratch_over(child: Child) -> None:
    """The launcher holds the scratch directory from now on: a tmpfs stays readable when its mount namespace is gone."""
    scratch = child.spec.plan.scratch
    if scratch is None:
        return
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    socket.send_fds(child.control, [b'{"scratch": true}'], [fd])
    os.close(fd)


def _landlock_rules(child: Child) -> None:
    """While every folder can still be opened: the worker that puts them on may find one on the way closed to it."""
    if child.spec.landlock is not None:
        child.ruleset = landlock.prepare(child.spec)


def _rlimits(child: Child) -> None:
    limits = child.spec.limits
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
    ):
        hard = resource.getrlimit(which)[1]
        # Raising a hard limit needs CAP_SYS_RESOURCE, which root may lack: the lower of the two holds.
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _pipes(child: Child) -> None:
    """The worker opens its own /dev/stdout anew, as a file of the pipe's owner."""
    for pipe in (child.stdout, child.stderr):
        os.fchown(pipe, child.spec.uid, child.spec.gid)


def _groups(child: Child) -> None:
    """An ordinary user who mapped no more than an own gid may not drop the others (user_namespaces(7), setgroups)."""
    if not child.spec.keeps_groups:
        os.setgroups([])


def _gid(child: Child) -> None:
    os.setresgid(child.spec.gid, child.spec.gid, child.spec.gid)


def _uid(child: Child) -> None:
    os.setresuid(child.spec.uid, child.spec.uid, child.spec.uid)


def _hide_init(_: Child) -> None:
    """The worker has init's uid outside: a process that is not dumpable is closed to it all the same (ptrace(2))."""
    prctl.set_dumpable(0)


def _die_with_launcher(child: Child) -> None:
    """After the uid change, which clears it (prctl(2)). A parent that died before is seen by its socket's end."""
    prctl.set_pdeathsig(signal.SIGKILL)
    _exit_if_orphaned(child)


def _adopt_orphans(child: Child) -> None:
    """Without a pid namespace, what the worker leaves behind becomes init's child and dies with the attempt."""
    prctl.set_child_subreaper(1)
    _exit_if_orphaned(child)


def _exit_if_orphaned(child: Child) -> None:
    poll = select.poll()
    poll.register(child.control, select.POLLHUP)
    if poll.poll(0):
        os._exit(1)


def _no_new_privileges(_: Child) -> None:
    prctl.set_no_new_privs(1)


def _guard(child: Child, worker: int) -> NoReturn:
    """Reaps whatever is orphaned, reports the worker's end, and ends when the launcher says so or is gone."""
    child.sync.close()
    for fd in (child.stdin, child.stdout, child.stderr, child.ruleset, *child.cgroup_tasks):
        if fd >= 0:
            os.close(fd)
    signals = syscalls.child_signals_fd()
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(child.control, select.POLLIN | select.POLLHUP)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if signals in ready:
            os.read(signals, 128)
            _reap(child, worker)
        if child.control.fileno() in ready:
            if not child.spec.confined:
                _end_descendants()
            os._exit(0)


def _reap(child: Child, worker: int) -> None:
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == worker:
            cpu_ms = round((usage.ru_utime + usage.ru_stime) * 1000)
            child.control.send(json.dumps({"ended": [status, usage.ru_maxrss * 1024, cpu_ms]}).encode())


def _end_descendants() -> None:
    """Unconfined only: kills children until none is left; killing one hands its own children to us."""
    while True:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


# --- worker ---------------------------------------------------------------------------------------------------------


def _wait_for_tracer(child: Child) -> None:
    """Says who we are (the launcher reads our pid from the message's credentials) and waits to be seized."""
    # An ordinary user's launcher may seize, and then look at, only what is dumpable (ptrace(2)).
    prctl.set_dumpable(1)
    child.sync.send(b'{"hello": true}')
    if child.sync.recv(16) != b"go":
        os._exit(127)


def _cgroups(child: Child) -> None:
    """Before anything that could be charged to it. See confine.cgroups for why it is the worker that writes this."""
    for fd in child.cgroup_tasks:
        os.write(fd, b"0")
        os.close(fd)


def _cgroup_namespace(_: Child) -> None:
    """Once more, now that it is in its cgroups: those are then the root of all that it can see."""
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)


def _user_namespace(child: Child) -> None:
    """Rebinds nothing outside: it gives the worker an own, empty set of capabilities and an own name for its uid.

    The maps are files of the process, root's if it were not dumpable any more (proc(5)); exec makes it so anyway.
    """
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    namespaces.map_own_user(child.spec.uid, child.spec.gid)


def _keyring(_: Child) -> None:
    syscalls.leave_session_keyring()


def _bounding_set(_: Child) -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        prctl.capbset_drop(capability)


def _securebits(_: Child) -> None:
    syscalls.lock_securebits()


def _capabilities(_: Child) -> None:
    syscalls.drop_all_capabilities()


def _die_with_init(_: Child) -> None:
    prctl.set_pdeathsig(signal.SIGKILL)
    if os.getppid() != 1:
        os._exit(127)


def _working_directory(child: Child) -> None:
    """As the worker, so that a directory closed to it fails here and not at its first relative path."""
    os.chdir(child.spec.plan.cwd)


def _descriptors_of_worker(child: Child) -> None:
    """0, 1 and 2, and the sync socket until exec: everything else is closed by exec, listed or not."""
    for fd, standard in ((child.stdin, 0), (child.stdout, 1), (child.stderr, 2)):
        os.dup2(fd, standard, inheritable=True)
    syscalls.close_on_exec_from(3)


def _signals(_: Child) -> None:
    os.umask(0o022)
    syscalls.reset_every_signal()  # what the interpreter and the launcher ignore, and what their starter did


def _landlock(child: Child) -> None:
    if child.ruleset >= 0:
        syscalls.landlock_restrict_self(child.ruleset)


def _seccomp(child: Child) -> None:
    """The last step, so that the list needs to allow exec and nothing that a launch does before."""
    if child.spec.seccomp is not None:
        syscalls.install_filter(bytes.fromhex(child.spec.seccomp.program))


def _exec(child: Child) -> None:
    plan = child.spec.plan
    try:
        os.execve(plan.executable, plan.argv, dict(child.spec.environment))
    except OSError as error:
        raise OSError(error.errno, error.strerror, plan.executable) from None


ROOTLESS_INIT: tuple[tuple[str, Callable[[Child], None]], ...] = (("identity maps", _wait_for_maps),)  # then
CONFINED_INIT: tuple[tuple[str, Callable[[Child], None]], ...] = (
    ("descriptors", _descriptors_of_init),
    ("session", _session),
    ("loopback", _loopback),
    ("mounts", _build_root),
    ("pivot_root", _pivot_root),
    ("hostname", _hostname),
    ("scratch", _hand_scratch_over),
    ("landlock rules", _landlock_rules),
    ("rlimits", _rlimits),
    ("pipes", _pipes),
    ("groups", _groups),
    ("gid", _gid),
    ("uid", _uid),
    ("hide init", _hide_init),
    ("die with launcher", _die_with_launcher),
    ("no_new_privs", _no_new_privileges),
    ("capabilities", _capabilities),
)  # then the fork
CONFINED_WORKER: tuple[tuple[str, Callable[[Child], None]], ...] = (
    ("seize", _wait_for_tracer),
    ("session", _session),
    ("cgroups", _cgroups),
    ("user namespace", _user_namespace),
    ("cgroup namespace", _cgroup_namespace),
    ("keyring", _keyring),
    ("bounding set", _bounding_set),
    ("securebits", _securebits),
    ("capabilities", _capabilities),
    ("die with init", _die_with_init),
    ("no_new_privs", _no_new_privileges),
    ("cwd", _working_directory),
    ("landlock", _landlock),
    ("descriptors", _descriptors_of_worker),
    ("signals", _signals),
    ("seccomp", _seccomp),
    ("exec", _exec),
)
UNCONFINED_INIT: tuple[tuple[str, Callable[[Child], None]], ...] = (
    ("descriptors", _descriptors_of_init),
    ("session", _session),
    ("rlimits", _rlimits),
    ("adopt orphans", _adopt_orphans),
)
UNCONFINED_WORKER: tuple[tuple[str, Callable[[Child], None]], ...] = (
    ("seize", _wait_for_tracer),
    ("session", _session),
    ("cgroups", _cgroups),
    ("cwd", _working_directory),
    ("descriptors", _descriptors_of_worker),
    ("signals", _signals),
    ("exec", _exec),
)

USER_NAMESPACE_HINTS = {
    errno.ENOSPC: "user namespaces are used up, or are off: raise user.max_user_namespaces",
    errno.EPERM: "user namespaces are refused here: see kernel.unprivileged_userns_clone and "
    "kernel.apparmor_restrict_unprivileged_userns, or run it as root",
}
_HINTS = {("user namespace", number): hint for number, hint in USER_NAMESPACE_HINTS.items()} | {
    ("cwd", errno.EACCES): "a folder on the way, below a visible one, is closed to the attempt's uid: chmod o+x it",
    ("exec", errno.EACCES): "it, or a folder on the way below the cwd or a read path, is closed to the attempt's uid: "
    "chmod -R go+rX that folder",
    ("exec", errno.ENOENT): "it, or the interpreter it names, is not visible inside: give its folder as a runtime root",
    ("exec", errno.ENOEXEC): "it has no format this machine runs: a script needs a #! line",
    ("mounts", errno.ENOENT): "a mount point below a read-only folder must exist on the machine",
    ("mounts", errno.EPERM): "the machine's /proc is covered in part, as in a container: a fresh one is refused then",
    ("mounts", errno.EROFS): "a mount point below a read-only folder must exist on the machine: make it first",
}


def step_failed(report: dict[str, Any]) -> StepFailed:
    """The launcher's side of _report()."""
    return StepFailed(report["step"], report["errno"], report["path"], report["hint"])
