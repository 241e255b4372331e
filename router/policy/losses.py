"""Tells deaths from connections that were lost, among the workers that one request had. Pure.

A worker is lost when its stream breaks or falls silent. It has died only if its process has ended: the supervisor or
another worker says so. One that is heard again, as the same process, has not: it could only not be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from tandem.core.identity import WorkerKey

#: So many deaths during one request are enough: it may be what kills them.
_MAX_DEATHS = 2


class Fate(Enum):
    """What has become of a worker that was lost."""

    UNKNOWN = "unknown"
    HEARD = "heard"  # the same process is connected again
    ENDED = "ended"


class Losses:
    """Attributes:
    died: whose processes have ended; that stays so.
    missing: lost, and not heard of since. Disjoint from `died`.
    """

    def __init__(self) -> None:
        self.died: set[WorkerKey] = set()
        self.missing: set[WorkerKey] = set()

    def note_lost(self, worker: WorkerKey) -> None:
        if worker not in self.died:
            self.missing.add(worker)

    def note_ended(self, worker: WorkerKey) -> None:
        self.died.add(worker)
        self.missing.discard(worker)

    def learn(self, fate_of: Callable[[WorkerKey], Fate]) -> None:
        """What is known by now of those that are missing."""
        for worker in tuple(self.missing):
            fate = fate_of(worker)
            if fate is Fate.ENDED:
                self.note_ended(worker)
            elif fate is Fate.HEARD:
                self.missing.discard(worker)

    @property
    def are_too_many(self) -> bool:
        """Whether the request must not be given to another worker, ever."""
        return len(self.died) >= _MAX_DEATHS

    @property
    def may_be_too_many(self) -> bool:
        """Whether the request must not be given to another worker as long as nothing more is known."""
        return len(self.died) + len(self.missing) >= _MAX_DEATHS
