/** What can be sent and what comes back. Integers are plain numbers: the kernel refuses those beyond 2^53 - 1. */
export type Json = null | boolean | number | string | Json[] | { [member: string]: Json };

/** Whatever `code` says; the kernel may add codes, so a program treats one that it does not know as a failure. */
export type WorkerErrorCode =
  // from the kernel
  | "unauthenticated"
  | "invalid_request"
  | "cancelled"
  | "conflict"
  | "checkpoint_conflict"
  | "limit_reached"
  | "runtime_error"
  | "response_too_large"
  | "invalid_frame"
  | "frame_timeout"
  | "blob_missing"
  // from the client
  | "transport_error"
  | "truncated_response"
  | "invalid_response"
  | "request_too_large"
  | (string & {});

/** A call that did not return a result. `code` is for programs, the message for people. */
export declare class WorkerError extends Error {
  readonly code: WorkerErrorCode;
  constructor(code: WorkerErrorCode, message: string, options?: ErrorOptions);
}

/** `revision` is a decimal string, `"0"` (with a null value) before the first save. */
export interface Checkpoint {
  revision: string;
  value: Json;
}

export interface Inspection {
  process_id: string;
  parent_id: string | null;
  root_id: string;
  state: "running" | "cancelled";
  depth: number;
  limits: { [name: string]: Json };
  tree_calls: number;
  checkpoint: Checkpoint;
  storage: { [name: string]: Json };
}

export type ToolOutput =
  | { kind: "value"; value: Json }
  | { kind: "text"; text: string }
  | { kind: "withheld"; reason: "too_large"; bytes: number; sha256: string };

/** A refusal is a result: read `verdict`, then `terminal_state`, then `output`. */
export interface ToolResult {
  request_id: string;
  verdict: "allow" | "deny";
  terminal_state: { state: "completed" | "incomplete"; reason?: string };
  output: ToolOutput | null;
  reason: string | null;
  /** The exact signed text. Keep it as it is. */
  receipt_json: string;
  reconciliation?: { [name: string]: Json };
  execution_nonce_json: string | null;
}

export interface BlobReference {
  sha256: string;
  bytes: number;
}

export interface ClientOptions {
  /** Bounds each call, in milliseconds. 60000 if absent. */
  timeoutMs?: number;
}

export interface InvokeOptions {
  /** Asks the kernel never to dispatch this key a second time. */
  knownOutcomeOnly?: boolean;
}

/** What a worker says of its own recovery. */
export type RecoveryEvent = "resumed" | "ambiguous_resume" | "schema_refused";

export interface NoteOptions {
  /** How old what it resumed from was, in milliseconds. */
  ageMs?: number;
}

/**
 * A worker's connection to its Chio kernel. Every method rejects with a `WorkerError`, and none of them repeats a
 * request: whether to make the same call again is the application's decision.
 */
export declare class ProcessClient {
  constructor(socketPath: string, credential: string, options?: ClientOptions);
  inspect(): Promise<Inspection>;
  /** Calls a tool under a key that stays the same whenever this same work is tried again. */
  invoke(
    key: string,
    server: string,
    tool: string,
    args: { [member: string]: Json },
    options?: InvokeOptions,
  ): Promise<ToolResult>;
  /** Saves `value` if the checkpoint is still at `expectedRevision`; otherwise `checkpoint_conflict`. */
  checkpoint(expectedRevision: string, value: Json): Promise<Checkpoint>;
  /** Stores at most 1 MiB, for ever and for this process alone. */
  putBlob(data: Uint8Array): Promise<BlobReference>;
  /** The bytes of a blob that this process stored, checked against `sha256`. */
  readBlob(sha256: string): Promise<Uint8Array>;
  /** Cancels this process and all below it, for good. */
  cancel(): Promise<{ cancelled_processes: Json }>;
  /** Counts an event of this worker's own recovery, for the operator's `status`; it is no evidence. */
  note(event: RecoveryEvent, options?: NoteOptions): Promise<{ [member: string]: never }>;
  /** Closes the kept connection. The next call connects again. */
  close(): void;
}
