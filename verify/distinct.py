"""How many different ids there are among any number, in bounded memory."""

import heapq
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import IO

ID_BYTES = 32
_RUN_IDS = 1 << 18  # about 25 MB as a set


class DistinctIds:
    """Counts distinct 32-byte ids: a set while they fit, then sorted runs in temporary files that are merged."""

    def __init__(self, run_ids: int = _RUN_IDS) -> None:
        self._run_ids = run_ids
        self._recent: set[bytes] = set()
        self._runs: list[IO[bytes]] = []

    def add(self, identity: bytes) -> None:
        self._recent.add(identity)
        if len(self._recent) >= self._run_ids:
            self._spill()

    def count(self) -> int:
        if not self._runs:
            return len(self._recent)
        sorted_runs: list[Iterator[bytes]] = [iter(sorted(self._recent))]
        for run in self._runs:
            run.seek(0)
            sorted_runs.append(iter(partial(run.read, ID_BYTES), b""))
        return sum(1 for _ in groupby(heapq.merge(*sorted_runs)))

    def close(self) -> None:
        for run in self._runs:
            run.close()

    def _spill(self) -> None:
        import tempfile  # only a file with very many receipts needs it

        run = tempfile.TemporaryFile()  # noqa: SIM115 - stays open until close
        run.write(b"".join(sorted(self._recent)))
        self._runs.append(run)
        self._recent.clear()
