/** A worker that somebody else launched: two clients at once, each with calls, checkpoints and a blob. */

import { Buffer } from "node:buffer";
import { readFileSync } from "node:fs";

import { ProcessClient } from "@chio-protocol/process";

const connection = JSON.parse(readFileSync(process.argv.at(-1), "utf8"));
const client = new ProcessClient(connection.socket_path, connection.credential);
for (const [key, tool] of JSON.parse(process.argv.at(-2))) {
  const reply = await client.invoke(key, "ledger", tool, { process: connection.process_id, key });
  if (reply.terminal_state.state === "completed" && reply.verdict !== "allow") throw new Error(`${key}: ${reply.reason}`);
}
const { checkpoint } = await client.inspect();
if (checkpoint.revision === "0") await client.checkpoint("0", "done");
await client.putBlob(Buffer.from("kept"));
client.close();
