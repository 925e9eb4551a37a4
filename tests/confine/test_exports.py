"""Exports: what a worker left in its scratch directory, collected, staged and published, or refused by name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from confine import ExportRefused, collect_exports, discard_staged, publish_staged, stage_exports
from tests.confine.launching import WITHOUT, Runner


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def harvest(runner: Runner, cwd: Path, script: str, patterns: list[str], max_bytes: int = 1_000) -> dict[str, bytes]:
    """Runs a shell script with ./out as its exports directory and publishes what matches there."""
    (cwd / "out").mkdir(exist_ok=True)
    exited = runner.run(["/bin/sh", "-c", f"cd out && {script}"], cwd, exports_directory="out").exited
    assert exited.exit_code == 0, exited.stderr
    assert exited.exports_fd is not None
    try:
        collected = collect_exports(exited.exports_fd, patterns, max_bytes)
    finally:
        os.close(exited.exports_fd)
    with opened(cwd / "out") as target:
        publish_staged(target, stage_exports(collected, target, "token"))
    for file in collected:
        file.close()
    assert list((cwd / "out").glob(".chio-staged-*")) == []
    return {str(p.relative_to(cwd / "out")): p.read_bytes() for p in (cwd / "out").rglob("*") if p.is_file()}


def test_declared_files_are_published_and_others_are_not(runner: Runner, cwd: Path) -> None:
    files = harvest(runner, cwd, "echo a > a.json; echo b > b.txt; echo c > c.json", ["*.json", "absent"])
    assert files == {"a.json": b"a\n", "c.json": b"c\n"}


def test_no_match_is_no_error(runner: Runner, cwd: Path) -> None:
    assert harvest(runner, cwd, "echo a > a", ["*.json"]) == {}


def test_a_published_file_replaces_the_one_before(runner: Runner, cwd: Path) -> None:
    (cwd / "out").mkdir()
    (cwd / "out" / "a").write_text("old")
    assert harvest(runner, cwd, "echo new > a", ["a"]) == {"a": b"new\n"}


def test_a_pattern_with_a_slash_reaches_a_folder_that_exists_outside(runner: Runner, cwd: Path) -> None:
    (cwd / "out" / "sub").mkdir(parents=True)
    assert harvest(runner, cwd, "mkdir sub; echo x > sub/x; echo y > y", ["sub/*"]) == {"sub/x": b"x\n"}


def test_the_scratch_directory_starts_empty_and_private(runner: Runner, cwd: Path) -> None:
    (cwd / "out").mkdir()
    (cwd / "out" / "old").write_text("outside")
    exited = runner.run(["/bin/sh", "-c", "ls -A out; stat -c %a:%U out"], cwd, exports_directory="out").exited
    # An ordinary user's host, whose uid is another than the attempt's, looks into it by its group.
    mode = 700 if os.geteuid() == 0 or "distinct-uids" in WITHOUT else 750
    assert exited.stdout.decode() == f"{mode}:chio\n"
    assert exited.exports_fd is not None
    os.close(exited.exports_fd)


def test_the_state_directory_itself_may_take_exports_and_stays_hidden(runner: Runner, cwd: Path) -> None:
    state = cwd / ".state"
    state.mkdir(mode=0o700)
    (state / "authority.db").write_text("rows")
    exited = runner.run(
        ["/bin/sh", "-c", "ls -A .state; echo r > .state/result.json"],
        cwd,
        exports_directory=".state",
        state_dir=str(state),
    ).exited
    assert (exited.exit_code, exited.stdout) == (0, b"")
    assert exited.exports_fd is not None
    collected = collect_exports(exited.exports_fd, ["result.json"], 100)
    os.close(exited.exports_fd)
    assert [file.name for file in collected] == ["result.json"]
    collected[0].close()


def test_scratch_is_limited_in_bytes(runner: Runner, cwd: Path) -> None:
    (cwd / "out").mkdir()
    script = "head -c 200000 /dev/zero > out/big"
    exited = runner.run(
        ["/bin/sh", "-c", script], cwd, exports_directory="out", limits={"scratch_bytes": 65_536}
    ).exited
    assert exited.exit_code != 0
    assert b"No space left" in exited.stderr
    assert exited.exports_fd is not None
    os.close(exited.exports_fd)


@pytest.mark.parametrize(
    ("script", "name", "why"),
    [
        ("ln -s /etc/passwd a", "a", "a symbolic link"),
        ("ln -s . a; ", "a", "a symbolic link"),
        ("echo x > b; ln b a", "a", "2 links to it"),
        ("mkfifo a", "a", "not a regular file"),
        ("mkdir a", "a", "not a regular file"),
        ("head -c 996 /dev/zero > a", "a", "over the size allowed, by 1 bytes"),
        ("ln -s /etc sub", "sub", "a symbolic link"),
    ],
)
def test_a_match_that_may_not_leave_is_refused_and_publishes_nothing(
    runner: Runner, cwd: Path, script: str, name: str, why: str
) -> None:
    with pytest.raises(ExportRefused) as refused:
        harvest(runner, cwd, f"echo good > A; {script}", ["A", "a", "sub/passwd"])
    assert (refused.value.name, refused.value.why) == (name, why)
    assert list((cwd / "out").iterdir()) == []


def test_a_folder_of_that_name_outside_refuses_before_anything_is_published(runner: Runner, cwd: Path) -> None:
    (cwd / "out" / "b").mkdir(parents=True)
    with pytest.raises(ExportRefused) as refused:
        harvest(runner, cwd, "echo a > a; echo b > b", ["a", "b"])
    assert refused.value.name == "b"
    assert [path.name for path in (cwd / "out").iterdir()] == ["b"]


def test_publishing_again_finishes_what_a_crash_left(tmp_path: Path) -> None:
    scratch, target = tmp_path / "scratch", tmp_path / "target"
    for folder in (scratch, target):
        folder.mkdir()
    for name in ("a", "b"):
        (scratch / name).write_text(name)
    with opened(scratch) as scratch_fd, opened(target) as target_fd:
        collected = collect_exports(scratch_fd, ["*"], 100)
        staged = stage_exports(collected, target_fd, "t1")
        publish_staged(target_fd, staged[:1])  # the crash
        publish_staged(target_fd, staged)
        for file in collected:
            file.close()
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "a", "b": "b"}


def test_discarding_removes_one_attempts_staged_files_only(tmp_path: Path) -> None:
    scratch, target = tmp_path / "scratch", tmp_path / "target"
    for folder in (scratch, target):
        folder.mkdir()
    (scratch / "a").write_text("a")
    with opened(scratch) as scratch_fd, opened(target) as target_fd:
        collected = collect_exports(scratch_fd, ["a"], 100)
        stage_exports(collected, target_fd, "t1")
        stage_exports(collected, target_fd, "t2")
        discard_staged(target_fd, "t1")
        collected[0].close()
    assert [path.name for path in target.iterdir()] == [".chio-staged-t2-0"]
