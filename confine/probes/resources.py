"""Probes of resources: each takes more than its limit, up to an own ceiling that the machine can bear."""

import errno
import os
import resource
import signal
import threading
import time

from confine.probes import Escaped, Group, World

probe = Group("resources")
_MIB = 1 << 20
_SMALL = {"memory_bytes": 160 * _MIB, "scratch_bytes": 16 * _MIB}  # scratch + 64 MiB must fit
_CEILING_BYTES = 512 * _MIB
_CEILING_COUNT = 400


@probe("refused", limits={"pids": 32})
def fork_bomb(_: World) -> str:
    """Forks until it is refused, or 400 times."""
    for number in range(_CEILING_COUNT):
        if os.fork() == 0:
            signal.pause()
            os._exit(number & 1)
    return f"{_CEILING_COUNT} processes, where 32 are allowed"


@probe("refused", limits={"pids": 32})
def threads(_: World) -> str:
    """Starts threads until it is refused, or 400."""
    stop = threading.Event()
    for number in range(_CEILING_COUNT):
        try:
            threading.Thread(target=stop.wait, daemon=True).start()
        except RuntimeError:
            raise BlockingIOError(errno.EAGAIN, f"at thread {number + 2}") from None
    return f"{_CEILING_COUNT} threads, where 32 are allowed"


@probe("contained", ends_by="memory_limit", limits=_SMALL)
def memory(_: World) -> str:
    """Touches 512 MiB of memory."""
    kept = []
    for _number in range(_CEILING_BYTES // _MIB):
        kept.append(b"x" * _MIB)
    raise Escaped(f"{len(kept)} MiB, where 160 are allowed")


@probe("contained", ends_by="memory_limit", limits=_SMALL)
def memory_files(_: World) -> str:
    """Writes 512 MiB to files that are in memory and in no directory."""
    total = 0
    for number in range(8):
        fd = os.memfd_create(f"probe{number}")
        for _part in range(_CEILING_BYTES // _MIB // 8):
            total += os.write(fd, b"x" * _MIB)
    raise Escaped(f"{total // _MIB} MiB, where 160 are allowed")


@probe("contained", ends_by="memory_limit", limits=_SMALL)
def memory_of_children(_: World) -> str:
    """Touches 512 MiB in four children: the limit is the attempt's, not a process's."""
    read, write = os.pipe()
    for _number in range(4):
        if os.fork() == 0:
            kept = b"x" * (_CEILING_BYTES // 4)
            os.write(write, kept[:1])
            signal.pause()
    os.close(write)
    for _number in range(4):
        if not os.read(read, 1):
            signal.pause()  # every child is dead: what killed them ends us too, or the deadline does
    raise Escaped(f"{_CEILING_BYTES // _MIB} MiB, where 160 are allowed")


@probe("refused")
def bytes_of_tmp(_: World) -> str:
    """Fills /tmp, and /dev/shm, up to 512 MiB each."""
    refusals = []
    for path in ("/tmp/big", "/dev/shm/big"):
        written = 0
        try:
            with open(path, "wb", buffering=0) as file:
                while written < _CEILING_BYTES:
                    written += file.write(bytes(_MIB))
        except OSError as error:
            refusals.append(error)
            os.truncate(path, 0)
        else:
            raise Escaped(f"{written // _MIB} MiB in {path}")
    raise refusals[0]


@probe("refused", limits={"scratch_bytes": 4 * _MIB})
def bytes_of_scratch(world: World) -> str:
    """Fills the exports directory, of 4 MiB."""
    written = 0
    with open(f"{world.exports}/big", "wb", buffering=0) as file:
        while written < 64 * _MIB:
            written += file.write(bytes(_MIB))
    return f"{written // _MIB} MiB"


@probe("refused")
def inodes_of_tmp(_: World) -> str:
    """Makes empty files, up to 100,000."""
    for number in range(100_000):
        os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
    return "100,000 files"


@probe("refused", limits={"open_files": 64})
def descriptors(_: World) -> str:
    """Opens descriptors until it is refused, or 4,096; then raises the limit."""
    try:
        for _number in range(4_096):
            os.dup(0)
    except OSError as refusal:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4_096, 4_096))
        except (OSError, ValueError):
            raise refusal from None
        raise Escaped("raised its hard limit") from None
    return "4,096 descriptors, where 64 are allowed"


@probe("contained", ends_by="output_limit", limits={"output_bytes": 65_536})
def output(_: World) -> str:
    """Writes 16 MiB to standard output, where 64 KiB are allowed."""
    for _number in range(16):
        os.write(1, b"x" * _MIB)
    time.sleep(5)
    raise Escaped("wrote 16 MiB and lived")


@probe("contained")
def standard_output_held_by_a_grandchild(_: World) -> str:
    """Ends, and leaves a process that keeps standard output open and would make a reader wait."""
    if os.fork() == 0:
        os.setsid()
        while True:
            time.sleep(60)
    return "left a process with its standard output; the attempt ended all the same"


@probe("refused", limits={"file_bytes": 65_536})
def file_size(_: World) -> str:
    """Writes a file over its limit, then one with a hole."""
    with open("/tmp/file", "wb", buffering=0) as file:
        written = 0
        while written < _MIB:
            written += file.write(bytes(4_096))
    return f"{written} bytes, where 65,536 are allowed"


@probe("contained", ends_by="cpu_limit", limits={"cpu_seconds": 1})
def processor_time(_: World) -> str:
    """Computes in two processes for up to 10 seconds, where 1 second of processor time is allowed."""
    os.fork()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        pass
    raise Escaped("computed to its own end")


@probe("contained", ends_by="timeout", timeout_ms=700)
def deadline(_: World) -> str:
    """Ignores every signal that can be ignored, and sleeps past its deadline."""
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    time.sleep(15)
    raise Escaped("slept to its own end")
