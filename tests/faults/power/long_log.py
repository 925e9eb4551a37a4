"""A run in which the write-ahead log is written back into the database and begun again while the kernel serves.

Only the power is cut here, and only from shortly before that moment, at a hundred states of some thirty megabytes each.
"""

from __future__ import annotations

from tests.faults.scenarios.project import Project, Worker, scenario

SCENARIO = scenario(
    "long-log",
    "blobs until the write-ahead log is begun again, and small commits upon it",
    Project((Worker("writer", "long_log.mjs", input={"blobs": 17, "saves": 3}),)),
    more={"cuts_after": ("blob_put", 16), "most_cuts": (100, 2)},
    timeout_s=180.0,
)
