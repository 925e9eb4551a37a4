/** Writes a document, keeps its reference, edits it, keeps that one, and reads back whatever the checkpoint names. */

import { JsonSnapshot } from "@chio-protocol/process/snapshot";

import { start } from "./client.mjs";

const { client } = start();
const snapshots = new JsonSnapshot(client);
const lines = Array.from({ length: 4000 }, (_, n) => ({ n, text: `line ${n} `.repeat(5) }));
for (const [revision, edit] of [["0", null], ["1", "edited"]]) {
  const { checkpoint } = await client.inspect();
  if (checkpoint.revision !== revision) continue;
  const document = { lines: lines.map((line) => (edit && line.n === 7 ? { ...line, text: edit } : line)) };
  await client.checkpoint(revision, await snapshots.write(document));
}
const { checkpoint } = await client.inspect();
const kept = await snapshots.read(checkpoint.value);
if (kept.lines.length !== 4000 || kept.lines[7].text !== "edited") throw new Error("another document");
