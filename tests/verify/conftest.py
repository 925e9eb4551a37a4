"""A reviewer who kept the request and the context of a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify import observed
from tests.verify.judging import Judge
from tests.verify.observed import Parts, assemble, key_of
from tests.verify.signed import jcs
from verify.calls import CallVerdict, Observation, check_call
from verify.keys import PublicKey
from verify.requests import Context, Request

KERNEL_KEY = key_of(observed.KERNEL)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Judges an artifact for a reviewer who kept `made`'s request and context."""

    def judge(
        made: Parts, artifact: bytes | None = None, *, key: str = KERNEL_KEY, runtime_id: str = observed.RUNTIME_ID
    ) -> CallVerdict:
        (tmp_path / "request.json").write_bytes(jcs(made.request))
        (tmp_path / "context.json").write_bytes(jcs(made.context))
        return check_call(
            Observation.read(artifact if artifact is not None else assemble(made)),
            Request.from_file(str(tmp_path / "request.json")),
            Context.from_file(str(tmp_path / "context.json")),
            PublicKey.from_hex(key),
            runtime_id,
        )

    return judge
