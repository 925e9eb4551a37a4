"""`chio process attest-call`, the host's half: the reviewer's documents in, one signed artifact out.

The host is stopped: opening the state takes its lock and recovers it, so no call is in flight. No tool server and no
worker is started.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

from chio import canonical, schema, statedir
from chio.errors import InputError
from chio.host import Host, read_document
from chio.wire import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES


def attest_call(
    state: Path,
    request: Path,
    context: Path,
    response: Path | None,
    out: Path,
    *,
    allow_volatile: bool,
    key_file: Path | None = None,
) -> dict[str, Any]:
    """Write the artifact to a new file; the JSON that the command prints. Raises `InputError`, `StateError`."""
    documents: dict[str, Any] = {
        "request": schema.kept_request(read_document(request, MAX_REQUEST_BYTES + 1), str(request)),
        "context": schema.kept_context(read_document(context, MAX_REQUEST_BYTES + 1), str(context)),
        "response": _response(response),
        "files": {"request": str(request), "context": str(context), "response": str(response)},
    }
    try:
        written = open(out, "xb")  # noqa: SIM115 - made before the state is opened, and removed if nothing is signed
    except OSError as error:
        raise _unwritable(out, error) from error
    signed = False
    try:
        with written:
            host = Host(state, allow_volatile=allow_volatile, key_file=key_file)
            try:
                answer = host.kernel.call("attest", **documents)
            finally:
                host.close()
            try:
                written.write(base64.b64decode(answer["artifact"]) + b"\n")
                written.flush()
                os.fsync(written.fileno())
                statedir.sync_parent(out)
            except OSError as error:
                raise _unwritable(out, error) from error
            signed = True
    finally:
        if not signed:
            os.unlink(out)
    return {
        "schema": "chio.process.call-attestation.v1",
        "file": str(out),
        "runtime_id": host.runtime_id,
        **{name: answer[name] for name in ("request_id", "observed_operation_state", "custody_binding")},
    }


def _response(file: Path | None) -> str | None:
    """The response's own text, which must be JSON of the profile."""
    if file is None:
        return None
    text = read_document(file, MAX_RESPONSE_BYTES + 1)
    try:
        if len(text) > MAX_RESPONSE_BYTES:
            raise canonical.NotCanonical(f"over {MAX_RESPONSE_BYTES} bytes")
        canonical.parse(text)
    except canonical.NotCanonical as error:
        raise InputError(
            "not a response", file=str(file), why=str(error), fix="name the response.json that was kept"
        ) from error
    return text.decode()


def _unwritable(out: Path, error: OSError) -> InputError:
    return InputError(
        "the artifact cannot be written",
        file=str(out),
        field="--out",
        why=os.strerror(error.errno or 0),
        fix="name a new file in a directory that exists",
    )
