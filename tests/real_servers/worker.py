"""The confined worker of these tests: makes the calls that its input lists, in order, and keeps every answer.

Input `{"directory", "calls": [{"key", "server", "tool", "arguments"}, …]}`; `answers-PROCESS.json` holds one entry for
each call, the reply or `{"error": CODE}`.
"""

import json
import sys
from pathlib import Path

from chio_process import ProcessClient, WorkerError

bootstrap = json.load(sys.stdin)
connection, given = bootstrap["connection"], bootstrap["input"]
client = ProcessClient(connection["socket_path"], connection["credential"])
answers = []
for call in given["calls"]:
    try:
        answers.append(client.invoke(call["key"], call["server"], call["tool"], call["arguments"]))
    except WorkerError as error:
        answers.append({"error": error.code})
name = client.inspect()["process_id"]
Path(given["directory"], f"answers-{name}.json").write_text(json.dumps(answers), encoding="utf-8")
