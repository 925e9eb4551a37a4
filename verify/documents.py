"""The texts in a bundle, each held against the digest that something signed has of it.

Config and policy are the bootstrap's. A launch record names the digest of its profile's text and of its resolved form;
the resolved form names the list of system calls by name and digest. The frozen plan has no digest in the log: what it
says is held against every launch record instead.

Profiles and policies are YAML, which is not read here. The resolved form of a profile is JSON, and what is judged; that
it follows from the YAML text is left to a reader of both.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verify import canonical, shape
from verify.authority import read_config
from verify.findings import Findings
from verify.verdict import VerifyError

LIMITS = (
    "open_files", "file_bytes", "scratch_bytes", "output_bytes", "memory_bytes", "pids", "cpu_seconds",
    "cpu_quota_percent",
)  # fmt: skip
MAX_DOCUMENTS = 8192
_FIRST = ("config", "policy", "plan")  # in this order; texts that are found by their digest follow


def _each(value: shape.Shape) -> shape.Shape:
    """An object with any members, each of which has this shape."""

    def check(found: Any, path: str) -> None:
        shape.object_of_anything(found, path)
        for name, member in found.items():
            value(member, f"{path}.{name}")

    return check


_RESOLVED = shape.record(
    {
        "schema": shape.one_of("chio.resolved-profile.v1"),
        "name": shape.text,
        "profile_sha256": shape.digest,
        "hostname": shape.text,
        "environment": _each(shape.string),
        "tmpfs": shape.record({name: shape.at_least(1) for name in ("tmp_bytes", "shm_bytes", "inodes")}),
        "limits": shape.record({name: shape.at_least(0) for name in LIMITS}),
        "network": shape.one_of("none", "loopback"),
        "seccomp": shape.record({"list": shape.text, "text_sha256": shape.digest}),
        "landlock": shape.one_of("best-effort", "required"),
        "cgroup": shape.one_of("best-effort", "required"),
    }
)
_WORKER = shape.record(
    {
        "process": shape.process_id,
        "command": shape.array(shape.string),
        "timeout_seconds": shape.at_least(1),
        "cwd": shape.text,
        "input": shape.null,  # it is its process's own data, and in no bundle
        "depends_on": shape.array(shape.process_id),
        "max_attempts": shape.at_least(1),
        "confinement": shape.record(
            {"profile": shape.text, "read": shape.array(shape.text), "exports": shape.nullable(
                shape.record({
                    "directory": shape.text, "files": shape.array(shape.text), "max_bytes": shape.at_least(1),
                })
            )}
        ),
        "limits": shape.object_of_anything,
    }
)  # fmt: skip
_RESOLVED_WORKER = shape.record(
    {
        "process": shape.process_id,
        "executable": shape.text,
        "executable_sha256": shape.digest,
        "program": shape.text,
        "program_sha256": shape.digest,
        "files": _each(shape.digest),
        "binds": shape.array(shape.text),
        "profile": shape.text,
        "profile_sha256": shape.nullable(shape.digest),
    }
)
_PLAN = shape.record(
    {
        "plan": shape.record(
            {
                "schema": shape.one_of("chio.process.run.v2"),
                "max_parallel": shape.at_least(1),
                "workers": shape.array(_WORKER),
            }
        ),
        "resolved": shape.array(_RESOLVED_WORKER),
    }
)


@dataclass(slots=True)
class Documents:
    """What a bundle's first section holds. Texts that records name by digest are kept under it."""

    config: bytes | None = None
    policy: bytes | None = None
    plan: bytes | None = None
    profiles: dict[str, bytes] = field(default_factory=dict)
    resolved: dict[str, bytes] = field(default_factory=dict)
    lists: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, items: Iterable[Any]) -> "Documents":
        """Raises `VerifyError` (check `documents`)."""
        documents = cls()
        kept: Mapping[str, dict[str, bytes]] = {
            "profile": documents.profiles,
            "resolved-profile": documents.resolved,
            "seccomp-list": documents.lists,
        }
        rank = -1
        for position, item in enumerate(items):
            place = f"documents[{position}]"
            if type(item) is not list or len(item) != 2 or type(item[0]) is not str or type(item[1]) is not bytes:
                raise VerifyError("not a kind and a text", check="documents", place=place)
            if position >= MAX_DOCUMENTS:
                raise VerifyError(f"more than {MAX_DOCUMENTS} documents", check="documents", place=place)
            kind, text = item
            before, rank = rank, _FIRST.index(kind) if kind in _FIRST else len(_FIRST)
            if kind in kept and hashlib.sha256(text).hexdigest() not in kept[kind]:
                kept[kind][hashlib.sha256(text).hexdigest()] = text
            elif kind in _FIRST and rank > before:
                setattr(documents, kind, text)
            else:
                why = f"a second `{kind}`, one out of order, or a kind that is not known"
                raise VerifyError(why, check="documents", place=place)
        return documents

    def read_config(self) -> dict[str, Any]:
        """The host config, whatever its digest. Raises `VerifyError`."""
        if self.config is None:
            raise VerifyError("there is no config", check="documents")
        return read_config(self.config)

    def require_pinned(self, bootstrap: dict[str, Any]) -> None:
        """Config and policy are the texts that the bootstrap has digests of."""
        for name, text in (("config", self.config), ("policy", self.policy)):
            if text is None:
                raise VerifyError(f"there is no {name}", check="documents")
            if hashlib.sha256(text).hexdigest() != bootstrap[f"{name}_digest"]:
                raise VerifyError(f"the {name} is not the one that the bootstrap names", check="documents")

    def read_plan(self) -> dict[str, Any] | None:
        """The frozen plan and what it resolved to: {"plan", "resolved"}; None if no plan was ever run."""
        if self.plan is None:
            return None
        value: dict[str, Any] = canonical.parse(self.plan, canonical=True)
        _PLAN(value, "plan")
        planned, resolved = (
            [worker["process"] for worker in workers] for workers in (value["plan"]["workers"], value["resolved"])
        )
        if planned != resolved:
            raise VerifyError("the plan did not resolve to its own workers", check="documents", place="plan")
        return value


class Profiles:
    """The profiles that launch records name. Each is read once."""

    CHECK = "profiles"

    def __init__(self, documents: Documents, findings: Findings) -> None:
        self._documents = documents
        self._findings = findings
        self._read: dict[tuple[str, str], dict[str, Any] | None] = {}
        self._forms: dict[str, dict[str, Any]] = {}  # of each profile's text, what it resolved to but for the list

    def of(self, asked: dict[str, Any], place: str) -> dict[str, Any] | None:
        """The resolved profile of a launch, if everything that it takes is here and fits together."""
        named = (str(asked.get("profile_sha256")), str(asked.get("profile_resolved_sha256")))
        if named not in self._read:
            try:
                self._read[named] = self._resolve(*named)
            except VerifyError as error:
                self._findings.refused(self.CHECK, error, place)
                self._read[named] = None
        return self._read[named]

    def _resolve(self, source: str, resolved: str) -> dict[str, Any]:
        text = self._documents.resolved.get(resolved)
        if source not in self._documents.profiles or text is None:
            raise VerifyError("the profile that the record names by digest is not in the bundle", check=self.CHECK)
        profile: dict[str, Any] = canonical.parse(text, canonical=True)
        _RESOLVED(profile, "resolved-profile")
        if profile["profile_sha256"] != source:
            raise VerifyError("the resolved profile is of another text", check=self.CHECK)
        if profile["seccomp"]["text_sha256"] not in self._documents.lists:
            raise VerifyError("the profile's list of system calls is not in the bundle", check=self.CHECK)
        form = {**profile, "seccomp": profile["seccomp"]["list"]}
        if self._forms.setdefault(source, form) != form:
            raise VerifyError("one profile's text resolved to two things", check=self.CHECK)
        return profile
