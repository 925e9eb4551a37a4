"""Capability tokens: a chain from the caller's own up to root's, and what it allows.

Every token is signed by the authority key that the signed bootstrap names, and names its parent's id. A child may only
be narrower than its parent: fewer tools and operations, no later end, no larger counts, every constraint kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from verify import canonical, shape
from verify.keys import PublicKey
from verify.verdict import VerifyError

MAX_DEPTH = 64
WHOLE_BPS = 10_000  # root's share

_GRANT = shape.record(
    {
        "server": shape.name,
        "tool": shape.name,
        "operations": shape.array(shape.one_of("invoke", "delegate")),
        "expires_ms": shape.at_least(0),
        "max_invocations": shape.nullable(shape.at_least(1)),
        "constraints": shape.array(shape.object_of_anything),
        "parent_grant": shape.nullable(shape.at_least(0)),
    }
)
_BODY = shape.record(
    {
        "schema": shape.one_of("chio.capability.v1"),
        "runtime_id": shape.runtime_id,
        "process_id": shape.process_id,
        "parent_capability_id": shape.nullable(shape.digest),
        "depth": shape.at_least(0),
        "issued_ms": shape.at_least(0),
        "expires_ms": shape.at_least(0),
        "budget_share_bps": shape.at_least(1),
        "grants": shape.array(_GRANT),
    }
)


@dataclass(frozen=True, slots=True)
class Capability:
    """A token whose signature holds."""

    id: str
    body: dict[str, Any]


def verify_capability(text: bytes, authority_key: PublicKey) -> Capability:
    """One token, as received."""
    members = canonical.split(text, ("body", "signature"))
    _BODY(members["body"].value, "body")
    shape.signature(members["signature"].value, "signature")
    identity = authority_key.verify_record("capability", members["body"].received, members["signature"].value)
    return Capability(identity, members["body"].value)


def verify_chain(texts: Sequence[str], bootstrap: dict[str, Any]) -> list[Capability]:
    """The caller's own token first, root's last, each one that the (verified) bootstrap body certifies."""
    if not 1 <= len(texts) <= MAX_DEPTH + 1:
        _refuse(f"a chain of {len(texts)} tokens")
    authority = PublicKey.from_hex(bootstrap["authority_key"])
    chain = [verify_capability(text.encode(), authority) for text in texts]
    certified = {entry["process_id"]: entry for entry in bootstrap["processes"]}
    for position, capability in enumerate(chain):
        above = chain[position + 1] if position + 1 < len(chain) else None
        entry = certified.get(capability.body["process_id"])
        if entry is None:
            _refuse(f"the bootstrap does not certify the token of `{capability.body['process_id']}`")
        verify_link(capability, above, entry, bootstrap["runtime_id"])
    return chain


def verify_link(capability: Capability, above: Capability | None, entry: dict[str, Any], runtime_id: str) -> None:
    """One token against its parent's (None for root's) and the bootstrap's `entry` of its process."""
    body = capability.body
    if body["runtime_id"] != runtime_id:
        _refuse("a token of another run")
    if (entry["process_id"], entry["capability_id"]) != (body["process_id"], capability.id):
        _refuse(f"the bootstrap does not certify the token of `{body['process_id']}`")
    if entry["parent_id"] != (above.body["process_id"] if above else None):
        _refuse(f"the token above that of `{body['process_id']}` is not its parent's")
    if body["parent_capability_id"] != (above.id if above else None):
        _refuse(f"the token of `{body['process_id']}` does not name the one above it")
    if body["depth"] != (above.body["depth"] + 1 if above else 0):
        _refuse(f"the token of `{body['process_id']}` is of another depth")
    _require_narrower(body, above.body if above else None)


def _require_narrower(child: dict[str, Any], parent: dict[str, Any] | None) -> None:
    who = child["process_id"]
    if parent is None and child["budget_share_bps"] != WHOLE_BPS:
        _refuse(f"the token of `{who}` has another share than all of it")
    if parent is not None and (
        child["expires_ms"] > parent["expires_ms"] or child["budget_share_bps"] > parent["budget_share_bps"]
    ):
        _refuse(f"the token of `{who}` is wider than its parent's")
    for position, grant in enumerate(child["grants"]):
        index = grant["parent_grant"]
        if parent is None:
            if index is not None:
                _refuse(f"grant {position} of root names a parent's")
            continue
        if index is None or index >= len(parent["grants"]):
            _refuse(f"grant {position} of `{who}` comes from no grant of its parent")
        if not _narrows(grant, parent["grants"][index]):
            _refuse(f"grant {position} of `{who}` is wider than the one it comes from")


def _narrows(grant: dict[str, Any], parent: dict[str, Any]) -> bool:
    most, allowed = grant["max_invocations"], parent["max_invocations"]
    return (
        grant["server"] == parent["server"]
        and grant["tool"] != "*"
        and parent["tool"] in ("*", grant["tool"])
        and "delegate" in parent["operations"]
        and set(grant["operations"]) <= set(parent["operations"])
        and grant["expires_ms"] <= parent["expires_ms"]
        and (allowed is None or (most is not None and most <= allowed))
        and all(constraint in grant["constraints"] for constraint in parent["constraints"])
    )


def granted(chain: Sequence[Capability], server: str, tool: str, at_ms: int) -> bool:
    """Whether the chain allowed the call at a time: expiries only; constraints and counts are not looked at."""
    return all(at_ms < capability.body["expires_ms"] for capability in chain) and any(
        grant["server"] == server
        and grant["tool"] in ("*", tool)
        and "invoke" in grant["operations"]
        and at_ms < grant["expires_ms"]
        for grant in chain[0].body["grants"]
    )


def _refuse(why: str) -> NoReturn:
    raise VerifyError(why, check="issued_capability")
