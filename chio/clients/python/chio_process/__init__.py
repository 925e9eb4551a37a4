"""The worker's side of the Chio process protocol `chio.process.v1`."""

from chio_process.client import ProcessClient
from chio_process.errors import WorkerError

__all__ = ["ProcessClient", "WorkerError"]
