/** Repeats a call whose outcome was unknown until the operator said it: the answer has to carry what he said. */

import { settle, start } from "./client.mjs";

const { name, client } = start();
const reply = await settle(client, "vanish-1", "ledger", "vanish", { process: name, key: "vanish-1" });
if (reply.reconciliation?.outcome !== "applied") throw new Error(`no reconciliation: ${reply.reason}`);
const more = await settle(client, "pay-1", "ledger", "pay", { process: name, key: "pay-1" });
console.log(more.verdict, more.reason);
