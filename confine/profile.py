"""Profiles: the one place where a profile document is read and judged.

A profile is YAML. `extends` names one other profile, which must not extend a third; its values are the defaults,
section by section. Unknown and duplicate keys are refused, so that a misspelt limit is never a missing one.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from confine.errors import ConfineError, ProfileError
from confine.limits import check_limits
from confine.spec import Limits

SCHEMA = "chio.profile.v1"
FOLDER = Path(__file__).resolve().parent.parent / "policies"
_MAX_BYTES = 65_536
_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")
_HOSTNAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYS = {
    *("schema", "description", "extends", "hostname", "environment", "tmpfs", "limits"),
    *("network", "seccomp", "landlock", "cgroup"),
}
_CHOICES = {  # what is left out is the first
    "network": ("none", "loopback"),
    "landlock": ("best-effort", "required"),
    "cgroup": ("required", "best-effort"),
}
_TMPFS = {"tmp_bytes": (65_536, 1 << 36), "shm_bytes": (4_096, 1 << 36), "inodes": (16, 1 << 24)}
_LIMITS = set(Limits.__slots__)


@dataclass(frozen=True, slots=True)
class Profile:
    """`text` is the document's (then, after a line of its own, the extended one's); `digest` is sha256 of that text.

    seccomp names a list (confine.seccomp); network is one of none and loopback, landlock and cgroup
    are each one of required and best-effort.
    A document that says nothing of them gets the worker profile's, never none.
    `resolved()` is what holds after all that, as one text that can be read without YAML.
    """

    name: str
    text: str
    digest: str
    hostname: str
    environment: Mapping[str, str]
    tmp_bytes: int
    shm_bytes: int
    inodes: int
    limits: Limits
    network: str
    seccomp: str
    landlock: str
    cgroup: str

    def resolved(self, list_sha256: str) -> str:
        """`chio.resolved-profile.v1`, canonical JSON: the names are ASCII, and the numbers are whole (RFC 8785).

        `list_sha256` is the digest of the text of the list that `seccomp` names (confine.seccomp.list_text).
        """
        document = {
            "schema": "chio.resolved-profile.v1",
            "name": self.name,
            "profile_sha256": self.digest,
            "hostname": self.hostname,
            "environment": dict(self.environment),
            "tmpfs": {name: getattr(self, name) for name in _TMPFS},
            "limits": {name: getattr(self.limits, name) for name in Limits.__slots__},
            "network": self.network,
            "seccomp": {"list": self.seccomp, "text_sha256": list_sha256},
            "landlock": self.landlock,
            "cgroup": self.cgroup,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def load_profile(name_or_path: str, folder: Path = FOLDER) -> Profile:
    """A bare name is looked up among the policies; anything with a slash or ".yaml" is a path. ProfileError."""
    path = _locate(name_or_path, folder, "the command line or the plan")
    text, document = _read(path)
    if "extends" in document:
        base_path = _locate(document["extends"], folder, str(path))
        base_text, base = _read(base_path)
        if "extends" in base:
            raise ProfileError("a profile that is extended may not extend another", path=str(base_path), fix="copy it")
        text = f"{text}\n--- extends {document['extends']}\n{base_text}"
        document = _merge(base, document)
    return _profile(path, text, document)


def _locate(name: Any, folder: Path, named_in: str) -> Path:
    if not isinstance(name, str) or not name:
        raise ProfileError("a profile is named by a word or a path", path=named_in, fix="write worker, for instance")
    if "/" in name or name.endswith(".yaml"):
        return Path(name)
    if not _NAME.fullmatch(name):
        raise ProfileError(
            f"{name!r} is not a profile's name", path=named_in, fix="use lower-case letters, digits and hyphens"
        )
    return folder / f"{name}.yaml"


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice; YAML 1.2 section 3.2.1.1 asks for it, PyYAML does not."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str):
                raise ProfileError(f"the key {key!r} is not text", path=str(path), fix="quote it")
            if keys.count(key) > 1:
                raise ProfileError(f"the key {key!r} is given twice", path=str(path), fix="keep one")
        return dict(zip(keys, (loader.construct_object(v, deep=True) for _, v in node.value), strict=True))

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ProfileError(f"a profile over {_MAX_BYTES} characters", path=str(path), fix="shorten it")
        document = yaml.load(text, UniqueKeys)  # noqa: S506 (UniqueKeys is a SafeLoader)
    except OSError as error:
        fix = f"the profiles are {', '.join(sorted(p.stem for p in FOLDER.glob('*.yaml')))}"
        raise ProfileError(f"no profile can be read: {error.strerror}", path=str(path), fix=fix) from None
    except UnicodeDecodeError:
        raise ProfileError("not UTF-8", path=str(path), fix="save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ProfileError(f"not YAML: {' '.join(str(error).split())}", path=str(path), fix="correct it") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ProfileError("not a profile", path=str(path), fix=f"start it with schema: {SCHEMA}")
    _only(document, _KEYS, "", path)
    return text, document


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = {**base[key], **value} if both else value
    return merged


def _profile(path: Path, text: str, document: dict[str, Any]) -> Profile:
    hostname = document.get("hostname", "chio")
    if not isinstance(hostname, str) or not _HOSTNAME.fullmatch(hostname):
        raise ProfileError("hostname is not a host's name", path=str(path), fix="use letters, digits and hyphens")
    environment = _section(document, "environment", None, path)
    for variable, value in environment.items():
        if not (
            isinstance(variable, str) and _VARIABLE.fullmatch(variable) and isinstance(value, str) and "\0" not in value
        ):
            raise ProfileError(f"environment.{variable} is not a text variable", path=str(path), fix="quote its value")
    tmpfs = _section(document, "tmpfs", set(_TMPFS), path)
    for key, (least, most) in _TMPFS.items():
        value = tmpfs.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ProfileError(
                f"tmpfs.{key} must be a whole number from {least} to {most}", path=str(path), fix="give one"
            )
    limits = _section(document, "limits", None, path)
    if missing := _LIMITS - set(limits):
        raise ProfileError(
            f"limits.{min(missing)} is missing", path=str(path), fix="give it, or extend a profile that does"
        )
    try:
        checked = check_limits(limits)
    except ConfineError as error:
        raise ProfileError(error.what, path=str(path), fix=error.fix) from None
    return Profile(
        name=path.stem,
        text=text,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        hostname=hostname,
        environment=MappingProxyType(dict(environment)),
        limits=checked,
        network=_choice(document, "network", path),
        seccomp=_seccomp_list(document, path),
        landlock=_choice(document, "landlock", path),
        cgroup=_choice(document, "cgroup", path),
        **tmpfs,
    )


def _choice(document: dict[str, Any], name: str, path: Path) -> str:
    value = document.get(name, _CHOICES[name][0])
    if not isinstance(value, str) or value not in _CHOICES[name]:
        fix = f"write {' or '.join(_CHOICES[name])}"
        raise ProfileError(f"{name} is {value!r}", path=str(path), fix=fix)
    return value


def _seccomp_list(document: dict[str, Any], path: Path) -> str:
    name = _section(document, "seccomp", {"list"}, path).get("list", "worker")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProfileError("seccomp.list is not a list's name", path=str(path), fix="write worker, for instance")
    return name


def _section(document: dict[str, Any], name: str, keys: set[str] | None, path: Path) -> dict[str, Any]:
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ProfileError(f"{name} is not a mapping", path=str(path), fix="write one key and value per line")
    if keys is not None:
        _only(section, keys, f"{name}.", path)
    return section


def _only(section: dict[str, Any], keys: set[str], prefix: str, path: os.PathLike[str]) -> None:
    for key in section:
        if key not in keys:
            raise ProfileError(f"unknown key {prefix}{key}", path=str(path), fix=f"known are {', '.join(sorted(keys))}")
