"""`python -m tests.kernel.full_disk SMALL BANK`: a state on the small file system SMALL, which then fills up.

Run by `test_full_disk` in a mount namespace of its own, where SMALL is mounted. Exit 0 when everything held.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.kernel.external import Gate, ToolState, child, effects, host_config, mailbox_routes, server, tool
from tests.kernel.serving import grant, policy, result_of

MEBIBYTE = 1024 * 1024


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def leave(folder: Path, size: int) -> None:
    """Fill the file system until `size` bytes are free (to a MiB)."""
    filler = os.open(folder / f"filler of {size}", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(filler, 0, free(folder) - size)
    os.close(filler)
    assert abs(free(folder) - size) < MEBIBYTE


def main(small: Path, bank: Path) -> None:
    kin = child("a", "bank/pay", *mailbox_routes("jobs"))
    state = ToolState.make(
        small / "project", host_config([server("bank", "resource.py", bank)], kin), policy(tool("bank"), grant())
    )
    with state.serve() as serving:
        worker = serving.worker("a")
        before = worker.call("before", "pay", {"n": 1}, "bank")
        first = worker.line(before)
        assert result_of(first)["verdict"] == "allow"
        leave(small, 80 * MEBIBYTE)
        assert worker.invoke("room enough", "pay", {"n": 2}, "bank")["verdict"] == "allow"
        gate = Gate(bank, "after_effect")
        with worker.connect() as line:
            line.send(worker.call("in flight", "pay", {"n": 3}, "bank"))
            gate.reached()
            leave(small, 60 * MEBIBYTE)
            calls = worker.ask("inspect")["tree_calls"]
            refused = worker.call("too late", "pay", {"n": 4}, "bank")
            for _ in range(2):
                with worker.connect() as other:
                    other.send(refused)
                    assert other.code() == "runtime_error"
            assert worker.ask("inspect")["tree_calls"] == calls
            assert state.rows("SELECT state FROM call WHERE operation_key = 'too late'") == []
            # New intents are refused first: what needs no outcome later goes on, and so does what is in flight.
            assert worker.send("letter", "jobs", "m", "text")["status"] == "sent"
            assert worker.invoke("elsewhere", "balance", {}, "bank")["reason"] == "out_of_scope"
            assert worker.ask("checkpoint", expected_revision="0", value=1)["revision"] == "1"
            assert worker.line(before) == first
            gate.go()
            assert result_of(line.read())["verdict"] == "allow"
        (small / f"filler of {60 * MEBIBYTE}").unlink()
        assert result_of(worker.line(refused))["verdict"] == "allow"
    assert [entry["arguments"]["n"] for entry in effects(bank)] == [1, 2, 3, 4]
    state.log()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
