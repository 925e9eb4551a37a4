/**
 * How a JSON document becomes fragments: canonical text (RFC 8785) and the places where it is cut. Pure: no client, no
 * I/O. The Python client's `fragments.py` says how the places are chosen and does the same, byte for byte;
 * `fixtures/vectors/snapshots` holds both to it.
 *
 * A region is {start, end, isString, ends, inner}: a container or string whose text is larger than `least`, the offsets
 * behind each small value directly inside, and the regions directly inside. A part is {start, end, glue}.
 */

import { createHash } from "node:crypto";

const MAX_DEPTH = 64; // levels of containers, an empty one included

const WINDOW = 256; // bytes before a cut between values that decide on it
const GEAR_WINDOW = 32; // a gear hash shifts out what is older
const GEAR = Uint32Array.from({ length: 256 }, (_, byte) => {
  return createHash("sha256").update(Buffer.of(byte)).digest().readUInt32BE(0);
});
const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  let rest = byte;
  for (let bit = 0; bit < 8; bit += 1) rest = (rest >>> 1) ^ (rest & 1 ? 0xedb88320 : 0);
  return rest;
});

/** A value outside the canonical profile. `pointer()` says where it is (RFC 6901). */
export class NotJson extends Error {
  above = []; // innermost first

  pointer() {
    const steps = this.above.toReversed().map((step) => String(step).replaceAll("~", "~0").replaceAll("/", "~1"));
    return steps.map((step) => `/${step}`).join("");
  }
}

/** The canonical text is longer than it may be. */
export class TooLarge extends Error {}

/** The canonical text and its regions below a root that is the whole text: {data, root}. */
export function encode(document, least, maxBytes) {
  const writer = new Writer(least, maxBytes);
  const root = region(0);
  writer.value(document, root, 0);
  const data = writer.written();
  root.end = data.length;
  return { data, root: root.end > least ? root.inner[0] : root };
}

function region(start, isString = false) {
  return { start, end: 0, isString, ends: [], inner: [] };
}

class Writer {
  #buffer = Buffer.allocUnsafe(64 * 1024);
  #length = 0;
  #least;
  #max;

  constructor(least, maxBytes) {
    this.#least = least;
    this.#max = maxBytes;
  }

  written() {
    return this.#buffer.subarray(0, this.#length);
  }

  /** Writes `value`, and notes in `around` the region that it is or the offset behind it. */
  value(value, around, depth) {
    if (typeof value === "string") {
      this.#string(value, around, true);
    } else if (typeof value === "number") {
      this.#put(written(value));
      around.ends.push(this.#length);
    } else if (value === null || typeof value === "boolean") {
      this.#put(String(value));
      around.ends.push(this.#length);
    } else if (typeof value === "object") {
      this.#container(value, around, depth);
    } else {
      throw new NotJson(`a ${typeof value} is not JSON`);
    }
  }

  #container(value, around, depth) {
    if (depth === MAX_DEPTH) throw new NotJson(`nested deeper than ${MAX_DEPTH}`);
    const own = region(this.#length);
    if (Array.isArray(value)) this.#array(value, own, depth + 1);
    else if (isPlain(value)) this.#object(value, own, depth + 1);
    else throw new NotJson(`a ${value.constructor?.name ?? "class instance"} is not JSON`);
    own.end = this.#length;
    if (own.end - own.start > this.#least) around.inner.push(own);
    else around.ends.push(this.#length);
  }

  #array(items, own, depth) {
    this.#put("[");
    for (let index = 0; index < items.length; index += 1) {
      if (index > 0) this.#put(",");
      below(index, () => this.value(items[index], own, depth));
    }
    this.#put("]");
  }

  #object(members, own, depth) {
    this.#put("{");
    const names = Object.keys(members);
    if (names.length > this.#max) throw new TooLarge();
    if (Object.getOwnPropertySymbols(members).length > 0) throw new NotJson("a name that is a symbol");
    names.sort(); // by UTF-16 code units, as RFC 8785 section 3.2.3 has it
    names.forEach((name, index) => {
      if (index > 0) this.#put(",");
      below(name, () => {
        this.#string(name, own, false);
        this.#put(":");
        this.value(members[name], own, depth);
      });
    });
    this.#put("}");
  }

  #string(text, around, ends) {
    const start = this.#length;
    if (start + text.length > this.#max) throw new TooLarge();
    if (!text.isWellFormed()) throw new NotJson("a lone surrogate in a string");
    this.#put(JSON.stringify(text)); // escapes exactly what RFC 8785 section 3.2.2.2 escapes
    if (this.#length - start > this.#least) {
      around.inner.push({ ...region(start, true), end: this.#length });
    } else if (ends) {
      around.ends.push(this.#length);
    }
  }

  #put(text) {
    const most = this.#length + 3 * text.length; // UTF-8 has at most three bytes for a UTF-16 code unit
    if (most > this.#buffer.length) {
      const larger = Buffer.allocUnsafe(Math.max(most, 2 * this.#buffer.length));
      this.#buffer.copy(larger, 0, 0, this.#length);
      this.#buffer = larger;
    }
    this.#length += this.#buffer.write(text, this.#length, "utf8");
    if (this.#length > this.#max) throw new TooLarge();
  }
}

function below(step, write) {
  try {
    write();
  } catch (error) {
    if (error instanceof NotJson) error.above.push(step);
    throw error;
  }
}

function isPlain(value) {
  const above = Object.getPrototypeOf(value);
  return above === null || Object.getPrototypeOf(above) === null; // also of another realm
}

function written(number) {
  if (!Number.isFinite(number)) throw new NotJson("a number that is not finite");
  if (Number.isInteger(number) && !Number.isSafeInteger(number)) throw new NotJson("a number beyond 2^53-1");
  return String(number); // RFC 8785 section 3.2.2.3 is ECMAScript's own notation; -0 is written 0
}

/** The parts of the text in order; together they are all of it. */
export function split(text, sizes) {
  const splitter = new Splitter(text.data, sizes);
  splitter.region(text.root);
  splitter.finish(text.root.end);
  return splitter.parts;
}

class Splitter {
  parts = [];
  #data;
  #sizes;
  #at = 0; // where the part begins that is not cut yet

  constructor(data, sizes) {
    this.#data = data;
    this.#sizes = sizes;
  }

  region(region) {
    this.#boundary(region.start);
    let start = region.start;
    for (const inner of region.inner) {
      this.#run(region, start, inner.start);
      this.region(inner);
      start = inner.end;
    }
    this.#run(region, start, region.end);
    this.#boundary(region.end);
  }

  finish(end) {
    this.#boundary(end);
    if (this.#at < end) this.#cut(end);
  }

  /** Cuts inside `text[start:end]`, which lies directly in `region`. None leaves less than `least` behind it. */
  #run(region, start, end) {
    const last = Math.min(end, region.end - this.#sizes.least);
    for (;;) {
      const first = Math.max(start + 1, this.#at + this.#sizes.least);
      const full = this.#at + this.#sizes.most;
      if (first > last) return;
      const chosen = region.isString
        ? this.#chooseInString(region, first, Math.min(last, full), full <= last)
        : this.#chooseBetweenValues(region, start, first, Math.min(last, full), full <= last);
      if (chosen === null) return;
      this.#cut(chosen);
    }
  }

  /** The first offset from `first` to `last` that the text chooses; without one, and `forced`, the last. */
  #chooseBetweenValues({ ends }, start, first, last, forced) {
    const low = lowerBound(ends, first);
    let previous = low > 0 ? Math.max(start, ends[low - 1]) : start;
    let index = low;
    for (; index < ends.length && ends[index] <= last; index += 1) {
      const end = ends[index];
      // A long value is followed by a cut more likely than a short one: so much for each of its bytes.
      if (this.#crc32(Math.max(start, end - WINDOW), end) * this.#sizes.spread < (end - previous) * 2 ** 32) return end;
      previous = end;
    }
    return forced && index > low ? ends[index - 1] : null;
  }

  #chooseInString(region, first, last, forced) {
    const data = this.#data;
    const limit = Math.floor(2 ** 32 / this.#sizes.spread);
    let mixed = 0;
    for (let offset = Math.max(region.start, first - GEAR_WINDOW); offset < last; ) {
      mixed = ((mixed << 1) + GEAR[data[offset]]) >>> 0;
      offset += 1;
      if (mixed < limit && offset >= first && !isContinuation(data[offset])) return offset;
    }
    if (!forced) return null;
    let aligned = last;
    while (isContinuation(data[aligned])) aligned -= 1;
    return aligned;
  }

  #crc32(start, end) {
    let rest = 0xffffffff;
    for (let offset = start; offset < end; offset += 1) rest = (rest >>> 8) ^ CRC[(rest ^ this.#data[offset]) & 0xff];
    return (rest ^ 0xffffffff) >>> 0;
  }

  #boundary(at) {
    const length = at - this.#at;
    if (length >= this.#sizes.least) {
      this.#cut(at);
    } else if (length > 0) {
      const glued = this.parts.at(-1)?.glue ? this.parts.at(-1) : null;
      const start = glued === null ? this.#at : glued.start;
      if (at - start > this.#sizes.glue) return;
      if (glued !== null) this.parts.pop();
      this.parts.push({ start, end: at, glue: true });
      this.#at = at;
    }
  }

  #cut(at) {
    this.parts.push({ start: this.#at, end: at, glue: false });
    this.#at = at;
  }
}

function isContinuation(byte) {
  return (byte & 0xc0) === 0x80;
}

/** The first index of `sorted` whose number is not below `wanted`. */
function lowerBound(sorted, wanted) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
