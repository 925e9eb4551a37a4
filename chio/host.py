"""The host: owns every process of one state. It holds no key and no database.

It takes the state's lock, starts the kernel (and, through `chio.runner`, the launcher), and speaks with the kernel
over an inherited socket pair. Every process it starts keeps the lock's descriptor, so the next host cannot begin before
all of them are dead.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chio import keyfile, statedir
from chio.errors import ChioError, HostFault, InputError, StateError
from chio.wire import Channel

_KINDS = {"StateError": StateError, "InputError": InputError}
_STOP_S = 10.0


class KernelProcess:
    """The kernel as the host sees it: one request at a time over the control socket.

    `checkpointed` is called with each checkpoint of the log, in their order, whatever the host was just waiting for.
    """

    def __init__(
        self, pass_fds: tuple[int, ...] = (), checkpointed: Callable[[str], None] = lambda _note: None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = (
                subprocess.Popen(  # -I: nothing of the caller's directory or environment decides what it loads
                    [sys.executable, "-I", "-m", "chio.kernel", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), *pass_fds),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )
        self._channel = Channel(ours, "kernel")
        self._checkpointed = checkpointed
        self._next = 0
        self._events: list[tuple[dict[str, Any], list[int]]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    def call(self, op: str, fds: tuple[int, ...] = (), **members: Any) -> dict[str, Any]:
        """Ask and wait for the answer. Raises what the kernel refused with, or `HostFault` when it is gone."""
        self._next += 1
        self._channel.send({"id": self._next, "op": op, **members}, fds)
        while True:
            received = self._channel.receive(wait=True)
            assert received is not None
            message, _ = received
            if message.get("re") != self._next:
                self._heard(received)
            elif message["ok"]:
                return message
            else:
                error = message["error"]
                kind = _KINDS.get(error.pop("kind"), HostFault)
                raise kind(error.pop("what"), **error)

    def _heard(self, received: tuple[dict[str, Any], list[int]]) -> None:
        message, _ = received
        if message.get("event") == "checkpoint":
            self._checkpointed(message["note"])
        else:
            self._events.append(received)

    @property
    def pending(self) -> bool:
        """Whether the kernel has said something by itself that `events` has not yet given. `HostFault` when it is gone.

        What arrives while an answer is waited for is kept here, and the socket does not become readable for it again.
        """
        while (received := self._channel.receive(wait=False)) is not None:
            self._heard(received)
        return bool(self._events)

    def events(self) -> list[tuple[dict[str, Any], list[int]]]:
        """What the kernel said by itself, with its descriptors, now the caller's. `HostFault` when it is gone."""
        taken, self._events = (self._events, []) if self.pending else ([], [])
        return taken

    def close(self) -> None:
        """End it in order; if it is gone or stuck, end it anyway. It loses nothing either way."""
        try:
            self.call("quit")
            self._process.wait(_STOP_S)
        except (ChioError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(HostFault):
            _ = self.pending  # to the end of what it said: its last checkpoint is committed after `quit`
        self._channel.close()


class Host:
    """One opened and recovered state, and the kernel that serves it."""

    def __init__(
        self,
        path: Path,
        *,
        allow_volatile: bool = False,
        key_file: Path | None = None,
        checkpointed: Callable[[str], None] = lambda _note: None,
    ) -> None:
        """`checkpointed` is told the log's newest checkpoint, and each one that is committed until it is closed."""
        self.path = path
        with contextlib.ExitStack() as held:
            directory = statedir.open_existing(path)
            held.callback(os.close, directory)
            fds = [directory]
            if key_file is not None:
                fds.append(keyfile.open_for(key_file, path))
                held.callback(os.close, fds[1])
            self.lock = statedir.lock(directory, path)
            fds.insert(1, self.lock)
            self.kernel = KernelProcess((self.lock,), checkpointed)
            try:
                opened = self.kernel.call(
                    "open",
                    tuple(fds),
                    path=str(path),
                    allow_volatile=allow_volatile,
                    key_file=str(key_file) if key_file is not None else None,
                )
            except BaseException:
                self.kernel.close()
                os.close(self.lock)
                raise
        self.runtime_id: str = opened["runtime_id"]
        self.kernel_key: str = opened["kernel_key"]
        self.processes: list[str] = opened["processes"]
        self.config_path: str = opened["config_path"]
        self.config_text: str = opened["config"]
        self.replay_only: bool = opened["replay_only"]

    def close(self) -> None:
        self.kernel.close()
        os.close(self.lock)


def initialize(
    config: Path,
    path: Path,
    *,
    allow_volatile: bool,
    runtime_roots: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    key_file: Path | None = None,
) -> dict[str, Any]:
    """`chio process init`: read the two documents, let a kernel make the state. Raises `InputError`, `StateError`.

    Tool servers are started for it, confined, so that the tools they declare can be pinned.
    """
    from chio import schema

    config_text = read_document(config)
    parsed = schema.host_config(config_text, str(config))
    policy = config.parent / parsed.policy
    policy_text = read_document(policy)
    schema.policy(policy_text, str(policy))
    kernel = KernelProcess()
    try:
        with contextlib.ExitStack() as started:
            fds: tuple[int, ...] = ()
            keys: tuple[int, ...] = ()
            if key_file is not None:
                keys = (keyfile.open_for(key_file, path),)
                started.callback(os.close, keys[0])
            if parsed.servers:
                from chio.servers import prepare, start_for_init

                fds = started.enter_context(
                    start_for_init(prepare(parsed, str(config), path, runtime_roots, without), str(config))
                )
            answer = kernel.call(
                "init",
                (*fds, *keys),
                path=str(path.absolute()),
                config=[str(config.absolute()), base64.b64encode(config_text).decode()],
                policy=[str(policy.absolute()), base64.b64encode(policy_text).decode()],
                allow_volatile=allow_volatile,
                servers=[server.id for server in parsed.servers],
                key_file=str(key_file) if key_file is not None else None,
            )
    finally:
        kernel.close()
    result: dict[str, Any] = answer["result"]
    return result


def restore(
    backup: Path,
    state: Path,
    *,
    by: str,
    signing_keys: Path | None,
    checkpoint: Path | None,
    key_file: Path | None,
    allow_volatile: bool,
) -> dict[str, Any]:
    """`chio process restore`: let a kernel make a state from a backup. Raises `InputError`, `StateError`."""
    noted = base64.b64encode(read_document(checkpoint, 1 << 20)).decode() if checkpoint is not None else None
    kernel = KernelProcess()
    try:
        with contextlib.ExitStack() as held:
            fds: tuple[int, ...] = ()
            if key_file is not None:
                fds = (keyfile.open_for(key_file, state),)
                held.callback(os.close, fds[0])
            answer = kernel.call(
                "restore",
                fds,
                backup=str(backup.absolute()),
                path=str(state.absolute()),
                by=by,
                signing_keys=str(signing_keys.absolute()) if signing_keys is not None else None,
                checkpoint=[noted, str(checkpoint)] if checkpoint is not None else None,
                key_file=str(key_file) if key_file is not None else None,
                allow_volatile=allow_volatile,
            )
    finally:
        kernel.close()
    result: dict[str, Any] = answer["result"]
    return result


def read_document(file: Path, limit: int = 8 * 1024 * 1024) -> bytes:
    """The bytes of one of the operator's files. Raises `InputError`."""
    try:
        with open(file, "rb") as opened:
            return opened.read(limit)
    except OSError as error:
        raise InputError(
            "a document cannot be read", file=str(file), why=os.strerror(error.errno or 0), fix="name a readable file"
        ) from error
