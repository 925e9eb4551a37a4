"""What the probes attack, on the machine's side: folders, sockets on loopback, a neighbour, a secret.

Everything is made in two new folders of mode 0700 and removed at the end. Nothing of the machine is touched, nothing
listens beyond loopback, and nothing here does a probe's act: this side only offers targets, and looks for damage.
"""

import errno
import fcntl
import json
import os
import pty
import secrets
import shutil
import socket
import tempfile
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from confine.errors import ConfineError

_VARIABLE = "CHIO_PROBE_SECRET"
_AWAY_FROM_TMP = "/var/tmp"  # what lies below /tmp inherits what Landlock grants there, where a worker may write
_READY_SECONDS = 20
_DISCARD_PORT = 9  # where there is no IPv6, a port that nobody listens on
# The neighbour: an attempt like any other, with a scratch folder and a socket, that the probes try to reach.
NEIGHBOUR = """
import ctypes, json, os, socket, sys, time
given = json.loads(sys.argv[1])
with open(given["scratch"] + "/secret", "w") as file:
    file.write(given["secret"])
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + given["abstract"])
listener.listen()
ctypes.CDLL(None).shmget(given["shm_key"], 4096, 0o1666)
with socket.socket(socket.AF_UNIX) as kernel:
    kernel.connect("/run/chio/process.sock")
    kernel.sendall(b"ready")
while True:
    time.sleep(60)
"""


class Counterparts:
    """The targets, as attributes that confine.probes.World carries inside. A context manager; one thread."""

    def __init__(self) -> None:
        self.secret_text = secrets.token_hex(16)
        self.abstract = f"chio-probe-{secrets.token_hex(8)}"
        self.neighbour_abstract = f"chio-probe-{secrets.token_hex(8)}"
        self.neighbour_shm_key = secrets.randbelow(1 << 30) + 1
        self._own = ExitStack()

    def __enter__(self) -> "Counterparts":
        self.top = self._new_folder(_AWAY_FROM_TMP)
        self.below_tmp = self._new_folder("/tmp")
        try:
            self._folders()
            self._sockets()
            self._leaks()
        except BaseException:
            self._own.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close()

    def _new_folder(self, parent: str) -> Path:
        folder = tempfile.mkdtemp(prefix="chio-probe-", dir=parent)
        self._own.callback(shutil.rmtree, folder)
        return Path(folder)

    def _folders(self) -> None:
        self.secret = self.top / "secret"
        self.cwd, self.private = self.top / "project", self.top / "private"
        self.exports, self.neighbour_scratch = self.top / "exports", self.top / "neighbour"
        for folder, mode in ((self.cwd, 0o755), (self.private, 0o700), (self.exports, 0o755), (self.secret, 0o755),
                             (self.neighbour_scratch, 0o755)):  # fmt: skip
            folder.mkdir()
            folder.chmod(mode)
        self._text(self.secret / "secret")
        (self.cwd / "harmless").mkdir()
        (self.cwd / "harmless" / "secret").write_text("harmless")
        (self.cwd / "swap").symlink_to("harmless")
        for folder in (self.cwd, self.private, self.below_tmp):
            self._text(folder / "input")
            os.mkfifo(folder / "pipe")
            (folder / "pipe").chmod(0o666)
            # Held open, so that a writer finds a reader.
            self._own.callback(os.close, os.open(folder / "pipe", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        for name in ("state", "moving"):
            self._state(self.cwd / name)

    def _sockets(self) -> None:
        self.tcp4 = self._listen(socket.AF_INET, ("127.0.0.1", 0)).getsockname()[1]
        try:
            self.tcp6 = self._listen(socket.AF_INET6, ("::1", 0)).getsockname()[1]
        except OSError:
            self.tcp6 = _DISCARD_PORT
        self._udp = self._own.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._udp.bind(("127.0.0.1", 0))
        self._udp.setblocking(False)
        self.udp = self._udp.getsockname()[1]
        self._listen(socket.AF_UNIX, "\0" + self.abstract)
        for folder in (self.cwd, self.private):
            self._listen(socket.AF_UNIX, str(folder / "host.sock"))
        # In place of the Chio kernel's: takes bytes and, like it, no descriptors.
        self.kernel_socket = str(self.top / "process.sock")
        threading.Thread(target=_answer, args=[self._listen(socket.AF_UNIX, self.kernel_socket)], daemon=True).start()
        self.neighbour_socket = str(self.top / "neighbour.sock")
        self._neighbour = self._listen(socket.AF_UNIX, self.neighbour_socket)

    def _leaks(self) -> None:
        """A descriptor that exec would pass on (7, or the next free one) and a variable of the environment."""
        folder = os.open(self.secret, os.O_RDONLY | os.O_DIRECTORY)
        self.inherited = fcntl.fcntl(folder, fcntl.F_DUPFD, 7)
        os.close(folder)
        self._own.callback(os.close, self.inherited)
        os.environ[_VARIABLE] = self.secret_text
        self._own.callback(os.environ.pop, _VARIABLE, None)

    def _text(self, path: Path) -> None:
        path.write_text(self.secret_text)
        path.chmod(0o644)

    def _state(self, path: Path) -> None:
        """A folder that holds what a host's state does."""
        path.mkdir(mode=0o700)
        (path / "authority.db").write_text("no database")
        self._text(path / "keys")

    def _listen(self, family: int, address: tuple[str, int] | str) -> socket.socket:
        listener = self._own.enter_context(socket.socket(family))
        listener.bind(address)
        listener.listen(64)
        self._own.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes who accepts on it
        if isinstance(address, str) and not address.startswith("\0"):
            os.chmod(address, 0o777)
        return listener

    # --- while probes run ---------------------------------------------------------------------------------------------

    def neighbour_arguments(self) -> str:
        given = {
            "scratch": str(self.neighbour_scratch),
            "secret": self.secret_text,
            "abstract": self.neighbour_abstract,
            "shm_key": self.neighbour_shm_key,
        }
        return json.dumps(given)

    def await_neighbour(self) -> None:
        """Until it said that its targets stand. ConfineError if it does not."""
        self._neighbour.settimeout(_READY_SECONDS)
        with suppress(TimeoutError), self._neighbour.accept()[0] as connection:
            connection.settimeout(_READY_SECONDS)
            if connection.recv(16) == b"ready":
                return
        raise ConfineError("the probes' neighbour did not start", fix="try chio-confine run true")

    def make_late_targets(self) -> None:
        """What appears in given folders after the launch was planned."""
        self._listen(socket.AF_UNIX, str(self.cwd / "late.sock"))
        for folder in (self.cwd, self.private):
            self._state(folder / "late")
        self._inventory = self._listing()

    @contextmanager
    def terminal(self) -> Iterator[int]:
        """A new terminal in raw mode: the descriptor that a program gets as its standard input."""
        master, slave = pty.openpty()
        try:
            tty.setraw(slave)
            yield slave
        finally:
            os.close(slave)
            os.close(master)

    @contextmanager
    def turning(self, probe: str) -> Iterator[None]:
        """While open, a thread turns what that probe races for."""
        turn = {"race_on_a_link_in_cwd": self._turn_link, "race_on_a_mask": self._turn_state}.get(probe)
        if turn is None:
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(target=_repeat, args=[turn, stop])
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _turn_link(self) -> None:
        for target in (str(self.secret), "harmless"):
            (self.cwd / "next").symlink_to(target)
            os.replace(self.cwd / "next", self.cwd / "swap")

    def _turn_state(self) -> None:
        os.rename(self.cwd / "moving", self.cwd / "moved")
        os.rename(self.cwd / "moved", self.cwd / "moving")

    def damage(self) -> str | None:
        """What a probe did outside, in words; None if nothing."""
        with suppress(BlockingIOError):
            self._udp.recv(64)
            return "a datagram came to the host's loopback"
        for file in (self.cwd / "input", self.private / "input", self.secret / "secret", self.cwd / "state" / "keys"):
            if not file.is_file() or file.read_text() != self.secret_text:
                return f"{file.name} in {file.parent.name}/ was changed"
        if self._listing() != self._inventory:
            return "a file appeared, vanished or changed its mode in a folder that is read-only inside"
        return None

    def _listing(self) -> set[tuple[str, int]]:
        folders = (self.cwd, self.private, self.below_tmp, self.exports, self.neighbour_scratch, self.secret)
        return {(str(path), path.lstat().st_mode) for folder in folders for path in (folder, *folder.rglob("*"))}


def _repeat(turn: Callable[[], None], stop: threading.Event) -> None:
    while not stop.is_set():
        turn()


def _answer(listener: socket.socket) -> None:
    """Takes one connection after another: reads what comes first, without descriptors, and answers one byte."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in {errno.EBADF, errno.EINVAL}:
                return  # closed: the probes are over
            raise
        with connection, suppress(ConnectionError, TimeoutError):
            connection.settimeout(2)
            connection.recv(64)
            connection.send(b"k")
