import { type Json, type ProcessClient, WorkerError } from "./index.js";

/**
 * Names a written document; a few hundred bytes, 5 KiB at most. `bytes` and `sha256` are those of its canonical text
 * (RFC 8785); `index` is the JSON array of its parts, and `blobs` the digests of the blobs that the index is in.
 */
export interface SnapshotReference {
  schema: "chio.process.json-snapshot.v1";
  bytes: number;
  sha256: string;
  index: { bytes: number; sha256: string; blobs: string[] };
}

/**
 * A document that could not be written or read. `code`, beside what any call of the client can end with:
 *
 * - `invalid_request`: write; the document is not JSON of the protocol, nothing was sent
 * - `snapshot_too_large`: write; its canonical text is over 8 MiB, nothing was sent
 * - `limit_reached`: write; the new blobs do not fit into the tree's storage, and nothing was written; or the kernel
 *   refused one after others were stored, which stay charged (the message says how many): another process of the tree
 *   used up the room meanwhile
 * - `blob_missing`: read; a blob that the reference needs is not among this process's
 * - `invalid_snapshot`: read; the reference, the index or a part is not what it must be
 */
export declare class SnapshotError extends WorkerError {}

/**
 * Writes and reads documents over one client. It remembers which blobs it has stored or read, and sends none of them
 * again: after `read(reference)`, writing an edited document sends what is new.
 */
export declare class JsonSnapshot {
  constructor(client: ProcessClient);
  /**
   * Stores a document and resolves to its reference, which has to go into a checkpoint. The same document can be
   * written again whatever the call came to; fragments that were stored are not charged twice.
   */
  write(document: Json): Promise<SnapshotReference>;
  /** The document that `write` resolved to this reference for; everything about it is checked. */
  read(reference: SnapshotReference): Promise<Json>;
}
