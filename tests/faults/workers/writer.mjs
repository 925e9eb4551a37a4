/**
 * Two writers of one checkpoint: this process and a second one that it starts. Each saves until it has seen three saves
 * of its own take, and gives way on a conflict. What a save says is who made it, which number of his, and on what.
 */

import { spawn } from "node:child_process";

import { ProcessClient } from "@chio-protocol/process";

import { start } from "./client.mjs";

const SAVES = 3;

async function save(client, who) {
  for (;;) {
    const { checkpoint } = await client.inspect();
    const saves = { ...(checkpoint.value?.saves ?? {}) };
    if ((saves[who] ?? 0) >= SAVES) return;
    saves[who] = (saves[who] ?? 0) + 1;
    try {
      await client.checkpoint(checkpoint.revision, { saves, by: who, on: checkpoint.revision });
    } catch (error) {
      if (error.code !== "checkpoint_conflict") throw error;
    }
  }
}

if (process.argv[2] === "second") {
  await save(new ProcessClient(process.argv[3], process.argv[4]), "second");
} else {
  const { client, connection } = start();
  const second = spawn(process.execPath, [process.argv[1], "second", connection.socket_path, connection.credential], {
    stdio: ["ignore", "inherit", "inherit"],
  });
  const ended = new Promise((resolve) => second.on("exit", (code) => resolve(code)));
  await save(client, "first");
  process.exitCode = (await ended) === 0 ? 0 : 1;
}
