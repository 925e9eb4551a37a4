"""One history: a seed decides who does what next, and where it all falls down."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chio.errors import ChioError
from chio.kernel.database import CommitFailed
from tests.faults.invariants import ROWS, Facts, broken, processes
from tests.faults.simulation.reference import Reference
from tests.faults.simulation.world import BOX, CHECKED_TTL_S, PARENTS, SERVER, TOOLS, Crash, Template, World
from tests.faults.snapshot import Snapshot
from verify.keys import Pins
from verify.verdict import VerifyError

STEPS = (15, 60)  # from, to
_KEYS = 14
_STARTS = 4
_FULL = 60  # for about ten statements nothing can be written
_EVERY_LOG = 25  # of how many histories the signatures are checked, too


@dataclass(frozen=True, slots=True)
class Told:
    """How a history ended. `steps` and `crashes` count what was done; `wrong` is empty when it is one that may be."""

    seed: int
    steps: int
    crashes: int
    calls: int
    wrong: list[str]


class History:
    def __init__(self, made: Template, pins: Pins, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pins = pins
        self.seed = seed
        self.world = World(made)
        self.crashes = 0
        self._later = False
        self.trail: list[str] = []
        self._asked: list[tuple[str, dict[str, Any]]] = []
        self._revisions = dict.fromkeys(PARENTS, 0)
        self._actions: list[tuple[int, Callable[[], str | None]]] = [
            (30, self._turn), (44, self._new_call), (20, self._repeat), (5, self._write), (8, self._apply),
            (16, self._answer), (4, self._time_out), (3, self._answer_late), (2, self._garble), (12, self._server_up),
            (3, self._server_dies), (1, self._server_refuses), (4, self._save), (2, self._blob), (4, self._pass_time),
            (3, self._hang_up), (3, self._end_attempt), (7, self._arm), (2, self._fall), (3, self._reconcile),
            (1, self._cancel), (1, self._revoke), (1, self._clock_on),
        ]  # fmt: skip

    def run(self) -> Told:
        world, rng = self.world, self._rng
        weights = [weight for weight, _ in self._actions]
        steps = rng.randint(*STEPS)
        try:
            self._start()
            for action in rng.choices([action for _, action in self._actions], weights, k=steps):
                self._guarded(action)
            self._guarded(self._drain)
            self._end()
        except (ChioError, VerifyError, AssertionError, sqlite3.Error, ValueError, LookupError) as error:
            world.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            calls = self._count()
            world.close()
        return Told(self.seed, steps, self.crashes, calls, world.wrong)

    def _count(self) -> int:
        ((count,),) = self.world.connection.execute("SELECT count(*) FROM call").fetchall()
        return int(count)

    # --- falling and rising --------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[[], str | None]) -> None:
        try:
            done = action()
        except (Crash, CommitFailed) as fall:
            self.trail.append(f"{action.__name__.strip('_')}: {type(fall).__name__} {fall}")
            self._fallen()
        else:
            if done is not None:
                self.trail.append(f"{action.__name__.strip('_')}: {done}")

    def _fallen(self) -> None:
        self.crashes += 1
        self.world.crash()
        self._start()

    def _start(self) -> None:
        """The kernel is started until it stands: it may fall while it recovers, too."""
        world = self.world
        for _ in range(_STARTS):
            lowest = os.dup(world.made.directory)
            os.close(lowest)
            try:
                world.open()
                break
            except (Crash, CommitFailed, sqlite3.Error) as fall:
                self.trail.append(f"start: {type(fall).__name__} {fall}")
                self.crashes += 1
                if _is_receipts(lowest):
                    os.close(lowest)
                world.forget()
        else:
            raise AssertionError(f"it does not start: {self.trail[-1]}")
        for process in PARENTS:
            self._guarded_reserve(process)

    def _guarded_reserve(self, process: str) -> None:
        world = self.world
        world.tell("reserve", process=process, confined=False)
        while world.loop.busy:
            world.loop.turn()

    # --- actions -------------------------------------------------------------------------------------------------

    def _turn(self) -> str | None:
        """Let everything that is ready run, or only the next."""
        loop, one = self.world.loop, self._rng.random() < 0.3
        turns = 0
        while loop.busy:
            loop.turn()
            turns += 1
            if one:
                break
        return f"{turns}" if turns else None

    def _drain(self) -> None:
        while self.world.loop.busy:
            self.world.loop.turn()

    def _operation(self, process: str, key: str) -> dict[str, Any]:
        rng = self._rng
        server, tool, arguments = (
            SERVER,
            rng.choice([*TOOLS, "pay", "read", "limited"]),
            {"process": process, "key": key},
        )
        draw = rng.random()
        if draw < 0.3:
            server, verb = "chio-ipc", rng.choice(("send", "send", "receive", "receive", "ack"))
            tool = f"{verb}_{BOX}"
            arguments = {
                "send": {"message_key": f"m{rng.randrange(5)}", "payload": rng.randrange(2)},
                "receive": {"after_sequence": str(rng.randrange(4)), "limit": rng.randint(1, 3)},
                "ack": {"through_sequence": str(rng.randrange(5))},
            }[verb]
            if verb == "receive" and rng.random() < 0.5:
                arguments["wait_ms"] = 1000
        elif draw < 0.34:
            tool = "transfer"
        elif tool == "checked":
            arguments["cents"] = rng.randint(1, 8)
        operation: dict[str, Any] = {
            "op": "invoke", "operation_key": key, "server_id": server, "tool_name": tool, "arguments": arguments,
        }  # fmt: skip
        if rng.random() < 0.1:
            operation["known_outcome_only"] = True
        return operation

    def _new_call(self) -> str | None:
        """A key that was perhaps used before: then it is a conflict, or chance makes it the same call."""
        process = self._rng.choice(list(PARENTS))
        operation = self._operation(process, f"k{self._rng.randrange(_KEYS)}")
        self._asked.append((process, operation))
        return self._ask(process, operation)

    def _repeat(self) -> str | None:
        if not self._asked:
            return None
        process, operation = self._rng.choice(self._asked[-8:])
        return self._ask(process, operation)

    def _ask(self, process: str, operation: dict[str, Any]) -> str:
        self.world.ask(process, operation)
        return f"{process} {operation.get('operation_key', operation['op'])} {operation.get('tool_name', '')}"

    def _save(self) -> str:
        process = self._rng.choice(list(PARENTS))
        expected = max(0, self._revisions[process] - self._rng.choice((0, 0, 1)))
        self._revisions[process] = expected + 1
        value = self._rng.randrange(100)
        return self._ask(process, {"op": "checkpoint", "expected_revision": str(expected), "value": value})

    def _blob(self) -> str:
        # sha256 of one byte, "0" or "1"
        data, digest = self._rng.choice((
            ("MA==", "5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9"),
            ("MQ==", "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"),
        ))  # fmt: skip
        process = self._rng.choice(list(PARENTS))
        return self._ask(process, {"op": "blob_put", "sha256": digest, "data_base64": data})

    def _pick(self, late: bool = False) -> Any:
        server = self.world.server
        found = [] if server is None else server.late if late else server.open
        return self._rng.choice(found) if found else None

    def _write(self) -> str | None:
        sent = self._pick()
        if sent is None or self.world.server is None:
            return None
        sent.written = True
        return f"{sent.process} {sent.key}"

    def _apply(self) -> str | None:
        sent = self._pick(late=self._rng.random() < 0.2)
        if sent is None or sent.applied or self.world.server is None:
            return None
        self.world.server.apply(sent)
        return f"{sent.process} {sent.key}"

    def _answer(self) -> str | None:
        sent = self._pick()
        if sent is None or self.world.server is None:
            return None
        if not sent.applied:
            self.world.server.apply(sent)
        self.world.server.answer(sent)
        return f"{sent.process} {sent.key}"

    def _garble(self) -> str | None:
        sent = self._pick()
        if sent is None or not sent.written or self.world.server is None:
            return None
        self.world.server.garble(sent)
        return f"{sent.process} {sent.key}"

    def _time_out(self) -> str | None:
        sent = self._pick()
        if sent is None or self.world.server is None:
            return None
        self.world.server.time_out(sent)
        return f"{sent.process} {sent.key}"

    def _answer_late(self) -> str | None:
        sent = self._pick(late=True)
        if sent is None or self.world.server is None:
            return None
        if not sent.applied:
            self.world.server.apply(sent)
        self.world.server.answer_late(sent)
        return f"{sent.process} {sent.key}"

    def _server_up(self) -> str | None:
        if self.world.server is not None:
            return None
        self.world.start_server()
        return ""

    def _server_dies(self) -> str | None:
        if self.world.server is None:
            return None
        self.world.server.close("it died")
        return ""

    def _server_refuses(self) -> str | None:
        if not self.world.server_wanted:
            return None
        self.world.refuse_server()
        return ""

    def _pass_time(self) -> str:
        seconds = self._rng.choice((0.6, 1.5, 11))
        self.world.loop.pass_time(seconds)
        return f"{seconds}"

    def _hang_up(self) -> str | None:
        if not self.world.waiting:
            return None
        client = self._rng.choice(self.world.waiting)
        self.world.lose(client)
        return str(client.operation.get("operation_key", client.operation["op"]))

    def _end_attempt(self) -> str | None:
        """A worker ends and is started again."""
        process = self._rng.choice(list(PARENTS))
        if process not in self.world.callers:
            return None
        caller, _ = self.world.callers[process]
        self.world.end(process, caller.attempt)
        self.world.tell("reserve", process=process, confined=False)
        return process

    def _reconcile(self) -> str | None:
        rows = self.world.connection.execute(
            "SELECT process, operation_key FROM call WHERE state = 'unknown'"
        ).fetchall()
        if not rows:
            return None
        process, key = self._rng.choice(rows)
        outcome = "applied" if self.world.effects.get((process, key)) else "not_applied"
        self.world.tell("reconcile", process=process, key=key, outcome=outcome, by="operator", evidence_sha256="0" * 64)
        return f"{process} {key}"

    def _cancel(self) -> str:
        process = self._rng.choice(list(PARENTS))
        if self._rng.random() < 0.5:
            return self._ask(process, {"op": "cancel"})
        self.world.tell("cancel", process=process)
        return process

    def _clock_on(self) -> str | None:
        """The clock goes on by more than the shortest grant lives; once, since no start believes more than a minute."""
        if self._later:
            return None
        self._later = True
        self.world.kernel.clock._wall += 1000 * (CHECKED_TTL_S + 5)
        return ""

    def _revoke(self) -> str:
        process = self._rng.choice(list(PARENTS))
        self.world.tell("revoke_capability", process=process)
        return process

    def _arm(self) -> str:
        """At one of the next points a crash, an error of the disk (once, or for a while), or a commit that fails."""
        left, kind = self._rng.randint(1, 30), self._rng.choice(("crash", "crash", "disk", "full", "commit"))

        def trap(what: str) -> None:
            nonlocal left
            if kind in ("disk", "full") and not what.startswith(("INSERT", "UPDATE")):
                return
            if kind == "commit" and what != "COMMIT":
                return
            left -= 1 if kind == "crash" else 6
            if left > 0:
                return
            if kind != "full" or left < -_FULL:
                self.world.trap = None
            if kind == "crash":
                raise Crash(what[:40])
            raise sqlite3.OperationalError(f"database or disk is full ({what[:40]})")

        self.world.trap = trap
        return kind

    def _fall(self) -> None:
        raise Crash("now")

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Everything is asked once more after a last crash, and all that ever left is judged."""
        world = self.world
        world.trap = None
        self._mirrored()
        self._nothing_more()
        for process in PARENTS:
            self._guarded_reserve(process)
        for process, operation in self._asked:
            self._ask(process, operation)
            self._drain()
            while world.server is not None and world.server.open:
                sent = world.server.open[0]
                world.server.apply(sent)
                world.server.answer(sent)
                self._drain()
            if world.server is None:
                world.start_server()
            self._drain()
        world.loop.pass_time(60)
        self._drain()
        self._judge()
        os.close(world.kernel.writer._receipts_fd)

    def _mirrored(self) -> None:
        """What the kernel keeps in memory is what stands in the rows."""
        kernel, execute = self.world.kernel, self.world.connection.execute
        kept = {name: (node.calls, node.running) for name, node in kernel.tree.nodes.items()}
        rows = execute("SELECT id, calls, state = 'running' FROM process JOIN usage ON process = id").fetchall()
        if kept != {name: (calls, bool(running)) for name, calls, running in rows}:
            self.world.wrong.append(f"the tree in memory is {kept}, the rows {rows}")
        ((leaves,),) = execute("SELECT count(*) FROM leaf").fetchall()
        if kernel.log.size != leaves:
            self.world.wrong.append(f"the log in memory has {kernel.log.size} leaves, the rows {leaves}")

    def _nothing_more(self) -> None:
        """After a recovery nothing is on its way, and a second one changes nothing."""
        world = self.world
        world.crash()
        world.open()
        for process, key in world.connection.execute(
            "SELECT process, operation_key FROM call WHERE state = 'dispatched'"
        ):
            world.wrong.append(f"{process}/{key}: still dispatched after a recovery")
        before = list(self._rows())
        world.crash()
        world.open()
        if list(self._rows()) != before:
            world.wrong.append("the second recovery changed rows")

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        execute = self.world.connection.execute
        for (table,) in execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall():
            for row in execute(f"SELECT * FROM {table} ORDER BY 1, 2"):
                yield table, *row

    def _judge(self) -> None:
        world = self.world
        snapshot = Snapshot._read(world.connection)
        names = processes(snapshot)
        reference = Reference(world.connection)
        reference.read_log()
        reference.compare()
        reference.judge(world.exchanges, names)
        reference.effects(world.effects, world.sent)
        world.wrong += reference.wrong
        notes = frozenset(note for exchange in world.exchanges if (note := exchange.answer.get("checkpoint")))
        reads = frozenset((SERVER, tool) for tool, read in TOOLS.items() if read)
        checks = ROWS if self.seed % _EVERY_LOG == 0 else {name: check for name, check in ROWS.items() if name != "log"}
        for name, wrong in broken(Facts(snapshot, self._pins, world.exchanges, notes, reads), checks).items():
            world.wrong += [f"{name}: {what}" for what in wrong]


def _is_receipts(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").endswith("/receipts.ndjson")
    except FileNotFoundError:
        return False
