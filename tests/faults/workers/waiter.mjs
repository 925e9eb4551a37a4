/** Says that it is there, then waits for a message; a wait that ends empty is followed by another under a key of its own. */

import { start, value } from "./client.mjs";

const { client, input } = start();
await value(client, "ready", "chio-ipc", "send_ready", { message_key: "ready", payload: null });
for (let turn = 0; ; turn += 1) {
  const found = await value(client, `receive-${turn}`, "chio-ipc", "receive_jobs", {
    after_sequence: "0",
    limit: 1,
    wait_ms: input.wait_ms,
  });
  if (found.messages.length === 0) continue;
  if (found.messages[0].payload.n !== 7) throw new Error("another message");
  await value(client, "ack", "chio-ipc", "ack_jobs", { through_sequence: found.messages[0].sequence });
  break;
}
