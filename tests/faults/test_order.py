"""The order of calls: what is owed a sync, and when telling somebody breaks a promise."""

from __future__ import annotations

import pytest

from tests.faults.boundaries import Boundary
from tests.faults.order import told_too_early


def call(name: str, path: str = "/s/f", kind: str = "file", *, second: str = "", new: bool = False,
         data: bytes | None = None, role: str = "kernel", pid: int = 1) -> Boundary:  # fmt: skip
    return Boundary(0, role, 1, name, kind, path, path, second, pid, 3, 0, 9, 0, data, 0, new)


def tell(data: bytes = b'{"ok":true}', pid: int = 1) -> Boundary:
    return call("write", "socket", "socket", data=data, pid=pid)


WRITE, SYNC, SYNC_FOLDER = call("write"), call("fsync"), call("fsync", "/s")
NEW = call("openat", new=True)
KEPT = {
    "written and synced": [WRITE, SYNC, tell()],
    "made, written, and both synced": [NEW, WRITE, SYNC, SYNC_FOLDER, tell()],
    "the folder synced before there was anything in the file": [NEW, SYNC_FOLDER, WRITE, SYNC, tell()],
    "made and still empty": [NEW, tell()],
    "renamed and the folder synced": [call("rename", "/s/a", second="/s/f"), SYNC_FOLDER, tell()],
    "written and removed": [WRITE, call("unlink"), tell()],
    "a folder that was there": [call("mkdir", "/s/d"), tell()],
    "a refusal": [WRITE, tell(b'{"ok":false}')],
    "somewhere else": [call("write", "/tmp/f"), tell()],
    "by another process": [WRITE, tell(pid=2)],
    "by one that promises nothing": [call("write", role="worker"), call("write", "pipe", "pipe", role="worker")],
}
BROKEN = {
    "not synced": [WRITE, tell()],
    "synced after": [WRITE, tell(), SYNC],
    "another file synced": [WRITE, call("fsync", "/s/g"), tell()],
    "the name not synced": [NEW, WRITE, SYNC, tell()],
    "the new name not synced": [call("rename", "/s/a", second="/s/f"), tell()],
    "a new folder's name not synced": [call("mkdir", "/s/d", new=True), tell()],
    "shortened and not synced": [call("ftruncate"), tell()],
    "said on standard output": [WRITE, call("write", "stdout", "said")],
}


@pytest.mark.parametrize("what", KEPT)
def test_a_promise_that_is_kept_is_believed(what: str) -> None:
    assert told_too_early(KEPT[what], ["/s"]) == []


@pytest.mark.parametrize("what", BROKEN)
def test_a_promise_that_comes_too_early_is_seen_once(what: str) -> None:
    assert len(told_too_early([*BROKEN[what], tell()], ["/s"])) == 1
