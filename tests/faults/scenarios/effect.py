"""An external effect whose owner keeps a record of its own, under a grant that counts."""

from __future__ import annotations

from tests.faults.scenarios.project import Project, Worker, scenario

SCENARIO = scenario(
    "effect",
    "external effects held against their owner's own record; grants that count, and their refunds",
    Project(
        (Worker("payer", "payer.mjs", ("ledger/pay", "ledger/look")),),
        ledger=True,
        grants=(
            {"server": "ledger", "tool": "pay", "max_invocations": 20},
            {"server": "ledger", "tool": "look"},
        ),
    ),
)
