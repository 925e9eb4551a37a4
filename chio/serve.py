"""`chio process serve`: a host for workers that someone else launches, and the operator's verbs on a stopped host.

One socket, identity by credential alone. The tool servers run as they do under `run`; without any, nothing here needs
root. `run` and `serve` exclude each other by the state's lock.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from chio import schema, statedir
from chio.errors import InputError
from chio.host import Host, read_document
from chio.signals import stop_signals
from chio.wire import PROTOCOL

if TYPE_CHECKING:
    from chio.servers import ToolServers

_BACKLOG = 128
_MAX_PATH_BYTES = 107  # sun_path without its NUL (unix(7))


def serve(
    host: Host,
    path: Path,
    roots: tuple[str, ...],
    without: tuple[str, ...],
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called once, when workers can connect. Raises `ChioError`."""
    with contextlib.ExitStack() as held:
        wakeup = held.enter_context(stop_signals())
        selector = held.enter_context(selectors.DefaultSelector())
        stopping: list[bool] = []
        selector.register(wakeup, selectors.EVENT_READ, lambda: stopping.append(bool(wakeup.recv(64))))
        servers = _start_servers(host, roots, without, selector, held)
        selector.register(host.kernel, selectors.EVENT_READ, lambda: _kernel_said(host, servers))
        while servers is not None and not servers.ready and not stopping:
            _turn(selector)
            _kernel_said(host, servers)
            servers.require_usable(host.path)
        if stopping:
            return
        with _listening(path) as listening:
            host.kernel.call("serve", (listening.fileno(),))
            ready({"ready": True, "protocol": PROTOCOL, "socket_path": str(path), "kernel_key": host.kernel_key})
            while not stopping:
                _kernel_said(host, servers)
                _turn(selector)
            host.kernel.call("drain")
        host.kernel.call("finish")
        if servers is not None:
            servers.stop()
            while servers.alive:
                _turn(selector)


def _start_servers(
    host: Host,
    roots: tuple[str, ...],
    without: tuple[str, ...],
    selector: selectors.BaseSelector,
    held: contextlib.ExitStack,
) -> ToolServers | None:
    """The host's tool servers, started; None when it has none (then no launcher either)."""
    config = schema.host_config(host.config_text.encode(), host.config_path)
    if not config.servers:
        return None
    from chio.servers import ToolServers, prepare
    from confine import Launcher

    launcher = held.enter_context(Launcher.start((host.lock,)))
    servers = ToolServers(prepare(config, host.config_path, host.path, roots, without), launcher, host.kernel)

    def said() -> None:
        for event in launcher.receive():
            servers.launcher_said(event)

    selector.register(launcher, selectors.EVENT_READ, said)
    servers.start_all()
    return servers


def _kernel_said(host: Host, servers: ToolServers | None) -> None:
    """All that the kernel has said, also what arrives while one of these is being seen to."""
    while host.kernel.pending:
        for event, _ in host.kernel.events():
            if servers is not None and event["event"] in ("server", "server_needed"):
                servers.kernel_said(event)


def _turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select():
        key.data()


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A new socket at `path`, mode 0600; only what we made there is removed again."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise InputError(
            "a socket path is too long",
            file=str(path),
            field="--socket",
            why=f"over {_MAX_PATH_BYTES} bytes",
            fix="choose a shorter one",
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise InputError(
            "the socket cannot be made",
            file=str(path),
            field="--socket",
            why=os.strerror(error.errno or 0),
            fix="remove what is there if no host serves it, or choose another path",
        ) from error
    finally:
        os.umask(before)
    made = os.stat(path, follow_symlinks=False)
    try:
        listening.listen(_BACKLOG)
        yield listening
    finally:
        listening.close()
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(path, follow_symlinks=False)
            if (now.st_dev, now.st_ino) == (made.st_dev, made.st_ino):
                os.unlink(path)


# --- with the host stopped -------------------------------------------------------------------------------------------


def credential(host: Host, process: str, socket_path: Path, out: Path) -> dict[str, Any]:
    """A new connection descriptor for a worker of this process, in a new file of mode 0600. It is never printed."""
    folder = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if out.parent.is_dir() else -1
    if folder < 0 or os.path.lexists(out):
        why = "its folder does not exist" if folder < 0 else "it exists"
        raise InputError(
            "the connection descriptor cannot be written",
            file=str(out),
            field="--out",
            why=why,
            fix="name a new file in a folder that exists",
        )
    try:
        connection = host.kernel.call("credential", process=process)["connection"]
        connection["socket_path"] = str(socket_path.absolute())
        statedir.write_new(folder, out.name, orjson.dumps(connection, option=orjson.OPT_INDENT_2) + b"\n")
        os.fsync(folder)
    finally:
        os.close(folder)
    return {"process": process, "connection": str(out), "socket_path": connection["socket_path"]}


def reconcile(host: Host, process: str, key: str, outcome: str, evidence: Path, by: str) -> dict[str, Any]:
    """The operator's statement about an unknown outcome, with the digest of what it rests on."""
    require_name(by)
    digest = sha256(read_document(evidence, 1 << 30)).hexdigest()
    answer = host.kernel.call("reconcile", process=process, key=key, outcome=outcome, by=by, evidence_sha256=digest)
    host.kernel.call("finish")
    return {"process": process, "operation_key": key, "log_index": answer["log_index"], **answer["reconciliation"]}


def accept(host: Host, by: str) -> dict[str, Any]:
    """A restored state admits new work from here on; committed and checkpointed."""
    require_name(by)
    answer = host.kernel.call("accept", by=by)
    host.kernel.call("finish")
    return {"accepted": True, "epoch": answer["epoch"]}


def require_name(by: str) -> None:
    """Whoever states something that the log keeps is named."""
    if not by.strip() or len(by) > 256:
        raise InputError(
            "a statement names who makes it", field="--by", why="empty or over 256 characters", fix="give a name"
        )


def tell(host: Host, op: str, process: str, by: str | None = None) -> dict[str, Any]:
    """`revoke`, `revoke_capability`, `cancel` or `delete` of one process, committed and checkpointed."""
    if by is not None:
        require_name(by)
    answer = host.kernel.call(op, process=process, by=by)
    host.kernel.call("finish")
    return {
        "process": process,
        **{name: value for name, value in answer.items() if name not in ("re", "ok", "process")},
    }
