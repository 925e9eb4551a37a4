"""Probes of other ways into the Linux kernel than the one that a filter of numbers looks at."""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import termios

from confine.probes import Escaped, Group, Skipped, World
from confine.probes.calls import CLONE_NEWUSER, call, call_number

probe = Group("abi")
_GETPID_32 = 20
_X32_BIT = 0x40000000
_TIOCLINUX = 0x541C


@probe("refused", cve="CVE-2009-0835")
def int_0x80(_: World) -> str:
    """Calls getpid by the 32-bit gate, where numbers mean other calls."""
    if platform.machine() != "x86_64":
        raise Skipped("only x86-64 has that gate")
    code = b"\xb8" + struct.pack("=I", _GETPID_32) + b"\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    answer = run()
    if answer < 0:
        raise OSError(-answer, "getpid by int 0x80")
    return f"getpid gave {answer}"


@probe("refused", cve="CVE-2014-0038")
def x32(_: World) -> str:
    """Calls getpid by its x32 number."""
    if platform.machine() != "x86_64":
        raise Skipped("only x86-64 has x32")
    return f"getpid gave {call_number(_X32_BIT | 39, 'x32 getpid')}"


@probe("refused", cve="CVE-2021-41133")
def clone3(_: World) -> str:
    """Makes a user namespace by clone3, whose flags a filter cannot see. ENOSYS makes the C library use clone()."""
    arguments = struct.pack("=QQQQQQQQ", CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0)
    result = call("clone3", arguments, len(arguments))
    if result == 0:
        os._exit(0)
    return "clone3 made a user namespace"


@probe("refused")
def unknown_call(_: World) -> str:
    """Calls a number that no Linux kernel has yet: ENOSYS lets programs fall back."""
    try:
        call_number(1000, "call 1000")
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise Escaped(f"{errno.errorcode.get(error.errno or 0)} where programs expect ENOSYS") from None
        raise
    return "it exists"


def _own_terminal() -> None:
    """Standard input is a fresh terminal of the command's; becomes this session's, which TIOCSTI needs."""
    try:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    except OSError as error:
        if error.errno == errno.ENOTTY:
            raise Skipped("standard input is no terminal here") from None
        raise


@probe("refused", cve="CVE-2017-5226", terminal=True)
def tiocsti(_: World) -> str:
    """Types a character into the terminal that it was started from."""
    _own_terminal()
    call("ioctl", 0, termios.TIOCSTI, b"x")
    return "typed"


@probe("refused", cve="CVE-2019-10063", terminal=True)
def tiocsti_with_high_bits(_: World) -> str:
    """The same with a bit above the 32 that the Linux kernel looks at."""
    _own_terminal()
    call("ioctl", 0, (1 << 32) | termios.TIOCSTI, b"x")
    return "typed"


@probe("refused", cve="CVE-2023-28100", terminal=True)
def tioclinux(_: World) -> str:
    """Pastes the console's selection, with and without high bits; ENOTTY would be the terminal's own answer."""
    for request in (_TIOCLINUX, (1 << 32) | _TIOCLINUX):
        try:
            call("ioctl", 0, request, bytes(16))
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EACCES}:
                raise Escaped(f"let in, and said {errno.errorcode.get(error.errno or 0)}") from None
            refusal = error
        else:
            raise Escaped("done")
    raise refusal


@probe("refused")
def personality(_: World) -> str:
    """Runs without address randomisation, and with readable code made executable."""
    call("personality", 0x0040000 | 0x0400000)
    return "set"
