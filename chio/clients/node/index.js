/**
 * The worker's side of the Chio process protocol `chio.process.v1`: its operations, each of which sends one
 * request, once. `index.d.ts` documents the types.
 */

import { createHash } from "node:crypto";
import { connect } from "node:net";

const PROTOCOL = "chio.process.v1";
const MAX_REQUEST_BYTES = 2 * 1024 * 1024; // including the newline
const MAX_RESPONSE_BYTES = 8 * 1024 * 1024; // including the newline
const DEFAULT_TIMEOUT_MS = 60_000;
// The kernel gives a frame 5 s. A connection that was idle for less cannot be one that it is about to drop.
const MAX_IDLE_MS = 2_000;
const NEWLINE = 0x0a;

// The members a reply must have to be worth handing on, and their types. Further members pass through.
const RESULT_MEMBERS = {
  inspect: { process_id: "string", state: "string", checkpoint: "object" },
  invoke: { request_id: "string", verdict: "string", terminal_state: "object", receipt_json: "string" },
  checkpoint: { revision: "string" },
  blob_put: { sha256: "string", bytes: "number" },
  blob_read: { sha256: "string", bytes: "number", data_base64: "string" },
  cancel: {},
  note: {},
};

export class WorkerError extends Error {
  constructor(code, message, options) {
    super(`${code}: ${message}`, options);
    this.name = "WorkerError";
    this.code = code;
  }
}

export class ProcessClient {
  #socketPath;
  #credential;
  #timeoutMs;
  #idle = null;

  constructor(socketPath, credential, { timeoutMs = DEFAULT_TIMEOUT_MS } = {}) {
    this.#socketPath = socketPath;
    this.#credential = credential;
    this.#timeoutMs = timeoutMs;
  }

  inspect() {
    return this.#call({ op: "inspect" });
  }

  invoke(key, server, tool, args, { knownOutcomeOnly = false } = {}) {
    const operation = { op: "invoke", operation_key: key, server_id: server, tool_name: tool, arguments: args };
    if (knownOutcomeOnly) operation.known_outcome_only = true;
    return this.#call(operation);
  }

  checkpoint(expectedRevision, value) {
    return this.#call({ op: "checkpoint", expected_revision: expectedRevision, value });
  }

  async putBlob(data) {
    const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
    const sha256 = digestOf(bytes);
    const stored = await this.#call({ op: "blob_put", sha256, data_base64: bytes.toString("base64") });
    if (stored.sha256 !== sha256 || stored.bytes !== bytes.length) {
      throw invalid("the stored blob is not the one that was sent");
    }
    return stored;
  }

  async readBlob(sha256) {
    const read = await this.#call({ op: "blob_read", sha256 });
    const bytes = Buffer.from(read.data_base64, "base64");
    // Buffer.from skips what is not base64, so the text is compared with the only right one.
    if (bytes.toString("base64") !== read.data_base64) throw invalid("the blob is not base64");
    if (read.bytes !== bytes.length || digestOf(bytes) !== sha256) throw invalid("the blob does not match its digest");
    return new Uint8Array(bytes);
  }

  cancel() {
    return this.#call({ op: "cancel" });
  }

  note(event, { ageMs } = {}) {
    return this.#call(ageMs === undefined ? { op: "note", event } : { op: "note", event, age_ms: ageMs });
  }

  close() {
    this.#idle?.close();
    this.#idle = null;
  }

  async #call(operation) {
    const frame = encode({ protocol: PROTOCOL, credential: this.#credential, operation });
    const connection = this.#takeIdle() ?? new Connection(this.#socketPath);
    try {
      const reply = await connection.exchange(frame, this.#timeoutMs);
      const result = decode(reply, RESULT_MEMBERS[operation.op]);
      this.#keep(connection);
      return result;
    } catch (error) {
      // Also after a refusal: the kernel closes some connections behind one, and the next call must not race it.
      connection.close();
      throw error;
    }
  }

  #takeIdle() {
    const idle = this.#idle;
    this.#idle = null;
    if (idle === null || idle.isFresh()) return idle;
    idle.close();
    return null;
  }

  #keep(connection) {
    if (this.#idle === null) this.#idle = connection;
    else connection.close();
  }
}

/** One connected Unix stream socket: one line out, one line in, before one deadline. */
class Connection {
  #socket;
  #chunks = [];
  #received = 0;
  #settle = null; // {resolve, reject} while a reply is awaited
  #ended = false;
  #usedAt = 0;

  constructor(path) {
    this.#socket = connect({ path });
    this.#socket.on("data", (chunk) => this.#onData(chunk));
    this.#socket.on("error", (error) => this.#onEnd(error));
    this.#socket.on("close", () => this.#onEnd(null));
  }

  close() {
    this.#ended = true;
    this.#socket.destroy();
  }

  /** Bytes or an end that arrived while nothing was asked mean that the peer is done with this connection. */
  isFresh() {
    return !this.#ended && this.#received === 0 && performance.now() - this.#usedAt <= MAX_IDLE_MS;
  }

  /** Resolves to the reply line without its newline. Any rejection leaves the connection of no use. */
  async exchange(frame, timeoutMs) {
    this.#socket.ref();
    let timer;
    try {
      return await new Promise((resolve, reject) => {
        this.#settle = { resolve, reject };
        timer = setTimeout(() => reject(new WorkerError("transport_error", "no reply: timed out")), timeoutMs);
        if (this.#socket.connecting) this.#socket.once("connect", () => this.#writeAfterPoll(frame));
        else this.#socket.write(frame);
      });
    } finally {
      clearTimeout(timer);
      this.#settle = null;
      this.#chunks = [];
      this.#received = 0;
      this.#usedAt = performance.now();
      this.#socket.unref(); // a kept connection must not keep the worker alive
    }
  }

  /**
   * A kernel that has no room answers and closes unasked, and a failed write would destroy the socket with that answer
   * unread. So the loop looks at a new socket first: an immediate of an immediate runs after the next poll.
   */
  #writeAfterPoll(frame) {
    setImmediate(() => {
      setImmediate(() => {
        if (!this.#ended && this.#received === 0) this.#socket.write(frame);
      });
    });
  }

  #onData(chunk) {
    this.#received += chunk.length;
    if (this.#settle === null) return;
    this.#chunks.push(chunk);
    if (this.#received > MAX_RESPONSE_BYTES) {
      this.#settle.reject(new WorkerError("response_too_large", `the reply is over ${MAX_RESPONSE_BYTES} bytes`));
      return;
    }
    const end = chunk.indexOf(NEWLINE);
    if (end === chunk.length - 1) this.#settle.resolve(Buffer.concat(this.#chunks).subarray(0, -1));
    else if (end >= 0) this.#settle.reject(invalid("bytes follow the reply's newline"));
  }

  #onEnd(cause) {
    this.#ended = true;
    if (this.#settle === null) return;
    if (this.#received > 0) {
      this.#settle.reject(new WorkerError("truncated_response", `the reply ended after ${this.#received} bytes`));
    } else {
      const why = cause === null ? "the connection was closed without a reply" : `no reply: ${cause.message}`;
      this.#settle.reject(new WorkerError("transport_error", why, { cause: cause ?? undefined }));
    }
  }
}

function encode(request) {
  let text;
  try {
    text = JSON.stringify(request, refuseLossy);
  } catch (error) {
    if (!(error instanceof TypeError || error instanceof RangeError)) throw error;
    throw new WorkerError("invalid_request", `an argument is not JSON: ${error.message}`, { cause: error });
  }
  const frame = Buffer.from(`${text}\n`, "utf8");
  if (frame.length > MAX_REQUEST_BYTES) {
    throw new WorkerError("request_too_large", `${frame.length} bytes, at most ${MAX_REQUEST_BYTES} can be sent`);
  }
  return frame;
}

/** JSON.stringify writes NaN as null and drops undefined: the kernel would bind the key to something else. */
function refuseLossy(name, value) {
  const lossy = typeof value === "number" ? !Number.isFinite(value) : value === undefined || isOpaque(value);
  if (lossy) throw new TypeError(`member ${JSON.stringify(name)} has no JSON form`);
  return value;
}

function isOpaque(value) {
  return typeof value === "function" || typeof value === "symbol" || value instanceof Map || value instanceof Set;
}

function decode(line, members) {
  let reply;
  try {
    reply = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(line));
  } catch (error) {
    throw new WorkerError("invalid_response", `the reply is not JSON: ${error.message}`, { cause: error });
  }
  if (!isObject(reply) || reply.protocol !== PROTOCOL || Object.keys(reply).length !== 3) {
    throw invalid(`the reply is not one of ${PROTOCOL}`);
  }
  if (reply.ok === false && isObject(reply.error) && typeof reply.error.code === "string" && reply.error.code !== "") {
    throw new WorkerError(reply.error.code, "refused by the kernel");
  }
  if (reply.ok !== true || !isObject(reply.result)) throw invalid("the reply is neither a result nor an error");
  for (const [name, type] of Object.entries(members)) {
    const value = reply.result[name];
    if (typeof value !== type || value === null) throw invalid(`the result has no ${name} of type ${type}`);
  }
  return reply.result;
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function digestOf(bytes) {
  return createHash("sha256").update(bytes).digest("hex");
}

function invalid(why) {
  return new WorkerError("invalid_response", why);
}
