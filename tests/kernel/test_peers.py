"""Who may speak on a confined attempt's socket: its uid, its pid namespace, then its credential."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable

from chio.runner import in_pid_namespace, pid_namespace
from chio_process import ProcessClient, WorkerError
from tests.kernel.serving import State


def _answers(state: State, tmp_name: str, uid: int, inside: bool) -> str:
    """What a peer of this process gets on a confined attempt's socket when the host answers `inside`."""
    with state.serve() as serving:
        kernel = serving.host.kernel
        reserved = kernel.call("reserve", process="a", confined=True)
        path = f"{state.path.parent}/{tmp_name}.sock"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            kernel.call("listen", (listening.fileno(),), process="a", number=reserved["number"],
                        credential=reserved["connection"]["credential"], launch_id=None, uid=uid)  # fmt: skip
            results: list[str] = []

            def call() -> None:
                client = ProcessClient(path, reserved["connection"]["credential"], timeout=20)
                try:
                    results.append(client.inspect()["process_id"])
                except WorkerError as error:
                    results.append(error.code)

            peer = threading.Thread(target=call)
            peer.start()
            if uid == os.geteuid():
                event, (pidfd,) = _wait_for_event(kernel)
                assert event["event"] == "peer"
                assert in_pid_namespace(pidfd, pid_namespace(os.getpid()))
                os.close(pidfd)
                kernel.call("peer", ticket=event["ticket"], inside=inside)
            peer.join()
            return results[0]


def _wait_for_event(kernel: object) -> tuple[dict[str, object], list[int]]:
    import select

    while not (events := kernel.events()):  # type: ignore[attr-defined]
        select.select([kernel], [], [], 10)
    (event,) = events
    return event  # type: ignore[no-any-return]


def test_a_peer_in_the_attempts_pid_namespace_is_served(make_state: Callable[..., State]) -> None:
    assert _answers(make_state(), "inside", os.geteuid(), True) == "a"


def test_a_peer_outside_the_attempts_pid_namespace_is_refused(make_state: Callable[..., State]) -> None:
    assert _answers(make_state(), "outside", os.geteuid(), False) == "unauthenticated"


def test_a_peer_with_another_uid_is_refused_without_asking(make_state: Callable[..., State]) -> None:
    assert _answers(make_state(), "uid", os.geteuid() + 1, True) == "unauthenticated"


def test_a_dead_process_is_in_no_pid_namespace() -> None:
    child = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(child.pid)
    child.wait()
    try:
        assert not in_pid_namespace(pidfd, pid_namespace(os.getpid()))
    finally:
        os.close(pidfd)


def test_a_live_process_is_not_in_another_pid_namespace() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        device, inode = pid_namespace(os.getpid())
        assert in_pid_namespace(pidfd, (device, inode))
        assert not in_pid_namespace(pidfd, (device, inode + 1))
    finally:
        os.close(pidfd)
