"""Probes of the network, and of every other socket that leads out."""

import array
import ctypes
import errno
import os
import select
import socket

from confine.probes import Escaped, Group, World
from confine.probes.calls import must_be_refused
from confine.probes.files import all_refused

probe = Group("network")
_KERNEL_SOCKET = "/run/chio/process.sock"
_MOST_FAMILIES = 46  # AF_MAX of Linux 6


@probe("refused")
def tcp_to_the_hosts_loopback(world: World) -> str:
    """Connects to a server of the host's 127.0.0.1."""
    with socket.create_connection(("127.0.0.1", world.tcp4), 3):
        return "connected"


@probe("refused")
def tcp_over_ipv6(world: World) -> str:
    """Connects to a server of the host's ::1."""
    with socket.socket(socket.AF_INET6) as sock:
        sock.settimeout(3)
        sock.connect(("::1", world.tcp6))
        return "connected"


@probe("contained")
def udp_to_the_hosts_loopback(world: World) -> str:
    """Sends a datagram to a socket of the host's 127.0.0.1; the command looks whether it came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(world.secret_text.encode(), ("127.0.0.1", world.udp))
    return "sent, inside its own network namespace"


@probe("refused", cve="CVE-2021-26708")
def vsock(_: World) -> str:
    """Opens a socket to the hypervisor, which no network namespace separates."""
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return "AF_VSOCK is open"


@probe("refused")
def netlink(_: World) -> str:
    """Opens a socket to the Linux kernel's configuration of the network."""
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return "AF_NETLINK is open"


@probe("refused", cve="CVE-2020-14386")
def packet(_: World) -> str:
    """Opens a socket to raw frames."""
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    return "AF_PACKET is open"


@probe("refused", cve="CVE-2019-8912")
def alg(_: World) -> str:
    """Opens a socket to the Linux kernel's cryptography."""
    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET, 0).close()
    return "AF_ALG is open"


@probe("refused")
def raw_ip(_: World) -> str:
    """Opens a raw IP socket."""
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "SOCK_RAW is open"


@probe("refused")
def every_other_address_family(world: World) -> str:
    """Opens a socket of every family that the profile does not allow."""
    allowed = {socket.AF_UNIX} | ({socket.AF_INET, socket.AF_INET6} if world.loopback else set())
    opened = []
    for family in range(_MOST_FAMILIES):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            if family in allowed:
                continue
            try:
                socket.socket(family, kind, 0).close()
            except OSError:
                continue
            opened.append(f"{family}/{int(kind)}")
    if opened:
        raise Escaped(f"family/type {', '.join(opened)}")
    raise PermissionError(errno.EPERM, "none could be opened")


@probe("refused", cve="CVE-2020-15257")
def abstract_socket(world: World) -> str:
    """Connects to an abstract socket of the host."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + world.abstract)
    return "connected"


@probe("refused")
def socket_in_a_read_folder(world: World) -> str:
    """Connects to a socket of the host that lies in a given folder and is open to all: a read-only bind would do."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{world.cwd}/host.sock")
    return "connected"


@probe("refused")
def socket_in_a_private_read_folder(world: World) -> str:
    """The same in a folder whose own mode is 0700."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{world.private}/host.sock")
    return "connected"


@probe("refused")
def socket_made_later_in_a_read_folder(world: World) -> str:
    """The same with a socket that was made after the launch."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{world.cwd}/late.sock")
    return "connected"


@probe("refused")
def socket_elsewhere(world: World) -> str:
    """Connects to well-known sockets of the machine by path."""
    for path in ("/var/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private", "/dev/log"):
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(path) == 0:
                raise Escaped(path)
    raise FileNotFoundError(errno.ENOENT, "none is there")


@probe("refused")
def another_attempts_socket(world: World) -> str:
    """Connects to the socket of an attempt that is running beside this one."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(world.neighbour_socket)
    return "connected"


@probe("refused")
def another_attempts_abstract_socket(world: World) -> str:
    """Connects to an abstract socket that an attempt beside this one listens on."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + world.neighbour_abstract)
    return "connected"


@probe("contained")
def descriptors_over_the_kernel_socket(_: World) -> str:
    """Sends a descriptor to the other end, and sees whether anyone keeps it: a pipe ends when its last writer goes."""
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(_KERNEL_SOCKET)
        sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))])
        os.close(write)
        answer = sock.recv(1)
        if not select.select([read], [], [], 5)[0]:
            raise Escaped("the other end holds the descriptor")
    return f"dropped (answer {answer!r})"


@probe("refused")
def binding_over_the_kernel_socket(_: World) -> str:
    """Puts a socket of its own where the Chio kernel's is: by unlink, by rename, by bind."""
    return all_refused(
        {
            "unlink": lambda: os.unlink(_KERNEL_SOCKET),
            "rename": lambda: os.rename(_KERNEL_SOCKET, "/run/chio/other"),
            "rename of its folder": lambda: os.rename("/run/chio", "/run/other"),
            "bind": lambda: _bind(_KERNEL_SOCKET),
            "bind beside it": lambda: _bind("/run/chio/beside.sock"),
        }
    )


def _bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)


@probe("refused", cve="CVE-2023-2598")
def io_uring(_: World) -> str:
    """Sets up a ring: its operations pass by a filter of system calls."""
    return must_be_refused("io_uring_setup", 1, ctypes.create_string_buffer(120))
