"""What a checkpoint store promises, and the one decision that every store makes before it writes."""

from typing import Protocol

from chio_process.checkpoints.document import checked_integer, invalid
from chio_process.checkpoints.envelope import Checkpoint
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind


class CheckpointStore(Protocol):
    """Optimistic concurrency over single records: no lease, no lock. An old writer cannot replace newer state."""

    def load(self, id: str) -> Checkpoint:
        """The current revision. CheckpointError: not_found, corrupt, unavailable."""
        ...

    def compare_and_swap(self, checkpoint: Checkpoint, expected: int | None) -> None:
        """Stores `checkpoint`, which is durable when this returns.

        `expected` None creates, at revision 0, what does not exist. Otherwise the current revision has to be exactly
        `expected` and the new one the next, of the same run and kind. CheckpointError: invalid, conflict, not_found,
        foreign_run, kind_mismatch, too_large, corrupt, unavailable, in which cases the stored bytes are what they
        were; or ambiguous.
        """
        ...


def check_swap(stored: Checkpoint | None, new: Checkpoint, expected: int | None) -> None:
    """Returns if `new` may take the place of `stored`, which is what the store holds under its id."""
    if expected is not None:
        checked_integer(expected, "expected")
    if new.revision != (0 if expected is None else expected + 1):
        invalid(f"revision {new.revision} is not the one after {expected}")
    if stored is None:
        if expected is not None:
            raise CheckpointError(CheckpointErrorKind.NOT_FOUND, f"no checkpoint has the id {new.id!r}")
        return
    if stored.run_id != new.run_id:
        raise CheckpointError(CheckpointErrorKind.FOREIGN_RUN, f"{new.id!r} belongs to run {stored.run_id!r}")
    if stored.kind != new.kind:
        raise CheckpointError(CheckpointErrorKind.KIND_MISMATCH, f"{new.id!r} is of kind {stored.kind}")
    if stored.revision != expected:
        raise CheckpointError(CheckpointErrorKind.CONFLICT, f"{new.id!r} is at revision {stored.revision}")
    if new.updated_at < stored.updated_at:
        invalid(f"updated_at of {new.id!r} would go back from {stored.updated_at} to {new.updated_at}")
