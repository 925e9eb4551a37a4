"""`chio process evidence`, the host's half: a new file, and a stopped state that signs itself into it.

Opening the state takes its lock and recovers it, so no call is in flight. No tool server and no worker is started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chio import statedir
from chio.errors import InputError
from chio.host import Host

WITHHELD = ("arguments", "outputs")
MAX_SELECTORS = 64
MAX_SELECTOR_BYTES = 1024


def require_selectors(selectors: tuple[str, ...]) -> None:
    """`arguments` or `outputs`, each alone or with `:PATTERN`. Raises `InputError`."""
    for selector in selectors:
        what, colon, pattern = selector.partition(":")
        if what not in WITHHELD or (colon and not pattern) or len(selector.encode()) > MAX_SELECTOR_BYTES:
            raise _refused_selector(f"`{selector[:80]}`")
    if len(selectors) > MAX_SELECTORS:
        raise _refused_selector(f"{len(selectors)} of them, the most are {MAX_SELECTORS}")


def write_evidence(
    state: Path, out: Path, withhold: tuple[str, ...], *, allow_volatile: bool, key_file: Path | None = None
) -> dict[str, Any]:
    """Write the bundle to a new file; the JSON that the command prints. Raises `InputError`, `StateError`."""
    require_selectors(withhold)
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(
            "the bundle cannot be written",
            file=str(out),
            field="--out",
            why=os.strerror(error.errno or 0),
            fix="name a new file in a directory that exists",
        ) from error
    written = False
    try:
        host = Host(state, allow_volatile=allow_volatile, key_file=key_file)
        try:
            host.kernel.call("finish")  # the checkpoint that the manifest stands on, on disk before it is shown
            answer = host.kernel.call("evidence", (fd,), withhold=list(withhold))
        finally:
            host.close()
        statedir.sync_parent(out)  # the kernel has synced the file, not its name
        written = True
    finally:
        os.close(fd)
        if not written:
            os.unlink(out)
    members = ("runtime_id", "leaves", "bytes", "withheld", "sections")
    return {"schema": "chio.process.evidence.v1", "file": str(out), **{name: answer[name] for name in members}}


def _refused_selector(why: str) -> InputError:
    return InputError(
        "what to withhold is not understood",
        field="--withhold",
        why=why,
        fix="write arguments or outputs, alone or with :PATTERN over a process or server/tool",
    )
