"""Capabilities, pure: what root is granted, how a child narrows it, and which grant covers a call.

Each process has one signed token that names its parent's. A child's grant comes from one grant of its parent
(`parent_grant`) and can only be narrower: one concrete tool, no more operations, no later expiry, the same or a
smaller `max_invocations`, every constraint kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from chio import canonical
from chio.errors import InputError
from chio.schema import RESERVED_SERVERS, ROOT, Child, HostConfig, Policy
from chio.signing import SigningKey, signed_text

MAILBOX_SERVER = "chio-ipc"
MAILBOX_VERBS = ("send", "receive", "ack")


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a capability. `tool` is a name, or `*` in root's only."""

    server: str
    tool: str
    operations: list[str]
    expires_ms: int
    max_invocations: int | None
    constraints: list[dict[str, Any]]
    parent_grant: int | None

    def covers(self, server: str, tool: str) -> bool:
        return self.server == server and self.tool in ("*", tool)


class CapabilityBody(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    runtime_id: str
    process_id: str
    parent_capability_id: str | None
    depth: int
    issued_ms: int
    expires_ms: int
    budget_share_bps: int
    grants: list[Grant]


@dataclass(frozen=True, slots=True)
class Capability:
    """A token: its id, its exact signed text, and what it says."""

    id: str
    text: bytes
    body: CapabilityBody

    @classmethod
    def read(cls, capability_id: str, text: bytes) -> Capability:
        """From the kernel's own store, whose text this kernel signed at init."""
        return cls(capability_id, text, msgspec.json.decode(text, type=_Token).body)


class _Token(msgspec.Struct):
    body: CapabilityBody
    signature: str


def require_tools(config: HostConfig, policy: Policy, policy_file: str, servers: dict[str, list[str]]) -> None:
    """Raises `InputError` for a grant of a tool that the host does not have."""
    known = mailbox_tools(config) | servers
    for position, tool in enumerate(policy.capabilities.default.tools):
        if tool.server not in known or (tool.tool != "*" and tool.tool not in known[tool.server]):
            raise InputError(
                "the policy grants a tool that the host does not have",
                file=policy_file,
                field=f"capabilities.default.tools[{position}]",
                why=f"{tool.server}/{tool.tool}",
                fix=_known_list(known),
            )


def issue(
    config: HostConfig,
    policy: Policy,
    file: str,
    *,
    servers: dict[str, list[str]],
    runtime_id: str,
    now_ms: int,
    authority: SigningKey,
) -> dict[str, Capability]:
    """One capability for each process, root first. Raises `InputError` where the two documents do not fit.

    `servers` are the tools of each tool server, as it declared them.
    """
    if config.limits.max_depth > policy.kernel.delegation_depth_limit:
        raise InputError(
            "the tree may grow deeper than the policy allows",
            file=file,
            field="limits.max_depth",
            why=f"{config.limits.max_depth} is over delegation_depth_limit {policy.kernel.delegation_depth_limit}",
            fix="lower max_depth or raise the policy's limit",
        )
    known = mailbox_tools(config) | servers
    expires_ms = now_ms + policy.kernel.max_capability_ttl * 1000

    def sign(process: str, parent: Capability | None, share: int, grants: list[Grant]) -> Capability:
        body = CapabilityBody(
            schema="chio.capability.v1",
            runtime_id=runtime_id,
            process_id=process,
            parent_capability_id=parent.id if parent else None,
            depth=parent.body.depth + 1 if parent else 0,
            issued_ms=now_ms,
            expires_ms=expires_ms,
            budget_share_bps=share,
            grants=grants,
        )
        text = canonical.encode(msgspec.to_builtins(body))
        signature, identity = authority.sign("capability", text)
        return Capability(identity, signed_text(text, signature), body)

    root_grants = [
        Grant(
            server=tool.server,
            tool=tool.tool,
            operations=list(tool.operations),
            expires_ms=now_ms + tool.ttl * 1000,
            max_invocations=tool.max_invocations,
            constraints=[tool.constraints] if tool.constraints is not None else [],
            parent_grant=None,
        )
        for tool in policy.capabilities.default.tools
    ]
    issued = {ROOT: sign(ROOT, None, 10_000, root_grants)}
    for position, child in enumerate(config.children):
        parent = issued[child.parent]
        if parent.body.depth + 1 > config.limits.max_depth:
            raise InputError(
                "a child lies too deep",
                file=file,
                field=f"children[{position}].parent",
                why=f"depth {parent.body.depth + 1} is over limits.max_depth {config.limits.max_depth}",
                fix="raise max_depth or choose another parent",
            )
        grants = _narrow(parent, child, f"children[{position}]", file, known)
        issued[child.id] = sign(child.id, parent, child.budget_share_bps, grants)
    return issued


def _narrow(parent: Capability, child: Child, field: str, file: str, known: dict[str, list[str]]) -> list[Grant]:
    grants: list[Grant] = []
    for position, route in enumerate(child.tools):
        where = f"{field}.tools[{position}]"
        if route.server_id not in known or route.tool_name not in known[route.server_id]:
            raise InputError(
                "a route leads nowhere",
                file=file,
                field=where,
                why=f"{route.server_id}/{route.tool_name}",
                fix=_known_list(known),
            )
        from_parent = [
            (index, grant)
            for index, grant in enumerate(parent.body.grants)
            if grant.covers(route.server_id, route.tool_name) and set(grant.operations) >= {"delegate", "invoke"}
        ]
        if not from_parent:
            raise InputError(
                "a route is outside its parent's scope",
                file=file,
                field=where,
                why=f"`{child.parent}` may not invoke and delegate {route.server_id}/{route.tool_name}",
                fix="grant it to the parent with operations [invoke, delegate], or remove the route",
            )
        grants += [
            msgspec.structs.replace(grant, tool=route.tool_name, parent_grant=index) for index, grant in from_parent
        ]
    return grants


def mailbox_tools(config: HostConfig) -> dict[str, list[str]]:
    """The built-in server and its tools."""
    return {MAILBOX_SERVER: [f"{verb}_{box.id}" for box in config.mailboxes for verb in MAILBOX_VERBS]}


def _known_list(known: dict[str, list[str]]) -> str:
    names = [f"{server}/{tool}" for server, tools in known.items() for tool in tools]
    return "the host has " + (
        ", ".join(names[:12]) + (", …" if len(names) > 12 else "") if names else "no tools: declare a mailbox"
    )


def covering(capability: Capability, server: str, tool: str) -> list[int]:
    """Positions of the grants that allow invoking the tool, in the token's order."""
    return [
        index
        for index, grant in enumerate(capability.body.grants)
        if grant.covers(server, tool) and "invoke" in grant.operations
    ]


def lives(capability: Capability, now_ms: int) -> bool:
    """Whether any grant can still be used: once none can, an attempt is refused before it is reserved.

    A process that was never given a tool still has its checkpoint and blobs, for as long as its capability lives.
    """
    entries = capability.body.grants
    return now_ms < capability.body.expires_ms and (not entries or any(now_ms < entry.expires_ms for entry in entries))


__all__ = [
    "MAILBOX_SERVER",
    "RESERVED_SERVERS",
    "Capability",
    "Grant",
    "covering",
    "issue",
    "lives",
    "mailbox_tools",
    "require_tools",
]
