"""Receipts verified per second beside the raw signature limit of the same processors, memory, and proofs."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nacl.bindings

from tests.verify import signed
from verify import log
from verify.keys import PublicKey
from verify.lines import processors
from verify.receipt_file import check_receipts

RECEIPTS = 20_000
_ROUNDS = 3
_SECONDS = 1.0
_GUARDS = ("budget", "revocation", "expiry", "grant", "constraints", "invocations")


def run(directory: str | None) -> None:
    """Print the table. The two rates are taken in turn, and each line is the median of the rounds."""
    key = PublicKey.from_hex(signed.KERNEL_KEY)
    with tempfile.TemporaryDirectory(prefix="chio-bench-", dir=directory) as folder:
        path = Path(folder) / "receipts.ndjson"
        bodies = write(path, RECEIPTS)
        rates: dict[str, list[float]] = {}
        for _ in range(_ROUNDS):
            for workers in sorted({1, processors()}):
                rates.setdefault(f"raw signatures/s, {workers} processes", []).append(raw(bodies[:500], workers))
                start = time.perf_counter()
                lines = check_receipts(str(path), key, processes=workers).lines
                rates.setdefault(f"receipts/s, {workers} processes", []).append(lines / (time.perf_counter() - start))
        for workers in sorted({1, processors()}):
            limit, verified = rates[f"raw signatures/s, {workers} processes"], rates[f"receipts/s, {workers} processes"]
            ratio = statistics.median(found / most for found, most in zip(verified, limit, strict=True))
            print(f"raw signatures/s, {workers} processes  {statistics.median(limit):10.0f}")
            reached = f"{statistics.median(verified):10.0f}   {ratio:.2f} of the limit"
            print(f"receipts/s, {workers} processes        {reached}")
        print_memory(Path(folder), path)
    print_proofs()


def write(path: Path, count: int) -> list[bytes]:
    """Receipts as a kernel writes them for a mailbox call; the bodies that were signed."""
    bodies = []
    with path.open("wb") as file:
        for index in range(count):
            body = {**signed.a_body(index), "evidence": [{"guard": name, "passed": True} for name in _GUARDS]}
            text = signed.jcs(body)
            bodies.append(text)
            file.write(signed.line_of(text, signed.jcs(signed.disclosed()), signed.sign(text)) + b"\n")
    return bodies


def raw(bodies: list[bytes], workers: int) -> float:
    """What PyNaCl alone verifies per second, on as many processes at once."""
    messages = [b"chio/receipt/v1\0" + body for body in bodies]
    texts = [bytes.fromhex(signed.sign(body)) + message for body, message in zip(bodies, messages, strict=True)]
    start, counts = multiprocessing.Barrier(workers), multiprocessing.Queue()
    made = [multiprocessing.Process(target=_open_signatures, args=(texts, start, counts)) for _ in range(workers)]
    for process in made:
        process.start()
    total = sum(counts.get() for _ in made)
    for process in made:
        process.join()
    return total


def _open_signatures(
    texts: list[bytes], start: multiprocessing.synchronize.Barrier, counts: multiprocessing.Queue[float]
) -> None:
    key = bytes.fromhex(signed.KERNEL_KEY)
    start.wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for text in texts:
            nacl.bindings.crypto_sign_open(text, key)
        done += len(texts)
    counts.put(done / (time.perf_counter() - began))


def print_memory(folder: Path, path: Path) -> None:
    """The peak of the command's own process, for a file and for one five times as long."""
    longer = folder / "longer.ndjson"
    write(longer, 5 * RECEIPTS)
    for name, file in ((RECEIPTS, path), (5 * RECEIPTS, longer)):
        print(f"peak memory, {name:7} receipts   {peak_mib(file):10.0f} MiB")


# Of its own memory after exec: what wait4 says counts the benchmark's, which it was forked from.
_PEAK = """
import re, sys
from verify.cli import main
try:
    main()
finally:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
    print(peak[1], file=sys.stderr)
"""


def peak_mib(path: Path) -> float:
    command = [sys.executable, "-c", _PEAK, "receipts", str(path), "--trusted-kernel-pubkey", signed.KERNEL_KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stderr) / 1024


def print_proofs() -> None:
    """An inclusion proof's size and the time to check it, in trees that grow tenfold."""
    for power in range(1, 7):
        size = 10**power
        nodes = inclusion_nodes(size)
        leaf, root = log.leaf_hash(b"leaf 0"), chained(log.leaf_hash(b"leaf 0"), nodes)
        times = []
        for _ in range(400):
            began = time.perf_counter()
            log.verify_inclusion(leaf, 0, size, nodes, root)
            times.append(time.perf_counter() - began)
        each = statistics.median(times)
        print(f"proof in {size:8} leaves: {32 * len(nodes):4} bytes, {each * 1e6:6.1f} microseconds to check")


def inclusion_nodes(size: int) -> list[bytes]:
    """The siblings of leaf 0 in a tree of this size: as many as it is high, and what they are does not matter here."""
    return [log.leaf_hash(b"node %d" % level) for level in range((size - 1).bit_length())]


def chained(leaf: bytes, nodes: list[bytes]) -> bytes:
    for node in nodes:
        leaf = log.node_hash(leaf, node)
    return leaf
