"""What the host tells the kernel of a launch: one shape for workers and tool servers."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from confine import Observed, Profile, list_text


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


def named_profile(profile: Profile) -> tuple[dict[str, Any], list[list[str]]]:
    """(what `asked` says of a profile, the [kind, text] of everything that it names by digest).

    The texts are kept beside the record, so that whoever holds a bundle can judge the launch and not only compare it.
    """
    calls = list_text(profile.seccomp)
    resolved = profile.resolved(sha256(calls.encode()).hexdigest())
    asked = {
        "profile": profile.name,
        "profile_sha256": profile.digest,
        "profile_resolved_sha256": sha256(resolved.encode()).hexdigest(),
    }
    return asked, [["profile", profile.text], ["resolved-profile", resolved], ["seccomp-list", calls]]


UNCONFINED = {"profile": "none", "profile_sha256": None, "profile_resolved_sha256": None}
