"""Checkpoints in a worker's process state: one member of the process's one value for each of them."""

from typing import Any, NoReturn, Protocol

from chio_process.checkpoints.document import JsonObject, encode
from chio_process.checkpoints.envelope import MAX_CHECKPOINT_BYTES, Checkpoint
from chio_process.checkpoints.errors import CheckpointError, CheckpointErrorKind
from chio_process.checkpoints.store import check_swap
from chio_process.errors import WorkerError

# A save that another save of the same value overtook is decided again on what is there then, this many times in all.
_MAX_SAVES = 8
# After these the kernel may have stored the value or not.
_LOST = {"transport_error", "truncated_response", "invalid_response", "response_too_large", "runtime_error"}


class StateClient(Protocol):
    """What is needed of a `chio_process.ProcessClient`."""

    def inspect(self) -> dict[str, Any]: ...

    def checkpoint(self, expected_revision: str, value: Any) -> dict[str, Any]: ...


class ProcessStateStore:
    """A `CheckpointStore` over `ProcessClient.inspect` and `.checkpoint`.

    The checkpoint of id I is the member `SLOT/I` of the process's value. Every other member is carried forward as it
    is, and the kernel's compare-and-swap of the whole value fences all of them. The value has to be null or an object
    and at most 1 MiB in all.
    """

    def __init__(self, client: StateClient, slot: str = "chio.checkpoints") -> None:
        self._client = client
        self._slot = slot

    def load(self, id: str) -> Checkpoint:
        _, value = self._read()
        stored = self._stored(value, id)
        if stored is None:
            raise CheckpointError(CheckpointErrorKind.NOT_FOUND, f"no checkpoint has the id {id!r}")
        return stored

    def compare_and_swap(self, checkpoint: Checkpoint, expected: int | None) -> None:
        """As the protocol says. After a lost reply it rereads: what was to be saved is there, and this returns; the
        value's revision is what it was, and the very same save goes out once more; else `ambiguous`."""
        document = checkpoint.to_document()
        for _ in range(_MAX_SAVES):
            revision, value = self._read()
            check_swap(self._stored(value, checkpoint.id), checkpoint, expected)
            changed = {**value, self._member(checkpoint.id): document}
            size = len(encode(changed).encode("utf-8"))
            if size > MAX_CHECKPOINT_BYTES:
                raise CheckpointError(
                    CheckpointErrorKind.TOO_LARGE,
                    f"the process's value would have {size} bytes, at most {MAX_CHECKPOINT_BYTES}",
                )
            try:
                self._client.checkpoint(revision, changed)
            except WorkerError as error:
                if error.code in _LOST:
                    return self._settle(checkpoint, revision, changed, error)
                if error.code != "checkpoint_conflict":
                    _refused(error)
                # Refused, so nothing of ours is stored. The loop decides on the value that overtook this save, which
                # ends it unless that one changed other members only.
                continue
            return None
        raise CheckpointError(
            CheckpointErrorKind.CONFLICT, f"other members of the value changed {_MAX_SAVES} times in a row"
        )

    def note(self, event: str, **fields: int) -> None:
        """Counts an event of recovery in the host's status, where the client and the kernel know how."""
        note = getattr(self._client, "note", None)
        if note is None:
            return
        try:
            note(event, **fields)
        except WorkerError as error:
            # A kernel that is older than the counters, or one that only replays until its restored state is accepted:
            # resuming what is completed or stable needs no write, and goes on.
            if error.code not in {"invalid_request", "runtime_error"}:
                _refused(error)

    def _settle(self, checkpoint: Checkpoint, revision: str, value: JsonObject, lost: WorkerError) -> None:
        """A save of `value` over `revision` may have been stored: find out, and send it once more if it was not."""
        if self._holds(checkpoint, revision, lost):
            return
        try:
            self._client.checkpoint(revision, value)
        except WorkerError as again:
            if again.code not in {*_LOST, "checkpoint_conflict"}:
                _ambiguous(checkpoint, again)
            # A conflict may be with the first send, which the kernel still had when the value was reread.
            if not self._holds(checkpoint, revision, again):
                _ambiguous(checkpoint, again)

    def _holds(self, checkpoint: Checkpoint, revision: str, lost: WorkerError) -> bool:
        """Whether the checkpoint is what is stored. False only if the value's revision is still `revision`."""
        try:
            current, value = self._read()
            stored = self._stored(value, checkpoint.id)
        except CheckpointError as error:
            raise CheckpointError(
                CheckpointErrorKind.AMBIGUOUS, f"{checkpoint.id!r} may be saved or not ({lost.code}, then {error})"
            ) from lost
        if stored is not None and stored.encoded() == checkpoint.encoded():
            return True
        if current == revision:
            return False
        if stored is not None and stored.revision == checkpoint.revision:
            raise CheckpointError(
                CheckpointErrorKind.CONFLICT, f"{checkpoint.id!r} is at revision {stored.revision}, another writer's"
            ) from lost
        _ambiguous(checkpoint, lost)

    def _read(self) -> tuple[str, JsonObject]:
        try:
            observed = self._client.inspect()["checkpoint"]
        except WorkerError as error:
            _refused(error)
        value = observed["value"]
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise CheckpointError(CheckpointErrorKind.CORRUPT, "the process's value is not a JSON object")
        return observed["revision"], value

    def _stored(self, value: JsonObject, id: str) -> Checkpoint | None:
        name = self._member(id)
        if name not in value:
            return None
        try:
            stored = Checkpoint.from_document(value[name])
        except CheckpointError as error:
            raise CheckpointError(CheckpointErrorKind.CORRUPT, f"{name!r} holds no checkpoint: {error}") from error
        if stored.id != id:
            raise CheckpointError(CheckpointErrorKind.CORRUPT, f"{name!r} holds the checkpoint {stored.id!r}")
        return stored

    def _member(self, id: str) -> str:
        return f"{self._slot}/{id}"


def _refused(error: WorkerError) -> NoReturn:
    kind = CheckpointErrorKind.INVALID if error.code == "invalid_request" else CheckpointErrorKind.UNAVAILABLE
    raise CheckpointError(kind, str(error)) from error


def _ambiguous(checkpoint: Checkpoint, error: WorkerError) -> NoReturn:
    raise CheckpointError(
        CheckpointErrorKind.AMBIGUOUS, f"{checkpoint.id!r} may be saved or not ({error.code}); load it and decide"
    ) from error
