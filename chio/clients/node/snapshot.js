/**
 * JSON documents of up to 8 MiB, kept in a process's blobs so that what repeats is stored once. `snapshot.d.ts`
 * documents the types. The format is that of the Python client's `snapshot.py`: either reads what the other wrote, and
 * both write the same blobs for the same document.
 */

import { createHash } from "node:crypto";

import { encode, NotJson, split, TooLarge } from "./fragments.js";
import { WorkerError } from "./index.js";

const SCHEMA = "chio.process.json-snapshot.v1";
const MAX_DOCUMENT_BYTES = 8 * 1024 * 1024;

// They decide which bytes a blob has. Others would read the same snapshots and share no fragment with those written.
const DOCUMENT = { least: 20 * 1024, spread: 12 * 1024, most: 64 * 1024, glue: 256 };
const INDEX = { least: 4 * 1024, spread: 4 * 1024, most: 16 * 1024, glue: 0 };

const MAX_INDEX_BYTES = 256 * 1024;
const MAX_INDEX_BLOBS = 64;
const MAX_PART_BYTES = 1024 * 1024; // a blob's

// What decoding, parsing and writing again can end with: not UTF-8, not JSON, nested too deep, outside the profile.
const UNREADABLE = [TypeError, SyntaxError, RangeError, NotJson, TooLarge];

const DIGEST = /^[0-9a-f]{64}$/;

export class SnapshotError extends WorkerError {
  constructor(code, message, options) {
    super(code, message, options);
    this.name = "SnapshotError";
  }
}

export class JsonSnapshot {
  #client;
  #stored = new Set();

  constructor(client) {
    this.#client = client;
  }

  async write(document) {
    const { reference, blobs } = snapshotOf(document);
    const fitting = await this.#fitting([...blobs].filter(([digest]) => !this.#stored.has(digest)));
    // The index comes last: where it is, all that it names is.
    for (const [number, [digest, data]] of fitting.entries()) {
      try {
        await this.#client.putBlob(data);
      } catch (error) {
        if (!(error instanceof WorkerError) || error.code !== "limit_reached") throw error;
        const stored = `${number} of ${fitting.length} new blobs are stored and stay charged`;
        throw new SnapshotError("limit_reached", `refused by the kernel, and ${stored}`, { cause: error });
      }
      this.#stored.add(digest);
    }
    return reference;
  }

  async read(reference) {
    const { whole, index, blobs } = checkedReference(reference);
    const used = new Set();
    const parts = checkedParts(parsed(await this.#index(index, blobs, used), index, "the index"), whole.bytes);
    const document = parsed(await this.#document(parts, whole, used), whole, "the document");
    for (const digest of used) this.#stored.add(digest);
    return document;
  }

  /**
   * What has to be sent of `blobs`. Whether a blob is stored is only asked when it matters: a repeat costs nothing, so
   * while all of them would fit, sending one that is there already is as good.
   */
  async #fitting(blobs) {
    if (blobs.length === 0) return blobs;
    const free = room(await this.#client.inspect());
    if (fits(blobs, free)) return blobs;
    const missing = [];
    for (const blob of blobs) if (!(await this.#isStored(blob[0]))) missing.push(blob);
    if (fits(missing, free)) return missing;
    const needed = `${missing.length} new blobs of ${totalOf(missing)} bytes`;
    const left = `${free.blobs} blobs and ${free.bytes} bytes`;
    throw new SnapshotError("limit_reached", `nothing was written: ${needed}, and the tree has room for ${left}`);
  }

  async #isStored(digest) {
    try {
      await this.#client.readBlob(digest);
    } catch (error) {
      if (!(error instanceof WorkerError) || error.code !== "blob_missing") throw error;
      return false;
    }
    this.#stored.add(digest);
    return true;
  }

  async #index(index, blobs, used) {
    const chunks = [];
    let length = 0;
    for (const digest of blobs) {
      const data = await this.#blob(digest, used);
      length += data.length;
      if (length > index.bytes) throw invalid("the index is longer than the reference says");
      chunks.push(data);
    }
    return checked(Buffer.concat(chunks), index, "the index");
  }

  async #document(parts, whole, used) {
    const text = Buffer.alloc(whole.bytes);
    const placed = new Map(); // where the bytes of a fragment stand already
    let at = 0;
    for (const part of parts) {
      if (typeof part === "string") {
        at += text.write(part, at, "utf8");
        continue;
      }
      const start = placed.get(part.sha256);
      if (start === undefined) {
        const data = await this.#blob(part.sha256, used);
        if (data.length !== part.bytes) {
          throw invalid(`fragment ${part.sha256} has ${data.length} bytes, and ${part.bytes} in the index`);
        }
        text.set(data, at);
        placed.set(part.sha256, at);
      } else {
        text.copyWithin(at, start, start + part.bytes);
      }
      at += part.bytes;
    }
    return checked(text, whole, "the document");
  }

  async #blob(digest, used) {
    let data;
    try {
      data = await this.#client.readBlob(digest);
    } catch (error) {
      if (!(error instanceof WorkerError) || error.code !== "blob_missing") throw error;
      throw new SnapshotError("blob_missing", `this process has no blob ${digest}`, { cause: error });
    }
    used.add(digest);
    return data;
  }
}

/** The reference of `document`, and all its blobs by digest, those of the index last. */
function snapshotOf(document) {
  const text = encoded(document);
  const blobs = new Map();
  const parts = store(text, DOCUMENT, blobs);
  const index = encode(parts, INDEX.least, MAX_INDEX_BYTES);
  const digests = store(index, INDEX, blobs).map((part) => part.sha256);
  return { reference: { schema: SCHEMA, ...sum(text.data), index: { ...sum(index.data), blobs: digests } }, blobs };
}

function encoded(document) {
  try {
    return encode(document, DOCUMENT.least, MAX_DOCUMENT_BYTES);
  } catch (error) {
    if (error instanceof NotJson) {
      const why = `the document is not JSON: ${error.message} (at ${JSON.stringify(error.pointer())})`;
      throw new SnapshotError("invalid_request", why, { cause: error });
    }
    if (!(error instanceof TooLarge)) throw error;
    throw new SnapshotError("snapshot_too_large", `the document is over ${MAX_DOCUMENT_BYTES} bytes`, { cause: error });
  }
}

/** The parts of `text` as an index lists them; the fragments go into `blobs`. */
function store(text, sizes, blobs) {
  return split(text, sizes).map(({ start, end, glue }) => {
    const data = text.data.subarray(start, end);
    if (glue) return data.toString("utf8");
    const described = sum(data);
    if (!blobs.has(described.sha256)) blobs.set(described.sha256, data);
    return described;
  });
}

function sum(data) {
  return { bytes: data.length, sha256: createHash("sha256").update(data).digest("hex") };
}

function room({ storage }) {
  const numbers = [storage?.limits?.max_bytes, storage?.limits?.max_blobs, storage?.tree_bytes, storage?.tree_blobs];
  if (!numbers.every(Number.isSafeInteger)) {
    throw new WorkerError("invalid_response", "the result has no storage with its limits and the tree's usage");
  }
  const [maxBytes, maxBlobs, treeBytes, treeBlobs] = numbers;
  return { bytes: maxBytes - treeBytes, blobs: maxBlobs - treeBlobs };
}

function fits(blobs, free) {
  return totalOf(blobs) <= free.bytes && blobs.length <= free.blobs;
}

function totalOf(blobs) {
  return blobs.reduce((total, [, data]) => total + data.length, 0);
}

function checkedReference(reference) {
  if (isObject(reference) && typeof reference.schema === "string" && reference.schema !== SCHEMA) {
    throw invalid(`the reference's schema is ${JSON.stringify(reference.schema)}, not ${JSON.stringify(SCHEMA)}`);
  }
  if (has(reference, ["schema", "bytes", "sha256", "index"]) && has(reference.index, ["bytes", "sha256", "blobs"])) {
    const { bytes, sha256, index } = reference;
    const whole = checkedSum({ bytes, sha256 }, MAX_DOCUMENT_BYTES, "the reference");
    const listed = checkedSum({ bytes: index.bytes, sha256: index.sha256 }, MAX_INDEX_BYTES, "the reference's index");
    const { blobs } = index;
    if (Array.isArray(blobs) && blobs.length >= 1 && blobs.length <= MAX_INDEX_BLOBS && blobs.every(isDigest)) {
      return { whole, index: listed, blobs: [...blobs] };
    }
  }
  throw invalid("the reference is not one: schema, bytes, sha256 and index {bytes, sha256, blobs} are its members");
}

function checkedParts(index, total) {
  if (!Array.isArray(index)) throw invalid("the index is not an array");
  let length = 0;
  const parts = index.map((part) => {
    if (typeof part === "string") {
      const bytes = Buffer.byteLength(part);
      if (bytes < 1 || bytes > DOCUMENT.glue) throw invalid(`a part of the index is text of ${bytes} bytes`);
      length += bytes;
      return part;
    }
    const fragment = checkedSum(part, MAX_PART_BYTES, "a part of the index");
    length += fragment.bytes;
    return fragment;
  });
  if (length !== total) throw invalid(`the index lists ${length} bytes, and the reference ${total}`);
  return parts;
}

function checkedSum(value, maxBytes, what) {
  if (!has(value, ["bytes", "sha256"]) || !Number.isSafeInteger(value.bytes) || !isDigest(value.sha256)) {
    throw invalid(`${what} lacks bytes or sha256, or has other members`);
  }
  if (value.bytes < 1 || value.bytes > maxBytes) {
    throw invalid(`${what} has ${value.bytes} bytes, at most ${maxBytes} are possible`);
  }
  return { bytes: value.bytes, sha256: value.sha256 };
}

function has(value, names) {
  if (!isObject(value) || Object.keys(value).length !== names.length) return false;
  return names.every((name) => Object.hasOwn(value, name));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isDigest(value) {
  return typeof value === "string" && DIGEST.test(value);
}

function checked(text, expected, what) {
  const { bytes, sha256 } = sum(text);
  if (bytes !== expected.bytes || sha256 !== expected.sha256) {
    throw invalid(`${what} does not match the reference's length and digest`);
  }
  return text;
}

/**
 * The value of `text`, which must be canonical: writing the value again must give the same digest. Without that, a name
 * that stands twice or a number beyond 2^53 would be read as something that was not written.
 */
function parsed(text, expected, what) {
  let value;
  let again;
  try {
    value = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(text));
    again = encode(value, DOCUMENT.least, MAX_DOCUMENT_BYTES).data;
  } catch (error) {
    if (!UNREADABLE.some((kind) => error instanceof kind)) throw error;
    throw new SnapshotError("invalid_snapshot", `${what} is not canonical JSON: ${error.message}`, { cause: error });
  }
  if (sum(again).sha256 !== expected.sha256) throw invalid(`${what} is not canonical JSON`);
  return value;
}

function invalid(why) {
  return new SnapshotError("invalid_snapshot", why);
}
