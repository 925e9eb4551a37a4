"""What a reviewer kept of a call: the request as it was meant, and the context of whoever made it.

Everything that names a call is computed from these two and a salt, so that nothing the host says of it is taken over.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from verify import canonical, shape
from verify.keys import read_small
from verify.verdict import VerifyError

MAX_REQUEST_BYTES = 2 * 1024 * 1024  # a request's frame (contract, section 3)

_REQUEST = shape.record(
    {
        "operation_key": shape.name,
        "server_id": shape.name,
        "tool_name": shape.name,
        "arguments": shape.object_of_anything,
    },
    {"known_outcome_only": shape.true},
)
_CONTEXT = shape.record({"runtime_id": shape.runtime_id, "process_id": shape.process_id, "capability_id": shape.digest})


@dataclass(frozen=True, slots=True)
class Request:
    """One `invoke` as it was meant. `digest` is sha256 of its JCS, so its spacing means nothing."""

    operation_key: str
    server_id: str
    tool_name: str
    arguments: dict[str, Any]
    recovery_policy: str
    digest: str

    @classmethod
    def from_file(cls, path: str) -> Self:
        value, digest = _document(path, MAX_REQUEST_BYTES, _REQUEST)
        policy = "known_outcome_only" if "known_outcome_only" in value else "default"
        return cls(value["operation_key"], value["server_id"], value["tool_name"], value["arguments"], policy, digest)

    def parameter_hash(self, salt: str) -> str:
        """The commitment to the arguments; `salt` is 32 hex digits."""
        return hashlib.sha256(bytes.fromhex(salt) + canonical.encode(self.arguments)).hexdigest()


@dataclass(frozen=True, slots=True)
class Context:
    """Who called: a run, a process of it, that process's capability."""

    runtime_id: str
    process_id: str
    capability_id: str
    digest: str

    @classmethod
    def from_file(cls, path: str) -> Self:
        value, digest = _document(path, 64 * 1024, _CONTEXT)
        return cls(value["runtime_id"], value["process_id"], value["capability_id"], digest)

    def request_id(self, request: Request, dispatch: int) -> str:
        named: list[Any] = [self.runtime_id, self.process_id, request.operation_key]
        if dispatch >= 2:
            named.append(dispatch)
        return "process:" + hashlib.sha256(canonical.encode(named)).hexdigest()

    def binding(self, request: Request, parameter_hash: str) -> str:
        bound = [
            self.runtime_id,
            self.process_id,
            request.operation_key,
            self.capability_id,
            request.server_id,
            request.tool_name,
            parameter_hash,
            request.recovery_policy,
        ]
        return hashlib.sha256(canonical.encode(bound)).hexdigest()


def _document(path: str, limit: int, expected: Callable[[Any, str], None]) -> tuple[dict[str, Any], str]:
    """A document of the reviewer's own, in any spelling of JSON, and the digest of its JCS."""
    try:
        value = canonical.parse(read_small(path, limit), canonical=False)
        expected(value, "")
    except VerifyError as error:
        raise error.located(path) from error
    return value, hashlib.sha256(canonical.encode(value)).hexdigest()
