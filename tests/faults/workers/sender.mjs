/** Waits until the other says that it waits, then sends it one message. */

import { start, value } from "./client.mjs";

const { client, input } = start();
for (let turn = 0; ; turn += 1) {
  const args = { after_sequence: "0", limit: 1, wait_ms: input.wait_ms };
  const { messages } = await value(client, `wait-${turn}`, "chio-ipc", "receive_ready", args);
  if (messages.length > 0) break;
}
await value(client, "send", "chio-ipc", "send_jobs", { message_key: "job", payload: { n: 7 } });
