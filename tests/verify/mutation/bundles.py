"""The bundle of a whole run: changed as it stands, and signed anew by every key that signs a part of it.

A change that is signed anew is a host's lie in one place: the leaf or token that was changed is signed, what names it
by its id or its binding follows, and so do the root, the checkpoint, the digests and the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tests.verify import bundled
from tests.verify.bundled import Leaf, decode, encode, entry, envelope
from tests.verify.mutation import harmless
from tests.verify.mutation.changes import Mutation, members, regions, text_of
from tests.verify.mutation.matrix import Judge, Subject
from tests.verify.observed import AUTHORITY, KERNEL, LOG, note, root_of
from tests.verify.signed import jcs
from verify.audit import audit
from verify.foundation import Trust
from verify.keys import Pins

OTHER_RUN = "00000000-0000-4000-8000-000000000000"

Sections = dict[str, list[bytes]]


def subjects(folder: Path) -> dict[str, Subject]:
    """By name. Their files stand in `folder`."""
    run = bundled.good()
    good, other = run.assemble(), _of_another_run().assemble()
    judge = _auditor(folder)
    cut = Subject(
        "bundle", good, judge, lambda: chain(regions(good, 256), _enveloped(good), _spliced(good, other)), draw=40
    )
    lies = Subject(
        "bundle signed anew", good, judge, lambda: Lies(run, _of_another_run()).all(), harmless.BUNDLE, draw=50
    )
    return {subject.name: subject for subject in (cut, lies)}


def _auditor(folder: Path) -> Judge:
    path, pins = folder / "run.chio", folder / "bundle-pins.json"
    pins.write_text(json.dumps(bundled.good().pins()))
    trust = Trust.of_pins(Pins.from_file(str(pins)))

    def judge(text: bytes) -> Any:
        path.write_bytes(text)
        verdict = audit(str(path), trust)
        verdict.require(("confined", "durable"))
        return verdict

    return judge


def _of_another_run() -> bundled.Run:
    """The same run under another id, by the same keys."""
    run = bundled.good()
    run.rename(run.runtime_id, OTHER_RUN)
    run.rebind()
    return run


def _parts(data: bytes) -> list[tuple[str, bytes]]:
    """Envelope and sections, by name."""
    (_, _, payload, _), at = decode(data)
    found = [("envelope", data[:at])]
    for section in decode(payload)[0]["sections"]:
        found.append((section["name"], data[at : at + section["bytes"]]))
        at += section["bytes"]
    return found


def _enveloped(good: bytes) -> Iterator[Mutation]:
    """The envelope and the manifest, finely."""
    first = _parts(good)[0][1]
    for mutation in regions(first, 4):
        yield Mutation(mutation.how, f"envelope {mutation.where}", lambda it=mutation: it.make() + good[len(first) :])


def _spliced(good: bytes, other: bytes) -> Iterator[Mutation]:
    """Envelope and sections taken from another run, left out, there twice, in another order; nobody signs anew."""
    parts, others = _parts(good), dict(_parts(other))
    for number, (name, content) in enumerate(parts):
        for how, new in (
            ("another run's", [others[name]]),
            ("removed", []),
            ("duplicated", [content, content]),
            ("re-ordered", [parts[number + 1][1], content] if number + 1 < len(parts) else [b"", content]),
        ):
            rest = parts[number + (2 if how == "re-ordered" else 1) :]
            made = [*(text for _, text in parts[:number]), *new, *(text for _, text in rest)]
            yield Mutation(how, f"section {name}", lambda made=made: b"".join(made))


# --- lies -------------------------------------------------------------------------------------------------------------


class Lies:
    """Everything that can be changed in one place of a run, signed anew."""

    def __init__(self, run: bundled.Run, other: bundled.Run) -> None:
        self._runtime_id = run.runtime_id
        self._time_ms = run.time_before(len(run.leaves))
        self._sections, self._others = run.sections(), other.sections()
        self._withheld = run.withheld
        self._leaves = [decode(item)[0] for item in self._sections["leaves"]]
        self._tokens = [decode(item)[0] for item in self._sections["capabilities"]]

    def all(self) -> Iterator[Mutation]:
        yield from self._of_manifest()
        yield from self._of_tokens()
        yield from self._of_leaves()
        for name in bundled.SECTIONS:
            yield from self._of_items(name)
        for kind in ("config", "plan", "resolved-profile"):
            yield from self._of_document(kind)

    # --- what is changed -----------------------------------------------------------------------------------------

    def _of_manifest(self) -> Iterator[Mutation]:
        manifest = self._manifest(self._sections)
        plain = json.loads(jcs({**manifest, "kernel_key": "", "log": {}, "sections": []}))
        for name, value in manifest.items():
            for how, new in (
                ("another value", _another_cbor(value)), ("another type", [] if not isinstance(value, list) else {}),
                ("removed", None),
            ):  # fmt: skip
                yield Mutation(how, f"manifest.{name}", lambda name=name, new=new: self._of({name: new}))
        assert set(plain) == set(manifest)

    def _of_tokens(self) -> Iterator[Mutation]:
        for position, text in enumerate(self._tokens):
            foreign = decode(self._others["capabilities"][position])[0]
            body, other = (json.loads(token)["body"] for token in (text, foreign))
            yield from members(
                body, other, lambda new, position=position: self._with_token(position, text_of(new)), "token"
            )

    def _of_leaves(self) -> Iterator[Mutation]:
        for index, text in enumerate(self._leaves):
            leaf = json.loads(text)
            other = json.loads(decode(self._others["leaves"][index])[0])
            yield from members(
                leaf["body"], other["body"], lambda new, index=index: self.with_leaf(index, text_of(new)), leaf["type"]
            )

    def _of_items(self, name: str) -> Iterator[Mutation]:
        """Items of a section removed, there twice, exchanged with the next, of another run."""
        items, others = self._sections[name], self._others[name]
        for number, item in enumerate(items):
            what = _kind_of(name, item)
            changes = {"removed": [], "duplicated": [item, item]}
            if others[number] != item:
                changes["another run's"] = [others[number]]
            for how, new in changes.items():
                made = [*items[:number], *new, *items[number + 1 :]]
                yield Mutation(how, f"item {what}", lambda made=made: self._of({}, {name: made}))
            if number + 1 < len(items):
                made = [*items[:number], items[number + 1], item, *items[number + 2 :]]
                yield Mutation("re-ordered", f"item {what}", lambda made=made: self._of({}, {name: made}))
        if name in ("arguments", "outputs"):
            for number, item in enumerate(items):
                index, salt, text = decode(item)[0]
                for where, changed in (
                    ("index", [index + 1, salt, text]),
                    ("salt", [index, bytes([salt[0] ^ 1]) + salt[1:], text]),
                    ("text", [index, salt, text[:-1] + b" }"]),
                ):
                    made = [*items[:number], encode(changed), *items[number + 1 :]]
                    yield Mutation("another value", f"{name}.{where}", lambda made=made: self._of({}, {name: made}))

    def _of_document(self, kind: str) -> Iterator[Mutation]:
        for number, item in enumerate(self._sections["documents"]):
            found, text = decode(item)[0]
            if found == kind:
                yield from members(
                    json.loads(text), None, lambda new, number=number: self._with_document(number, text_of(new)), kind
                )

    # --- signing anew --------------------------------------------------------------------------------------------

    def _with_token(self, position: int, body: bytes) -> bytes:
        """A token changed, and with it all that names it: tokens below it, the bootstrap, calls and their bindings."""
        renamed: dict[bytes, bytes] = {}
        tokens = []
        for at, text in enumerate(self._tokens):
            old = _body_of(text)
            new = body if at == position else _renamed(old, renamed)
            if new != old:
                renamed[_id("capability", old)] = _id("capability", new)
            tokens.append(encode(_signed("capability", new)))
        for text in self._leaves:
            leaf = json.loads(_renamed(text, renamed))
            if leaf["type"] in ("intent", "receipt"):
                ids = bundled.call_ids(self._runtime_id, Leaf(leaf["type"], leaf["body"]))
                renamed[leaf["body"]["call"]["binding"].encode()] = ids["binding"].encode()
        return self._of({}, {"capabilities": tokens}, renamed)

    def with_leaf(self, index: int, body: bytes) -> bytes:
        leaves = list(self._sections["leaves"])
        text = self._leaves[index]
        kind = json.loads(text)["type"]
        renamed = {_id("launch", _body_of(text)): _id("launch", body)} if kind == "launch" else {}
        leaves[index] = encode(_leaf(kind, body))
        return self._of({}, {"leaves": leaves}, renamed, after=index + 1)

    def _with_document(self, number: int, text: bytes) -> bytes:
        """A document changed, and with it the digests that name it in bootstrap and launch records."""
        documents = list(self._sections["documents"])
        kind, old = decode(documents[number])[0]
        documents[number] = encode([kind, text])
        renamed = {hashlib.sha256(old).hexdigest().encode(): hashlib.sha256(text).hexdigest().encode()}
        return self._of({}, {"documents": documents}, renamed if kind != "config" else {})

    def _of(
        self, manifest: dict[str, Any], changed: Sections | None = None, renamed: dict[bytes, bytes] | None = None, *,
        after: int = 0,
    ) -> bytes:  # fmt: skip
        """The bundle of these sections, its leaves from `after` on renamed and signed, and the manifest over it all."""
        sections = {**self._sections, **(changed or {})}
        if renamed:
            sections["leaves"] = _followed(sections["leaves"], dict(renamed), after)
        document = {**self._manifest(sections), **manifest}
        document = {name: value for name, value in document.items() if value is not None}
        content = b"".join(b"".join(items) for items in sections.values())
        return envelope(encode(document), KERNEL) + content

    def _manifest(self, sections: Sections) -> dict[str, Any]:
        hashes = [hashlib.sha256(b"\0" + decode(item)[0]).digest() for item in sections["leaves"]]
        root = root_of(hashes)
        return {
            "schema": "chio.bundle.v1",
            "runtime_id": self._runtime_id,
            "kernel_key": KERNEL.verify_key.encode(),
            "time_ms": self._time_ms,
            "log": {"size": len(hashes), "root": root},
            "checkpoint": note(f"chio.invalid/{self._runtime_id}", len(hashes), root, LOG),
            "withheld": self._withheld,
            "sections": [entry(name, items) for name, items in sections.items()],
        }


def _followed(leaves: list[bytes], renamed: dict[bytes, bytes], after: int) -> list[bytes]:
    """The leaves with other ids in them, signed anew; a launch record that changes so has another id itself."""
    made = leaves[:after]
    for item in leaves[after:]:
        text = decode(item)[0]
        new = _renamed(text, renamed)
        if new == text:
            made.append(item)
            continue
        kind, body = json.loads(text)["type"], _body_of(new)
        if kind == "launch":
            renamed[_id("launch", _body_of(text))] = _id("launch", body)
        made.append(encode(_leaf(kind, body)))
    return made


def _leaf(kind: str, body: bytes) -> bytes:
    if kind not in bundled.SIGNED:
        return b'{"body":' + body + b',"signature":null,"type":"' + kind.encode() + b'"}'
    return _signed(kind, body)[:-1] + b',"type":"' + kind.encode() + b'"}'


def _signed(kind: str, body: bytes) -> bytes:
    key = AUTHORITY if kind == "capability" else KERNEL
    signature = key.sign(f"chio/{kind}/v1".encode() + b"\0" + body).signature.hex()
    return b'{"body":' + body + b',"signature":"' + signature.encode() + b'"}'


def _body_of(text: bytes) -> bytes:
    """The body's own bytes of a leaf or a token."""
    found = re.fullmatch(rb'\{"body":(.*),"signature":(?:null|"[0-9a-f]{128}")(?:,"type":"[a-z]+")?\}', text)
    assert found is not None
    return found[1]


def _id(kind: str, body: bytes) -> bytes:
    return hashlib.sha256(f"chio/{kind}/v1".encode() + b"\0" + body).hexdigest().encode()


def _renamed(text: bytes, renamed: dict[bytes, bytes]) -> bytes:
    return re.sub(rb"[0-9a-f]{64}", lambda found: renamed.get(found[0], found[0]), text) if renamed else text


def _kind_of(section: str, item: bytes) -> str:
    value = decode(item)[0]
    if section == "documents":
        return str(value[0])
    return str(json.loads(value)["type"]) if section == "leaves" else section


def _another_cbor(value: Any) -> Any:
    match value:
        case int():
            return value + 1
        case str():
            return value[:-1] + ("1" if value[-1] != "1" else "2")
        case bytes():
            return bytes([value[0] ^ 1]) + value[1:]
        case list():
            return [*value, *value] if value and isinstance(value[0], dict) else [*value, "arguments:x"]
    return {**value, "size": value["size"] + 1}
