"""Profiles and limits: what is read, what extends what, and every way to get one wrong."""

import hashlib
import json
from pathlib import Path

import pytest
import rfc8785

import confine
from confine import LimitRefused, Limits, ProfileError, check_limits, list_text, load_profile
from confine.profile import FOLDER
from confine.seccomp import LISTS

DEFAULTS = Limits(
    open_files=1024,
    file_bytes=1 << 20,
    scratch_bytes=1 << 20,
    output_bytes=1 << 20,
    memory_bytes=1 << 30,
    pids=64,
    cpu_seconds=60,
    cpu_quota_percent=100,
)


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f"schema: chio.profile.v1\n{text}")
    return str(path)


def test_the_default_profile_is_read_and_digested() -> None:
    profile = load_profile("worker")
    assert profile.name == "worker"
    assert profile.digest == hashlib.sha256(profile.text.encode()).hexdigest()
    assert profile.limits.open_files == 1024
    assert set(profile.environment) == {"PATH", "HOME", "LANG", "TMPDIR"}


def test_a_profile_extends_another_section_by_section(tmp_path: Path) -> None:
    path = write(tmp_path, "mine", "extends: worker\nlimits:\n  open_files: 77\nenvironment:\n  MODE: x\n")
    mine, worker = load_profile(path), load_profile("worker")
    assert mine.limits.open_files == 77
    assert mine.limits.file_bytes == worker.limits.file_bytes
    assert mine.environment == {**worker.environment, "MODE": "x"}
    assert mine.digest != worker.digest
    assert worker.text in mine.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: worker\nlimit: {}\n", "unknown key limit"),
        ("extends: worker\ntmpfs:\n  tmp_size: 1\n", "unknown key tmpfs.tmp_size"),
        ("extends: worker\nlimits:\n  open_file: 5\n", "no such limit"),
        ("extends: worker\nextends: worker\n", "given twice"),
        ("extends: worker\nlimits:\n  open_files: 5000\n  open_files: 50\n", "given twice"),
        ("extends: worker\nlimits:\n  pids: 0\n", "pids: 0 is not a whole number"),
        ("extends: worker\nlimits:\n  memory_bytes: 100000000\n", "cannot hold scratch_bytes, 67108864"),
        ("extends: worker\ncgroup: maybe\n", "cgroup is 'maybe'"),
        ("extends: worker\nlandlock: maybe\n", "landlock is 'maybe'"),
        ("extends: worker\nnetwork: [none]\n", "network is"),
        ("extends: worker\nseccomp:\n  list: ../worker\n", "not a list's name"),
        ("extends: worker\nseccomp: worker\n", "not a mapping"),
        ("extends: worker\nseccomp:\n  action: log\n", "unknown key seccomp.action"),
        ("extends: worker\nlimits:\n  open_files: true\n", "not a whole number"),
        ("extends: worker\ntmpfs:\n  inodes: 0\n", "tmpfs.inodes must be"),
        ("extends: worker\nenvironment:\n  PORT: 80\n", "environment.PORT is not a text"),
        ("extends: worker\nenvironment:\n  A=B: x\n", "environment.A=B is not a text"),
        ("extends: worker\nhostname: a.b\n", "hostname"),
        ("extends: worker\nlimits: 5\n", "limits is not a mapping"),
        ("limits: {}\n", "tmpfs.tmp_bytes must be"),
        ("extends: nothing-of-that-name\n", "no profile can be read"),
        ("extends: [worker]\n", "named by a word or a path"),
        ("a: [\n", "not YAML"),
        ("? [a]\n: b\n", "is not text"),
        ("1: b\n", "is not text"),
    ],
)
def test_a_wrong_profile_is_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "wrong", text)
    with pytest.raises(ProfileError, match=message) as refused:
        load_profile(path)
    assert refused.value.fix
    assert refused.value.path


def test_a_chain_of_extensions_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path, "first", "extends: worker\n")
    with pytest.raises(ProfileError, match="may not extend another"):
        load_profile(write(tmp_path, "second", f"extends: {first}\n"))


@pytest.mark.parametrize("content", [b"", b"schema: other\n", b"\xff\xfe", b"- list\n"])
def test_a_document_that_is_no_profile_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(ProfileError):
        load_profile(str(tmp_path / "a.yaml"))


def test_limits_asked_for_replace_the_defaults_by_name() -> None:
    assert check_limits({"open_files": 64}, DEFAULTS).open_files == 64
    assert check_limits({"open_files": 64}, DEFAULTS).file_bytes == DEFAULTS.file_bytes


@pytest.mark.parametrize("value", [0, -1, 15, 1.5, "64", None, True, 1 << 60])
def test_a_limit_that_is_nonsense_is_refused(value: object) -> None:
    with pytest.raises(LimitRefused, match="open_files"):
        check_limits({"open_files": value}, DEFAULTS)


def test_the_package_exports_what_it_says_and_each_name_is_there() -> None:
    assert all(getattr(confine, name) is not None for name in confine.__all__)
    assert sorted(confine.__all__) == sorted(confine._HOME)
    with pytest.raises(AttributeError):
        _ = confine.nothing_of_that_name


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_the_resolved_form_of_a_profile_is_canonical_and_says_what_holds_after_extends(name: str) -> None:
    profile = load_profile(name)
    text = profile.resolved("0" * 64)
    document = json.loads(text)
    assert rfc8785.dumps(document) == text.encode()
    assert document["profile_sha256"] == profile.digest
    assert document["limits"] == {limit: getattr(profile.limits, limit) for limit in Limits.__slots__}
    assert document["environment"] == dict(profile.environment)
    assert (document["network"], document["seccomp"]["list"]) == (profile.network, profile.seccomp)


def test_the_text_of_a_list_has_what_it_includes_behind_it() -> None:
    worker = (LISTS / "worker.list").read_text()
    assert list_text("worker") == worker
    assert list_text("loopback") == f"{(LISTS / 'loopback.list').read_text()}\n--- include worker\n{worker}"
