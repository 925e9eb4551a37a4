"""Who may do what in a run, before anything happened: the bootstrap's processes, their tokens, the tools there are.

Everything that a log says is judged against this. It comes from the signed bootstrap (leaf 0), the signed tokens, and
the host config whose digest the bootstrap holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from verify import canonical, shape
from verify.capabilities import WHOLE_BPS, Capability, verify_capability, verify_link
from verify.keys import PublicKey
from verify.verdict import VerifyError

BUILT_IN_SERVERS = ("chio-ipc", "chio-process")
MAILBOX_SERVER = "chio-ipc"
MAX_PROCESSES = 1025
_MAILBOX_VERBS = ("send", "receive", "ack")


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """One process and its token. `above` runs from its parent up to root."""

    id: str
    ceiling: int
    capability: Capability
    above: tuple["Process", ...]

    @property
    def path(self) -> tuple["Process", ...]:
        """Itself, and everything up to root."""
        return (self, *self.above)

    @property
    def parent(self) -> "Process | None":
        return self.above[0] if self.above else None

    @property
    def grants(self) -> list[dict[str, Any]]:
        grants: list[dict[str, Any]] = self.capability.body["grants"]
        return grants

    def covering(self, server: str, tool: str) -> list[int]:
        """Positions of the grants that name the tool and `invoke`, in the token's order."""
        return [
            position
            for position, grant in enumerate(self.grants)
            if grant["server"] == server and grant["tool"] in ("*", tool) and "invoke" in grant["operations"]
        ]

    def counted(self, grant: int) -> list[tuple[str, int, int]]:
        """(process, grant, max_invocations) of each grant from this one up to root that counts invocations."""
        found: list[tuple[str, int, int]] = []
        position: int | None = grant
        for process in self.path:
            if position is None:
                break
            entry = process.grants[position]
            if entry["max_invocations"] is not None:
                found.append((process.id, position, entry["max_invocations"]))
            position = entry["parent_grant"]
        return found


_SERVER = shape.record(
    {
        "server_id": shape.process_id,
        "tools_digest": shape.digest,
        "tools": shape.array(shape.record({"name": shape.name, "read_only": shape.boolean})),
    }
)


@dataclass(frozen=True, slots=True)
class Authority:
    """`tools` says of each tool of each server whether it was pinned as free of side effects."""

    bootstrap: dict[str, Any]
    processes: Mapping[str, Process]
    tools: Mapping[str, Mapping[str, bool]]

    def below(self, process_id: str) -> Iterator[str]:
        """A process and everything below it."""
        return (id for id, process in self.processes.items() if any(at.id == process_id for at in process.path))

    def is_read(self, server: str, tool: str) -> bool:
        return self.tools.get(server, {}).get(tool, False)


def require_servers(bootstrap: dict[str, Any]) -> None:
    """The bootstrap's list of tool servers has its form."""
    shape.array(_SERVER)(bootstrap["servers"], "body.servers")


def read_authority(bootstrap: dict[str, Any], texts: Sequence[bytes], config: dict[str, Any] | None) -> Authority:
    """The tree, each token verified under the bootstrap's authority key and no wider than its parent's.

    Raises `VerifyError` (check `capabilities`). `config` adds the mailboxes; without it no tool of theirs is known.
    """
    entries = bootstrap["processes"]
    if not 1 <= len(entries) <= MAX_PROCESSES or len(texts) != len(entries):
        _refuse(f"{len(texts)} tokens for {len(entries)} processes")
    key = PublicKey.from_hex(bootstrap["authority_key"])
    processes: dict[str, Process] = {}
    for position, (entry, text) in enumerate(zip(entries, texts, strict=True)):
        try:
            capability = verify_capability(text, key)
            above = processes.get(entry["parent_id"]) if entry["parent_id"] is not None else None
            if (entry["parent_id"] is None) != (position == 0) or (entry["parent_id"] is not None and above is None):
                _refuse(f"`{entry['process_id']}` stands before its parent, or has none and is not the first")
            if entry["process_id"] in processes:
                _refuse(f"`{entry['process_id']}` is there twice")
            verify_link(capability, above.capability if above else None, entry, bootstrap["runtime_id"])
        except VerifyError as error:
            raise VerifyError(error.what, check="capabilities", place=f"capabilities[{position}]") from error
        processes[entry["process_id"]] = Process(
            entry["process_id"], entry["ceiling"], capability, above.path if above else ()
        )
    tools: dict[str, dict[str, bool]] = {
        server["server_id"]: {tool["name"]: tool["read_only"] for tool in server["tools"]}
        for server in bootstrap["servers"]
    }
    if config is not None:
        tools[MAILBOX_SERVER] = {
            f"{verb}_{box['id']}": False for box in config.get("mailboxes", []) for verb in _MAILBOX_VERBS
        }
    return Authority(bootstrap, processes, tools)


# --- the host config -------------------------------------------------------------------------------------------------

_ANY = shape.anything
_CHILD = shape.record(
    {
        "id": shape.process_id,
        "parent": shape.process_id,
        "tools": shape.array(shape.record({"server_id": shape.name, "tool_name": shape.name})),
        "budget_share_bps": shape.at_least(1),
    }
)
_CONFINEMENT = shape.record(
    {}, {"profile": shape.text, "read": shape.array(shape.text), "write": shape.array(shape.text)}
)
_CONFIG = shape.record(
    {
        "schema": shape.one_of("chio.process.host.v1"),
        "policy": shape.text,
        "limits": shape.record(
            {"max_processes": shape.at_least(1), "max_depth": shape.at_least(0), "max_calls": shape.at_least(1)},
            {"state": _ANY},
        ),
    },
    {
        "mailboxes": shape.array(shape.record({"id": shape.process_id}, {"limits": _ANY})),
        "servers": shape.array(
            shape.record(
                {"id": shape.process_id, "command": shape.array(shape.string)},
                {"request_timeout_seconds": _ANY, "confinement": _CONFINEMENT},
            )
        ),
        "children": shape.array(_CHILD),
    },
)


def read_config(text: bytes) -> dict[str, Any]:
    """The host config (JSON, not canonical). Raises `VerifyError` (`text`, `fields`)."""
    config: dict[str, Any] = canonical.parse(text, canonical=False)
    _CONFIG(config, "config")
    return config


def require_tree(authority: Authority, config: dict[str, Any]) -> None:
    """The bootstrap's tree, ceilings and tokens are those that the config describes. Raises `VerifyError` (`tree`)."""
    limits, children = config["limits"], config.get("children", [])
    processes = list(authority.processes.values())
    if [process.id for process in processes] != ["root", *(child["id"] for child in children)]:
        _refuse_tree("the processes are not the config's")
    if len(processes) > limits["max_processes"]:
        _refuse_tree(f"{len(processes)} processes, where the config allows {limits['max_processes']}")
    if processes[0].ceiling != limits["max_calls"]:
        _refuse_tree(f"root's ceiling is {processes[0].ceiling}, and max_calls {limits['max_calls']}")
    given: dict[str, int] = {}
    for process, child in zip(processes[1:], children, strict=True):
        body, share = process.capability.body, child["budget_share_bps"]
        parent = process.parent
        if parent is None or parent.id != child["parent"] or body["depth"] > limits["max_depth"]:
            _refuse_tree(f"`{process.id}` does not stand where the config has it")
        if body["budget_share_bps"] != share or process.ceiling != limits["max_calls"] * share // WHOLE_BPS:
            _refuse_tree(f"the share or the ceiling of `{process.id}` is not the config's")
        given[parent.id] = given.get(parent.id, 0) + share
        if given[parent.id] > parent.capability.body["budget_share_bps"]:
            _refuse_tree(f"the children of `{parent.id}` have more than it has")
        routes = {(route["server_id"], route["tool_name"]) for route in child["tools"]}
        if {(grant["server"], grant["tool"]) for grant in process.grants} != routes:
            _refuse_tree(f"the token of `{process.id}` grants other tools than the config")
    if [server["server_id"] for server in authority.bootstrap["servers"]] != [
        server["id"] for server in config.get("servers", [])
    ]:
        _refuse_tree("the tool servers are not the config's")


def _refuse(why: str) -> NoReturn:
    raise VerifyError(why, check="capabilities")


def _refuse_tree(why: str) -> NoReturn:
    raise VerifyError(why, check="tree")
