"""Checkpoint envelopes: progress of agents and workflows that a restart can stand on (docs/checkpoints.md)."""

from chio_process.checkpoints.agent import AgentIdentity, AgentPhase, AgentState
from chio_process.checkpoints.effects import (
    Effect,
    EffectsByWork,
    EffectStore,
    KernelEffects,
    SqliteEffects,
    Standing,
    Work,
)
from chio_process.checkpoints.envelope import Checkpoint, new_checkpoint_id
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.migrations import BUILT_IN, Migration, MigrationRegistry, migrate, migrate_file
from chio_process.checkpoints.process_state import ProcessStateStore
from chio_process.checkpoints.progress import Identity, InFlight, Progress, advance, read, start
from chio_process.checkpoints.resume import Completed, Continued, PlannedEffect, ResumePolicy, Retried, resume
from chio_process.checkpoints.sqlite import SqliteStore
from chio_process.checkpoints.store import CheckpointStore
from chio_process.checkpoints.usage import Usage
from chio_process.checkpoints.workflow import Branch, WorkflowIdentity, WorkflowState

__all__ = [
    "BUILT_IN",
    "AgentIdentity",
    "AgentPhase",
    "AgentState",
    "Branch",
    "Checkpoint",
    "CheckpointError",
    "CheckpointErrorKind",
    "CheckpointStore",
    "Completed",
    "Continued",
    "Effect",
    "EffectStore",
    "EffectsByWork",
    "Identity",
    "InFlight",
    "KernelEffects",
    "Migration",
    "MigrationRegistry",
    "PlannedEffect",
    "ProcessStateStore",
    "Progress",
    "ResumePolicy",
    "Retried",
    "SqliteEffects",
    "SqliteStore",
    "Standing",
    "Usage",
    "Work",
    "WorkflowIdentity",
    "WorkflowState",
    "advance",
    "migrate",
    "migrate_file",
    "new_checkpoint_id",
    "read",
    "resume",
    "start",
]
