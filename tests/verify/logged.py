"""A whole log as a kernel would write it, and what goes with it, made without any code of the project."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nacl.signing import SigningKey

from tests.verify import observed
from tests.verify.observed import AUTHORITY, KERNEL, LOG, RUNTIME_ID, T0, key_of, note
from tests.verify.signed import jcs

ORIGIN = f"chio.invalid/{RUNTIME_ID}"
SIGNED = ("bootstrap", "receipt", "launch", "exit", "epoch")
WITNESS = SigningKey(bytes([21]) * 32)
WITNESS_NAME = "witness.example/w1"


def _head(kind: str, index: int) -> dict[str, Any]:
    return {"schema": f"chio.{kind}.v1", "runtime_id": RUNTIME_ID, "time_ms": T0 + index}


def _others(index: int, call: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """One leaf of each type that a call alone does not have, from this index on. An epoch's root is set later."""
    digest, process = "5" * 64, {"process_id": "producer"}
    written: list[tuple[str, dict[str, Any]]] = [
        ("launch", {**process, "attempt": 1, "observer": "host", "confined": True, "asked": {"command": ["true"]},
                    "executable_sha256": digest,
                    "fields": [{"name": "uid", "asked": [1], "value": [1], "source": "observed", "detail": "é"}]}),
        ("launch", {"process_id": None, "server": "reports", "attempt": 1, "observer": "host", "confined": True,
                    "asked": {}, "executable_sha256": "", "fields": []}),
        ("exit", {**process, "attempt": 1, "launch_id": digest, "observer": "host", "outcome": "exit_0",
                  "status": {"exit": 0}, "usage": {"cpu_ms": 3}, "output": {"stdout_bytes": 1, "stderr_bytes": 0},
                  "limits_hit": ["pids"], "exports": [{"file": "a", "bytes": 1, "sha256": digest}]}),
        ("attempt", {**process, "attempt": 2, "event": "ended", "outcome": "host_interrupted"}),
        ("incident", {"call": call, "detail": "an answer came late", "answer_bytes": 7, "answer_sha256": digest}),
        ("incident", {"server": "reports", "detail": "ended: exit_0", "start": 1}),
        ("revocation", {**process, "what": "credentials", "count": 2}),
        ("revocation", {**process, "what": "capability", "capability_id": digest}),
        ("cancellation", {**process, "by": "operator", "processes": ["producer"]}),
        ("tombstone", {**process, "by": "ada"}),
        ("epoch", {"epoch": 1, "event": "restored", "by": "ada", "size": None, "root": None}),
    ]  # fmt: skip
    return [(kind, {**_head(kind, index + place), **body}) for place, (kind, body) in enumerate(written)]


@dataclass(slots=True)
class Logged:
    """Leaves before they are signed; `text` and the rest sign whatever they say."""

    entries: list[tuple[str, dict[str, Any]]]
    keys: dict[str, SigningKey] = field(default_factory=lambda: dict.fromkeys(SIGNED, KERNEL))

    def leaves(self) -> list[bytes]:
        made: list[bytes] = []
        for kind, body in self.entries:
            if kind == "epoch" and body["root"] is None:
                body = {**body, "size": len(made), "root": observed.root_of([hashed(leaf) for leaf in made]).hex()}
            signature = observed.sign(kind, body, self.keys[kind]) if kind in SIGNED else None
            made.append(jcs({"body": body, "signature": signature, "type": kind}))
        return made

    def body(self, kind: str) -> dict[str, Any]:
        return next(body for found, body in self.entries if found == kind)


def log() -> Logged:
    """A reconciled call, then one leaf of every other type, then a call to a built-in tool."""
    first = observed.parts("reconciled")
    entries = list(first.log)
    entries += _others(len(entries), first.leaf("receipt")["call"])
    second = observed.parts("built_in")
    receipt = {**second.leaf("receipt"), "log_index": len(entries), "time_ms": T0 + len(entries)}
    return Logged([*entries, ("receipt", receipt)])


def hashed(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\0" + leaf).digest()


def checkpoint(leaves: list[bytes], size: int | None = None, key: SigningKey = LOG, origin: str = ORIGIN) -> str:
    covered = leaves[: len(leaves) if size is None else size]
    return note(origin, len(covered), observed.root_of([hashed(leaf) for leaf in covered]), key)


def cosigned(checkpoint: str, time: int = 1_795_992_600, key: SigningKey = WITNESS, name: str = WITNESS_NAME) -> str:
    """The checkpoint with one more line (c2sp.org/tlog-cosignature)."""
    text = checkpoint.partition("\n\n")[0] + "\n"
    signature = key.sign(f"cosignature/v1\ntime {time}\n{text}".encode()).signature
    blob = vkey_hash(name, 4, key) + time.to_bytes(8, "big") + signature
    return f"{checkpoint}— {name} {base64.b64encode(blob).decode()}\n"


def vkey_hash(name: str, kind: int, key: SigningKey) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + bytes([kind]) + key.verify_key.encode()).digest()[:4]


def vkey(name: str = WITNESS_NAME, kind: int = 4, key: SigningKey = WITNESS) -> str:
    material = base64.b64encode(bytes([kind]) + key.verify_key.encode()).decode()
    return f"{name}+{vkey_hash(name, kind, key).hex()}+{material}"


def inclusion(leaves: list[bytes], index: int, checkpoint: str, extra: bytes | None = None) -> str:
    """A C2SP tlog-proof in the tree of all `leaves`."""
    nodes = observed.inclusion_of([hashed(leaf) for leaf in leaves], index)
    lines = ["c2sp.org/tlog-proof@v1", *([f"extra {b64(extra)}"] if extra is not None else []), f"index {index}"]
    return "\n".join([*lines, *map(b64, nodes)]) + "\n\n" + checkpoint


def consistency(leaves: list[bytes], old: int, checkpoint: str) -> str:
    """The body of a C2SP add-checkpoint request."""
    nodes = _consistency([hashed(leaf) for leaf in leaves], old, True)
    return "\n".join([f"old {old}", *map(b64, nodes)]) + "\n\n" + checkpoint


def _consistency(hashes: list[bytes], old: int, complete: bool) -> list[bytes]:
    """RFC 9162 section 2.1.4.1, as it is defined there."""
    if old == len(hashes):
        return [] if complete else [observed.root_of(hashes)]
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    if old <= split:
        return [*_consistency(hashes[:split], old, complete), observed.root_of(hashes[split:])]
    return [*_consistency(hashes[split:], old - split, False), observed.root_of(hashes[:split])]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def pins(folder: Path, **changes: str) -> str:
    document = {
        "schema": "chio.pins.v1",
        "runtime_id": RUNTIME_ID,
        "kernel_key": key_of(KERNEL),
        "log_key": key_of(LOG),
        "authority_key": key_of(AUTHORITY),
        "config_digest": "1" * 64,
        "policy_digest": "2" * 64,
        **changes,
    }
    path = folder / "pins.json"
    path.write_text(json.dumps(document))
    return str(path)
