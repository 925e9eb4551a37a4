"""`python -I -m chio.kernel FD`: the kernel process, started by the host with its end of the control socket pair."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chio.errors import ChioError, HostFault, InputError
from chio.kernel import database, vault
from chio.kernel.database import CommitFailed, unreadable
from chio.kernel.store import Store
from chio.tools.mcp import Tool
from chio.wire import Channel
from confine import ConfineError
from confine.lockdown import confine_kernel, start_filtered
from confine.spec import Filter


def main() -> int:
    # Ctrl-C, and what a service manager sends, reach the whole group; when to stop is the host's decision, told over
    # the control socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), "host")
    try:
        received = channel.receive(wait=True)
        assert received is not None
        message, fds = received
        if message["op"] == "init":
            channel.send(_reply(message, lambda: _initialize(message, fds)))
            return 0
        if message["op"] == "restore":
            channel.send(_reply(message, lambda: _restore(message, fds)))
            return 0
        if message["op"] == "quit":
            channel.send({"re": message["id"], "ok": True})
            return 0
        return _serve(channel, message, fds)
    except HostFault:
        return 1


def _initialize(message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    import base64

    from chio.kernel.initialize import Source, initialize

    config, policy = (Source(file, base64.b64decode(text)) for file, text in (message["config"], message["policy"]))
    tools = _declared(message["servers"], fds, config.path) if message["servers"] else {}
    key = vault.read_key(fds[-1], message["key_file"]) if message.get("key_file") else None
    return {"result": initialize(Path(message["path"]), config, policy, message["allow_volatile"], tools, key)}


def _restore(message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    import base64

    from chio.kernel.backup import Restore, restore

    checkpoint, file = message["checkpoint"], message["key_file"]
    asked = Restore(
        Path(message["backup"]),
        Path(message["path"]),
        message["by"],
        Path(message["signing_keys"]) if message["signing_keys"] else None,
        (base64.b64decode(checkpoint[0]), checkpoint[1]) if checkpoint else None,
        message["allow_volatile"],
    )
    return {"result": restore(asked, (vault.read_key(fds[0], file), file) if file else None)}


def _declared(servers: list[str], fds: list[int], file: str) -> dict[str, list[Tool]]:
    """The tools that each started server declares, to be pinned."""
    from chio.tools.mcp import ServerFault, StdioClient
    from chio.tools.router import tools_digest

    async def ask(client: StdioClient) -> list[Tool] | str:
        try:
            tools = await client.start()
            tools_digest(tools)
            return tools
        except ServerFault as error:
            return str(error)
        finally:
            client.close("init is done")

    async def ask_all() -> list[list[Tool] | str]:
        loop = asyncio.get_running_loop()
        clients = [StdioClient(loop, fds[2 * n], fds[2 * n + 1], lambda _: None) for n in range(len(servers))]
        return await asyncio.gather(*(ask(client) for client in clients))

    found: dict[str, list[Tool]] = {}
    for position, (server, answer) in enumerate(zip(servers, asyncio.run(ask_all()), strict=True)):
        if isinstance(answer, str):
            raise InputError(
                "a tool server cannot be used",
                file=file,
                field=f"servers[{position}]",
                why=answer,
                fix="run its command by hand to see what it says",
            )
        found[server] = answer
    return found


def _serve(channel: Channel, message: dict[str, Any], fds: list[int]) -> int:
    import uvloop

    from chio.kernel.control import Control
    from chio.kernel.process import Kernel

    held: list[Filter] = []

    def close_calls() -> dict[str, Any]:
        held.append(_confined(start_filtered))
        return {}

    refusal = _reply(message, close_calls)
    if not held:
        channel.send(refusal)
        return 1
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    control = Control(loop, channel)
    directory = fds[0]  # fds[1] is the state's lock: held until this process is dead
    opened: list[Kernel] = []

    def start() -> dict[str, Any]:
        path = message["path"]
        os.fchdir(directory)
        store = Store(database.open_existing(directory, path))
        try:
            file = message.get("key_file")
            key = vault.read_key(fds[2], file) if file else None
            kernel = Kernel(loop, store, directory, path, message["allow_volatile"], control, key, file)
        except sqlite3.DatabaseError as error:
            store.close()
            raise unreadable(path, error) from error
        except ChioError:
            store.close()  # a state that is refused keeps no -wal and -shm from being looked at
            raise
        try:
            _confined(lambda: confine_kernel(held[0], directory))
        except HostFault:
            store.close()
            raise
        opened.append(kernel)
        return {
            "runtime_id": kernel.runtime_id,
            "kernel_key": kernel.kernel_key,
            "processes": list(kernel.tree.nodes),
            "config_path": kernel.host["config_path"],
            "config": kernel.config_text,
            "grants_live": kernel.grants_live(),
            "recovered": kernel.recovered,
            "replay_only": kernel.replay_only,
        }

    reply = _reply(message, start)
    channel.send(reply)
    if not opened:
        return 1
    control.attach(opened[0])
    loop.set_exception_handler(lambda _loop, context: _end(message["path"], context))
    loop.run_until_complete(control.stopped)
    try:
        opened[0].close()
    except CommitFailed as error:
        _end(message["path"], {"exception": error})
    return 0


def _confined(work: Callable[[], Any]) -> Any:
    """A kernel that cannot be confined does not serve: the keys are in its memory."""
    try:
        return work()
    except (ConfineError, OSError) as error:
        fix = "run chio-confine doctor to see what this machine lacks"
        raise HostFault("the Chio kernel's process cannot be confined", why=str(error), fix=fix) from error


def _end(path: str, context: dict[str, Any]) -> None:
    """A fault of ours or of the disk: end at once, answer nothing more. What was acknowledged is on disk already."""
    error = context.get("exception")
    print(
        f"chio: the Chio kernel stopped ({path}, {error or context['message']}; run the same command again)",
        file=sys.stderr,
    )
    if error is not None and not isinstance(error, CommitFailed):
        traceback.print_exception(error)
    os._exit(70)


def _reply(message: dict[str, Any], work: Any) -> dict[str, Any]:
    try:
        return {"re": message["id"], "ok": True, **work()}
    except ChioError as error:
        return {"re": message["id"], "ok": False, "error": {"kind": type(error).__name__, **error.as_wire()}}


if __name__ == "__main__":
    sys.exit(main())
