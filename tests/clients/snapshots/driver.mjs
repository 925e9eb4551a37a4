// Writes and reads snapshots as a test tells it to.
//
// argv: the client's folder, a socket, a credential. stdin: one JSON line for each step, {write: document},
// {evaluate: source} (a document that JSON cannot hold) or {read: reference}; `pause: true` beside a write prints
// "paused" after its first blob and waits for a line. stdout: one JSON line for each step, {result} or {code, message}.

import { createInterface } from "node:readline";

const [folder, socket, credential] = process.argv.slice(2);
const { ProcessClient, WorkerError } = await import(`${folder}/index.js`);
const { JsonSnapshot, SnapshotError } = await import(`${folder}/snapshot.js`);

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const next = async () => (await lines.next()).value;
const say = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

let paused = true;

class PausingClient extends ProcessClient {
  async putBlob(data) {
    const stored = await super.putBlob(data);
    if (!paused) {
      paused = true;
      say("paused");
      await next();
    }
    return stored;
  }
}

const client = new PausingClient(socket, credential);
const snapshots = new JsonSnapshot(client);

async function perform(step) {
  if ("read" in step) return snapshots.read(step.read);
  paused = !step.pause;
  return snapshots.write("evaluate" in step ? new Function(`return ${step.evaluate}`)() : step.write);
}

for (let line = await next(); line !== undefined; line = await next()) {
  try {
    say({ result: await perform(JSON.parse(line)) });
  } catch (error) {
    if (!(error instanceof WorkerError)) throw error;
    say({ code: error.code, message: error.message, of_snapshots: error instanceof SnapshotError });
  }
}
client.close();
