"""A file of lines, judged by all processors in memory that does not grow with the file.

The file is read once, in order, in chunks that end with a line. A chunk is judged as a whole by one function; chunks
are dealt in turn to as many processes as there are processors, and their results are taken in the same turn, so that
what is found does not depend on who was quicker. A small file is judged here, without starting anything.

The standard library's executors are not used: with one of their processes killed while a chunk is on its way, they wait
for ever (CPython issue 94777).
"""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from verify.files import open_file
from verify.verdict import VerifyError, unreadable

if TYPE_CHECKING:
    from multiprocessing import Process
    from multiprocessing.connection import Connection

# A reply holds a receipt and is at most this long (contract, section 3), so no line can be longer.
MAX_LINE_BYTES = 8 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """How far a file was read, on a terminal's stderr; nothing where stderr is no terminal or the file is small."""

    total: int
    shown: int = field(default=-1)
    done: int = 0

    def advance(self, size: int) -> None:
        self.done += size
        percent = 100 * self.done // self.total if self.total else 100
        if self.total > 16 * CHUNK_BYTES and percent != self.shown and sys.stderr.isatty():
            self.shown = percent
            sys.stderr.write(f"\r{percent:3d} % of {self.total >> 20} MiB")
            sys.stderr.flush()

    def clear(self) -> None:
        if self.shown >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def processors() -> int:
    """Those that this process may use (sched_getaffinity(2) where there is one)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def judge_lines(path: str, judge: Callable[[bytes], T], processes: int | None = None) -> Generator[T, None, None]:
    """What `judge` makes of each chunk, in order. It must be one that a process can be handed (pickle).

    Raises `VerifyError` for a file that cannot be read. What `judge` raises ends the iteration too.
    """
    file = open_file(path, pipe=True)
    progress = Progress(os.fstat(file.fileno()).st_size)
    with file:
        try:
            yield from _judge(file, path, judge, processors() if processes is None else processes, progress)
        finally:
            progress.clear()


def _judge(file: IO[bytes], path: str, judge: Callable[[bytes], T], processes: int, progress: Progress) -> Iterator[T]:
    chunks = _chunks(file, path)
    first, second = next(chunks, None), next(chunks, None)
    if first is None:
        return
    if second is None or len(first) < CHUNK_BYTES // 2 or processes < 2:
        for chunk in (first, *([second] if second is not None else []), *chunks):
            yield judge(chunk)
            progress.advance(len(chunk))
        return
    with _Workers(judge, processes, path) as workers:
        sent = 0
        sizes: deque[int] = deque()
        for chunk in _chained(first, second, chunks):
            # A worker gets its next chunk as soon as its last result is taken, and before anybody looks at that.
            result = workers.take(sent) if sent >= processes else None
            workers.give(sent, chunk)
            sizes.append(len(chunk))
            if sent >= processes:
                progress.advance(sizes.popleft())
                yield cast(T, result)
            sent += 1
        for number in range(max(0, sent - processes), sent):
            result = workers.take(number)
            progress.advance(sizes.popleft())
            yield result


class _Workers(Generic[T]):
    """Processes that each judge one chunk at a time. Chunk n is the business of worker n modulo their number.

    Nobody waits for somebody who waits for him: a chunk is given only to a worker whose last result was taken.
    """

    def __init__(self, judge: Callable[[bytes], T], count: int, path: str) -> None:
        self._path = path
        import multiprocessing  # a file of usual size is judged without it

        self._pipes: list[Connection] = []
        self._processes: list[Process] = []
        # A worker must not meet an interrupt before it has learnt to ignore it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                ours, theirs = multiprocessing.Pipe()
                process = multiprocessing.Process(target=_work, args=(theirs, judge), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()

    def give(self, number: int, chunk: bytes) -> None:
        try:
            self._pipes[number % len(self._pipes)].send_bytes(chunk)
        except OSError as error:
            raise self._lost() from error

    def take(self, number: int) -> T:
        try:
            result, error = self._pipes[number % len(self._pipes)].recv()
        except (EOFError, OSError) as lost:
            raise self._lost() from lost
        if error is not None:
            raise error
        return cast(T, result)

    def _lost(self) -> VerifyError:
        what = "a process that was verifying it was killed"
        return VerifyError(what, check="input", file=self._path, fix="try again with more memory free")


def _chained(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest


def _work(pipe: "Connection", judge: Callable[[bytes], Any]) -> None:
    """A worker: (result, None) or (None, what was raised) for each chunk, until there are no more."""
    _live_and_die_with_the_parent()
    try:
        while True:
            chunk = pipe.recv_bytes()
            try:
                answer = judge(chunk), None
            except VerifyError as error:
                pipe.send((None, error))
            else:
                pipe.send(answer)
    except (EOFError, OSError):
        return  # the parent has no more, or is no more


def _live_and_die_with_the_parent() -> None:
    """An interrupt is the parent's to answer; a parent that was killed leaves nobody behind."""
    import multiprocessing
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(1)


def _chunks(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Whole lines, about `CHUNK_BYTES` of them at a time. The last line may lack its newline."""
    lines = 0
    rest = b""
    while block := _read(file, path):
        end = block.rfind(b"\n") + 1
        if end:
            chunk, rest = rest + block[:end], block[end:]
            yield chunk
            lines += chunk.count(b"\n")
        else:
            rest += block
        if len(rest) > MAX_LINE_BYTES:
            raise VerifyError(f"over {MAX_LINE_BYTES} bytes", check="text", file=path, place=f"line {lines + 1}")
    if rest:
        yield rest


def _read(file: IO[bytes], path: str) -> bytes:
    """About `CHUNK_BYTES`, less only at the end. Read call by call, so that an interrupt is met between two of them."""
    parts: list[bytes] = []
    wanted = CHUNK_BYTES
    try:
        while wanted and (part := file.read(wanted)):
            parts.append(part)
            wanted -= len(part)
    except OSError as error:
        raise unreadable(path, error) from error
    return b"".join(parts)
