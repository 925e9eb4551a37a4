-- The state of one host. Times are Unix milliseconds; digests are lower-case hex unless the column says raw. A column
-- called sealed holds its text as it is, or encrypted under its process's data key (`vault.py`) if there is one.
-- Texts called JCS are RFC 8785 and are never parsed and rebuilt: what was stored is what is signed and answered.

CREATE TABLE host (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    runtime_id    TEXT NOT NULL,               -- random UUID of this host
    created_ms    INTEGER NOT NULL,
    bootstrap     TEXT NOT NULL,               -- JCS, signed: keys, digests, storage, processes
    bootstrap_id  TEXT NOT NULL,               -- digest of what was signed
    config_path   TEXT NOT NULL,               -- where the operator's own files lay at init: a change there is refused
    policy_path   TEXT NOT NULL,
    ready         INTEGER NOT NULL CHECK (ready IN (0, 1)),  -- 1 only when every file of the state is on disk
    plan          TEXT,                        -- JCS of the frozen plan, with what it resolved to but without its workers'
                                               -- inputs; null before the first run
    epoch         INTEGER NOT NULL DEFAULT 0,  -- how often this state was restored from a backup
    replay_only   INTEGER NOT NULL DEFAULT 0 CHECK (replay_only IN (0, 1))  -- restored, and not yet accepted
) STRICT;

CREATE TABLE data_key (                        -- none in a state without a key file
    process       TEXT PRIMARY KEY,            -- empty: the host's own
    wrapped       BLOB,                        -- sealed under the key file; null once destroyed
    tombstone     INTEGER REFERENCES leaf (idx),  -- the leaf that says so
    CHECK ((wrapped IS NULL) = (tombstone IS NOT NULL))
) STRICT;

CREATE TABLE plan_input (
    process       TEXT PRIMARY KEY REFERENCES process (id),
    value         BLOB NOT NULL                -- JCS, sealed
) STRICT;

CREATE TABLE counter (                         -- for operators; says nothing about what was done
    process       TEXT NOT NULL REFERENCES process (id),
    name          TEXT NOT NULL,
    value         INTEGER NOT NULL,
    PRIMARY KEY (process, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE process (
    position      INTEGER PRIMARY KEY,         -- order of declaration; root is 0
    id            TEXT NOT NULL UNIQUE,
    parent        TEXT REFERENCES process (id),
    depth         INTEGER NOT NULL CHECK (depth >= 0),
    share_bps     INTEGER NOT NULL CHECK (share_bps BETWEEN 1 AND 10000),
    ceiling       INTEGER NOT NULL CHECK (ceiling >= 1),  -- most new logical calls of its subtree
    state         TEXT NOT NULL CHECK (state IN ('running', 'cancelled')),
    capability_id TEXT NOT NULL UNIQUE,
    capability    TEXT NOT NULL                -- JCS, signed by the authority key
) STRICT;

CREATE TABLE usage (                           -- apart from `process`: a debit must not rewrite the capability text
    process       TEXT PRIMARY KEY REFERENCES process (id),
    calls         INTEGER NOT NULL CHECK (calls >= 0)  -- new logical calls of the subtree, refused ones too
) STRICT, WITHOUT ROWID;

CREATE TABLE grant_usage (                     -- only for grants that carry max_invocations
    process       TEXT NOT NULL REFERENCES process (id),
    position      INTEGER NOT NULL,            -- index of the grant in the capability
    used          INTEGER NOT NULL CHECK (used >= 0),
    PRIMARY KEY (process, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE revocation (                      -- a capability and, through the chain, its descendants
    capability_id TEXT PRIMARY KEY,
    at_ms         INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE leaf (                            -- the append-only log
    idx           INTEGER PRIMARY KEY,         -- from 0, without a gap
    type          TEXT NOT NULL CHECK (type IN ('bootstrap', 'intent', 'receipt', 'incident', 'attempt', 'launch', 'exit',
                      'revocation', 'cancellation', 'reconciliation', 'tombstone', 'epoch')),
    body          TEXT NOT NULL,               -- JCS
    signature     TEXT,                        -- null where the checkpoints do the signing
    disclosed     BLOB,                        -- receipts: JCS beside the signed body, sealed; not part of the leaf
    hash          BLOB NOT NULL CHECK (length(hash) = 32)  -- raw, RFC 9162 leaf hash
) STRICT;

CREATE TABLE log_checkpoint (
    size          INTEGER PRIMARY KEY,         -- leaves it covers
    frontier      BLOB NOT NULL,               -- raw, roots of the full subtrees, largest first
    note          TEXT NOT NULL                -- C2SP tlog-checkpoint
) STRICT;

CREATE TABLE call (
    id            INTEGER PRIMARY KEY,
    process       TEXT NOT NULL REFERENCES process (id),
    operation_key TEXT NOT NULL,
    state         TEXT NOT NULL CHECK (state IN ('refused', 'completed', 'dispatched', 'compensated', 'unknown', 'reconciled')),
    server        TEXT NOT NULL,
    tool          TEXT NOT NULL,
    recovery_policy TEXT NOT NULL CHECK (recovery_policy IN ('default', 'known_outcome_only')),
    binding       TEXT NOT NULL,
    parameter_salt BLOB NOT NULL,              -- raw, sealed; drawn once per key; empty once deleted
    parameter_hash TEXT NOT NULL,
    parameters    BLOB,                        -- JCS, sealed; only while dispatched: a receipt discloses them
    dispatch      INTEGER NOT NULL CHECK (dispatch BETWEEN 1 AND 3),
    request_id    TEXT NOT NULL,
    attempt       INTEGER,                     -- attempt that made the call; null under serve
    launch_id     TEXT,
    debited       TEXT,                        -- JCS list of [process, grant] debited from max_invocations, null when none
    reason        TEXT,                        -- of a refusal or an unknown outcome
    output        BLOB,                        -- JCS of the whole output object, sealed
    receipt       INTEGER REFERENCES leaf (idx),  -- the receipt that answers; null while dispatched
    reconciliation TEXT,                       -- JCS {outcome, by, record}: the operator's statement, beside the receipt
    UNIQUE (process, operation_key),
    CHECK ((state = 'dispatched') = (receipt IS NULL)),
    CHECK ((state = 'dispatched') = (parameters IS NOT NULL))
) STRICT;

CREATE TABLE quarantine (                      -- dispatched calls whose row recovery could not believe; they stay as they are
    process       TEXT NOT NULL,
    operation_key TEXT NOT NULL,
    why           TEXT NOT NULL,
    PRIMARY KEY (process, operation_key)
) STRICT, WITHOUT ROWID;

CREATE INDEX call_dispatched ON call (id) WHERE state = 'dispatched';

CREATE TABLE attempt (
    process       TEXT NOT NULL REFERENCES process (id),
    number        INTEGER NOT NULL CHECK (number >= 1),
    state         TEXT NOT NULL CHECK (state IN ('reserved', 'running', 'ended')),
    credential    BLOB NOT NULL CHECK (length(credential) = 32),  -- raw SHA-256 of the credential
    confined      INTEGER NOT NULL CHECK (confined IN (0, 1)),
    reserved_ms   INTEGER NOT NULL,
    launch_id     TEXT,
    outcome       TEXT,
    peak_resident_bytes INTEGER,
    peak_resident_source TEXT,
    cpu_ms        INTEGER,
    exports       TEXT,                        -- JCS list of staged files {staged, file, bytes, sha256}; null once settled
    PRIMARY KEY (process, number),
    CHECK ((state = 'ended') = (outcome IS NOT NULL))
) STRICT, WITHOUT ROWID;

CREATE TABLE credential (                      -- of workers that someone else launches (`serve`)
    digest        BLOB PRIMARY KEY CHECK (length(digest) = 32),  -- raw SHA-256
    process       TEXT NOT NULL REFERENCES process (id),
    issued_ms     INTEGER NOT NULL,
    revoked       INTEGER NOT NULL CHECK (revoked IN (0, 1))
) STRICT, WITHOUT ROWID;

CREATE TABLE attempt_log (
    process       TEXT NOT NULL,
    number        INTEGER NOT NULL,
    stream        TEXT NOT NULL CHECK (stream IN ('stdout', 'stderr')),
    kept          BLOB NOT NULL,               -- at most 64 KiB, the credential replaced; sealed
    bytes         INTEGER NOT NULL,            -- written by the worker in all
    PRIMARY KEY (process, number, stream)
) STRICT;

CREATE TABLE server_start (                    -- the newest starts of each tool server
    server        TEXT NOT NULL,
    number        INTEGER NOT NULL,
    outcome       TEXT,                        -- null while it runs
    kept          BLOB,                        -- of its stderr, at most 64 KiB; sealed under the host's key
    bytes         INTEGER,                     -- written in all
    PRIMARY KEY (server, number)
) STRICT;

CREATE TABLE worker_checkpoint (
    process       TEXT PRIMARY KEY REFERENCES process (id),
    revision      TEXT NOT NULL,               -- decimal, without limit
    value         BLOB NOT NULL,               -- JCS, at most 1 MiB, sealed
    bytes         INTEGER NOT NULL,            -- of the value as it is
    saved_ms      INTEGER NOT NULL
) STRICT;

CREATE TABLE blob (
    process       TEXT NOT NULL REFERENCES process (id),
    sha256        TEXT NOT NULL,               -- or its keyed digest, where the data is sealed
    bytes         INTEGER NOT NULL,            -- of the data as it is
    data          BLOB NOT NULL,               -- sealed
    PRIMARY KEY (process, sha256)
) STRICT;

CREATE TABLE mailbox (
    id            TEXT PRIMARY KEY,
    last_sequence INTEGER NOT NULL,            -- of the newest message, 0 before the first
    acknowledged_through INTEGER NOT NULL,
    pending_messages INTEGER NOT NULL,
    pending_bytes INTEGER NOT NULL,
    CHECK (acknowledged_through <= last_sequence)
) STRICT, WITHOUT ROWID;

CREATE TABLE message (
    mailbox       TEXT NOT NULL REFERENCES mailbox (id),
    sequence      INTEGER NOT NULL,
    message_key   TEXT NOT NULL,               -- or its keyed digest
    sender        TEXT NOT NULL REFERENCES process (id),
    payload_digest TEXT NOT NULL,              -- sha256 of its JCS, or the keyed digest of that; outlives the payload
    bytes         INTEGER NOT NULL,            -- of the payload as it is
    payload       BLOB,                        -- JCS, sealed; null once acknowledged or deleted
    PRIMARY KEY (mailbox, sequence),
    UNIQUE (mailbox, message_key)
) STRICT, WITHOUT ROWID;
