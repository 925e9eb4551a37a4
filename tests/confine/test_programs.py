"""Real programs under the default profile: what they need is allowed, or they would have been noticed too late."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.confine.launching import PYTHON, Runner

ROOT = Path(__file__).resolve().parent.parent.parent
NODE_PATH = f"{ROOT}/.node/bin:{os.environ.get('PATH', '')}"


def installed(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed here")


def test_numpy_computes_in_several_threads(runner: Runner, cwd: Path) -> None:
    """Its linear algebra starts threads of its own as well, one for each processor."""
    script = """
import json, threading
import numpy as np
rng = np.random.default_rng(7)
a = rng.standard_normal((400, 400))
right = np.linalg.inv(a)
results = [None] * 4
def work(index):
    results[index] = float(np.abs(a @ right - np.eye(400)).max())
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
np.save("/tmp/a.npy", a)
mapped = np.load("/tmp/a.npy", mmap_mode="r")
print(json.dumps([max(results) < 1e-6, bool((mapped == a).all())]))
"""
    assert runner.run([sys.executable, "-c", script], cwd).json() == [True, True]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_event_loop_serves_sockets_processes_threads_and_signals(runner: Runner, cwd: Path, loop: str) -> None:
    script = """
import asyncio, json, os, signal, sys, threading
async def main():
    async def echo(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    server = await asyncio.start_unix_server(echo, "/tmp/echo.sock")
    reader, writer = await asyncio.open_unix_connection("/tmp/echo.sock")
    writer.write(b"line\\n")
    line = (await reader.readline()).decode()
    server.close()
    child = await asyncio.create_subprocess_exec("/bin/cat", stdin=-1, stdout=-1)
    output, _ = await child.communicate(b"through a child")
    loop, woken, signalled = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    threading.Thread(target=lambda: loop.call_soon_threadsafe(woken.set)).start()
    loop.add_signal_handler(signal.SIGUSR1, signalled.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(asyncio.gather(woken.wait(), signalled.wait()), 10)
    total = await loop.run_in_executor(None, sum, range(1000))
    print(json.dumps([type(loop).__module__.split(".")[0], line, output.decode(), total]))
if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""
    ended = runner.run([sys.executable, "-c", script, loop], cwd)
    assert ended.json() == [loop, "line\n", "through a child", 499_500]


def test_node_runs_worker_threads_over_shared_memory(runner: Runner, cwd: Path) -> None:
    (cwd / "threads.mjs").write_text(
        """
import { Worker, isMainThread, workerData } from "node:worker_threads";
import { execFileSync } from "node:child_process";
import { createHash, randomBytes } from "node:crypto";
import { writeFile, readFile } from "node:fs/promises";
import { gzipSync, gunzipSync } from "node:zlib";
if (isMainThread) {
  const shared = new Int32Array(new SharedArrayBuffer(4));
  const ends = [1, 2, 3, 4].map((n) => new Promise((resolve, reject) => {
    const worker = new Worker(new URL(import.meta.url), { workerData: { shared, n } });
    worker.on("exit", resolve); worker.on("error", reject);
  }));
  await Promise.all(ends);
  const bytes = randomBytes(65536);
  await writeFile("/tmp/file", gzipSync(bytes));
  const again = gunzipSync(await readFile("/tmp/file"));
  const child = execFileSync("/bin/echo", ["child"]).toString();
  const major = Number(process.versions.node.split(".")[0]);
  console.log(JSON.stringify([major >= 22, shared[0], bytes.equals(again), child]));
} else {
  for (let i = 0; i < 1000; i++) Atomics.add(workerData.shared, 0, workerData.n);
}
"""
    )
    if shutil.which("node", path=NODE_PATH) is None:
        pytest.skip("node is not installed here")
    assert runner.run(["node", "threads.mjs"], cwd, path_env=NODE_PATH).json() == [True, 10_000, True, "child\n"]


@installed("git")
def test_git_commits_branches_merges_clones_and_collects(runner: Runner, cwd: Path) -> None:
    script = """
set -e
git config --global user.email a@example.invalid
git config --global user.name A
git config --global init.defaultBranch main
git init -q /tmp/one && cd /tmp/one
echo 1 > a && git add a && git commit -q -m first
git checkout -q -b side && echo 2 > b && git add b && git commit -q -m second
git checkout -q main && echo 3 > c && git add c && git commit -q -m third
git merge -q side -m merged
git gc -q
git clone -q /tmp/one /tmp/two
git -C /tmp/two log --format=%s | sort
git -C /tmp/two fsck --strict
"""
    exited = runner.run(["/bin/sh", "-c", script], cwd).exited
    assert (exited.exit_code, exited.stdout) == (0, b"first\nmerged\nsecond\nthird\n"), exited.stderr


@installed("sqlite3")
def test_the_sqlite3_shell_works_on_a_database_with_a_write_ahead_log(runner: Runner, cwd: Path) -> None:
    script = """
set -e
sqlite3 /tmp/a.db "pragma journal_mode=wal; create table t(x); insert into t select value from generate_series(1,1000);"
sqlite3 /tmp/a.db "select sum(x) from t; pragma integrity_check;"
sqlite3 /tmp/a.db vacuum
sqlite3 :memory: "select 1"
"""
    exited = runner.run(["/bin/sh", "-c", script], cwd).exited
    assert (exited.exit_code, exited.stdout) == (0, b"wal\n500500\nok\n1\n"), exited.stderr


def test_pythons_sqlite3_serves_two_processes(runner: Runner, cwd: Path) -> None:
    script = """
import json, os, sqlite3
db = sqlite3.connect("/tmp/a.db", isolation_level=None)
db.executescript("pragma journal_mode=wal; create table t(x)")
db.close()
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        own = sqlite3.connect("/tmp/a.db", timeout=20)
        for n in range(100):
            with own:
                own.execute("insert into t values (?)", (n,))
        os._exit(0)
    children.append(pid)
statuses = [os.waitpid(pid, 0)[1] for pid in children]
print(json.dumps([statuses, sqlite3.connect("/tmp/a.db").execute("select count(*) from t").fetchone()[0]]))
"""
    assert runner.python(script, cwd).json() == [[0, 0], 200]


@installed("gcc")
def test_gcc_compiles_and_its_output_runs(runner: Runner, cwd: Path) -> None:
    (cwd / "sum.c").write_text(
        """
#include <pthread.h>
#include <stdio.h>
static void *add(void *to) { for (int i = 0; i < 1000; i++) __sync_add_and_fetch((int *)to, i); return NULL; }
int main(void) {
    pthread_t threads[4]; int sum = 0;
    for (int i = 0; i < 4; i++) if (pthread_create(&threads[i], NULL, add, &sum)) return 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    return printf("%d\\n", sum) != 8;
}
"""
    )
    script = "gcc -O2 -Wall -Werror -pthread -o /tmp/sum sum.c && exec /tmp/sum"
    exited = runner.run(["/bin/sh", "-c", script], cwd).exited
    assert (exited.exit_code, exited.stdout) == (0, b"1998000\n"), exited.stderr


@installed("gcc")
def test_a_static_binary_runs_with_no_library_at_all(runner: Runner, cwd: Path) -> None:
    (cwd / "hello.c").write_text('#include <stdio.h>\nint main(void) { puts("static"); return 3; }\n')
    subprocess.run(["gcc", "-static", "-o", cwd / "hello", cwd / "hello.c"], check=True)
    exited = runner.run(["./hello"], cwd).exited
    assert (exited.exit_code, exited.stdout) == (3, b"static\n")


def test_a_pool_of_processes_shares_memory_and_locks(runner: Runner, cwd: Path) -> None:
    """POSIX semaphores and shared memory live in /dev/shm, which is the worker's own."""
    (cwd / "pool.py").write_text(
        """
import json, multiprocessing as mp
from multiprocessing import shared_memory
def square(n):
    return n * n
if __name__ == "__main__":
    with mp.get_context("spawn").Pool(3) as pool:
        squares = pool.map(square, range(5))
    block = shared_memory.SharedMemory(create=True, size=64)
    block.buf[:2] = b"ok"
    again = shared_memory.SharedMemory(block.name)
    print(json.dumps([squares, bytes(again.buf[:2]).decode()]))
    again.close(); block.close(); block.unlink()
"""
    )
    assert runner.run([PYTHON, "pool.py"], cwd).json() == [[0, 1, 4, 9, 16], "ok"]


def test_common_tools_work_together(runner: Runner, cwd: Path) -> None:
    script = """
set -e
mkdir -p /tmp/tree/sub && seq 1 1000 > /tmp/tree/sub/numbers
tar -C /tmp -czf /tmp/tree.tgz tree && mkdir /tmp/out && tar -C /tmp/out -xzf /tmp/tree.tgz
sort -n -r /tmp/out/tree/sub/numbers | head -n 1
find /tmp/out -type f -exec sha256sum {} + | wc -l
awk '{ s += $1 } END { print s }' /tmp/tree/sub/numbers | sed s/^/sum=/
timeout 5 sleep 0 && mktemp -d /tmp/XXXX > /dev/null && xargs -n 1 -P 4 true < /tmp/tree/sub/numbers
"""
    exited = runner.run(["/bin/sh", "-c", script], cwd).exited
    assert (exited.exit_code, exited.stdout) == (0, b"1000\n1\nsum=500500\n"), exited.stderr
