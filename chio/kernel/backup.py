"""`chio process backup` and `restore`: a stopped state as a folder of plain files, and a state from such a folder.

A backup is a copy of what a stopped host has on disk, its write-ahead log folded in, with a manifest that is written
last. It has no signing keys unless they are asked for, and an encrypted state's backup is as encrypted as the state.
A restored state begins a new epoch (`chio.kernel.epoch`) and only replays until the operator accepts it.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from chio import canonical, schema, statedir
from chio.errors import InputError, StateError
from chio.kernel import database, epoch, vault
from chio.kernel.clock import Clock
from chio.kernel.log import Log, NotACheckpoint, leaf_hash, origin, read_note
from chio.kernel.pinned import read_keys
from chio.kernel.recovery import newest_time_ms
from chio.kernel.store import Store
from chio.signing import Keyring

MANIFEST = "backup.json"
_NEVER_COPIED = frozenset(
    {statedir.LOCK, statedir.DATABASE, f"{statedir.DATABASE}-wal", f"{statedir.DATABASE}-shm", statedir.KEYS}
)
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Restore:
    """What `restore` is asked. `signing_keys`: a `keys.json` kept elsewhere. `checkpoint`: a C2SP note and its file."""

    backup: Path
    state: Path
    by: str
    signing_keys: Path | None
    checkpoint: tuple[bytes, str] | None
    allow_volatile: bool


# --- backup ----------------------------------------------------------------------------------------------------------


def back_up(state: Path, out: Path, *, with_signing_key: bool) -> dict[str, Any]:
    """Copy a stopped state to the new folder `out`. Raises `StateError`; what failed half way has no manifest."""
    directory = statedir.open_existing(state)
    lock = None
    try:
        lock = statedir.lock_for_reading(directory, state)
        if lock is None:
            raise StateError(
                "a live state cannot be backed up", file=str(state), why="a host is running on it", fix="stop it first"
            )
        if Path(os.path.realpath(state)) in (Path(os.path.realpath(out)), *Path(os.path.realpath(out)).parents):
            raise InputError(
                "a backup does not go into the state",
                file=str(out),
                field="--out",
                fix="name a new folder outside the state",
            )
        target = statedir.create(out)
        try:
            for name in (statedir.DATABASE, f"{statedir.DATABASE}-wal"):
                _copy(state / name, out / name)
            size, root, host = _fold(out / statedir.DATABASE, str(state))
            names = [statedir.DATABASE, *sorted(_others(state))]
            if with_signing_key:
                names.append(statedir.KEYS)
            for name in names[1:]:
                (out / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _copy(state / name, out / name)
            manifest = {
                "schema": "chio.backup.v1",
                "runtime_id": host["runtime_id"],
                "created_ms": time.time_ns() // 1_000_000,
                "epoch": host["epoch"],
                "size": size,
                "root": root.hex(),
                "signing_key": with_signing_key,
                "files": [_described(out, name) for name in names],
            }
            _sync_folders(out)
            statedir.write_new(target, MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n")
            os.fsync(target)
        finally:
            os.close(target)
    finally:
        if lock is not None:
            os.close(lock)
        os.close(directory)
    return {"backup": str(out), **{name: manifest[name] for name in ("runtime_id", "size", "root", "signing_key")}}


def _others(state: Path) -> Iterator[str]:
    """The regular files of the state beside its database: its own, and what was exported into it."""
    for folder, _, files in os.walk(state):
        for name in files:
            path = Path(folder) / name
            relative = str(path.relative_to(state))
            if relative not in _NEVER_COPIED and stat.S_ISREG(path.lstat().st_mode):
                yield relative


def _copy(source: Path, target: Path) -> None:
    """One file, synced, mode 0600, without touching the source's access time. A missing source is left out."""
    try:
        read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with os.fdopen(read, "rb") as reading:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as writing:
            shutil.copyfileobj(reading, writing, _BLOCK)
            writing.flush()
            os.fsync(writing.fileno())


def _fold(file: Path, path: str) -> tuple[int, bytes, dict[str, Any]]:
    """Fold the copy's write-ahead log into it and check its log: (size, root, row of the host)."""
    with database.copied(file, path) as opened:
        store = Store(opened)
        store.erase_log()
        host = store.host()
        if not host.get("ready"):
            raise database.half_initialised(path)
        log = _checked_log(store, origin(host["runtime_id"]), None, path)
    return log.size, log.root(), host


def _checked_log(
    store: Store, name: str, keys: Keyring | None, path: str, held: tuple[int, bytes] | None = None
) -> Log:
    """The log made anew from its leaves, held against each checkpoint in the state and against `held` (size, root)."""
    key = keys.log if keys else Keyring.generate().log  # without the log's key nothing is signed
    log, frontiers = Log(name, key), dict(store.checkpoint_frontiers())
    held_root = log.root() if held is not None and held[0] == 0 else None
    for index, kind, body, signature, hashed in store.leaves():
        if index != log.size or leaf_hash(kind, body.encode(), signature) != hashed:
            raise StateError("the log is damaged", file=path, field=f"leaf {log.size}", fix="use an older backup")
        log.append(hashed)
        if frontiers.get(log.size, b"".join(log.frontier)) != b"".join(log.frontier):
            raise StateError(
                "the log is not the one that its checkpoints signed",
                file=path,
                field=f"checkpoint {log.size}",
                fix="use an older backup",
            )
        if held is not None and held[0] == log.size:
            held_root = log.root()
    if held is not None and held_root != held[1]:
        raise StateError(
            "the backup does not hold what the checkpoint covers",
            file=path,
            field="--checkpoint",
            why=f"the checkpoint covers {held[0]} leaves, the backup has {log.size}"
            if held[0] > log.size
            else f"its first {held[0]} leaves are others",
            fix="use a newer backup; without --checkpoint this one is restored, and what it lacks is lost",
        )
    return log


def _described(folder: Path, name: str) -> dict[str, Any]:
    return {"name": name, "bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}


def _digest(file: Path) -> str:
    hashed = sha256()
    with open(file, "rb") as reading:
        while block := reading.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest()


def _sync_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# --- restore ---------------------------------------------------------------------------------------------------------


def restore(asked: Restore, key: tuple[bytes, str] | None) -> dict[str, Any]:
    """Make a state from a backup: files first, then the database, checked and with its epoch, by rename.

    `key`: a key file's bytes and name, to be held against an encrypted backup. Raises `InputError`, `StateError`.
    """
    manifest = _manifest(asked.backup)
    if not manifest.signing_key and asked.signing_keys is None:
        raise InputError(
            "a restored state needs its signing keys",
            file=str(asked.backup),
            field="--signing-key",
            why="the backup was made without them",
            fix=f"name the {statedir.KEYS} that was kept elsewhere",
        )
    for entry in manifest.files:
        found = asked.backup / entry.name
        if not found.is_file() or found.is_symlink() or _digest(found) != entry.sha256:
            raise InputError(
                "the backup is damaged", file=str(found), why="it is not what the manifest says", fix="use another one"
            )
    directory = statedir.create(asked.state)
    try:
        statedir.require_durable(directory, asked.state, asked.allow_volatile)
        for entry in manifest.files:
            if entry.name not in (statedir.DATABASE, statedir.KEYS):
                (asked.state / entry.name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _copy(asked.backup / entry.name, asked.state / entry.name)
        _copy(asked.signing_keys or asked.backup / statedir.KEYS, asked.state / statedir.KEYS)
        statedir.write_new(directory, statedir.LOCK, b"")
        staged = asked.state / f"{statedir.RESERVED_PREFIX}-restoring"
        staged.mkdir(mode=0o700)
        _copy(asked.backup / statedir.DATABASE, staged / statedir.DATABASE)
        begun = _begin_epoch(staged / statedir.DATABASE, directory, asked, manifest, key)
        _sync_folders(asked.state)
        os.rename(staged / statedir.DATABASE, asked.state / statedir.DATABASE)
        staged.rmdir()
        os.fsync(directory)
    finally:
        os.close(directory)
    return {"restored": True, "runtime_id": manifest.runtime_id, **begun, "replay_only": True}


def _manifest(backup: Path) -> schema.Backup:
    try:
        text = (backup / MANIFEST).read_bytes()
    except OSError as error:
        raise InputError(
            "not a backup",
            file=str(backup / MANIFEST),
            why=os.strerror(error.errno or 0),
            fix="name a folder that `chio process backup` finished",
        ) from error
    manifest = schema.backup(text, str(backup / MANIFEST))
    for entry in manifest.files:
        if Path(entry.name).is_absolute() or ".." in Path(entry.name).parts:
            raise InputError(
                "not a backup", file=str(backup / MANIFEST), field="files", why=f"`{entry.name}`", fix="use another one"
            )
    return manifest


def _begin_epoch(
    file: Path, directory: int, asked: Restore, manifest: schema.Backup, key: tuple[bytes, str] | None
) -> dict[str, Any]:
    """Check the database and write the epoch's leaf into it: it is no state's yet."""
    path = str(asked.backup)
    with database.copied(file, path) as opened:
        store = Store(opened)
        host = store.host()
        keys = read_keys(directory, orjson.loads(host["bootstrap"])["body"], str(asked.state))
        if key is not None:
            vault.vault_of(key[0], host["runtime_id"], store.data_keys(), path, key[1])
        log = _checked_log(store, origin(host["runtime_id"]), keys, path, _held(asked, keys, host["runtime_id"]))
        if (log.size, log.root().hex()) != (manifest.size, manifest.root):
            raise StateError("the backup is damaged", file=path, field="root", fix="use another one")
        _append_epoch(store, log, keys, host, asked.by)
    return {"epoch": host["epoch"] + 1, "size": log.size}


def _held(asked: Restore, keys: Keyring, runtime_id: str) -> tuple[int, bytes] | None:
    if asked.checkpoint is None:
        return None
    note, file = asked.checkpoint
    try:
        return read_note(note, origin(runtime_id), keys.log.public)
    except NotACheckpoint as error:
        raise InputError(
            "not a checkpoint of this log",
            file=file,
            field="--checkpoint",
            why=str(error),
            fix="name a checkpoint that this log's key signed",
        ) from error


def _append_epoch(store: Store, log: Log, keys: Keyring, host: dict[str, Any], by: str) -> None:
    number = host["epoch"] + 1
    body = canonical.encode(
        {
            "schema": "chio.epoch.v1",
            "runtime_id": host["runtime_id"],
            "time_ms": Clock(newest_time_ms(store)).now_ms(),
            **epoch.members(number, "restored", by, log),
        }
    )
    signature, _ = keys.kernel.sign("epoch", body)
    hashed = leaf_hash("epoch", body, signature)
    store.begin()
    store.put_leaf(log.append(hashed), "epoch", body, signature, hashed)
    store.put_checkpoint(log.size, b"".join(log.frontier), log.note())
    store.set_host("epoch", number)
    store.set_host("replay_only", 1)
    store.commit()
