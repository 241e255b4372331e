"""The name of one life of a worker process."""

from __future__ import annotations

from typing import NamedTuple


class WorkerKey(NamedTuple):
    """One life of a worker process."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"
