"""`--checkpoint-to`: each checkpoint of the log goes out of this host's hands as soon as it is committed.

A log shows that nothing was changed or left out only against a checkpoint that somebody else kept. The kernel tells the
host of each one; here it becomes the content of a file, or the stdin of a command. One thread does it, one at a time
and always the newest that there is, so that neither a slow disk nor a slow command holds up what is served.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from chio import statedir
from chio.errors import InputError

COMMAND_S = 30.0
_OPTION = "--checkpoint-to"
_BEGINS = b"chio.invalid/"  # of every checkpoint: its log's name


@contextlib.contextmanager
def handing_out(target: str | None, state: Path) -> Iterator[Callable[[str], None]]:
    """What hands one checkpoint out, without waiting for it; at the end the newest is waited for.

    `target` is a file, or after a `|` a command. Raises `InputError` before anything is started. What goes wrong later
    is a line on stderr: a run is not worse for it, but its operator has to know.
    """
    if target is None:
        yield lambda _note: None
        return
    with contextlib.ExitStack() as held:
        deliver = _to_command(target[1:]) if target.startswith("|") else _to_file(Path(target), state, held)
        notes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_hand_out, args=(notes, deliver), name="handout")
        thread.start()
        try:
            yield notes.put
        finally:
            notes.put(None)
            thread.join()


def _hand_out(notes: queue.SimpleQueue[str | None], deliver: Callable[[bytes], None]) -> None:
    """Until None comes. Of several checkpoints that wait, the newest is worth all of them."""
    ended = False
    while not ended:
        waiting = [notes.get()]
        while not notes.empty():
            waiting.append(notes.get())
        ended = waiting[-1] is None
        told = [note for note in waiting if note is not None]
        if told:
            try:
                deliver(told[-1].encode())
            except InputError as error:
                print(f"chio: {error}", file=sys.stderr, flush=True)


def _to_command(text: str) -> Callable[[bytes], None]:
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise _refused(f"|{text}", str(error), "quote the command as for a shell") from error
    if not command:
        raise _refused(f"|{text}", "there is no command after the |", "write '|COMMAND', or name a file")

    def deliver(note: bytes) -> None:
        why = _run(command, note)
        if why is not None:
            raise _lost(command[0], why, "mend the command: the next checkpoint covers this one too")

    return deliver


def _run(command: list[str], note: bytes) -> str | None:
    """Run it once, with the checkpoint as its stdin; why it failed.

    It has a session of its own: Ctrl-C does not reach it, and at its time limit all that it started goes with it.
    stdout is for the host's own documents.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        return os.strerror(error.errno or 0)
    with process:
        try:
            process.communicate(note, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"it took longer than {COMMAND_S:g} s"
    if process.returncode < 0:
        return f"it was ended by signal {-process.returncode}"
    return f"it ended with status {process.returncode}" if process.returncode else None


def _to_file(path: Path, state: Path, held: contextlib.ExitStack) -> Callable[[bytes], None]:
    folder, name = path.parent, path.name
    if not name:
        raise _refused(str(path), "it names no file", "name a file, or write '|COMMAND'")
    if name in statedir.RESERVED_NAMES or name.startswith(statedir.RESERVED_PREFIX):
        raise _refused(str(path), "a host keeps a file of that name in its state", "choose another name")
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(str(path), _why(error, folder), "name a file in a folder that exists") from error
    held.callback(os.close, directory)
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(state)):
        raise _refused(str(path), "it is in the state", "name a file where this host's state is not kept")
    _require_replaceable(path, directory)
    beside = f".{name}.new"

    def deliver(note: bytes) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=directory)  # a host that was killed left it
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=directory)
            with open(fd, "wb") as file:
                file.write(note)
                file.flush()
                os.fsync(fd)
            os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
        except OSError as error:
            raise _lost(
                str(path), _why(error, folder), "make it writable: the next checkpoint covers this one"
            ) from error

    return deliver


def _require_replaceable(path: Path, directory: int) -> None:
    """Nothing is there, or an older checkpoint: a mistyped name shall not cost a file."""
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refused(str(path), "what is there is no checkpoint", "name a new file") from error
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if not regular or os.read(fd, len(_BEGINS)) not in (b"", _BEGINS):
            raise _refused(str(path), "what is there is no checkpoint", "name a new file")
    finally:
        os.close(fd)


def _why(error: OSError, folder: Path) -> str:
    return f"{folder}: {os.strerror(error.errno or 0)}"


def _refused(file: str, why: str, fix: str) -> InputError:
    return InputError("checkpoints cannot be handed out there", file=file, field=_OPTION, why=why, fix=fix)


def _lost(where: str, why: str, fix: str) -> InputError:
    return InputError("a checkpoint was not handed out", file=where, field=_OPTION, why=why, fix=fix)
