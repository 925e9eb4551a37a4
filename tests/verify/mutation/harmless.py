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
    found = []
    for line in text.removesuffix(b"\n").split(b"\n"):
        try:
            document = json.loads(line)
        except ValueError:
            document = line.hex()
        if isinstance(document, dict) and isinstance(document.get("disclosed"), dict):
            document["disclosed"].pop("output_salt", None)
        found.append(json.dumps(document))
    return found


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

# --- a whole run, signed anew by who has every key --------------------------------------------------------------------


def _any_of(*patterns: str) -> str:
    return "|".join(f"(?:{pattern})" for pattern in patterns)


BUNDLE = (
    Harmless(
        "a time is the host's clock, and only its order is held",
        where=_any_of(r"[a-z]+\.time_ms", r"token\.issued_ms"),
        how="another value",
    ),
    Harmless(
        "what was seen at an end, counted or said in words is the host's word",
        where=_any_of(
            r"exit\.(?:usage|output)\.[a-z_]+", r"exit\.exports\.\*\.(?:bytes|sha256)", r"[a-z]+\.(?:.*\.)?detail",
            r"incident\.answer_(?:bytes|sha256)", r"bootstrap\.storage\.filesystem",
        ),
        how="another value|null|removed",
    ),
    Harmless(
        "what an operator stated is the operator's word",
        where=r"(?:reconciliation|cancellation)\.(?:by|outcome|evidence_sha256)",
        how="another value",
    ),
    Harmless(
        "what only a checkpoint kept elsewhere can miss: that it was said, or what it said of files",
        where=_any_of("item (?:reconciliation|incident|revocation|cancellation)", r"exit\.exports\.\*"),
        how="removed",
    ),
    Harmless("what is taken away twice is taken away", where="item revocation", how="duplicated"),
    Harmless(
        "whether single files seem to be the attempt's own weakens nothing",
        where=r"launch\.fields\.id_mapped_mounts\.(?:name|asked\.\*|asked|value)",
        how="another value|removed|duplicated",
    ),
    Harmless("of two things at the same time the log says which was first", where="item [a-z-]+", how="re-ordered"),
    Harmless(
        "a set has no order, and nothing in it twice",
        where=_any_of(
            r"launch\.fields",
            r"launch\.fields\.landlock\.(?:asked|value)\.rights", r"token\.grants\.\*\.operations(?:\.\*)?",
            r"bootstrap\.servers\.\*\.tools(?:\.[a-z]+)?", r"cancellation\.processes",
        ),
        how="re-ordered|duplicated",
    ),
    Harmless(
        "root's grants and ends are those of the policy, which is YAML (`policy` is unchecked)",
        where=r"token\.(?:expires_ms|grants\.\*(?:\.(?:max_invocations|expires_ms|operations\.\*))?)",
        how="another value|another type|null|removed|duplicated|re-ordered",
    ),
    Harmless(
        "which tools a server has is what it said at init",
        where=r"bootstrap\.servers\.\*\.(?:tools_digest|tools\.[a-z]+\.(?:read_only|name))",
        how="another value",
    ),
    Harmless(
        "the plan has no digest in the log: what no launch shows of it is the host's word",
        where=r"plan\..*",
        how="another value|null|removed|duplicated|re-ordered|added",
    ),
    Harmless(
        "that a profile's resolved form follows from its text is for a reader of YAML (`profile_texts` is unchecked)",
        where=r"resolved-profile\.(?:environment|tmpfs)\.[A-Za-z_]+",
        how="another value",
    ),
    Harmless("a rule that covers nothing withholds nothing", where=r"manifest\.withheld", how="another value"),
)  # fmt: skip
