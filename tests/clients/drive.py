"""One way to make the same calls on either client."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chio_process import ProcessClient, WorkerError
from tests.clients.peer import CREDENTIAL

ROOT = Path(__file__).parents[2]
_NODE_CLIENT = ROOT / "chio/clients/node/index.js"
_DRIVER = Path(__file__).with_name("driver.mjs")
_SNAKE = {"putBlob": "put_blob", "readBlob": "read_blob"}
_SPECIAL = {
    "$nan": float("nan"),
    "$infinity": float("-inf"),
    "$undefined": object(),
    "$bigint": {1, 2},
    "$map": b"bytes",
}


@dataclass(frozen=True, slots=True)
class Call:
    """`method` as Node names it. A member `$bytes` stands for bytes, `$nan` and the like for what JSON lacks."""

    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Between two calls: run `until` while the client rests."""

    until: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Together:
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`result`, or the `code` of a WorkerError; `text` is all that the error says of itself."""

    result: Any = None
    code: str | None = None
    text: str = ""


Step = Call | Wait | Together


def drive(
    client: str, path: Path | str, *steps: Step, timeout: float = 30.0, credential: str = CREDENTIAL
) -> list[Outcome]:
    run = _drive_python if client == "python" else _drive_node
    outcomes, shown = run(str(path), credential, steps, timeout)
    assert credential not in shown
    assert not any(credential in outcome.text for outcome in outcomes)
    return outcomes


def node() -> str:
    own = ROOT / ".node/bin/node"
    found = str(own) if own.exists() else shutil.which("node")
    assert found, "no Node: run `make setup`"
    return found


def _drive_python(path: str, credential: str, steps: tuple[Step, ...], timeout: float) -> tuple[list[Outcome], str]:
    outcomes: list[Outcome] = []
    with ProcessClient(path, credential, timeout) as client:
        for step in steps:
            match step:
                case Wait():
                    step.until()
                case Together():
                    with ThreadPoolExecutor(len(step.calls)) as pool:
                        outcomes.extend(pool.map(lambda call: _python_outcome(client, call), step.calls))
                case Call():
                    outcomes.append(_python_outcome(client, step))
        return outcomes, repr(client)


def _python_outcome(client: ProcessClient, call: Call) -> Outcome:
    args = [_python_value(argument) for argument in call.args]
    options = {}
    if call.method == "invoke" and len(args) == 5:
        options["known_outcome_only"] = args.pop()["knownOutcomeOnly"]
    try:
        return Outcome(result=getattr(client, _SNAKE.get(call.method, call.method))(*args, **options))
    except WorkerError as error:
        return Outcome(code=error.code, text=f"{error} {error!r} {error.__cause__!r}")


def _python_value(value: Any) -> Any:
    if isinstance(value, str):
        return _SPECIAL.get(value, value)
    if isinstance(value, list):
        return [_python_value(item) for item in value]
    if isinstance(value, dict):
        if "$bytes" in value:
            return base64.b64decode(value["$bytes"])
        return {name: _python_value(item) for name, item in value.items()}
    return value


def _drive_node(path: str, credential: str, steps: tuple[Step, ...], timeout: float) -> tuple[list[Outcome], str]:
    plan = {
        "client": str(_NODE_CLIENT),
        "socket": path,
        "credential": credential,
        "timeout_ms": timeout * 1000,
        "calls": [_node_step(step) for step in steps],
    }
    with subprocess.Popen(
        [node(), _DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"PATH": os.defpath},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(plan) + "\n")
        process.stdin.flush()
        for step in steps:
            if isinstance(step, Wait):
                line = process.stderr.readline()
                assert line == "waiting\n", line + process.stderr.read()
                step.until()
                process.stdin.write("\n")
                process.stdin.flush()
        try:
            printed, complaints = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, complaints
    report = json.loads(printed)
    return [_node_outcome(outcome) for outcome in report["outcomes"]], report["shown"]


def _node_step(step: Step) -> dict[str, Any]:
    match step:
        case Wait():
            return {"wait": True}
        case Together():
            return {"together": [_node_step(call) for call in step.calls]}
        case Call():
            return {"method": step.method, "args": list(step.args)}


def _node_outcome(outcome: dict[str, Any]) -> Outcome:
    result = outcome.get("result")
    if isinstance(result, dict) and "$bytes" in result:
        assert result["plain"], "a Buffer where a plain Uint8Array was promised"
        result = base64.b64decode(result["$bytes"])
    return Outcome(result, outcome.get("code"), outcome.get("text", ""))


def bytes_argument(data: bytes) -> dict[str, str]:
    return {"$bytes": base64.b64encode(data).decode()}
