"""A tool server that does nothing, so that what is left of a call is Chio's own cost. Standard library only."""

import json
import sys


def result(message: dict) -> bytes | None:
    match message["method"]:
        case "tools/call":
            return b'{"content":[]}'
        case "initialize":
            version = json.dumps(message["params"]["protocolVersion"]).encode()
            return (
                b'{"protocolVersion":' + version + b',"capabilities":{"tools":{}},'
                b'"serverInfo":{"name":"noop","version":"1"}}'
            )
        case "tools/list":
            return b'{"tools":[{"name":"nothing","inputSchema":{"type":"object"}}]}'
    return None


for line in sys.stdin.buffer:
    message = json.loads(line)
    answer = result(message)
    if answer is not None:
        sys.stdout.buffer.write(b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (message["id"], answer))
        sys.stdout.buffer.flush()
