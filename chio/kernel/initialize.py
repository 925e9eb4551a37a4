"""`chio process init`, the kernel's half: from two documents to a state directory that can be served.

Everything is decided before the directory is made. The database says `ready` in a last commit, when every file is on
disk: a state that `init` did not finish can never be served, and says so.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from chio import canonical, schema, statedir
from chio.errors import StateError
from chio.kernel import budgets, database, grants
from chio.kernel.clock import Clock
from chio.kernel.constraints import require_schemas
from chio.kernel.grants import Capability
from chio.kernel.log import Log, leaf_hash, origin
from chio.kernel.store import Store
from chio.kernel.vault import HOST
from chio.signing import Keyring, signed_text
from chio.tools.mcp import Tool
from chio.tools.router import tools_digest

_JSON_FILE = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE


@dataclass(frozen=True, slots=True)
class Source:
    """One of the operator's files, as it was read: `path` is absolute."""

    path: str
    text: bytes

    @property
    def digest(self) -> str:
        return sha256(self.text).hexdigest()


@dataclass(frozen=True, slots=True)
class _Decided:
    """Everything of a new state that is known before its directory is made."""

    config: schema.HostConfig
    config_source: Source
    policy_source: Source
    keys: Keyring
    runtime_id: str
    now_ms: int
    issued: dict[str, Capability]
    ceilings: dict[str, int]
    tools: dict[str, list[Tool]]

    def pins(self) -> dict[str, Any]:
        """`chio.pins.v1`: what an auditor copies away."""
        return {
            "schema": "chio.pins.v1",
            "runtime_id": self.runtime_id,
            "kernel_key": self.keys.kernel.public,
            "log_key": self.keys.log.public,
            "authority_key": self.keys.authority.public,
            "config_digest": self.config_source.digest,
            "policy_digest": self.policy_source.digest,
        }

    def bootstrap(self, file_system: statedir.FileSystem) -> bytes:
        """The body of `chio.bootstrap.v1`, JCS."""
        parents = {child.id: child.parent for child in self.config.children}
        return canonical.encode(
            {
                **self.pins(),
                "schema": "chio.bootstrap.v1",
                "created_ms": self.now_ms,
                "time_ms": self.now_ms,
                "log_origin": origin(self.runtime_id),
                "storage": {
                    "filesystem": file_system.name,
                    "journal_mode": "wal",
                    "synchronous": "full",
                    "volatile": not file_system.durable,
                },
                "processes": [
                    {
                        "process_id": name,
                        "parent_id": parents.get(name),
                        "capability_id": capability.id,
                        "ceiling": self.ceilings[name],
                    }
                    for name, capability in self.issued.items()
                ],
                "servers": [
                    {
                        "server_id": server,
                        "tools_digest": tools_digest(found),
                        "tools": [{"name": tool.name, "read_only": tool.read_only} for tool in found],
                    }
                    for server, found in self.tools.items()
                ],
            }
        )


def initialize(
    path: Path,
    config_source: Source,
    policy_source: Source,
    allow_volatile: bool,
    servers: dict[str, list[Tool]] | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Make the state; the JSON that the command prints. Raises `InputError`, `StateError`: nothing servable is left.

    `key`: of a key file, for a state whose workers' data is encrypted at rest.
    """
    decided = _decide(config_source, policy_source, servers or {})
    _refuse_volatile_parent(path, allow_volatile)

    directory = statedir.create(path)
    statedir.write_new(directory, statedir.LOCK, b"")
    lock = statedir.lock(directory, path)
    body = decided.bootstrap(statedir.require_durable(directory, path, allow_volatile))
    signature, bootstrap_id = decided.keys.kernel.sign("bootstrap", body)
    _write_files(directory, decided, signed_text(body, signature))
    os.fchdir(directory)
    store = Store(database.create(directory))
    store.begin()
    if key is not None:
        from chio.kernel.sealed import new_keys

        store.put_data_keys(new_keys(key, decided.runtime_id, [HOST, *decided.issued]))
    _write_rows(store, decided, body, signature, bootstrap_id)
    store.commit()
    os.fsync(directory)
    _sync_parent(path)
    store.begin()
    store.set_host("ready", 1)
    store.commit()
    store.close()
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    return {
        "initialized": True,
        "processes": len(decided.issued),
        "kernel_key": decided.keys.kernel.public,
        "runtime_id": decided.runtime_id,
    }


def _decide(config_source: Source, policy_source: Source, tools: dict[str, list[Tool]]) -> _Decided:
    """Both documents held against each other and against the tools that there are. Raises `InputError`."""
    config = schema.host_config(config_source.text, config_source.path)
    policy = schema.policy(policy_source.text, policy_source.path)
    ceilings = budgets.ceilings(config, config_source.path)
    keys, runtime_id, now_ms = Keyring.generate(), str(uuid.uuid4()), Clock(0).now_ms()
    names = {server: [tool.name for tool in found] for server, found in tools.items()}
    grants.require_tools(config, policy, policy_source.path, names)
    require_schemas(policy, policy_source.path)
    issued = grants.issue(
        config,
        policy,
        config_source.path,
        servers=names,
        runtime_id=runtime_id,
        now_ms=now_ms,
        authority=keys.authority,
    )
    return _Decided(config, config_source, policy_source, keys, runtime_id, now_ms, issued, ceilings, tools)


def _write_files(directory: int, decided: _Decided, bootstrap: bytes) -> None:
    """Every file but the database, each with its final mode and synced."""
    keys = decided.keys
    seeds = {name: getattr(keys, name).seed.hex() for name in ("kernel", "log", "authority")}
    statedir.write_new(directory, statedir.KEYS, orjson.dumps({"schema": "chio.keys.v1", **seeds}, option=_JSON_FILE))
    statedir.write_new(directory, statedir.CONFIG, decided.config_source.text)
    statedir.write_new(directory, statedir.POLICY, decided.policy_source.text)
    statedir.write_new(directory, statedir.KERNEL_PUB, keys.kernel.public.encode() + b"\n")
    statedir.write_new(directory, statedir.PINS, orjson.dumps(decided.pins(), option=_JSON_FILE))
    statedir.write_new(directory, statedir.BOOTSTRAP, bootstrap + b"\n")
    statedir.write_new(directory, statedir.RECEIPTS, b"")


def _write_rows(store: Store, decided: _Decided, body: bytes, signature: str, bootstrap_id: str) -> None:
    """The processes, the mailboxes, and a log whose first leaf is the bootstrap."""
    store.put_host(
        runtime_id=decided.runtime_id,
        created_ms=decided.now_ms,
        bootstrap=signed_text(body, signature).decode(),
        bootstrap_id=bootstrap_id,
        config_path=decided.config_source.path,
        policy_path=decided.policy_source.path,
        ready=0,
    )
    parents = {child.id: child.parent for child in decided.config.children}
    for position, (name, capability) in enumerate(decided.issued.items()):
        store.put_process(
            position,
            name,
            parents.get(name),
            capability.body.depth,
            capability.body.budget_share_bps,
            decided.ceilings[name],
            capability.id,
            capability.text.decode(),
        )
    for box in decided.config.mailboxes:
        store.put_mailbox(box.id)
    log = Log(origin(decided.runtime_id), decided.keys.log)
    hashed = leaf_hash("bootstrap", body, signature)
    store.put_leaf(log.append(hashed), "bootstrap", body, signature, hashed)
    store.put_checkpoint(log.size, b"".join(log.frontier), log.note())


def _refuse_volatile_parent(path: Path, allow_volatile: bool) -> None:
    """Before anything is made: the file system that the state would lie on."""
    above = path if path.is_dir() else path.parent
    try:
        parent = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(
            "a state cannot be created here",
            file=str(path),
            why=os.strerror(error.errno or 0),
            fix="make its parent directory first",
        ) from error
    try:
        statedir.require_durable(parent, path, allow_volatile)
    finally:
        os.close(parent)


def _sync_parent(path: Path) -> None:
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
