"""A file of lines over several processes: one result whatever the number, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify import signed
from verify import lines
from verify.keys import PublicKey
from verify.lines import CHUNK_BYTES, MAX_LINE_BYTES, judge_lines
from verify.receipt_file import check_receipts
from verify.verdict import VerifyError

ROOT = Path(__file__).parents[2]
KEY = PublicKey.from_hex(signed.KERNEL_KEY)
COUNT = 3000  # five chunks


@pytest.fixture(scope="module")
def made() -> list[bytes]:
    return [signed.receipt(signed.a_body(index)) for index in range(COUNT)]


def counted(chunk: bytes) -> tuple[int, bytes]:
    return chunk.count(b"\n"), chunk[:9]


def bad_at_nine(chunk: bytes) -> int:
    if b"\n9" in chunk:
        raise VerifyError("a nine", check="text")
    return len(chunk)


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_the_order_of_the_file(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%08d%s\n" % (number, b"x" * 200) for number in range(30_000)))
    results = list(judge_lines(str(path), counted, processes))
    assert sum(count for count, _ in results) == 30_000
    assert [first for _, first in results] == sorted(first for _, first in results)
    assert len(results) > 5


@pytest.mark.parametrize("processes", [1, 3])
def test_distinct_receipts_are_counted_over_all_processes(tmp_path: Path, made: list[bytes], processes: int) -> None:
    verdict = check_receipts(signed.write(tmp_path, *made, *made[:100]), KEY, processes=processes)
    assert (verdict.lines, verdict.distinct) == (COUNT + 100, COUNT)


@pytest.mark.parametrize("processes", [1, 4])
def test_the_first_bad_line_is_named_whoever_was_quicker(tmp_path: Path, made: list[bytes], processes: int) -> None:
    bad = [*made]
    for number in (700, 1500, 2999):
        bad[number] = bad[number].replace(b'"producer"', b'"consumer"')
    with pytest.raises(VerifyError) as refused:
        check_receipts(signed.write(tmp_path, *bad), KEY, processes=processes)
    assert (refused.value.place, refused.value.check) == ("line 701", "signature")


def test_what_a_process_raises_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes((b"1" * 99 + b"\n") * 40_000 + b"9\n")
    with pytest.raises(VerifyError) as refused:
        list(judge_lines(str(path), bad_at_nine, 2))
    assert (refused.value.what, refused.value.check) == ("a nine", "text")


def kill_yourself(chunk: bytes) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def test_a_killed_process_is_an_error_of_the_machine_and_not_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes((b"1" * 99 + b"\n") * 40_000)
    with pytest.raises(VerifyError, match="was killed") as refused:
        list(judge_lines(str(path), kill_yourself, 2))
    assert (refused.value.check, refused.value.file) == ("input", str(path))


@pytest.mark.parametrize("before", [0, 3 * CHUNK_BYTES])
def test_a_line_that_never_ends_is_refused_in_bounded_memory(tmp_path: Path, before: int) -> None:
    path = tmp_path / "lines"
    with path.open("wb") as file:
        file.write(b"x\n" * (before // 2))
        file.truncate(before + 4 * 1024**3)  # sparse
    with pytest.raises(VerifyError) as refused:
        list(judge_lines(str(path), counted, 1))
    assert (refused.value.check, refused.value.place) == ("text", f"line {before // 2 + 1}")
    assert refused.value.what == f"over {MAX_LINE_BYTES} bytes"


# A test may run where interrupts are ignored, which programs inherit.
_RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from verify.cli import main
main()
"""


def started(path: str, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _RUN.format(root=str(ROOT)), "receipts", path]
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [*command, "--trusted-kernel-pubkey", signed.KERNEL_KEY], start_new_session=True, **options
    )


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A pipe and its other side: whoever reads it is in the middle of its work until that is closed."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # does not wait for a reader, as O_WRONLY would (fifo(7))
    yield str(path), descriptor
    os.close(descriptor)


def feed(descriptor: int, made: list[bytes]) -> None:
    text = memoryview(b"".join(line + b"\n" for line in made))
    while text:
        text = text[os.write(descriptor, text) :]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int]) -> None:
    """Returns when none of these is left; the test's own time limit is the deadline."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_no_process_and_no_traceback(
    endless: tuple[str, int], made: list[bytes], how: signal.Signals
) -> None:
    path, descriptor = endless
    process = started(path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    feed(descriptor, made)
    found = children(process.pid)
    # An interrupt on a terminal goes to the whole group; a kill to one process.
    (os.killpg if how is signal.SIGINT else os.kill)(process.pid, how)
    told, complained = process.communicate(timeout=60)
    assert told == b""
    assert b"Traceback" not in complained
    assert process.returncode == (1 if how is signal.SIGINT else -signal.SIGKILL)
    if lines.processors() > 1:
        assert found
    gone(found)


def test_progress_is_shown_on_a_terminal_alone_and_taken_away_again(tmp_path: Path, made: list[bytes]) -> None:
    path = signed.write(tmp_path, *made * 5)
    quiet = started(path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert quiet.communicate(timeout=120)[1] == b""
    ours, theirs = os.openpty()
    process = started(path, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # EIO is how a Linux terminal ends when its other side is closed
        pass
    os.close(ours)
    assert process.wait(timeout=120) == 0
    assert b"100 % of " in shown
    assert shown.endswith(b"\r\x1b[K")
