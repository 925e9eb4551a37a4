"""Opens what a power cut left with the real kernel, in this process, and holds it to what had been promised.

`Kernel` and `Store` are the product's own, recovery included; only the event loop is never run, and there is no host on
the other side. A repeat is decided by the kernel's own ledger, as a worker's frame would be, and taken back.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from chio import wire
from chio.errors import ChioError, StateError
from chio.kernel import database
from chio.kernel.calls import State
from chio.kernel.invocations import Answer, Caller, CallError, Dispatch, Down, read_request
from chio.kernel.process import Kernel
from chio.kernel.store import Store
from tests.faults.exchanges import Exchange
from tests.faults.invariants import ROWS, SETTLED, Facts, broken, note_of
from tests.faults.power.promises import Promises
from tests.faults.snapshot import Snapshot
from verify.keys import Pins
from verify.verdict import VerifyError


class NoHost:
    """The host's side of a kernel that nobody talks to."""

    def cancelled(self, processes: list[str]) -> None:
        pass

    def server_needed(self, server: str) -> None:
        pass

    def checkpointed(self, note: str) -> None:
        pass

    def check_peer(self, process: str, number: int, pidfd: int, done: Callable[[bool], None]) -> None:
        raise AssertionError("nobody connects")


def check(state: Path, promises: Promises, initialised: bool, key_file: Path | None = None) -> dict[str, list[str]]:
    """{invariant: what is wrong} after a power cut; empty when all hold. The state is opened for good.

    `initialised`: whether anybody had been told that this is a state. Until then it may be refused, never be wrong.
    `key_file`: of an encrypted one; it lies elsewhere, on a disk whose power is not cut.
    """
    try:
        with opened(state, key_file) as kernel:
            repeats, wrong_again = _repeats(kernel, promises)
        first = _snapshot(state)
        if first.damage:
            return {"database": [first.damage]}
        with opened(state, key_file):
            pass
        wrong = _judged(state, first, [*promises.exchanges, *repeats])
        if wrong_again:
            wrong["effects"] = wrong_again
        if changed := _snapshot(state).differences(first):
            wrong["second_recovery"] = changed
        return wrong
    except (ChioError, OSError) as error:
        if not initialised and isinstance(error, StateError | FileNotFoundError):
            return {}
        return {"acknowledged": [f"the state is refused: {error}"]}
    except sqlite3.Error as error:
        return {"database": [str(error)]}
    except VerifyError as error:
        return {"verify": [str(error)]}
    except (ValueError, LookupError, TypeError, AssertionError) as error:
        return {"database": [f"not even refused: {type(error).__name__}: {error}"]}


def _snapshot(state: Path) -> Snapshot:
    found = Snapshot.of(state)
    if found is None:
        raise FileNotFoundError(f"{state}: no database")
    return found


def _judged(state: Path, snapshot: Snapshot, exchanges: list[Exchange]) -> dict[str, list[str]]:
    bootstrap = json.loads(snapshot["host"][0]["bootstrap"])["body"]
    reads = {
        (entry["server_id"], tool["name"])
        for entry in bootstrap["servers"]
        for tool in entry["tools"]
        if tool["read_only"]
    }
    notes = {note for exchange in exchanges if (note := note_of(exchange.answer)) is not None}
    facts = Facts(snapshot, Pins.from_file(str(state / "pins.json")), exchanges, frozenset(notes), frozenset(reads))
    # An attempt's exports are settled by the host, when it resumes: that is not the kernel's recovery.
    settled = {name: judge for name, judge in SETTLED.items() if name != "attempts"}
    return broken(facts, {**ROWS, **settled})


@contextmanager
def opened(state: Path, key_file: Path | None = None) -> Iterator[Kernel]:
    """The kernel over a state, recovered. Raises what the product raises."""
    directory = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    loop = asyncio.new_event_loop()
    try:
        os.fchdir(directory)
        store = Store(database.open_existing(directory, str(state)))
        with closing(store):
            key = bytes.fromhex(key_file.read_text()) if key_file is not None else None
            kernel = Kernel(loop, store, directory, str(state), False, NoHost(), key, str(key_file))
            try:
                yield kernel
            finally:
                os.close(kernel.writer._receipts_fd)
    finally:
        os.chdir("/")
        os.close(directory)
        loop.close()


def _again(kernel: Kernel, process: str, operation: dict[str, Any]) -> object:
    """What a repeat would be answered: an `Answer`, a `Dispatch`, or an error's code."""
    try:
        request = read_request(operation, False)
        return kernel.ledger.invoke(Caller(kernel.tree[process], 1, None), request, may_wait=False)
    except CallError as error:
        return error.code
    finally:
        if kernel.store.in_transaction:
            kernel.store.rollback()


def _names(kernel: Kernel) -> dict[str, str]:
    attempts = {row["credential"].hex(): row["process"] for row in kernel.store.attempts()}
    return attempts | {digest.hex(): process for digest, process in kernel.store.credentials()}


def _repeats(kernel: Kernel, promises: Promises) -> tuple[list[Exchange], list[str]]:
    """Every call that was answered or sent to a server, asked again: the answers, and what is wrong."""
    names, wrong = _names(kernel), []
    last: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for entry in (*promises.exchanges, *promises.asked):
        if entry.request.get("op") == "invoke" and entry.digest in names:
            last[names[entry.digest], entry.request["operation_key"]] = entry.digest, entry.request
    known = {(names.get(entry.digest, "?"), entry.request["operation_key"]) for entry in promises.asked}
    known |= {key for key, _ in _answered(names, promises.exchanges)}
    found = []
    for (process, key), (digest, request) in last.items():
        call = kernel.store.find_call(process, key)
        if call is None:
            if (process, key) in known:
                wrong.append(f"{process}/{key}: answered or sent to its server, and nothing is known of it")
            continue
        again = _again(kernel, process, request)
        if isinstance(again, Answer):
            frame = wire.ok_frame(again.result)
            found.append(Exchange(-1, digest, request, json.loads(frame), frame))
        elif isinstance(again, Dispatch):
            if call.state is not State.COMPENSATED and not kernel.router.is_read(call.server, call.tool):
                wrong.append(f"{process}/{key}: {call.state.value}, and its server would be asked again")
        elif not isinstance(again, Down) and (again != "cancelled" or kernel.tree[process].running):
            wrong.append(f"{process}/{key}: a repeat is told {again}")
    return found, wrong


def _answered(names: dict[str, str], exchanges: list[Exchange]) -> Iterator[tuple[tuple[str, str], Exchange]]:
    for exchange in exchanges:
        if exchange.op == "invoke" and exchange.ok and exchange.digest in names:
            yield (names[exchange.digest], exchange.request["operation_key"]), exchange
