"""From an argv and a folder to a MountPlan: what one worker will see, decided before anything starts.

In order: the cwd and the read paths, what the command is, what it needs to run (confine.programs), the system's own
folders, state directories to hide. All paths in a plan are resolved; a link found later where a plan says folder is a
change, and refused at launch.
"""

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from confine.digests import path_digest
from confine.errors import CommandRefused, ConfineError
from confine.programs import EVERYTHING, Program, find_program
from confine.spec import Bind, MountPlan

STATE_MARK = "authority.db"  # what a directory holds that is a host's state
_MAX_ENTRIES = 500_000
_MAX_MASKS = 256
_MERGED_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Of /etc, only what a program needs to find its libraries and to check certificates; accounts are synthetic.
_ETC = ("alternatives", "ld.so.cache", "localtime", "ssl/certs", "ssl/openssl.cnf")
# Folders that are never handed over whole: they hold the machine, or everyone's secrets.
_NEVER = ("/", "/boot", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var", "/var/tmp")
_OWN = ("/proc", "/dev", "/run/chio", "/sys", "/etc")  # made new inside, so nothing else is mounted there


@dataclass(slots=True)
class _Draft:
    """A plan in the making: binds and links by path."""

    binds: dict[str, Bind] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


def resolve_executable(command: str, cwd: str, path_env: str | None = None) -> str:
    """The absolute path of a command: with a slash relative to cwd, a bare name by PATH. ConfineError."""
    if "/" in command:
        candidates = [os.path.normpath(os.path.join(cwd, command))]
        fix = "correct the command or its cwd"
    else:
        path_env = os.environ.get("PATH", "") if path_env is None else path_env
        candidates = [os.path.join(folder, command) for folder in path_env.split(":") if folder.startswith("/")]
        fix = "install it, or give its path with a slash"
    files = [candidate for candidate in candidates if os.path.isfile(candidate)]
    if not files:
        where = candidates[0] if "/" in command else None
        raise CommandRefused(f"the command {command!r} is not there", 127, path=where, fix=fix)
    for file in files:
        if os.access(file, os.X_OK):
            return file
    raise CommandRefused(f"the command {command!r} is not executable", 126, path=files[0], fix="chmod +x it")


def plan_mounts(
    *,
    argv: Sequence[str],
    cwd: str,
    state_dir: str | None,
    read: Sequence[str] = (),
    write: Sequence[str] = (),
    runtime_roots: Sequence[str] = (),
    socket: str | None = None,
    exports_directory: str | None = None,
    path_env: str | None = None,
) -> MountPlan:
    """What a worker with this command sees. Relative `read` paths and exports are relative to cwd.

    state_dir          this host's own state, hidden wherever it is; other hosts' are found by their authority.db
    runtime_roots      folders where an interpreter may be looked for, besides /usr, /opt and this interpreter's own
    socket             the attempt's socket on the machine; a plan made to be frozen has none
    exports_directory  an existing folder; inside, an empty private one is at its path
    path_env           where a bare command is looked up (default: this process's PATH)

    ConfineError, with the path and the fix, before anything is started or made.
    """
    if not argv or any("\0" in item for item in argv):
        raise ConfineError("a command is a list of at least one text without NUL", fix="correct the command")
    cwd = _folder(cwd, "cwd")
    states = [os.path.realpath(state_dir)] if state_dir is not None else []
    draft = _Draft()
    _system(draft)
    _bind(draft, cwd)
    for path in read:
        _bind(draft, _read_path(path, cwd))
    for path in write:
        _bind_writable(draft, _read_path(path, cwd))
    executable = resolve_executable(argv[0], cwd, path_env)
    bare = "/" not in argv[0]
    roots = tuple(_folder(root, "runtime root") for root in runtime_roots)
    program = find_program(
        executable,
        visible=tuple(draft.binds),
        roots=("/usr", "/opt", sys.base_prefix, sys.prefix, *roots),
        bare=bare,
    )
    _add_program(draft, program)
    binds = _order(draft)
    masks = _masks(binds, states)
    scratch = _scratch(exports_directory, cwd, binds, states)
    return MountPlan(
        argv=(program.executable if bare else argv[0], *argv[1:]),
        cwd=cwd,
        executable=program.executable,
        executable_sha256=path_digest(program.executable),
        program=program.image,
        program_sha256=path_digest(program.image),
        binds=binds,
        links=tuple(sorted(draft.links.items())),
        masks=tuple(mask for mask in masks if mask != scratch),
        scratch=scratch,
        socket=None if socket is None else os.path.realpath(socket),
        visible_files=_visible_files(argv[1:], cwd, binds, masks),
    )


def plan_unconfined(*, argv: Sequence[str], cwd: str, path_env: str | None = None) -> MountPlan:
    """The plan of a worker that sees the whole machine: what runs, and its digests. ConfineError as above."""
    if not argv or any("\0" in item for item in argv):
        raise ConfineError("a command is a list of at least one text without NUL", fix="correct the command")
    cwd = os.path.realpath(cwd)
    if not os.path.isdir(cwd):
        raise ConfineError("the cwd is not a folder that exists", path=cwd, fix="make it, or correct the path")
    program = find_program(resolve_executable(argv[0], cwd, path_env), visible=EVERYTHING, roots=(), bare=False)
    return MountPlan(
        argv=(program.executable if "/" not in argv[0] else argv[0], *argv[1:]),
        cwd=cwd,
        executable=program.executable,
        executable_sha256=path_digest(program.executable),
        program=program.image,
        program_sha256=path_digest(program.image),
        binds=(),
        links=(),
        masks=(),
        scratch=None,
        socket=None,
        visible_files=_visible_files(argv[1:], cwd, [Bind("/", True)], ()),
    )


def for_attempt(plan: MountPlan, socket: str | None) -> MountPlan:
    """A frozen plan for one attempt: its socket, and the state directories that are there now hidden as well.

    ConfineError when a folder of the plan has come to lie in a state.
    """
    masks = tuple(mask for mask in _masks(plan.binds, plan.masks) if mask != plan.scratch)
    return replace(plan, masks=masks, socket=os.path.realpath(socket) if socket is not None else None)


def _folder(path: str, what: str) -> str:
    resolved = os.path.realpath(path)
    if not os.path.isdir(resolved):
        raise ConfineError(f"the {what} is not a folder that exists", path=path, fix="make it, or correct the path")
    return _allowed(resolved, path, what)


def _read_path(path: str, cwd: str) -> str:
    """A read path is what it says: one that is a link to elsewhere is refused, not followed."""
    named = os.path.normpath(os.path.join(cwd, path))
    try:
        mode = os.lstat(named).st_mode
    except OSError as error:
        raise ConfineError(f"a read path cannot be used: {error.strerror}", path=named, fix="correct it") from None
    if stat.S_ISLNK(mode) or os.path.realpath(named) != named:
        fix = f"name what it leads to: {os.path.realpath(named)}"
        raise ConfineError("a read path leads through a link to elsewhere", path=named, fix=fix)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfineError("a read path is a device, socket or pipe", path=named, fix="name a file or a folder")
    return _allowed(named, path, "read path")


def _allowed(resolved: str, path: str, what: str) -> str:
    if resolved in _NEVER or any(_beneath(resolved, own) for own in ("/proc", "/dev", "/sys", "/run/chio")):
        raise ConfineError(
            f"the {what} is a folder of the machine, never visible whole", path=path, fix="name one below it"
        )
    return resolved


def _system(draft: _Draft) -> None:
    _bind(draft, "/usr", system=True)
    for name in _MERGED_USR:
        _link_or_bind(draft, f"/{name}")
    for name in _ETC:
        _link_or_bind(draft, f"/etc/{name}")


def _link_or_bind(draft: _Draft, path: str) -> None:
    if os.path.islink(path):
        draft.links[path] = os.readlink(path)
    elif os.path.exists(path):
        _bind(draft, path, system=True)


def _bind(draft: _Draft, path: str, *, system: bool = False) -> None:
    """One more read-only bind, unless a folder that holds it is there already and shows it just so.

    A folder needs no owner's rights to be seen: the top of its overlay is open to all. A single file may.
    """
    status = os.stat(path)
    directory = stat.S_ISDIR(status.st_mode)
    needed = 0o005 if directory else 0o004
    closed = status.st_mode & needed != needed
    for known in draft.binds.values():
        if path == known.path or (_beneath(path, known.path) and not closed and _reached(path, known.path)):
            return
    owner = (status.st_uid, status.st_gid) if closed and not directory else None
    draft.binds[path] = Bind(path, directory, owner, system)


def _bind_writable(draft: _Draft, path: str) -> None:
    """A folder that a tool server owns: ID-mapped, so that what it writes there is the folder's owner's."""
    status = os.stat(path)
    owner = (status.st_uid, status.st_gid)
    draft.binds[path] = Bind(path, stat.S_ISDIR(status.st_mode), owner, writable=True)


def _reached(path: str, top: str) -> bool:
    """Whether every folder between the two lets the worker through, so that `path` needs no bind of its own."""
    while path != top:
        path = os.path.dirname(path)
        if path != top and not os.stat(path).st_mode & 0o001:
            return False
    return True


def _add_program(draft: _Draft, program: Program) -> None:
    for path in program.needs:
        _bind(draft, _allowed(path, path, "folder of the command"))
    for path, target in program.links.items():
        if not any(_beneath(path, bind) for bind in draft.binds):
            draft.links.setdefault(path, target)


def _order(draft: _Draft) -> tuple[Bind, ...]:
    """Parents before children, so that a child is mounted into its parent and not under it."""
    return tuple(draft.binds[path] for path in sorted(draft.binds, key=lambda path: (path.count("/"), path)))


def _states_below(tops: Sequence[str]) -> set[str]:
    """Every state directory at or below these folders; below a state nothing more is looked for."""
    found = set()
    entries = 0
    for top in tops:
        for folder, folders, files in os.walk(top):
            entries += len(folders) + len(files)
            if STATE_MARK in files:
                found.add(folder)
                folders.clear()
            if entries > _MAX_ENTRIES:
                fix = "give the worker a smaller folder"
                raise ConfineError(f"more than {_MAX_ENTRIES} entries to search for states", path=top, fix=fix)
    return found


def _masks(binds: Sequence[Bind], states: Sequence[str]) -> tuple[str, ...]:
    """The states that a bind would show, none inside another. ConfineError for a bind that is in one itself."""
    given = [bind for bind in binds if not bind.system]
    for bind in given:
        _refuse_inside_state(bind.path, states)
    known = _states_below([bind.path for bind in given if bind.directory]) | set(states)
    shown = {state for state in known if any(_beneath(state, bind.path) for bind in binds)}
    if len(shown) > _MAX_MASKS:
        fix = "name a smaller folder"
        raise ConfineError(f"more than {_MAX_MASKS} state directories to hide", path=min(shown), fix=fix)
    return tuple(sorted(path for path in shown if not any(path != top and _beneath(path, top) for top in shown)))


def _refuse_inside_state(path: str, states: Sequence[str]) -> None:
    """A folder or file that is a host's state, or inside one, is never given, however it is named."""
    holder = path if os.path.isdir(path) else os.path.dirname(path)
    while True:
        if holder in states or os.path.exists(os.path.join(holder, STATE_MARK)):
            raise ConfineError("it is inside a host's state, which no worker sees", path=path, fix="move it out")
        if holder == "/":
            return
        holder = os.path.dirname(holder)


def _scratch(directory: str | None, cwd: str, binds: Sequence[Bind], states: Sequence[str]) -> str | None:
    """The exports directory. It may be this host's own state directory, and nothing else that is one or in one."""
    if directory is None:
        return None
    scratch = _folder(os.path.normpath(os.path.join(cwd, directory)), "exports directory")
    if any(_beneath(bind.path, scratch) for bind in binds):
        raise ConfineError("the exports directory would hide the cwd or a read path", path=scratch, fix="name another")
    if any(_beneath(scratch, own) for own in ("/usr", *_OWN)):
        raise ConfineError("the exports directory is in a folder made new inside", path=scratch, fix="name another")
    if scratch in states:
        return scratch
    _refuse_inside_state(scratch, states)
    below = _states_below([scratch]) | {state for state in states if _beneath(state, scratch)}
    if below:
        raise ConfineError(
            f"the exports directory holds a host's state, {min(below)}", path=scratch, fix="name another"
        )
    return scratch


def _visible_files(items: Sequence[str], cwd: str, binds: Sequence[Bind], masks: Sequence[str]) -> dict[str, str]:
    files = {}
    for item in items:
        path = os.path.realpath(os.path.join(cwd, item)) if item and "\0" not in item else ""
        if not path or not os.path.isfile(path) or any(_beneath(path, mask) for mask in masks):
            continue
        if any(_beneath(path, bind.path) for bind in binds):
            files[item] = path_digest(path)
    return files


def _beneath(path: str, top: str) -> bool:
    """At or below, by whole components."""
    return path == top or path.startswith(top.rstrip("/") + "/")
