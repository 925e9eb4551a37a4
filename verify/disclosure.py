"""Arguments and outputs: that what is shown is what was committed to, and that what is not shown is accounted for.

A receipt holds salted commitments alone. The bundle's sections `arguments` and `outputs` open them, in the order of the
leaves. What the operator withheld is named in the manifest by rule; what a process's erasure took away, by a tombstone.
Anything else that is missing was left out without a word, and that is a failure.
"""

import fnmatch
import hashlib
from collections.abc import Iterator
from typing import Any

from verify import canonical, shape
from verify.bundle import Bundle
from verify.findings import Findings
from verify.history import Leaf
from verify.responses import output
from verify.verdict import Unchecked, VerifyError

_SALT_BYTES = 16


class Disclosure:
    """Reads both sections beside the leaves. Contradictions go to `findings`."""

    CHECKS = ("arguments", "outputs", "withheld")

    def __init__(self, bundle: Bundle, findings: Findings) -> None:
        self._findings = findings
        self._rules = [_Rule(selector, findings) for selector in bundle.manifest["withheld"]]
        self._arguments = _Opened("arguments", iter(bundle.sections["arguments"]))
        self._outputs = _Opened("outputs", iter(bundle.sections["outputs"]))
        self._erased: set[str] = set()
        self.shown = {"arguments": 0, "outputs": 0}
        self.hidden = {"arguments": 0, "outputs": 0}
        self._unexplained: dict[tuple[str, str], str] = {}  # (process, what) -> the first leaf that lacks it

    def read(self, leaf: Leaf) -> bytes | None:
        """The salt that opens the arguments of a receipt, where they are shown."""
        if leaf.kind == "tombstone":
            self._erased.add(leaf.body["process_id"])
        if leaf.kind != "receipt":
            return None
        body = leaf.body
        salt = self._one(leaf, self._arguments, body["action"]["parameter_hash"])
        if body["output"] is not None:
            self._one(leaf, self._outputs, body["output"]["hash"])
        return salt

    def close(self) -> None:
        """Nothing may be left that belongs to no receipt; what is missing must have been erased by the log's end."""
        for opened in (self._arguments, self._outputs):
            if opened.next_index is not None:
                self._findings.fail(
                    opened.what, "it opens no commitment of a receipt", f"{opened.what}: leaf {opened.next_index}"
                )
            opened.drain()
        for (process, what), place in self._unexplained.items():
            if process not in self._erased:
                why = f"{what} of `{process}` are missing, and nothing says that they were withheld or erased"
                self._findings.fail("withheld", why, place)

    def left(self, what: str) -> Unchecked | None:
        """Why not all of it was checked, if not all of it is here."""
        hidden, shown = self.hidden[what], self.shown[what]
        if not hidden:
            return None
        return Unchecked(f"not shown of {hidden} of {hidden + shown} receipts; what is shown is what was committed to")

    def _one(self, leaf: Leaf, opened: "_Opened", committed: str) -> bytes | None:
        """Checks one item against its commitment; its salt."""
        what = opened.what
        entry = opened.take(leaf.index)
        if entry is None:
            self.hidden[what] += 1
            if not any(rule.covers(what, leaf.body) for rule in self._rules):
                self._unexplained.setdefault((leaf.body["call"]["process_id"], what), leaf.place)
            return None
        self.shown[what] += 1
        salt, text = entry
        if hashlib.sha256(salt + text).hexdigest() != committed:
            self._findings.fail(what, "they are not what the receipt commits to", leaf.place)
            return salt
        try:
            value = canonical.parse(text, canonical=True)
            (shape.object_of_anything if what == "arguments" else output)(value, "")
            if what == "outputs" and value["kind"] != leaf.body["output"]["kind"]:
                raise VerifyError("an output of another kind than the receipt says", check="fields")
        except VerifyError as error:
            self._findings.refused(what, error, leaf.place)
        return salt


class _Rule:
    """One selector of the manifest: `arguments` or `outputs`, perhaps `:` and a pattern."""

    def __init__(self, selector: str, findings: Findings) -> None:
        self._what, colon, self._pattern = selector.partition(":")
        if self._what not in ("arguments", "outputs") or (colon and not self._pattern):
            findings.fail("withheld", f"`{selector[:80]}` is no rule", "manifest")

    def covers(self, what: str, receipt: dict[str, Any]) -> bool:
        if what != self._what:
            return False
        route = f"{receipt['tool_server']}/{receipt['tool_name']}"
        name = route if "/" in self._pattern else receipt["call"]["process_id"]
        return not self._pattern or fnmatch.fnmatchcase(name, self._pattern)


class _Opened:
    """One section, taken leaf by leaf. Its items are [leaf index, salt, text], in the order of the leaves."""

    def __init__(self, what: str, items: Iterator[Any]) -> None:
        self.what = what
        self._items = items
        self._item: tuple[int, bytes, bytes] | None = None
        self._advance(-1)

    @property
    def next_index(self) -> int | None:
        return self._item[0] if self._item is not None else None

    def take(self, index: int) -> tuple[bytes, bytes] | None:
        if self._item is None or self._item[0] != index:
            return None
        _, salt, text = self._item
        self._advance(index)
        return salt, text

    def drain(self) -> None:
        """To the section's end, where its digest is known."""
        for _ in self._items:
            pass

    def _advance(self, after: int) -> None:
        item = next(self._items, None)
        if item is None:
            self._item = None
            return
        if type(item) is not list or [type(part) for part in item] != [int, bytes, bytes]:
            raise VerifyError("not a leaf's index, a salt and a text", check="encoding", place=self.what)
        if item[0] <= after or len(item[1]) != _SALT_BYTES:
            raise VerifyError("out of order, or a salt of another length", check="encoding", place=self.what)
        self._item = (item[0], item[1], item[2])
