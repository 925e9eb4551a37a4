// Makes the calls that a test names on the Node client and prints what each came to.
//
// stdin: one JSON line {client, socket, credential, timeout_ms, calls}, then one line for each "wait" among the calls.
// A call is {method, args} or {wait: true} or {together: [calls]}. stdout: one JSON array of outcomes.

import { createInterface } from "node:readline";
import { inspect } from "node:util";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const next = async () => (await lines.next()).value;
const plan = JSON.parse(await next());
const { ProcessClient, WorkerError } = await import(plan.client);
const client = new ProcessClient(plan.socket, plan.credential, { timeoutMs: plan.timeout_ms });

const SPECIAL = { $nan: NaN, $infinity: -Infinity, $undefined: undefined, $bigint: 1n, $map: new Map() };

function revive(_, value) {
  if (value !== null && typeof value === "object" && "$bytes" in value) return Buffer.from(value.$bytes, "base64");
  return value;
}

function special(value) {
  if (typeof value === "string" && value in SPECIAL) return SPECIAL[value];
  if (value instanceof Uint8Array || value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) return value.map(special);
  return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, special(item)]));
}

async function outcome({ method, args }) {
  const given = special(JSON.parse(JSON.stringify(args), revive));
  try {
    const result = await client[method](...given);
    if (result instanceof Uint8Array) {
      return { result: { $bytes: Buffer.from(result).toString("base64"), plain: !Buffer.isBuffer(result) } };
    }
    return { result };
  } catch (error) {
    if (!(error instanceof WorkerError)) throw error;
    return { code: error.code, text: inspect(error, { depth: 10 }) };
  }
}

const outcomes = [];
for (const call of plan.calls) {
  if (call.wait) {
    process.stderr.write("waiting\n");
    await next();
    await new Promise(setImmediate); // what the socket had to say before the line came has now been heard
  } else if (call.together) {
    outcomes.push(...(await Promise.all(call.together.map(outcome))));
  } else {
    outcomes.push(await outcome(call));
  }
}
process.stdin.destroy();
// Not process.exit: the kept connection must let the process end by itself.
process.stdout.write(JSON.stringify({ outcomes, shown: inspect(client, { depth: 10, showHidden: true }) }));
