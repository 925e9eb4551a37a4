"""What the host tells the kernel of a launch: one shape for workers and tool servers."""

from __future__ import annotations

from typing import Any

from confine import Observed


def launch_record(event: Observed, confined: bool) -> dict[str, Any]:
    """The part of a launch record that is read off the process at its exec stop (contract section 9)."""
    return {
        "observer": "host",
        "confined": confined,
        "executable_sha256": event.executable_sha256,
        "fields": [
            {"name": at.name, "asked": at.asked, "value": at.value, "source": at.source}
            | ({"detail": at.detail} if at.detail is not None else {})
            for at in event.fields
        ],
    }
