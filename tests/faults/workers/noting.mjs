/** Keeps a member of its own, `notes`, of a value that somebody else migrates: five notes, each once, each saved. */

import { readFileSync } from "node:fs";

import { ProcessClient } from "@chio-protocol/process";

const NOTES = 5;
const connection = JSON.parse(readFileSync(process.argv.at(-1), "utf8"));
const client = new ProcessClient(connection.socket_path, connection.credential);
for (;;) {
  const { checkpoint } = await client.inspect();
  const notes = checkpoint.value?.notes ?? [];
  if (notes.length === NOTES) break;
  try {
    await client.checkpoint(checkpoint.revision, { ...checkpoint.value, notes: [...notes, `note ${notes.length + 1}`] });
  } catch (error) {
    if (error.code !== "checkpoint_conflict") throw error;
  }
}
client.close();
