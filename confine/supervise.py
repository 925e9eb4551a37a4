"""One attempt from clone to burial, as the launcher sees it: tracer, reader of its output, keeper of its deadline.

Phases only go forward:

    SETUP     cloned; init builds, the worker walks to its exec. A failed step ends in LaunchFailed
    OBSERVED  at the exec stop, before the first instruction; Observed was sent. resume() goes on
    RUNNING   until exit, deadline, limit or kill()
    ENDING    init was killed, and with it everything in its pid namespace; Exited (or LaunchFailed) follows

The worker is seized (not attached): group stops are told from signal stops and left stopped (ptrace(2), PTRACE_SEIZE).
"""

import enum
import errno
import json
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module

from confine import mounts, syscalls
from confine.cgroups import Group, Spent
from confine.child import USER_NAMESPACE_HINTS, Child, run_init, step_failed
from confine.digests import FileState, file_digest, file_state
from confine.errors import StepFailed
from confine.identities import ID_MAPPERS
from confine.namespaces import CONFINED, ROOTLESS, MountIdMaps, map_ranges
from confine.observe import Expected, observe, peak_resident_bytes
from confine.spec import CAPTURE_BYTES, Exited, LaunchFailed, LaunchSpec, Limits, Observed, Usage

SETUP_MS = 15_000
OBSERVED_MS = 120_000
_READ_BYTES = 65_536
_TRACE = syscalls.PTRACE_O_TRACEEXEC | syscalls.PTRACE_O_TRACEEXIT | syscalls.PTRACE_O_EXITKILL
_STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_REPORT_BYTES = 32_768
_ENDED_BY = {"memory_limit": "memory_bytes", "cpu_limit": "cpu_seconds", "output_limit": "output_bytes"}
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid (unix(7))


class Phase(enum.IntEnum):
    SETUP = 0
    OBSERVED = 1
    RUNNING = 2
    ENDING = 3


class Output:
    """One of the worker's streams: the first CAPTURE_BYTES are kept, the rest drained and counted.

    `echo` is where everything goes as well (chio-confine run), with the launcher waiting for its reader; None for none.
    """

    def __init__(self, fd: int, echo: int | None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._echo = echo
        self.kept = bytearray()
        self.bytes = 0

    def read(self) -> bool:
        """Takes what is there, one read. False at the end of the stream."""
        try:
            chunk = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        more = bool(chunk)
        self.bytes += len(chunk)
        self.kept += chunk[: CAPTURE_BYTES - len(self.kept)]
        try:
            while self._echo is not None and chunk:
                chunk = chunk[os.write(self._echo, chunk) :]
        except OSError:
            self._echo = None  # its reader is gone; the worker's end is no different for that
        return more

    def drain(self) -> None:
        """What is left in the pipe when its writers are dead. A passed-on descriptor may keep it from ending."""
        while True:
            before = self.bytes
            if not self.read() or self.bytes == before:
                return


class Attempt:
    """Owns every descriptor and process of one attempt; `finished` once nothing of it is left."""

    def __init__(
        self,
        name: str,
        spec: LaunchSpec,
        selector: selectors.BaseSelector,
        emit: Callable[[Observed | LaunchFailed | Exited], None],
    ) -> None:
        self.name = name
        self.finished = False
        self.deadline: float | None = time.monotonic() + SETUP_MS / 1000
        self._spec = spec
        self._selector = selector
        self._emit = emit
        self._own = ExitStack()
        self._phase = Phase.SETUP
        self._observed = False
        self._killed_for: str | None = None
        self._failure: StepFailed | None = None
        self._init_alive = False
        self._worker: int | None = None
        self._status: int | None = None
        self._usage = (0, 0)
        self._peak: int | None = None
        self._started = self._ended = time.monotonic()
        self._scratch: int | None = None
        self._group: Group | None = None
        self._timeout_at = 0.0

    def start(
        self,
        id_maps: MountIdMaps,
        make_group: Callable[[Limits], Group],
        stdin: int,
        null: int,
        held: tuple[int, ...],
        echo: tuple[int, ...] = (),
        given_stdout: int | None = None,
    ) -> None:
        """Clones init. `echo` are two descriptors for the streams, from now on this object's to close.
        `given_stdout` (the caller's to close) is the worker's stdout instead of a pipe that is read here.

        StepFailed, with nothing left open, when it does not come to a clone.
        """
        with ExitStack() as childs:
            for fd in echo:
                self._own.callback(os.close, fd)
            try:
                program, digest = self._hash_program()
                sources = mounts.NO_SOURCES
                if self._spec.confined and not self._spec.rootless:
                    sources = mounts.open_sources(self._spec, id_maps)
                childs.callback(sources.close)
                self._stdout, stdout = self._output(childs, echo[0] if echo else None)
                if given_stdout is not None:
                    stdout = given_stdout  # the pipe above then ends at once
                self._stderr, stderr = self._output(childs, echo[1] if echo else None)
                self._control, control = self._socket_pair(childs)
                self._sync, sync = self._socket_pair(childs)
                self._sync.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                given = tuple((s.st_dev, s.st_ino) for s in map(os.fstat, (stdin, stdout, stderr)))
                if self._spec.cgroup:
                    self._group = make_group(self._spec.limits)
                    self._own.callback(self._group.bury)
                self._expected = Expected(program, digest, given, self._group)
                if self._spec.network == "loopback":
                    import_module("confine.loopback")  # here, since nothing is imported after the clone
                tasks = self._group.tasks if self._group is not None else ()
                child = Child(self._spec, sources, control, sync, stdin, stdout, stderr, null, held, tasks)
                self._init, self._pidfd = self._clone()
                if self._init == 0:
                    run_init(child)
            except OSError as error:
                self._own.close()
                raise StepFailed("launch", error.errno or 0, error.filename) from None
            except StepFailed:
                self._own.close()
                raise
        self._init_alive = True
        self._own.callback(os.close, self._pidfd)
        for file, handler in (
            (self._control, self._on_control),
            (self._sync, self._on_sync),
            (self._stdout.fd, lambda: self._on_output(self._stdout)),
            (self._stderr.fd, lambda: self._on_output(self._stderr)),
        ):
            self._selector.register(file, selectors.EVENT_READ, handler)
        if self._group is not None and self._group.ooms >= 0:
            self._selector.register(self._group.ooms, selectors.EVENT_READ, self._on_out_of_memory)
        if self._spec.rootless:
            self._map_identity()

    def _clone(self) -> tuple[int, int]:
        flags = CONFINED if self._spec.confined else 0
        cgroup = self._group.into if self._group is not None else -1
        if not self._spec.rootless:
            return syscalls.clone(flags, cgroup)
        try:
            return syscalls.clone(flags | ROOTLESS, cgroup)
        except OSError as error:
            number = error.errno or 0
            raise StepFailed("user namespace", number, None, USER_NAMESPACE_HINTS.get(number)) from None

    def _map_identity(self) -> None:
        try:
            map_ranges(self._init, self._spec.uid_ranges, self._spec.gid_ranges, ID_MAPPERS)
        except StepFailed as failure:
            self._fail(failure)
        else:
            self._tell(self._control, b"go")

    def _hash_program(self) -> tuple[FileState, str]:
        """The program as it is now. One that is not the planned one any more is refused here."""
        plan = self._spec.plan
        fd = os.open(plan.program, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            digest, state = file_digest(fd), file_state(os.fstat(fd))
        finally:
            os.close(fd)
        if digest != plan.program_sha256:
            raise StepFailed("executable", 0, plan.program, "its content changed since the run was planned")
        return state, digest

    def _output(self, childs: ExitStack, echo: int | None) -> tuple[Output, int]:
        read, write = os.pipe2(os.O_CLOEXEC)
        self._own.callback(os.close, read)
        childs.callback(os.close, write)
        return Output(read, echo), write

    def _socket_pair(self, childs: ExitStack) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.callback(ours.close)
        childs.callback(theirs.close)
        ours.setblocking(False)
        return ours, theirs

    # --- what the host asks -------------------------------------------------------------------------------------------

    def resume(self) -> None:
        if self._phase is Phase.OBSERVED and self._worker is not None:
            self._phase = Phase.RUNNING
            self._started = time.monotonic()
            self._timeout_at = self._started + self._spec.timeout_ms / 1000
            self._wait_for_a_limit()
            self._continue(0)

    def end(self, reason: str | None) -> None:
        """Kills everything of the attempt. The first reason stands; None when the worker ended by itself."""
        if self._phase is Phase.ENDING:
            return
        if reason is not None and not self._observed and self._failure is None:
            self._failure = StepFailed("killed", 0, None, reason)
        self._phase = Phase.ENDING
        self.deadline = None
        self._killed_for = reason
        self._ended = time.monotonic()
        try:
            if self._spec.confined:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._worker is not None and self._status is None:
                # Init kills what it adopted; this pid stays the worker's until we have waited for it.
                os.kill(self._worker, signal.SIGKILL)
        except ProcessLookupError:
            pass  # dead already, and perhaps what brought us here
        self._tell(self._control, b"end")

    def on_deadline(self) -> None:
        if self._phase is Phase.SETUP:
            self._fail(StepFailed("setup", errno.ETIMEDOUT, None, f"not at its exec after {SETUP_MS} ms"))
        elif self._phase is not Phase.RUNNING:
            self.end("not_resumed")
        elif time.monotonic() >= self._timeout_at:
            self.end("timeout")
        else:
            self._wait_for_a_limit()

    def _wait_for_a_limit(self) -> None:
        """Until the timeout, or the first moment at which the CPU seconds can be used up."""
        self.deadline = self._timeout_at
        if self._group is not None:
            patience = self._group.cpu_patience()
            if patience == 0:
                self.end("cpu_limit")
            else:
                self.deadline = min(self.deadline, time.monotonic() + patience)

    # --- what comes from the two processes ----------------------------------------------------------------------------

    def _on_control(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _REPORT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""  # it ended with a message of ours unread
        if not data:
            self._unwatch(self._control)
            return
        report = json.loads(data)
        if "scratch" in report:
            self._scratch = fds[0]
        elif "failed" in report:
            self._fail(step_failed(report["failed"]))
        elif self._status is None:
            # Only if the tracer lost the worker: an exec by another thread than the traced one takes its pid over.
            self._status, maximum, cpu_ms = report["ended"]
            self._usage = (maximum, cpu_ms)
            self._peak = None
            self.end(None)

    def _on_sync(self) -> None:
        try:
            data, ancillary, _, _ = self._sync.recvmsg(_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._unwatch(self._sync)
            return
        report = json.loads(data)
        if "failed" in report:
            self._fail(step_failed(report["failed"]))
            return
        (pid, _, _) = _CREDENTIALS.unpack(ancillary[0][2])
        try:
            syscalls.ptrace(syscalls.PTRACE_SEIZE, pid, _TRACE)
        except OSError as error:
            self._fail(StepFailed("seize", error.errno or 0, None, "another tracer holds it, or Yama forbids ptrace"))
            return
        self._worker = pid
        self._tell(self._sync, b"go")

    def _tell(self, to: socket.socket, message: bytes) -> None:
        try:
            to.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process is dead already; its wait status says the rest

    def _on_output(self, output: Output) -> None:
        if not output.read():
            self._unwatch(output.fd)
        elif output.bytes > self._spec.limits.output_bytes:
            self.end("output_limit")

    def _on_out_of_memory(self) -> None:
        assert self._group is not None
        os.eventfd_read(self._group.ooms)
        self.end("memory_limit")

    def _unwatch(self, file: socket.socket | int) -> None:
        if file in self._selector.get_map():
            self._selector.unregister(file)

    def _fail(self, failure: StepFailed) -> None:
        if self._failure is None:
            self._failure = failure
        self.end(None)

    # --- ptrace and wait ----------------------------------------------------------------------------------------------

    def on_child_change(self) -> None:
        """Takes every wait status there is, of the worker and then of init."""
        while self._worker is not None and self._status is None:
            try:
                pid, status, usage = os.wait4(self._worker, os.WNOHANG | syscalls.WAIT_ALL)
            except ChildProcessError:
                self._worker = None  # see _on_control: init reports its end
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._on_stop(status)
                continue
            self._status = status
            self._usage = (usage.ru_maxrss * 1024, round((usage.ru_utime + usage.ru_stime) * 1000))
            if not self._observed and self._failure is None:
                # A failed step says so on its socket before it ends: hear it first.
                self._on_sync()
            self.end(None)
        if self._init_alive and os.waitpid(self._init, os.WNOHANG)[0]:
            self._init_alive = False
            if self._worker is not None and self._status is None:
                # Without a pid namespace, both may have been killed at once (a v2 cgroup out of memory): a worker that
                # stands at its exit stop leaves it for its tracer alone, whatever signal it is sent (ptrace(2)).
                os.kill(self._worker, signal.SIGKILL)
        if not self._init_alive and (self._worker is None or self._status is not None):
            self._finish()

    def _on_stop(self, status: int) -> None:
        event, stop_signal = status >> 16, os.WSTOPSIG(status)
        if event == syscalls.PTRACE_EVENT_EXEC and self._phase is Phase.SETUP:
            self._observe()
        elif event == syscalls.PTRACE_EVENT_EXIT:
            assert self._worker is not None
            self._peak = peak_resident_bytes(self._worker)
            self._continue(0)
        elif event == syscalls.PTRACE_EVENT_STOP and stop_signal in _STOPPING:
            self._ptrace(syscalls.PTRACE_LISTEN, 0)
        else:
            self._continue(0 if event else stop_signal)

    def _continue(self, deliver: int) -> None:
        self._ptrace(syscalls.PTRACE_CONT, deliver)

    def _ptrace(self, request: int, data: int) -> None:
        assert self._worker is not None
        try:
            syscalls.ptrace(request, self._worker, data)
        except ProcessLookupError:
            pass  # killed while it stood still: the wait status is on its way

    def _observe(self) -> None:
        assert self._worker is not None
        try:
            fields, satisfied, digest = observe(self._worker, self._spec, self._expected)
            if self._group is not None:
                self._group.start_counting()
        except OSError as error:
            self._fail(StepFailed("observe", error.errno or 0, error.filename))
            return
        self._phase = Phase.OBSERVED
        self._observed = True
        self.deadline = time.monotonic() + OBSERVED_MS / 1000
        self._emit(Observed(self.name, self._worker, fields, satisfied, digest))
        if not satisfied:
            self.end("not_enforced")

    def _finish(self) -> None:
        """Init is reaped, so everything in its pid namespace is dead. Says what happened and closes everything."""
        self.end(None)
        for output in (self._stdout, self._stderr):
            output.drain()
        while self._status is None and self._control in self._selector.get_map():
            self._on_control()
        for file in (self._control, self._sync, self._stdout.fd, self._stderr.fd):
            self._unwatch(file)
        spent = None
        if self._group is not None:
            if self._group.ooms >= 0:
                self._unwatch(self._group.ooms)
            spent = self._group.bury()  # while the scratch directory is held: what is in it counts
        self._own.close()
        self.finished = True
        if self._observed:
            self._emit(self._exited(spent))
            return
        if self._scratch is not None:
            os.close(self._scratch)
        failure = self._failure or StepFailed("setup", 0, None, "a process of the launch ended without a word")
        self._emit(launch_failed(self.name, failure))

    def _exited(self, spent: Spent | None) -> Exited:
        status = signal.SIGKILL if self._status is None else self._status  # a bare signal number is that wait status
        maximum, cpu_ms = self._usage
        peak, source = (maximum, "wait4") if self._peak is None else (self._peak, "vm_hwm")
        usage = Usage(peak, source, cpu_ms, "wait4", round((self._ended - self._started) * 1000))
        killed_for = self._killed_for
        if spent is not None:
            usage = replace(
                usage,
                cpu_ms=spent.cpu_ms,
                cpu_source="cgroup",
                memory_peak_bytes=spent.memory_peak_bytes,
                process_peak=spent.process_peak,
                oom_kills=spent.oom_kills,
            )
            if killed_for is None and spent.oom_kills:
                # The worker, or one of its children; that its own end was heard of before the eventfd is chance.
                killed_for = "memory_limit"
        return Exited(
            attempt=self.name,
            exit_code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            killed_for=killed_for,
            usage=usage,
            stdout=bytes(self._stdout.kept),
            stderr=bytes(self._stderr.kept),
            stdout_bytes=self._stdout.bytes,
            stderr_bytes=self._stderr.bytes,
            limits_hit=self._limits_hit(spent, status, killed_for),
            exports_fd=self._scratch,
        )

    def _limits_hit(self, spent: Spent | None, status: int, killed_for: str | None) -> tuple[str, ...]:
        """What is known to have been met. A write that failed at file_bytes, or an open at open_files, is not: only
        the program heard of it."""
        hit = set(spent.limits_hit if spent is not None else ())
        if killed_for in _ENDED_BY:
            hit.add(_ENDED_BY[killed_for])
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ:
            hit.add("file_bytes")
        if self._scratch is not None:
            scratch = os.fstatvfs(self._scratch)
            if not scratch.f_bavail:
                hit.add("scratch_bytes")
            if not scratch.f_favail:
                hit.add("inodes")
        return tuple(sorted(hit))


def launch_failed(attempt: str, failure: StepFailed) -> LaunchFailed:
    return LaunchFailed(attempt, failure.step, failure.number, failure.path, failure.hint)
