"""The loopback profile: a server and its client inside, and nothing of the machine's network."""

import os
import socket
from pathlib import Path

from confine import load_profile
from tests.confine.launching import Runner

SERVER = """
import http.server, json, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from inside")
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(json.dumps(urllib.request.urlopen("http://localhost:8080/").read().decode()))
"""
REACH = """
import errno, json, os, socket
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return "ok"
"""


def test_an_http_server_and_its_client_talk_inside_one_attempt(runner: Runner, cwd: Path) -> None:
    assert runner.python(SERVER, cwd, profile="loopback").json() == "from inside"


def test_ipv6_and_datagrams_work_as_well(runner: Runner, cwd: Path) -> None:
    script = """
import json, socket
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as a, socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as b:
    a.bind(("::1", 0))
    b.sendto(b"hello", a.getsockname())
    print(json.dumps(a.recv(16).decode()))
"""
    assert runner.python(script, cwd, profile="loopback").json() == "hello"


def test_the_machines_loopback_and_everything_beyond_are_not_reached(runner: Runner, cwd: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0chio-loopback-{os.getpid()}")
        abstract.listen()
        port = tcp.getsockname()[1]
        script = f"""{REACH}
print(json.dumps([attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 5)),
                  attempt(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
                  attempt(lambda: socket.socket(2, 2).sendto(b"x", ("192.0.2.1", 53))),
                  attempt(lambda: socket.create_connection(("2001:db8::1", 80), 5)),
                  attempt(lambda: socket.socket(1).connect("\\0chio-loopback-{os.getpid()}"))]))
"""
        here, beyond, datagram, six, name = runner.python(script, cwd, profile="loopback").json()
        socket.create_connection(("127.0.0.1", port)).close()  # the control: it is there for others
    assert here == "ECONNREFUSED"
    assert {beyond, datagram, six} == {"ENETUNREACH"}
    assert name in {"ECONNREFUSED", "EPERM"}


def test_raw_packet_netlink_and_vsock_sockets_stay_refused(runner: Runner, cwd: Path) -> None:
    script = f"""{REACH}
kinds = [(2, 3), (10, 3), (17, 3), (16, 3), (40, 1), (38, 5), (2, 5), (2, 10)]
print(json.dumps([attempt(lambda: socket.socket(family, kind).close()) for family, kind in kinds]))
"""
    assert set(runner.python(script, cwd, profile="loopback").json()) == {"EPERM"}


def test_the_interface_cannot_be_changed_from_inside(runner: Runner, cwd: Path) -> None:
    script = f"""{REACH}
import fcntl, struct
name = struct.pack("16sh14x", b"lo", 0)
with socket.socket(2, 2) as sock:
    print(json.dumps([attempt(lambda: fcntl.ioctl(sock, request, name)) for request in (0x8913, 0x8914)]))
"""
    assert runner.python(script, cwd, profile="loopback").json() == ["ok", "EPERM"]


def test_what_is_up_is_seen_from_outside(runner: Runner, cwd: Path) -> None:
    up, down = runner.run(["/bin/true"], cwd, profile="loopback"), runner.run(["/bin/true"], cwd)
    assert up.field("local_addresses").value == ["127.0.0.1"]
    assert down.field("local_addresses").value == []
    assert up.field("network_interfaces").value == down.field("network_interfaces").value == ["lo"]
    assert up.field("seccomp_program").value["list"] == "loopback"


def test_the_profile_is_the_workers_but_for_the_network() -> None:
    worker, loopback = load_profile("worker"), load_profile("loopback")
    assert (worker.network, worker.seccomp) == ("none", "worker")
    assert (loopback.network, loopback.seccomp) == ("loopback", "loopback")
    assert (loopback.limits, loopback.landlock) == (worker.limits, worker.landlock)
