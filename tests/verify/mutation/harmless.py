"""What nothing catches, and why it means nothing: everything that may pass though it was changed."""

from __future__ import annotations

import json

from tests.verify.mutation.matrix import Harmless


def _without_last_newline(good: bytes, changed: bytes) -> bool:
    return good.removesuffix(b"\n") == changed.removesuffix(b"\n")


LAST_NEWLINE = (Harmless("the newline at the end is nobody's", same=_without_last_newline),)

# --- receipts ---------------------------------------------------------------------------------------------------------


def _lines(text: bytes) -> list[str]:
    """Each line, but for the salt of an output that is not there."""
    try:
        documents = [json.loads(line) for line in text.removesuffix(b"\n").split(b"\n")]
        for document in documents:
            document["disclosed"].pop("output_salt", None)
    except ValueError:
        return [str(text)]
    return [json.dumps(document) for document in documents]


def _same_but_for_output_salts(good: bytes, changed: bytes) -> bool:
    return _lines(good) == _lines(changed)


def _lines_of(good: bytes, changed: bytes) -> bool:
    """Whole lines of the good one, at least one of them, and nothing else."""
    return set(_lines(changed)) <= set(_lines(good))


_SAID_ALONE = "|".join(
    ("attempt", r"attempt\.launch_id", r"attempt\.number", r"call\.[a-z_]+", "capability_id", r"decision\.[a-z]+",
     r"evidence\.\*", r"evidence\.\*\.[a-z]+", "log_index", "output", r"output\.(?:hash|kind)", "policy_hash",
     r"terminal_state\.reason", "time_ms", "tool_name", "tool_server")
)  # fmt: skip
RECEIPT = (
    Harmless("the newline at the end is nobody's", same=_without_last_newline),
    Harmless("the output's salt opens an output, and there is none here", same=_same_but_for_output_salts),
    Harmless("the same receipt twice is the same receipt", how="concatenated", same=_lines_of),
    Harmless(
        "what a kernel signs in a receipt is its word: the worker's response, the log or a bundle contradict it",
        where=f"signed anew\\.(?:{_SAID_ALONE})",
        how="another value|null|removed|duplicated",
    ),
)
RECEIPTS = (
    Harmless("the output's salt opens an output, and there is none here", same=_same_but_for_output_salts),
    Harmless("which receipts there are, how often and in what order, only the log shows", same=_lines_of),
)

CALL = (
    *LAST_NEWLINE,
    Harmless("an observation may be without a response; the verdict says so", where=r"signed anew\.response_json"),
    Harmless("when it was observed is the host's word", where=r"signed anew\.time_ms", how="another value"),
)

# --- notes and proofs -------------------------------------------------------------------------------------------------


def _same_signers(good: bytes, changed: bytes) -> bool:
    """The same text, and below it the same lines, twice or in another order."""
    (text, _, signers), (text_then, _, signers_then) = good.rpartition(b"\n\n"), changed.rpartition(b"\n\n")
    return text == text_then and signers_then.endswith(b"\n") and set(signers.split()) == set(signers_then.split())


NOTE = (Harmless("a signature twice, or in another order, is the same signature", same=_same_signers),)

# --- pins -------------------------------------------------------------------------------------------------------------


def _same_document(good: bytes, changed: bytes) -> bool:
    try:
        return bool(json.loads(changed, object_pairs_hook=sorted) == json.loads(good, object_pairs_hook=sorted))
    except ValueError:
        return False


PINS = (
    Harmless("the spacing, the order and the escapes of pins mean nothing: nobody signs them", same=_same_document),
)
