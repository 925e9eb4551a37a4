"""A worker of a `chio process serve` whose connection is cut after its request was delivered, at each point of a save.

The recipe reads again before it changes anything: what was saved is found, what was not is sent again, and what another
writer saved meanwhile is left as it is.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.serving import State, all_of, child, config, mailbox
from tests.report.walkthrough import Project
from tests.state.proxy import Loss, Proxy
from tests.state.recipes import LANGUAGES
from tests.state.served import Served

pytestmark = pytest.mark.timeout(120)

DONE = {"version": 1, "completed": ["report-42"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One host for the module: its one process `a` has what the recipes need."""
    host = config(child("a", *all_of("reports"), share=10_000), mailboxes=[mailbox("reports")])
    with Served(State.make(tmp_path_factory.mktemp("served") / "folder", host), "a") as served:
        served.start()
        yield served


@pytest.fixture
def proxy(served: Served) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="chio-test-") as short:
        made = Proxy(Path(short) / "p", served.path)
        yield made
        assert made.all_lost, "what was to be lost never passed"
        made.close()


def worker(
    project: Project, served: Served, proxy: Proxy, language: str, *recipes: str
) -> subprocess.CompletedProcess[str]:
    """One attempt of a worker that someone else launches: its bootstrap names the proxy's socket."""
    bootstrap = {
        "schema": "chio.process.worker-bootstrap.v1", "attempt": 1, "input": {"recipes": recipes},
        "connection": {**served.connection, "socket_path": str(proxy.path)},
    }  # fmt: skip
    return subprocess.run(
        LANGUAGES[language], input=json.dumps(bootstrap), cwd=project.folder, env=project.environment, text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def came_to(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)["came_to"]


@pytest.mark.parametrize(
    ("loss", "saves"),
    [(Loss.REQUEST, 1), (Loss.REPLY, 1), (Loss.HALF_THE_REPLY, 1), (Loss.LATE, 2)],
    ids=["before the kernel sees it", "after the commit", "in mid reply", "and it arrives after all"],
)
def test_a_save_of_which_nothing_is_heard_is_found_or_sent_again_and_kept_once(
    project: Project, served: Served, proxy: Proxy, language: str, loss: Loss, saves: int
) -> None:
    before = served.save({"other": 1})
    proxy.lose("checkpoint", loss)
    saved = came_to(worker(project, served, proxy, language, "retain-progress"))
    assert saved == {
        "revision": str(int(before["revision"]) + 1), "value": {"other": 1, "report.v1": DONE},
    }  # fmt: skip
    assert served.checkpoint() == saved
    assert proxy.reached.count("checkpoint") == saves


def contradicted(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 1 and done.stdout == "" and "another writer saved" in done.stderr


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.REPLY], ids=["before the commit", "after the commit"])
def test_a_writer_that_advanced_meanwhile_is_left_as_it_is(
    project: Project, served: Served, proxy: Proxy, language: str, loss: Loss
) -> None:
    served.save({"other": 1})
    others: list[dict[str, Any]] = []
    proxy.lose("checkpoint", loss, meanwhile=lambda: others.append(served.save({"other": 2})))
    assert contradicted(worker(project, served, proxy, language, "retain-progress"))
    assert [served.checkpoint()] == others
    assert proxy.reached.count("checkpoint") == (1 if loss is Loss.REPLY else 0)


def test_progress_that_another_writer_carried_along_is_retained(
    project: Project, served: Served, proxy: Proxy, language: str
) -> None:
    served.save({"other": 1})
    others: list[dict[str, Any]] = []

    def carry_along() -> None:
        others.append(served.save({**served.checkpoint()["value"], "other": 2}))

    proxy.lose("checkpoint", Loss.REPLY, meanwhile=carry_along)
    assert came_to(worker(project, served, proxy, language, "retain-progress")) == others[0]
    assert others[0]["value"] == {"other": 2, "report.v1": DONE}
    assert served.checkpoint() == others[0]


def test_a_worker_that_never_hears_of_its_save_gives_up_without_a_further_save(
    project: Project, served: Served, proxy: Proxy, language: str
) -> None:
    before = served.save({})
    for _ in range(3):
        proxy.lose("checkpoint", Loss.REQUEST)
    done = worker(project, served, proxy, language, "retain-progress")
    assert (done.returncode, done.stdout) == (1, "")
    assert "transport_error" in done.stderr
    assert served.checkpoint() == before


def test_a_slot_of_another_version_is_refused_and_not_read_as_empty(
    project: Project, served: Served, proxy: Proxy, language: str
) -> None:
    before = served.save({"report.v1": {"version": 2, "done": True}})
    done = worker(project, served, proxy, language, "retain-progress")
    assert done.returncode == 1
    assert "is not of version 1" in done.stderr
    assert served.checkpoint() == before
    assert proxy.reached == ["inspect"]


def test_a_blob_of_which_nothing_was_heard_is_put_again_for_nothing(
    project: Project, served: Served, proxy: Proxy, language: str
) -> None:
    proxy.lose("blob_put", Loss.REPLY)
    done = worker(project, served, proxy, language, "round-trip-blob")
    assert done.returncode == 1
    assert "transport_error" in done.stderr
    stored = served.ask("inspect")["storage"]
    reference = came_to(worker(project, served, proxy, language, "round-trip-blob"))
    assert served.ask("blob_read", **{"sha256": reference["sha256"]})["bytes"] == reference["bytes"] == 20
    assert served.ask("inspect")["storage"] == stored


def test_a_call_of_which_nothing_was_heard_is_answered_again_with_its_receipt(
    project: Project, served: Served, proxy: Proxy, language: str
) -> None:
    served.save({})
    before = served.state.receipt_lines()
    proxy.lose("invoke", Loss.REPLY)
    done = worker(project, served, proxy, language, "publish")
    assert done.returncode == 1
    assert "transport_error" in done.stderr
    assert served.checkpoint()["value"]["report.v1"]["phase"] == "prepared"

    published = came_to(worker(project, served, proxy, language, "publish"))
    assert published["checkpoint"]["value"]["report.v1"]["phase"] == "completed"
    # One process serves every case here, so that the first language's call is what the second's resolves to.
    first, second = served.state.receipt_lines()[len(before) :]
    assert first == second == published["receipt"].encode()
    assert served.state.rows("SELECT last_sequence FROM mailbox") == [(1,)]
