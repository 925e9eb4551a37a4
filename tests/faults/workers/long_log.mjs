/** Stores so many bytes that the state's write-ahead log is written back and begun again, then small things upon it. */

import { Buffer } from "node:buffer";
import { createHash } from "node:crypto";

import { start } from "./client.mjs";

const { client, input } = start();
for (let n = 0; n < input.blobs; n += 1) {
  await client.putBlob(Buffer.alloc(1_000_000, createHash("sha512").update(String(n)).digest()));
}
for (let n = Number((await client.inspect()).checkpoint.revision); n < input.saves; n += 1) {
  await client.checkpoint(String(n), { n });
  await client.invoke(`refused-${n}`, "chio-ipc", "send_nowhere", { n });
}
