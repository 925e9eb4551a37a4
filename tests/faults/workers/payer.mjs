/** Pays three times under three keys, looks once, and repeats everything: no answer may change, no effect be added. */

import { settle, start } from "./client.mjs";

const { name, client } = start();
const calls = [
  ["pay-1", "pay"],
  ["pay-2", "pay"],
  ["look-1", "look"],
  ["pay-3", "pay"],
];
for (const [key, tool] of [...calls, ...calls]) {
  const reply = await settle(client, key, "ledger", tool, { process: name, key });
  console.log(key, reply.verdict, reply.reason);
}
