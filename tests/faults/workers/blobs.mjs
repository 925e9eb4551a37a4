/** Stores blobs, one of them twice and one large, keeps their digests in the checkpoint, and reads them all back. */

import { Buffer } from "node:buffer";

import { start } from "./client.mjs";

const { client } = start();
const blobs = [Buffer.from("first"), Buffer.from("second"), Buffer.from("first"), Buffer.alloc(300_000, "x")];
const kept = [];
for (const data of blobs) kept.push((await client.putBlob(data)).sha256);
const { checkpoint } = await client.inspect();
if (checkpoint.revision === "0") await client.checkpoint("0", kept);
for (const [index, digest] of kept.entries()) {
  const data = await client.readBlob(digest);
  if (!blobs[index].equals(Buffer.from(data))) throw new Error(`blob ${index} is another`);
}
