"""One type per document; the type is the wire form (contract sections 1, 2 and 8).

`host_config`, `policy` and `run_plan` read a whole document: size, syntax, duplicate names, unknown or mistyped
fields, then the rules that lie within the document itself. Rules that need two documents are in
`chio.kernel.grants`. Every refusal is an `InputError` naming file, field and fix.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from chio import canonical
from chio.errors import InputError

MAX_DOCUMENT_BYTES = 1024 * 1024
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_PLAN_BYTES = 4 * 1024 * 1024
MAX_KEPT_BYTES = 2 * 1024 * 1024  # a request's frame (contract section 3)
RESERVED_SERVERS = ("chio-ipc", "chio-process")
ROOT = "root"

T = TypeVar("T")

Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
MailboxId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,32}\Z")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every document: unknown fields are refused."""


# --- host config -------------------------------------------------------------------------------------------------


class MailboxLimits(Document, frozen=True):
    max_pending_messages: Annotated[int, Meta(ge=1, le=256)] = 32
    max_pending_bytes: Annotated[int, Meta(ge=1, le=8 * 1024 * 1024)] = 1024 * 1024
    max_message_bytes: Annotated[int, Meta(ge=1, le=64 * 1024)] = 64 * 1024
    max_messages: Annotated[int, Meta(ge=1, le=100_000)] = 256


class Mailbox(Document, frozen=True):
    id: MailboxId
    limits: MailboxLimits = MailboxLimits()


class StateLimits(Document, frozen=True):
    max_bytes: Annotated[int, Meta(ge=1, le=1024**3)] = 64 * 1024 * 1024
    max_blobs: Annotated[int, Meta(ge=1, le=16_384)] = 4096


class HostLimits(Document, frozen=True):
    max_processes: Annotated[int, Meta(ge=1, le=1025)]
    max_depth: Annotated[int, Meta(ge=0, le=64)]
    max_calls: Annotated[int, Meta(ge=1, le=2**40)]
    state: StateLimits = StateLimits()


class Route(Document, frozen=True):
    server_id: Name
    tool_name: Name


class ServerConfinement(Document, frozen=True):
    profile: Annotated[str, Meta(min_length=1, max_length=4096)] = "tool-server"
    read: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=64)] = []
    write: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=64)] = []


class Server(Document, frozen=True):
    """A tool server: an MCP server that speaks over its stdin and stdout. `command` is a literal argv."""

    id: Id
    command: Annotated[list[Annotated[str, Meta(max_length=16_384)]], Meta(min_length=1, max_length=128)]
    request_timeout_seconds: Annotated[int, Meta(ge=1, le=3600)] = 60
    confinement: ServerConfinement = ServerConfinement()


class Child(Document, frozen=True):
    id: Id
    parent: Id
    tools: Annotated[list[Route], Meta(max_length=1024)]
    budget_share_bps: Annotated[int, Meta(ge=1, le=10_000)]


class HostConfig(Document, frozen=True):
    """`chio.process.host.v1`."""

    schema: Literal["chio.process.host.v1"]
    policy: Annotated[str, Meta(min_length=1, max_length=4096)]
    limits: HostLimits
    mailboxes: Annotated[list[Mailbox], Meta(max_length=32)] = []
    servers: Annotated[list[Server], Meta(max_length=32)] = []
    children: Annotated[list[Child], Meta(max_length=1024)] = []


# --- backup ------------------------------------------------------------------------------------------------------

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class BackupFile(Document, frozen=True):
    """`name` is relative to the backup's folder."""

    name: Annotated[str, Meta(min_length=1, max_length=4096)]
    bytes: Annotated[int, Meta(ge=0)]
    sha256: Digest


class Backup(Document, frozen=True):
    """`chio.backup.v1`: the manifest of a backup. `size` and `root` are of its log."""

    schema: Literal["chio.backup.v1"]
    runtime_id: Annotated[str, Meta(min_length=36, max_length=36)]
    created_ms: Annotated[int, Meta(ge=0)]
    epoch: Annotated[int, Meta(ge=0)]
    size: Annotated[int, Meta(ge=1)]
    root: Digest
    signing_key: bool
    files: list[BackupFile]


# --- policy ------------------------------------------------------------------------------------------------------

_MAX_TTL_S = 10 * 365 * 24 * 3600


class PolicyKernel(Document, frozen=True):
    max_capability_ttl: Annotated[int, Meta(ge=1, le=_MAX_TTL_S)]
    delegation_depth_limit: Annotated[int, Meta(ge=0, le=64)]
    durable_admission_mode: Literal["all"]


class PolicyTool(Document, frozen=True):
    """One root grant. `constraints` is a JSON Schema (draft 2020-12) that the arguments must satisfy."""

    server: Name
    tool: Name
    operations: Annotated[list[Literal["invoke", "delegate"]], Meta(min_length=1, max_length=2)]
    ttl: Annotated[int, Meta(ge=1, le=_MAX_TTL_S)]
    max_invocations: Annotated[int, Meta(ge=1, le=2**40)] | None = None
    constraints: dict[str, Any] | None = None


class PolicyTools(Document, frozen=True):
    tools: Annotated[list[PolicyTool], Meta(max_length=1024)]


class PolicyCapabilities(Document, frozen=True):
    default: PolicyTools


class Policy(Document, frozen=True):
    kernel: PolicyKernel
    capabilities: PolicyCapabilities


# --- run plan ----------------------------------------------------------------------------------------------------


class Exports(Document, frozen=True):
    directory: Annotated[str, Meta(min_length=1, max_length=4096)]
    files: Annotated[list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(min_length=1, max_length=64)]
    max_bytes: Annotated[int, Meta(ge=1, le=1024**3)] = 1024 * 1024


class Confinement(Document, frozen=True):
    profile: Annotated[str, Meta(min_length=1, max_length=4096)] = "worker"
    read: Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=64)] = []
    exports: Exports | None = None


class Worker(Document, frozen=True):
    process: Id
    command: Annotated[list[Annotated[str, Meta(max_length=16_384)]], Meta(min_length=1, max_length=128)]
    timeout_seconds: Annotated[int, Meta(ge=1, le=3600)]
    cwd: Annotated[str, Meta(min_length=1, max_length=4096)] = "."
    input: Any = None
    depends_on: Annotated[list[Id], Meta(max_length=128)] = []
    max_attempts: Annotated[int, Meta(ge=1, le=16)] = 1
    confinement: Confinement = Confinement()
    limits: dict[str, Annotated[int, Meta(ge=1, le=2**50)]] = {}


class Plan(Document, frozen=True):
    """`chio.process.run.v2`."""

    schema: Literal["chio.process.run.v2"]
    max_parallel: Annotated[int, Meta(ge=1, le=32)]
    workers: Annotated[list[Worker], Meta(min_length=1, max_length=128)]


# --- a call, as whoever made it kept it -----------------------------------------------------------------------


class KeptRequest(Document, frozen=True):
    """One `invoke` as it was written down before it was sent."""

    operation_key: Name
    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]
    known_outcome_only: bool | msgspec.UnsetType = msgspec.UNSET


class KeptContext(Document, frozen=True):
    """Who sent it: the run, the process, its capability."""

    runtime_id: str
    process_id: Id
    capability_id: str


# --- reading -----------------------------------------------------------------------------------------------------


def host_config(text: bytes, file: str) -> HostConfig:
    config = _convert(_json(text, file, MAX_DOCUMENT_BYTES), HostConfig, file)
    _unique([box.id for box in config.mailboxes], "mailboxes", file)
    _unique([server.id for server in config.servers], "servers", file)
    for position, server in enumerate(config.servers):
        if server.id in RESERVED_SERVERS:
            raise InputError(
                "a server's id is reserved",
                file=file,
                field=f"servers[{position}].id",
                why=f"`{server.id}`",
                fix="choose another id",
            )
    if len(config.children) + 1 > config.limits.max_processes:
        raise InputError(
            "more processes than the host allows",
            file=file,
            field="limits.max_processes",
            why=f"{len(config.children)} children and root, at most {config.limits.max_processes}",
            fix="raise max_processes or declare fewer children",
        )
    known = {ROOT}
    for position, child in enumerate(config.children):
        field = f"children[{position}]"
        if child.id in known:
            raise InputError(
                "a process is declared twice",
                file=file,
                field=f"{field}.id",
                why=f"`{child.id}`",
                fix="give every child its own id; `root` is implicit",
            )
        if child.parent not in known:
            raise InputError(
                "a child comes before its parent",
                file=file,
                field=f"{field}.parent",
                why=f"`{child.parent}` is not declared above",
                fix="declare parents first",
            )
        known.add(child.id)
        _unique([f"{route.server_id}/{route.tool_name}" for route in child.tools], f"{field}.tools", file)
    return config


def backup(text: bytes, file: str) -> Backup:
    return _convert(_json(text, file, MAX_MANIFEST_BYTES), Backup, file)


def policy(text: bytes, file: str) -> Policy:
    document = _convert(_yaml(text, file), Policy, file)
    for position, tool in enumerate(document.capabilities.default.tools):
        field = f"capabilities.default.tools[{position}]"
        if tool.ttl > document.kernel.max_capability_ttl:
            raise InputError(
                "a grant outlives its capability",
                file=file,
                field=f"{field}.ttl",
                why=f"{tool.ttl} s is over kernel.max_capability_ttl",
                fix=f"at most {document.kernel.max_capability_ttl}",
            )
        if len(set(tool.operations)) != len(tool.operations):
            raise InputError("an operation is listed twice", file=file, field=f"{field}.operations", fix="list it once")
        if tool.server == "*":
            raise InputError(
                "a grant names one server",
                file=file,
                field=f"{field}.server",
                why="`*`",
                fix="write one entry for each server; only `tool` may be `*`",
            )
    return document


def run_plan(text: bytes, file: str) -> Plan:
    plan = _convert(_json(text, file, MAX_PLAN_BYTES), Plan, file)
    position_of = {worker.process: position for position, worker in enumerate(plan.workers)}
    _unique([worker.process for worker in plan.workers], "workers", file, "process")
    for position, worker in enumerate(plan.workers):
        field = f"workers[{position}]"
        _unique(worker.depends_on, f"{field}.depends_on", file)
        for name in worker.depends_on:
            if name == worker.process or name not in position_of:
                raise InputError(
                    "a dependency cannot be met",
                    file=file,
                    field=f"{field}.depends_on",
                    why=f"`{name}` is " + ("the worker itself" if name == worker.process else "no worker of this plan"),
                    fix="name other workers of the plan",
                )
        if any("\0" in part for part in worker.command) or not worker.command[0]:
            raise InputError(
                "a command cannot be run",
                file=file,
                field=f"{field}.command",
                why="an empty program name or a NUL byte",
                fix="write the program first, then its arguments",
            )
    _refuse_cycles(plan, file)
    return plan


def kept_request(text: bytes, file: str) -> dict[str, Any]:
    """A request as it was kept. It is handed on as it is, since its digest is taken of what it says."""
    value: dict[str, Any] = _json(text, file, MAX_KEPT_BYTES)
    if _convert(value, KeptRequest, file).known_outcome_only is False:
        raise InputError(
            "a document has a wrong value",
            file=file,
            field="known_outcome_only",
            why="`false` is written by leaving it out",
            fix="remove it, or make it true if it was sent",
        )
    return value


def kept_context(text: bytes, file: str) -> dict[str, Any]:
    value: dict[str, Any] = _json(text, file, MAX_KEPT_BYTES)
    _convert(value, KeptContext, file)
    return value


def _refuse_cycles(plan: Plan, file: str) -> None:
    waiting = {worker.process: set(worker.depends_on) for worker in plan.workers}
    while ready := [name for name, on in waiting.items() if not on]:
        for name in ready:
            del waiting[name]
        for on in waiting.values():
            on.difference_update(ready)
    if waiting:
        raise InputError(
            "dependencies form a cycle",
            file=file,
            field="workers[].depends_on",
            why=", ".join(f"`{name}`" for name in sorted(waiting)),
            fix="remove one of these dependencies",
        )


def _unique(names: list[str], field: str, file: str, what: str = "entry") -> None:
    seen: set[str] = set()
    for position, name in enumerate(names):
        if name in seen:
            raise InputError(
                f"a duplicate {what}", file=file, field=f"{field}[{position}]", why=f"`{name}`", fix="name each once"
            )
        seen.add(name)


def _json(text: bytes, file: str, limit: int) -> Any:
    if len(text) > limit:
        raise InputError("a document is too big", file=file, why=f"{len(text)} bytes", fix=f"at most {limit}")
    try:
        return canonical.parse(text)
    except canonical.NotCanonical as error:
        raise InputError(
            "a document cannot be read", file=file, field=duplicate_field(text), why=str(error), fix="correct the file"
        ) from error


def duplicate_field(text: bytes) -> str | None:
    """The path of the first duplicate field of a JSON text, for its error message; None when there is none."""
    import json

    class Marked(dict[str, Any]):
        name: str | None = None

    def mark(pairs: list[tuple[str, Any]]) -> Marked:
        members = Marked(pairs)
        names = [name for name, _ in pairs]
        members.name = (
            next((name for name in names if names.count(name) > 1), None) if len(members) < len(names) else None
        )
        return members

    def find(value: Any, path: str) -> str | None:
        if isinstance(value, Marked):
            if value.name is not None:
                return f"{path}.{value.name}".lstrip(".")
            return next((hit for name, item in value.items() if (hit := find(item, f"{path}.{name}"))), None)
        if isinstance(value, list):
            return next((hit for n, item in enumerate(value) if (hit := find(item, f"{path}[{n}]"))), None)
        return None

    try:
        return find(json.loads(text, object_pairs_hook=mark), "")
    except (ValueError, RecursionError):
        return None


def _yaml(text: bytes, file: str) -> Any:
    import yaml

    class Strict(yaml.SafeLoader):
        """Duplicate keys and aliases are refused: each says one thing in one place. A key is a text."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.MarkedYAMLError(
                    problem="an alias is not accepted", problem_mark=self.current_event.start_mark
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(problem="a key that is no text", problem_mark=key.start_mark)
                if key.value in seen or key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate or merge key `{key.value}`", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    if len(text) > MAX_DOCUMENT_BYTES:
        raise InputError(
            "a document is too big", file=file, why=f"{len(text)} bytes", fix=f"at most {MAX_DOCUMENT_BYTES}"
        )
    try:
        return yaml.load(text, Loader=Strict)  # noqa: S506 - a SafeLoader subclass
    except yaml.MarkedYAMLError as error:
        at = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(
            "a document cannot be read", file=file, why=f"{error.problem}{at}", fix="correct the file"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError(
            "a document cannot be read", file=file, why=str(error).split("\n")[0], fix="correct the file"
        ) from error


_AT = re.compile(r"\A(?P<why>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?\Z", re.DOTALL)


def _convert(value: Any, kind: type[T], file: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        why, path = (found["why"], found["path"]) if found else (str(error), None)
        named = re.search(r"(?:unknown|required) field `([^`]*)`", why)
        if named:
            path = f"{path}.{named[1]}".lstrip(".") if path else named[1]
        raise InputError(
            "a field is not accepted",
            file=file,
            field=path or "(the whole document)",
            why=why,
            fix=f"see the {kind.__name__} schema in docs/formats.md",
        ) from error
