"""Whole runs as a kernel would sign them, made from a good one without any code of the project.

`load()` takes `fixtures/artifacts/valid/bundles/orders.chio` apart: a real run, with tool servers, a lost call that was
reconciled, a read that was dispatched again, refusals, a revocation and a cancellation. `Run.assemble()` puts a bundle
together and signs all of it with the keys of `tests.verify.observed`: leaves, ids, root, checkpoint, manifest. What is
changed between the two is signed by the right keys, as a host that lies would; what is changed afterwards is a forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.verify.observed import AUTHORITY, KERNEL, LOG, key_of, note, root_of, sha, sign, signed_id
from tests.verify.signed import jcs

GOOD = Path(__file__).resolve().parents[2] / "fixtures/artifacts/valid/bundles/orders.chio"
SECTIONS = ("documents", "capabilities", "leaves", "arguments", "outputs")
SIGNED = ("bootstrap", "receipt", "launch", "exit", "epoch")


# --- deterministic CBOR, once more -----------------------------------------------------------------------------------


def head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    width = next(width for width in (1, 2, 4, 8) if argument < 1 << 8 * width)
    return bytes([major << 5 | {1: 24, 2: 25, 4: 26, 8: 27}[width]]) + argument.to_bytes(width, "big")


def encode(value: Any) -> bytes:
    match value:
        case int():
            return head(0, value)
        case bytes():
            return head(2, len(value)) + value
        case str():
            return head(3, len(value.encode())) + value.encode()
        case list():
            return head(4, len(value)) + b"".join(map(encode, value))
        case dict():
            return head(5, len(value)) + b"".join(
                name + member
                for name, member in sorted((encode(name), encode(member)) for name, member in value.items())
            )
    raise TypeError(type(value))


def decode(data: bytes, at: int = 0) -> tuple[Any, int]:
    """(value, where it ends); of the good bundle, so nothing is checked."""
    major, argument = data[at] >> 5, data[at] & 31
    at += 1
    if argument >= 24:
        width = 1 << (argument - 24)
        argument, at = int.from_bytes(data[at : at + width], "big"), at + width
    if major == 0:
        return argument, at
    if major in (2, 3):
        text = data[at : at + argument]
        return (text if major == 2 else text.decode()), at + argument
    if major == 6:
        return decode(data, at)
    items = []
    for _ in range(argument * (2 if major == 5 else 1)):
        item, at = decode(data, at)
        items.append(item)
    return (items if major == 4 else dict(zip(items[::2], items[1::2], strict=True))), at


# --- a run -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Leaf:
    """One leaf before it is signed. `id` is the launch id that it had; `arguments` and `output` are (salt, text)."""

    kind: str
    body: dict[str, Any]
    arguments: tuple[bytes, bytes] | None = None
    output: tuple[bytes, bytes] | None = None
    id: str | None = None

    @property
    def call(self) -> dict[str, Any]:
        call: dict[str, Any] = self.body["call"]
        return call


@dataclass(slots=True)
class Run:
    """All that a bundle says, before anything is signed."""

    documents: list[list[Any]]
    tokens: list[dict[str, Any]]
    leaves: list[Leaf]
    withheld: list[str]
    keys: dict[str, Any] = field(default_factory=lambda: {"kernel": KERNEL, "log": LOG, "authority": AUTHORITY})
    manifest: dict[str, Any] = field(default_factory=dict)  # members to put in place of the true ones

    @property
    def bootstrap(self) -> dict[str, Any]:
        return self.leaves[0].body

    @property
    def runtime_id(self) -> str:
        return str(self.bootstrap["runtime_id"])

    # --- finding -------------------------------------------------------------------------------------------------

    def all(self, kind: str, **members: Any) -> list[Leaf]:
        """Leaves of a type whose call, or body, has these members."""
        return [
            leaf
            for leaf in self.leaves
            if leaf.kind == kind
            and all({**leaf.body, **leaf.body.get("call", {})}.get(name) == value for name, value in members.items())
        ]

    def one(self, kind: str, **members: Any) -> Leaf:
        return self.all(kind, **members)[0]

    def index(self, leaf: Leaf) -> int:
        return next(index for index, at in enumerate(self.leaves) if at is leaf)

    def insert(self, index: int, *leaves: Leaf) -> None:
        """Each gets the time of the leaf before it, if it has one of its own."""
        for offset, leaf in enumerate(leaves):
            if "time_ms" in leaf.body:
                leaf.body["time_ms"] = self.time_before(index + offset)
            self.leaves.insert(index + offset, leaf)

    def time_before(self, index: int) -> int:
        return max(leaf.body.get("time_ms", 0) for leaf in self.leaves[:index])

    def token(self, process: str) -> dict[str, Any]:
        return next(token for token in self.tokens if token["process_id"] == process)

    def document(self, kind: str) -> list[Any]:
        return next(document for document in self.documents if document[0] == kind)

    # --- changing ------------------------------------------------------------------------------------------------

    def retoken(self, process: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a token, and everything that names it or one below it by its id."""
        before = {token["process_id"]: signed_id("capability", token) for token in self.tokens}
        change(self.token(process))
        for token in self.tokens:  # parents stand first
            old, new = before[token["process_id"]], signed_id("capability", token)
            if old != new:
                self.rename(old, new)
        self.rebind()

    def rename(self, old: str, new: str) -> None:
        self.tokens[:] = json.loads(json.dumps(self.tokens).replace(old, new))
        for leaf in self.leaves:
            leaf.body = json.loads(json.dumps(leaf.body).replace(old, new))

    def rebind(self) -> None:
        """Request ids and bindings of all calls, computed again."""
        for leaf in self.leaves:
            if leaf.kind not in ("intent", "receipt"):
                continue
            old = dict(leaf.call)
            leaf.call.update(call_ids(self.runtime_id, leaf))
            for other in self.leaves:
                if other.kind in ("incident", "reconciliation") and other.body.get("call") == old:
                    other.body["call"] = dict(leaf.call)

    # --- signing -------------------------------------------------------------------------------------------------

    def sections(self) -> dict[str, list[bytes]]:
        bootstrap = self.bootstrap
        bootstrap.update({f"{name}_key": key_of(key) for name, key in self.keys.items()})
        texts = [
            jcs({"body": body, "signature": sign("capability", body, self.keys["authority"])}) for body in self.tokens
        ]
        renamed: dict[str, str] = {}
        leaves, arguments, outputs = [], [], []
        for index, leaf in enumerate(self.leaves):
            body = leaf.body
            if leaf.kind == "receipt":
                body = {**body, "log_index": index, "kernel_key": key_of(self.keys["kernel"])}
            text = jcs(body).decode()
            for old, new in renamed.items():
                text = text.replace(old, new)
            body = json.loads(text)
            if leaf.id is not None and signed_id("launch", body) != leaf.id:
                renamed[leaf.id] = signed_id("launch", body)
            signature = sign(leaf.kind, body, self.keys["kernel"]) if leaf.kind in SIGNED else None
            leaves.append(jcs({"body": body, "signature": signature, "type": leaf.kind}))
            for opened, section in ((leaf.arguments, arguments), (leaf.output, outputs)):
                if opened is not None:
                    section.append(encode([index, *opened]))
        return {
            "documents": [encode(document) for document in self.documents],
            "capabilities": [encode(text) for text in texts],
            "leaves": [encode(leaf) for leaf in leaves],
            "arguments": arguments,
            "outputs": outputs,
        }

    def assemble(self) -> bytes:
        """The bundle, signed whatever it says."""
        sections = self.sections()
        hashes = [hashlib.sha256(b"\0" + decode(item)[0]).digest() for item in sections["leaves"]]
        manifest = {
            "schema": "chio.bundle.v1",
            "runtime_id": self.runtime_id,
            "kernel_key": bytes.fromhex(key_of(self.keys["kernel"])),
            "time_ms": self.time_before(len(self.leaves)),
            "log": {"size": len(hashes), "root": root_of(hashes)},
            "checkpoint": note(f"chio.invalid/{self.runtime_id}", len(hashes), root_of(hashes), self.keys["log"]),
            "withheld": self.withheld,
            "sections": [entry(name, items) for name, items in sections.items()],
            **self.manifest,
        }
        return envelope(encode(manifest), self.keys["kernel"]) + b"".join(
            b"".join(items) for items in sections.values()
        )

    def root(self) -> bytes:
        """The root over all leaves."""
        return root_of([hashlib.sha256(b"\0" + decode(item)[0]).digest() for item in self.sections()["leaves"]])

    def checkpoint(self) -> str:
        """The log's checkpoint over all of it."""
        return note(f"chio.invalid/{self.runtime_id}", len(self.leaves), self.root(), self.keys["log"])

    def pins(self) -> dict[str, str]:
        """What the auditor holds: of the run as it was, under the keys of these tests."""
        return {
            "schema": "chio.pins.v1",
            "runtime_id": self.runtime_id,
            **{
                f"{name}_key": key_of(key) for name, key in (("kernel", KERNEL), ("log", LOG), ("authority", AUTHORITY))
            },
            **{name: self.bootstrap[name] for name in ("config_digest", "policy_digest")},
        }


def entry(name: str, items: list[bytes]) -> dict[str, Any]:
    content = b"".join(items)
    return {"name": name, "items": len(items), "bytes": len(content), "sha256": hashlib.sha256(content).digest()}


def envelope(payload: bytes, key: Any) -> bytes:
    """The COSE_Sign1 around a manifest."""
    protected = bytes.fromhex("a10127")
    signed = encode(["Signature1", protected, b"chio/bundle/v1", payload])
    return b"\xd2" + encode([protected, {}, payload, key.sign(signed).signature])


def call_ids(runtime_id: str, leaf: Leaf) -> dict[str, str]:
    """The request id and the binding that follow from an intent or a receipt."""
    body, call = leaf.body, leaf.call
    named: list[Any] = [runtime_id, call["process_id"], call["operation_key"]]
    server, tool = (body["server"], body["tool"]) if leaf.kind == "intent" else (body["tool_server"], body["tool_name"])
    parameter_hash = body["parameter_hash"] if leaf.kind == "intent" else body["action"]["parameter_hash"]
    bound = [*named, body["capability_id"], server, tool, parameter_hash, call["recovery_policy"]]
    if call["dispatch"] > 1:
        named.append(call["dispatch"])
    return {"request_id": "process:" + sha(jcs(named)), "binding": sha(jcs(bound))}


def load(path: Path = GOOD) -> Run:
    """The parts of the good bundle."""
    data = path.read_bytes()
    (_, _, payload, _), at = decode(data)
    manifest, _ = decode(payload)
    found: dict[str, list[Any]] = {}
    for name in SECTIONS:
        count = next(section["items"] for section in manifest["sections"] if section["name"] == name)
        found[name] = []
        for _ in range(count):
            item, at = decode(data, at)
            found[name].append(item)
    arguments = {index: (salt, text) for index, salt, text in found["arguments"]}
    outputs = {index: (salt, text) for index, salt, text in found["outputs"]}
    leaves = []
    for index, text in enumerate(found["leaves"]):
        value = json.loads(text)
        identity = signed_id("launch", value["body"]) if value["type"] == "launch" else None
        leaves.append(Leaf(value["type"], value["body"], arguments.get(index), outputs.get(index), identity))
    tokens = [json.loads(text)["body"] for text in found["capabilities"]]
    return Run(found["documents"], tokens, leaves, manifest["withheld"])


_GOOD = load()


def good() -> Run:
    """A copy of the good run, to be changed."""
    return deepcopy(_GOOD)


def written(run: Run, folder: Path) -> tuple[str, str]:
    """(bundle, pins): two files."""
    bundle, pins = folder / "run.chio", folder / "pins.json"
    bundle.write_bytes(run.assemble())
    pins.write_text(json.dumps(good().pins()))
    return str(bundle), str(pins)
