"""The files that a state pins: its keys, the host config, the policy. A changed byte refuses the host at its start."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import orjson

from chio import schema, statedir
from chio.errors import StateError
from chio.signing import Keyring, SigningKey


def read_pinned(directory: int, host: dict[str, Any], path: str) -> tuple[Keyring, str, dict[str, Any]]:
    """Keys, config and bootstrap of the state, each held against the signed bootstrap before anything starts."""
    bootstrap = orjson.loads(host["bootstrap"])["body"]
    keys = read_keys(directory, bootstrap, path)
    try:
        config_text = statedir.read(directory, statedir.CONFIG)
        policy_text = statedir.read(directory, statedir.POLICY)
    except OSError as error:
        raise _unreadable(path, error) from error
    for name, text, digest, source in (
        (statedir.CONFIG, config_text, bootstrap["config_digest"], host["config_path"]),
        (statedir.POLICY, policy_text, bootstrap["policy_digest"], host["policy_path"]),
    ):
        if sha256(text).hexdigest() != digest:
            raise StateError(
                "a pinned document was changed", file=f"{path}/{name}", fix="restore it; the state pins its digest"
            )
        _refuse_changed_source(source, digest)
    return keys, config_text.decode(), bootstrap


def read_keys(directory: int, bootstrap: dict[str, Any], path: str) -> Keyring:
    """The signing keys, which must be the bootstrap's. Raises `StateError`."""
    try:
        seeds = orjson.loads(statedir.read(directory, statedir.KEYS))
        keys = Keyring(*(SigningKey(bytes.fromhex(seeds[name])) for name in ("kernel", "log", "authority")))
    except (OSError, KeyError, ValueError) as error:
        raise _unreadable(path, error) from error
    if (keys.kernel.public, keys.log.public, keys.authority.public) != (
        bootstrap["kernel_key"],
        bootstrap["log_key"],
        bootstrap["authority_key"],
    ):
        raise StateError(
            "the state cannot be served",
            file=f"{path}/{statedir.KEYS}",
            why="its keys are not the bootstrap's",
            fix="restore the state from a backup",
        )
    return keys


def _unreadable(path: str, error: Exception) -> StateError:
    return StateError(
        "the state cannot be served",
        file=path,
        why=f"a pinned file cannot be read: {error}",
        fix="restore the state from a backup",
    )


def _refuse_changed_source(source: str, digest: str) -> None:
    """The operator's own file, if it is still there, says what was pinned; a silent difference would mislead."""
    try:
        with open(source, "rb") as file:
            now = sha256(file.read(schema.MAX_DOCUMENT_BYTES + 1)).hexdigest()
    except OSError:
        return
    if now != digest:
        raise StateError(
            "a document was changed since init",
            file=source,
            why="the state pins its bytes",
            fix="restore it, or start a new state for the changed one",
        )
