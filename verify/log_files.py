"""Files of one log, judged together: an export of its leaves, checkpoints, proofs, and what witnesses have signed.

What a file is shows at its beginning: `{` an export (one leaf per line, in order), `c2sp.org/tlog-proof@v1` an
inclusion proof, `old ` a consistency proof, anything else a checkpoint. The export is read once, in constant memory.

    checkpoint            each is signed by the pinned log key, under the log's origin
    cosignature NAME      a named witness signed the newest
    leaves                each leaf is canonical JSON of a type that the log has
    bootstrap             leaf 0 certifies the pinned keys
    runtime_pin           each leaf that names a run names this one
    leaf_signatures       each leaf of a signed type is signed by the pinned kernel key
    order                 receipts name their own index; time never runs backwards
    epochs                an epoch stands on the root of the log before it
    completeness          the root over all leaves is the newest checkpoint's: none is missing, none is more
    consistency           every checkpoint is of a beginning of the newest
    inclusion             each proved leaf is in the log at its index
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from verify.export import Export, LogTrust, read_export, renamed
from verify.files import open_file
from verify.keys import read_small
from verify.leaves import LogLeaf, read_leaf_text
from verify.lines import MAX_LINE_BYTES
from verify.log import Checkpoint, leaf_hash, read_checkpoint, receipt_leaf, verify_consistency
from verify.log import verify_inclusion as verify_leaf
from verify.notes import ED25519, MAX_NOTE_BYTES, Note, VerifierKey, read_note
from verify.proofs import CONSISTENCY_HEADER, INCLUSION_HEADER, MAX_PROOF_BYTES, ConsistencyProof, InclusionProof
from verify.receipts import verify_receipt
from verify.verdict import Unchecked, Verdict, VerifyError, unreadable

_OF_LEAVES = ("leaves", "bootstrap", "runtime_pin", "leaf_signatures", "order", "epochs")


@dataclass(slots=True)
class _Files:
    """What was given, by what it is. Checkpoints in proofs are among the checkpoints."""

    leaves: str | None = None
    checkpoints: list[tuple[str, Note, Checkpoint]] = field(default_factory=list)
    inclusions: list[tuple[str, InclusionProof, Checkpoint]] = field(default_factory=list)
    consistencies: list[tuple[str, ConsistencyProof, Checkpoint]] = field(default_factory=list)
    refused: VerifyError | None = None

    @property
    def newest(self) -> Checkpoint | None:
        return max((checkpoint for _, _, checkpoint in self.checkpoints), key=lambda it: it.size, default=None)


def judge_log(paths: Sequence[str], trust: LogTrust, leaf_file: str | None = None) -> Verdict:
    """Judges the files together. Raises `VerifyError` only for one that cannot be read."""
    files = _sort(paths, trust)
    sizes = {checkpoint.size for _, _, checkpoint in files.checkpoints}
    indexes = {proof.index for _, proof, _ in files.inclusions}
    export = read_export(files.leaves, trust, sizes, indexes) if files.leaves is not None else None
    verdict = Verdict("log")
    if files.refused is not None:
        verdict.fail("checkpoint", files.refused)
    elif files.newest is None:
        verdict.leave("checkpoint", "no checkpoint was given", required=True)
    else:
        verdict.passes("checkpoint", f"The log's key signed the log {trust.origin} at {files.newest.size} leaves.")
    for witness in trust.witnesses:
        _judge_witness(verdict, files, witness)
    _judge_leaves(verdict, files, export, trust)
    newest = files.newest
    verdict.run(
        "completeness",
        partial(_require_complete, export, newest),
        file=files.leaves or "",
        proves=(
            f"The export is all {newest.size if newest else 0} leaves of that checkpoint, none missing and none more."
        ),
    )
    verdict.run(
        "consistency",
        partial(_require_consistent, files, export),
        proves=(f"All of the {len(files.checkpoints)} checkpoints are of one log that only ever grew."),
    )
    if files.inclusions:
        proved = [proof.index for _, proof, _ in files.inclusions]
        verdict.run(
            "inclusion",
            partial(_require_included, files, export, trust, leaf_file),
            proves=(f"The log holds what is proved of it, at leaf {', '.join(map(str, proved))}."),
        )
    else:
        verdict.leave("inclusion", "no inclusion proof was given")
    verdict.figures = {
        "leaves": export.tree.size if export else None,
        "checkpoint_size": newest.size if newest else None,
    }
    return verdict


# --- what the files are ----------------------------------------------------------------------------------------------


def _sort(paths: Sequence[str], trust: LogTrust) -> _Files:
    files = _Files()
    for path in paths:
        kind = _beginning(path)
        if kind.startswith(b"{"):
            if files.leaves is not None:
                raise VerifyError("a second export of leaves", check="input", file=path, fix="give one export")
            files.leaves = path
            continue
        try:
            _sort_small(files, path, kind, trust)
        except VerifyError as error:
            if error.check == "input":
                raise
            files.refused = files.refused or error.located(path)
    return files


def _sort_small(files: _Files, path: str, kind: bytes, trust: LogTrust) -> None:
    if kind == INCLUSION_HEADER:
        proof = InclusionProof.read(read_small(path, MAX_PROOF_BYTES))
        files.inclusions.append((path, proof, _checkpoint(files, path, proof.checkpoint, trust)))
    elif kind.startswith(CONSISTENCY_HEADER):
        grown = ConsistencyProof.read(read_small(path, MAX_PROOF_BYTES))
        files.consistencies.append((path, grown, _checkpoint(files, path, grown.checkpoint, trust)))
    else:
        _checkpoint(files, path, read_small(path, MAX_NOTE_BYTES), trust)


def _checkpoint(files: _Files, path: str, text: bytes, trust: LogTrust) -> Checkpoint:
    note = read_note(text)
    VerifierKey(trust.origin, ED25519, trust.log_key).verify(note)
    checkpoint = read_checkpoint(note, trust.origin)
    files.checkpoints.append((path, note, checkpoint))
    return checkpoint


def _beginning(path: str) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(len(INCLUSION_HEADER))
    except OSError as error:
        raise unreadable(path, error) from error


_SHOWS: dict[str, Callable[[Export], str]] = {
    "leaves": lambda export: f"Each of the {export.tree.size} leaves is canonical and of a known type.",
    "bootstrap": lambda _: "Leaf 0 certifies the pinned keys for this run, config and policy.",
    "leaf_signatures": lambda _: "Every bootstrap, receipt, launch, exit and epoch is signed by the pinned kernel key.",
    "order": lambda _: "Receipts stand where they say, and time never runs backwards.",
}


def _judge_leaves(verdict: Verdict, files: _Files, export: Export | None, trust: LogTrust) -> None:
    for name in _OF_LEAVES:
        if export is None:
            verdict.leave(name, "no export of leaves was given")
        elif name in export.failed:
            verdict.fail(name, export.failed[name])
        elif name in ("runtime_pin", "leaf_signatures") and trust.pins is None:
            verdict.leave(name, "no pins were given, only the log's key and origin", file=files.leaves or "")
        else:
            verdict.passes(name, _SHOWS[name](export) if name in _SHOWS else "")


# --- what they show together -----------------------------------------------------------------------------------------


def _require_complete(export: Export | None, newest: Checkpoint | None) -> None:
    if export is None:
        raise Unchecked("no export of leaves was given")
    if newest is None:
        raise Unchecked("no checkpoint was given to hold the leaves against", required=True)
    if export.tree.size != newest.size:
        difference = export.tree.size - newest.size
        what = f"{difference} leaves more than" if difference > 0 else f"{-difference} leaves fewer than"
        raise VerifyError(f"{what} the {newest.size} of the newest checkpoint", check="completeness")
    if export.tree.root() != newest.root:
        raise VerifyError("the root over all leaves is not the newest checkpoint's", check="completeness")


def _require_consistent(files: _Files, export: Export | None) -> None:
    """From each checkpoint there is a way up to the newest, each step shown by the leaves or by a proof."""
    newest = files.newest
    if newest is None or len(files.checkpoints) < 2:
        raise Unchecked("fewer than two checkpoints were given")
    roots: dict[int, bytes] = {}
    for path, _, checkpoint in files.checkpoints:
        if roots.setdefault(checkpoint.size, checkpoint.root) != checkpoint.root:
            raise VerifyError(f"two roots for {checkpoint.size} leaves", check="consistency", file=path)
        if export is not None and export.roots.get(checkpoint.size, checkpoint.root) != checkpoint.root:
            raise VerifyError(f"the leaves have another root at {checkpoint.size}", check="consistency", file=path)
    steps = set()
    for path, proof, new in files.consistencies:
        if proof.old_size not in roots:
            raise Unchecked(
                f"the checkpoint of {proof.old_size} leaves that {path} starts from is not here", required=True
            )
        try:
            verify_consistency(Checkpoint(new.origin, proof.old_size, roots[proof.old_size]), new, proof.nodes)
        except VerifyError as error:
            raise error.located(path) from error
        steps.add((proof.old_size, new.size))
    if export is not None:
        steps |= {(size, newest.size) for size in export.roots if newest.size in export.roots}
    reached = {newest.size}
    for old, new_size in sorted(steps, key=lambda step: -step[1]):
        if new_size in reached:
            reached.add(old)
    for size in sorted(roots):
        if size not in reached:
            why = f"nothing shows that the log of {newest.size} leaves begins with that of {size}"
            raise Unchecked(f"{why}: give the leaves or a consistency proof", required=True)


def _require_included(files: _Files, export: Export | None, trust: LogTrust, leaf_file: str | None) -> None:
    given = _given_leaf(leaf_file, trust) if leaf_file is not None else None
    for path, proof, checkpoint in files.inclusions:
        try:
            text = proof.leaf if proof.leaf is not None else given
            hashed = leaf_hash(text) if text is not None else export.hashes.get(proof.index) if export else None
            if hashed is None:
                raise Unchecked(f"the leaf that {path} is about is not here: give it with --leaf", required=True)
            verify_leaf(hashed, proof.index, checkpoint.size, proof.nodes, checkpoint.root)
            if export is not None and export.hashes.get(proof.index, hashed) != hashed:
                raise VerifyError("the export has another leaf there", check="inclusion", place=f"leaf {proof.index}")
            if text is not None:
                _require_own_place(read_leaf_text(text), proof.index, trust)
        except VerifyError as error:
            raise error.located(path) from error


def _require_own_place(leaf: LogLeaf, index: int, trust: LogTrust) -> None:
    if trust.pins is not None:
        leaf.verify(trust.pins.kernel_key)
    if leaf.kind == "receipt" and leaf.body["log_index"] != index:
        raise VerifyError(f"a receipt that says it is leaf {leaf.body['log_index']}", check="inclusion")


def _given_leaf(path: str, trust: LogTrust) -> bytes:
    """The leaf in a file: as it is, or of a receipt with what it discloses."""
    text = read_small(path, MAX_LINE_BYTES).removesuffix(b"\n")
    try:
        if b',"disclosed":{' in text and trust.pins is not None:
            return receipt_leaf(verify_receipt(text, trust.pins.kernel_key, trust.pins.runtime_id))
        return read_leaf_text(text).text
    except VerifyError as error:
        raise error.located(path) from error


def _judge_witness(verdict: Verdict, files: _Files, witness: VerifierKey) -> None:
    name, newest = f"cosignature {witness.name}", files.newest
    notes = [(path, note) for path, note, it in files.checkpoints if newest is not None and it.size == newest.size]
    signed = [(path, note) for path, note in notes if note.of(witness.name, witness.key_id)]
    if not signed:
        verdict.leave(name, "it did not sign the newest checkpoint that was given", required=True)
        return
    path, note = signed[0]
    try:
        time = witness.verify(note)
    except VerifyError as error:
        verdict.fail(name, renamed(error, "cosignature"), file=path)
        return
    seen = f", which it saw at {time} s since the epoch" if time is not None else ""
    verdict.passes(name, f"The witness {witness.name} vouches for the newest checkpoint{seen}.")
