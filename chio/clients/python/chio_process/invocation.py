"""`python -m chio_process.invocation`: one operator's call whose evidence is kept, whatever becomes of it.

It sends one request once, and keeps a new directory:

    request.json        the request's own bytes; written before anything is sent
    context.json        {runtime_id, process_id, capability_id} of the caller; written before anything is sent
    kernel.pub          the trusted key
    response.json       what the kernel answered
    receipts.ndjson     the receipt in it, as it was signed
    verification.json   what `chio receipt verify-process-response` says of the response; `response_bound` is the result
    unresolved.json     instead of the last three: there was no answer to keep, {code, message, may_have_happened}

Nothing is retried. A response that fails its check stays where it is. Resolving an unresolved call is making the same
request again into another directory, when its cause is known: the kernel answers a known key with its first outcome.

Exit status: 0 the response is bound, 1 it is not or there is none, 2 wrong usage, 3 something was not checked.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from chio_process.client import MAX_REQUEST_BYTES, PROTOCOL, ProcessClient
from chio_process.errors import WorkerError

_CONTEXT = ("runtime_id", "process_id", "capability_id")
_REQUEST = {"operation_key": str, "server_id": str, "tool_name": str, "arguments": dict}
_MAX_FILE_BYTES = 1024 * 1024
_CHECK_SECONDS = 120
# After these the kernel has not admitted the call, and says so or was never reached.
_NEVER_ADMITTED = (
    "unauthenticated",
    "invalid_request",
    "conflict",
    "limit_reached",
    "invalid_frame",
    "frame_timeout",
    "request_too_large",
)


class InvocationError(Exception):
    """What keeps the call from being made, in one line. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before the first byte is sent."""

    request_text: bytes
    request: dict[str, Any]
    connection: dict[str, Any]
    kernel_key: str

    @property
    def context(self) -> dict[str, str]:
        return {name: self.connection[name] for name in _CONTEXT}


class Evidence:
    """The new directory. Each file is complete and on disk before the next step is taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            raise InvocationError(f"--output must be a new directory: {path} ({error.strerror})") from error
        _sync(path.parent)

    def keep(self, name: str, content: bytes) -> None:
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        _sync(self.path)

    def keep_json(self, name: str, value: Any) -> None:
        self.keep(name, json.dumps(value, ensure_ascii=False).encode() + b"\n")


def invoke(prepared: Prepared, evidence: Evidence, timeout: float) -> bool:
    """Send the request once. False when there is no response: `unresolved.json` says why."""
    evidence.keep("request.json", prepared.request_text)
    evidence.keep_json("context.json", prepared.context)
    evidence.keep("kernel.pub", prepared.kernel_key.encode() + b"\n")
    request, connection = prepared.request, prepared.connection
    client = ProcessClient(connection["socket_path"], connection["credential"], timeout)
    try:
        with client:
            response = client.invoke(
                request["operation_key"],
                request["server_id"],
                request["tool_name"],
                request["arguments"],
                known_outcome_only="known_outcome_only" in request,
            )
    except WorkerError as error:
        evidence.keep_json(
            "unresolved.json",
            {"code": error.code, "message": error.message, "may_have_happened": error.code not in _NEVER_ADMITTED},
        )
        _say(f"no response ({error}; the request is kept in {evidence.path} and was not repeated)")
        return False
    evidence.keep_json("response.json", response)
    evidence.keep("receipts.ndjson", response["receipt_json"].encode() + b"\n")
    return True


def check(chio: str, evidence: Evidence) -> int:
    """Have the response judged by the verifier of `chio`; its verdict is kept and printed, its exit status returned."""
    files = {name: str(evidence.path / f"{name}.json") for name in ("response", "request", "context")}
    command = [chio, "receipt", "verify-process-response"]
    for name, file in files.items():
        command += [f"--{name}", file]
    command += ["--trusted-kernel-pubkey", str(evidence.path / "kernel.pub")]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CHECK_SECONDS, check=False
        )
        status, printed, said = done.returncode, done.stdout, done.stderr.decode("utf-8", "replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        status, printed, said = 1, b"", f"{chio} could not be run: {error}"
    verdict = _verdict(printed) or {"response_bound": False, "exit": status, "said": said[:4096]}
    evidence.keep_json("verification.json", verdict)
    print(json.dumps(verdict))
    if said:
        print(said, file=sys.stderr)
    bound = verdict.get("response_bound") is True
    return status if status != 0 or bound else 1


def _verdict(printed: bytes) -> dict[str, Any] | None:
    try:
        verdict = json.loads(printed)
    except ValueError:
        return None
    return verdict if isinstance(verdict, dict) and type(verdict.get("response_bound")) is bool else None


def prepare(connection_file: Path, key: str, request_file: Path) -> Prepared:
    """Read and check the three inputs. Raises `InvocationError`."""
    connection = _read_json(connection_file, _MAX_FILE_BYTES)[1]
    for name in ("protocol", "socket_path", "credential", *_CONTEXT):
        if type(connection.get(name)) is not str:
            raise InvocationError(f"the connection has no text `{name}`: {connection_file}")
    if connection["protocol"] != PROTOCOL:
        raise InvocationError(f"the connection is not one of {PROTOCOL}: {connection_file}")
    text, request = _read_json(request_file, MAX_REQUEST_BYTES)
    for name, kind in _REQUEST.items():
        if type(request.get(name)) is not kind:
            raise InvocationError(f"the request has no `{name}` of the right type: {request_file}")
    unknown = request.keys() - _REQUEST.keys() - {"known_outcome_only"}
    if unknown:
        raise InvocationError(f"the request has a field that is not known, `{min(unknown)}`: {request_file}")
    if request.get("known_outcome_only", True) is not True:
        raise InvocationError(f"`known_outcome_only` is true or absent: {request_file}")
    return Prepared(text, request, connection, _read_key(key))


def _read_key(given: str) -> str:
    """The key as hex, from hex or a file that holds it."""
    if not re.fullmatch("[0-9a-fA-F]{64}", given):
        try:
            given = Path(given).read_bytes()[:128].decode("ascii").removesuffix("\n")
        except (OSError, ValueError) as error:
            raise InvocationError(f"--trusted-kernel-pubkey is neither 64 hex digits nor a file: {error}") from error
    if not re.fullmatch("[0-9a-fA-F]{64}", given):
        raise InvocationError("--trusted-kernel-pubkey holds no key of 64 hex digits")
    return given.lower()


def _read_json(file: Path, limit: int) -> tuple[bytes, dict[str, Any]]:
    try:
        with open(file, "rb") as opened:
            text = opened.read(limit + 1)
        if len(text) > limit:
            raise InvocationError(f"over {limit} bytes: {file}")
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except OSError as error:
        raise InvocationError(f"cannot be read: {file} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        # Without the error's own text: it can quote a credential.
        raise InvocationError(f"not one JSON object without duplicate fields: {file}") from error
    if type(value) is not dict:
        raise InvocationError(f"not a JSON object: {file}")
    return text, value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a duplicate field")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _say(what: str) -> None:
    print(f"chio_process.invocation: {what}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m chio_process.invocation", description="Make one call, once, and keep the evidence of it."
    )
    parser.add_argument("--chio", required=True, metavar="CHIO", help="the chio command that checks the response")
    parser.add_argument("--connection", required=True, type=Path, metavar="FILE", help="a connection descriptor (JSON)")
    parser.add_argument("--trusted-kernel-pubkey", required=True, metavar="KEY|FILE", help="64 hex digits, or a file")
    parser.add_argument(
        "--request",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON: operation_key, server_id, tool_name, arguments, and known_outcome_only: true if it is wanted",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="NEW_DIR", help="where the evidence goes")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for the answer (60)")
    given = parser.parse_args(arguments)
    try:
        prepared = prepare(given.connection, given.trusted_kernel_pubkey, given.request)
        evidence = Evidence(given.output)
    except InvocationError as error:
        _say(f"{error} (nothing was sent)")
        return 1
    if not invoke(prepared, evidence, given.timeout):
        return 1
    return check(given.chio, evidence)


if __name__ == "__main__":
    sys.exit(main())
