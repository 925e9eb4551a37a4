"""What only the Python client has: forks, pickles, its types and its distribution."""

import ast
import os
import pickle
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import chio_process
from chio_process import ProcessClient, WorkerError
from tests.clients.peer import CREDENTIAL, RESULTS, Peer, Stream, error, kernel_like

PACKAGE = Path(chio_process.__file__).parent


def test_the_public_door_is_two_names() -> None:
    assert chio_process.__all__ == ["ProcessClient", "WorkerError"]


def test_the_package_stands_on_the_standard_library_alone() -> None:
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "chio_process"}, path.name


def test_the_distribution_declares_its_types_and_no_dependency() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert project["tool"]["setuptools"]["package-data"] == {"chio_process": ["py.typed"]}
    assert (PACKAGE / "py.typed").exists()


def test_an_error_survives_the_way_out_of_a_pool() -> None:
    carried = pickle.loads(pickle.dumps(WorkerError("conflict", "refused by the kernel")))
    assert (carried.code, str(carried)) == ("conflict", "conflict: refused by the kernel")


def test_a_lone_surrogate_is_refused_before_anything_is_sent(peer: Peer) -> None:
    with pytest.raises(WorkerError) as refused:
        ProcessClient(peer.path, CREDENTIAL).checkpoint("0", "\ud800")
    assert refused.value.code == "invalid_request"


def test_a_value_that_holds_itself_is_refused_without_a_traceback_through_the_request(peer: Peer) -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(WorkerError) as refused:
        ProcessClient(peer.path, CREDENTIAL).checkpoint("0", value)
    assert (refused.value.code, refused.value.__cause__) == ("invalid_request", None)


def test_a_forked_child_never_writes_on_its_parents_connection(peer: Peer) -> None:
    peer.play(kernel_like, kernel_like)
    with ProcessClient(peer.path, CREDENTIAL) as client:
        client.inspect()
        child = os.fork()
        if child == 0:
            os._exit(0 if client.inspect() == RESULTS["inspect"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.inspect()
    assert peer.connections == 2


def test_a_closed_client_connects_again(peer: Peer) -> None:
    peer.play(kernel_like, kernel_like)
    client = ProcessClient(peer.path, CREDENTIAL)
    client.inspect()
    client.close()
    client.inspect()
    client.close()
    assert peer.connections == 2


def test_no_descriptor_is_left_open_whatever_a_call_came_to(peer: Peer) -> None:
    def limited(stream: Stream) -> None:
        stream.send(error("limit_reached"))

    def broken(stream: Stream) -> None:
        stream.read()

    def unreadable(stream: Stream) -> None:
        stream.read()
        stream.send(b"\n")
        stream.wait_for_close()

    peer.play(limited, broken, unreadable, kernel_like)
    before = _descriptors()
    with ProcessClient(peer.path, CREDENTIAL) as client:
        for code in ("limit_reached", "transport_error", "invalid_response"):
            with pytest.raises(WorkerError) as refused:
                client.inspect()
            assert refused.value.code == code
        client.inspect()
    for _ in range(4):
        assert peer.closed.acquire(timeout=10)
    assert _descriptors() == before


def test_a_call_that_is_interrupted_leaves_no_connection_with_a_late_reply(peer: Peer) -> None:
    """KeyboardInterrupt in the middle of a call: the reply to it must not answer the next one."""
    asked = threading.Event()

    def late(stream: Stream) -> None:
        stream.read()
        asked.set()
        stream.wait_for_close()

    peer.play(late, kernel_like)
    client = ProcessClient(peer.path, CREDENTIAL)
    main = threading.get_ident()

    def interrupt() -> None:
        import signal

        asked.wait()
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        client.inspect()
    assert client.inspect() == RESULTS["inspect"]
    client.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
