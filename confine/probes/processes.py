"""Probes of other processes: the machine's, init, and what is left behind."""

import ctypes
import errno
import os
import signal
import struct
import time

from confine.probes import Escaped, Group, World
from confine.probes.calls import call, libc, must_be_refused
from confine.probes.files import all_refused, each_refused, readable

probe = Group("processes")
_PTRACE_TRACEME, _PTRACE_SEIZE = 0, 0x4206
_PR_SET_PDEATHSIG = 1


@probe("refused")
def a_process_of_the_host(world: World) -> str:
    """Asks whether it may signal the command that started it, and opens it."""
    return all_refused(
        {
            "kill": lambda: os.kill(world.host_pid, 0),
            "pidfd_open": lambda: os.pidfd_open(world.host_pid),
            "/proc": lambda: os.listdir(f"/proc/{world.host_pid}"),
        }
    )


@probe("refused")
def ptrace_of_init(_: World) -> str:
    """Traces process 1, which has the same uid outside."""
    return must_be_refused("ptrace", _PTRACE_SEIZE, 1, 0, 0)


@probe("refused", cve="CVE-2019-13272")
def ptrace(_: World) -> str:
    """Asks to be traced by its parent, in a child of its own."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            call("ptrace", _PTRACE_TRACEME, 0, 0, 0)
            os.write(write, b"0")
        except OSError as error:
            os.write(write, str(error.errno).encode())
        os._exit(0)
    os.close(write)
    number = int(os.read(read, 8) or b"0")
    if number:
        raise OSError(number, os.strerror(number))
    return "ptrace is open, for its own children"


@probe("refused")
def reading_the_memory_of_init(_: World) -> str:
    """Reads process 1 by process_vm_readv, then itself, to see whether the call is open at all."""
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("=QQ", ctypes.addressof(buffer), 8)
    try:
        call("process_vm_readv", 1, vector, 1, vector, 1, 0)
    except OSError:
        return must_be_refused("process_vm_readv", os.getpid(), vector, 1, vector, 1, 0)
    raise Escaped("read the memory of process 1")


@probe("refused")
def taking_a_descriptor_of_init(_: World) -> str:
    """Copies a descriptor of process 1, then one of its own, to see whether the call is open at all."""
    try:
        call("pidfd_getfd", os.pidfd_open(1), 0, 0)
    except OSError:
        return must_be_refused("pidfd_getfd", os.pidfd_open(os.getpid()), 0, 0)
    raise Escaped("took a descriptor of process 1")


@probe("refused")
def files_of_init(_: World) -> str:
    """Reads the descriptors, memory, environment and arguments of process 1."""
    names = ("fd", "fdinfo", "mem", "environ", "cmdline", "maps", "ns/mnt", "stack")
    return each_refused(readable, [f"/proc/1/{name}" for name in names])


@probe("contained")
def signals_to_init(_: World) -> str:
    """Kills and stops process 1, on which its own namespace's signals have no hold."""
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(1, number)
        except PermissionError:
            pass
    return "process 1 goes on: this line is reported"


@probe("contained")
def killing_everything(_: World) -> str:
    """kill(-1, SIGKILL): everything that it may signal, but itself."""
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(-1, signal.SIGKILL)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        raise Escaped("its own child was not even reached")
    return "only its own child died"


@probe("contained")
def survivors(_: World) -> str:
    """Leaves processes that changed session, ignore every signal and dropped their death signal."""
    for _number in range(3):
        if os.fork() == 0:
            os.setsid()
            libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if os.fork() == 0:
                while True:
                    time.sleep(60)
            os._exit(0)
    return "left three processes"


@probe("contained", ends_by="timeout", timeout_ms=700)
def stopping_itself(_: World) -> str:
    """Stops itself, so that no deadline of its own comes."""
    os.kill(os.getpid(), signal.SIGSTOP)
    raise Escaped("it went on")


@probe("refused")
def setns(_: World) -> str:
    """Enters a namespace: its own network namespace, which would change nothing."""
    return must_be_refused("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0)


@probe("refused")
def setns_by_pidfd(_: World) -> str:
    """Enters every namespace of process 1 by a pidfd of it."""
    return must_be_refused("setns", os.pidfd_open(1), 0x00020000 | 0x40000000)


@probe("refused")
def priority(_: World) -> str:
    """Takes the processor from others: a better nice value, real-time scheduling."""
    return all_refused(
        {
            "nice": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
            "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        }
    )


@probe("refused")
def subreaper_of_the_host(_: World) -> str:
    """Looks for a parent above process 1."""
    if os.getppid() != 1:
        raise Escaped(f"its parent is {os.getppid()}")
    raise ProcessLookupError(errno.ESRCH, "its parent is process 1")
