/** What every worker of these scenarios starts with: who it is, a connection, and calls that are made until they are settled. */

import { readFileSync } from "node:fs";

import { ProcessClient } from "@chio-protocol/process";

export function start() {
  const bootstrap = JSON.parse(readFileSync(0, "utf8"));
  const { socket_path, credential, process_id } = bootstrap.connection;
  return { name: process_id, input: bootstrap.input, client: new ProcessClient(socket_path, credential), connection: bootstrap.connection };
}

/** The outcome of one key: a call that was provably never sent, or a read of unknown outcome, is made again. */
export async function settle(client, key, server, tool, args) {
  for (let tries = 0; ; tries += 1) {
    const reply = await client.invoke(key, server, tool, args);
    const again = reply.reason === "not_dispatched" || (tool === "look" && reply.reason === "outcome_unknown_after_dispatch");
    if (!again || tries === 2) return reply;
  }
}

/** The value of an allowed call. */
export async function value(client, key, server, tool, args) {
  const reply = await client.invoke(key, server, tool, args);
  if (reply.verdict !== "allow") throw new Error(`${key}: ${reply.reason}`);
  return reply.output.value;
}
