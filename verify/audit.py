"""A whole run, judged from its bundle: one pass over the log, what was signed held against everything else that was.

The order of the checks is the order of trust. The pinned kernel key signed the manifest, so these are the kernel's
bytes; leaf 0, signed by the same key, certifies the log's and the authority's keys; the log's key signed the root over
all leaves; each leaf is read strictly and, where its type is signed, verified. What the leaves say is then held against
the rules: calls, authority, budgets, attempts, confinement. Each check goes on whatever became of the others.

Nothing that is believed comes from the bundle alone: the kernel key and the run's id are the auditor's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verify import conclusions
from verify.admissions import Admissions
from verify.attempts import Attempts
from verify.budget import Budget
from verify.bundle import Bundle
from verify.confinement import Confinement
from verify.disclosure import Disclosure
from verify.documents import Profiles
from verify.findings import Findings
from verify.foundation import Foundation, Trust, read_foundation
from verify.history import History, Leaf
from verify.inquiry import Inquiry, Kept
from verify.keys import PublicKey
from verify.leaves import LogLeaf, read_leaf_text
from verify.lines import Progress
from verify.log import Tree, leaf_hash, verify_checkpoint
from verify.verdict import Verdict, VerifyError

_EPOCH = b'"type":"epoch"}'


@dataclass(slots=True)
class KeptCheckpoint:
    """A checkpoint that the auditor brought, and what the log's root was at its size."""

    file: str
    size: int
    root: bytes
    found: bytes | None = None


def audit(path: str, trust: Trust, scope: str = "bundle", kept: Kept | None = None) -> Verdict:
    """The verdict on one bundle; a scope of `conclusions.SCOPES` tells only its own checks and what they stand on.

    `kept` asks after one call. Raises `VerifyError` only for a file that is no bundle, that the pinned key did not
    sign, or whose bytes are not those that its manifest accounts for: then there is nothing to judge.
    """
    verdict = Verdict(path)
    try:
        bundle = Bundle.open(path)
        _require_signed(bundle, trust)
        verdict.passes("signer_pin")
        passed = Pass(bundle, trust, read_foundation(bundle, trust, verdict), kept)
        passed.run()
    except VerifyError as error:
        raise (error if error.file else error.located(path)) from error
    conclusions.tell(verdict, passed)
    return conclusions.within(verdict, scope)


def _require_signed(bundle: Bundle, trust: Trust) -> None:
    named = bundle.manifest["kernel_key"].hex()
    if named != trust.kernel_key.hex:
        raise VerifyError(f"signed for the key {named}, which is not the pinned one", check="signer_pin")
    try:
        bundle.verify_signature(trust.kernel_key)
    except VerifyError as error:
        raise VerifyError("the manifest's signature does not hold", check="signer_pin", place="COSE_Sign1") from error


class Pass:
    """Everything that reads the leaves, in the order in which it does."""

    def __init__(self, bundle: Bundle, trust: Trust, base: Foundation, kept: Kept | None) -> None:
        self.bundle, self.trust, self.foundation = bundle, trust, base
        self.findings = findings = Findings()
        self.tree = Tree()
        self.history = History(base.authority, findings)
        self.admissions = Admissions(base.authority, findings)
        self.budget = Budget(base.authority, findings, self.history.table)
        self.attempts = Attempts(base.authority, base.plan, findings)
        self.confinement = Confinement(Profiles(base.documents, findings), base.plan, base.config, findings)
        self.disclosure = Disclosure(bundle, findings)
        self.inquiry = Inquiry(kept, base.authority, trust.kernel_key) if kept is not None else None
        self.checkpoints = self._checkpoints()

    def run(self) -> None:
        """From the first leaf to the last; how far it is, on a terminal's stderr."""
        progress = Progress(self.bundle.sections["leaves"].size)
        for leaf in self._leaves():
            progress.advance(len(leaf.text))
            held = self.confinement.read(leaf) if leaf.kind == "launch" else True
            occurrence = self.history.read(leaf)
            self.admissions.read(leaf, occurrence)
            self.attempts.read(leaf, held)
            if occurrence is not None:
                self.attempts.called(occurrence)
                self.budget.read(occurrence)
            salt = self.disclosure.read(leaf)
            if self.inquiry is not None:
                self.inquiry.read(leaf, salt)
        progress.clear()
        self.history.close(self.tree.size)
        self.attempts.close(self.tree.size)
        self.disclosure.close()

    def _checkpoints(self) -> list[KeptCheckpoint]:
        """Those that the auditor kept, if the log's key signed them."""
        kept, bootstrap = [], self.foundation.bootstrap
        for file, note in self.trust.checkpoints:
            try:
                checkpoint = verify_checkpoint(note, PublicKey.from_hex(bootstrap["log_key"]), bootstrap["log_origin"])
                kept.append(KeptCheckpoint(file, checkpoint.size, checkpoint.root))
            except VerifyError as error:
                self.findings.refused("kept_checkpoints", error, file)
        return kept

    def _leaves(self) -> Iterator[Leaf]:
        """Every leaf that can be read: strictly, signed where its type is, of this run, in the order of time."""
        since_ms = 0
        for index, text in enumerate(self.bundle.sections["leaves"]):
            if type(text) is not bytes:
                raise VerifyError("a leaf that is no byte string", check="encoding", place=f"leaf {index}")
            self._compare_roots()
            root = self.tree.root() if text.endswith(_EPOCH) else None
            self.tree.add(leaf_hash(text))
            try:
                read = read_leaf_text(text)
                identity = _verify_leaf(read, index, self.trust)
            except VerifyError as error:
                self.findings.refused("leaves", error, f"leaf {index}")
                continue
            leaf = Leaf(index, read.kind, read.body, since_ms, text, identity)
            self._judge_place(leaf, root)
            yield leaf
            since_ms = max(since_ms, read.body.get("time_ms", 0))
        self._compare_roots()

    def _compare_roots(self) -> None:
        for kept in self.checkpoints:
            if kept.size == self.tree.size:
                kept.found = self.tree.root()

    def _judge_place(self, leaf: Leaf, root: bytes | None) -> None:
        """Time runs forward; an epoch stands on the log before it."""
        back_ms = leaf.since_ms - leaf.body.get("time_ms", leaf.since_ms)
        if back_ms > 0:
            self.findings.fail("leaves", f"its time is {back_ms} ms before that of a leaf before it", leaf.place)
        if root is not None and (leaf.body["size"], leaf.body["root"]) != (leaf.index, root.hex()):
            self.findings.fail("epochs", "it does not stand on the log before it", leaf.place)


def _verify_leaf(leaf: LogLeaf, index: int, trust: Trust) -> str | None:
    """The id of a signed leaf. Every body but an intent's names the run."""
    body = leaf.body
    if body.get("runtime_id", trust.runtime_id) != trust.runtime_id:
        raise VerifyError("a leaf of another run", check="runtime_pin")
    if (leaf.kind == "bootstrap") != (index == 0):
        raise VerifyError("a bootstrap that is not leaf 0", check="leaves")
    if leaf.kind == "receipt" and body["kernel_key"] != trust.kernel_key.hex:
        raise VerifyError("a receipt of another kernel", check="signer_pin")
    if leaf.kind == "receipt" and body["log_index"] != index:
        raise VerifyError(f"a receipt of leaf {body['log_index']}", check="leaves")
    wanted, there = _MEMBERS[leaf.kind](body) if leaf.kind in _MEMBERS else ("", True)
    if not there:
        raise VerifyError(f"the member `{wanted}` is missing, or has no place here", check="fields")
    return leaf.verify(trust.kernel_key)


# Members that one of the others calls for: its name, and whether it is there exactly when it has to be.
_MEMBERS: dict[str, Callable[[dict[str, Any]], tuple[str, bool]]] = {
    "launch": lambda body: ("server", ("server" in body) == (body["process_id"] is None)),
    "attempt": lambda body: ("outcome", ("outcome" in body) == (body["event"] == "ended")),
    "revocation": lambda body: ("capability_id", ("capability_id" in body) == (body["what"] == "capability")),
    "incident": lambda body: ("call", ("call" in body) != ("server" in body)),
}
