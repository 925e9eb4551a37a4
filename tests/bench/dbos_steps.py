"""Durable steps per second of DBOS on SQLite, run by build/dbos: `dbos_steps.py DATABASE SECONDS WORKFLOWS…`.

One JSON object on stdout: for each number of concurrent workflows the rate of steps that do nothing. A step's result is
committed before the next one starts; that is DBOS's promise as it is Chio's.
"""

import asyncio
import json
import sys
import time

from dbos import DBOS, DBOSConfig

database, seconds = sys.argv[1], float(sys.argv[2])
config: DBOSConfig = {
    "name": "bench",
    "system_database_url": f"sqlite:///{database}",
    "log_level": "ERROR",
    "enable_otlp": False,
    "run_admin_server": False,
}
DBOS(config=config)


@DBOS.step()
def nothing(n: int) -> dict[str, list[int]]:
    return {"content": []}


@DBOS.workflow()
def workflow(until: float) -> int:
    steps = 0
    while time.time() < until:
        nothing(steps)
        steps += 1
    return steps


def rate(workflows: int) -> float:
    start = time.time()
    handles = [DBOS.start_workflow(workflow, start + seconds) for _ in range(workflows)]
    steps = sum(handle.get_result() for handle in handles)
    return steps / (time.time() - start)


@DBOS.step()
async def nothing_async(n: int) -> dict[str, list[int]]:
    return {"content": []}


@DBOS.workflow()
async def workflow_async(until: float) -> int:
    steps = 0
    while time.time() < until:
        await nothing_async(steps)
        steps += 1
    return steps


async def rate_async(workflows: int) -> float:
    start = time.time()
    handles = [await DBOS.start_workflow_async(workflow_async, start + seconds) for _ in range(workflows)]
    steps = 0
    for handle in handles:
        steps += await handle.get_result()
    return steps / (time.time() - start)


DBOS.launch()
# Whichever of its two ways is the faster one here.
print(json.dumps({n: max(rate(n), asyncio.run(rate_async(n))) for n in map(int, sys.argv[3:])}))
DBOS.destroy()
