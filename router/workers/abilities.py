"""What every worker that takes requests can do. Pure; asking costs the same however many there are."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tandem.core.identity import WorkerKey


class Ability(NamedTuple):
    """Of one worker.

    Attributes:
        max_context: tokens of prompt and output that it can hold; 0: it has not said.
        protocol: the newest number of the protocol that it speaks.
    """

    max_context: int
    protocol: int


class Abilities:
    """Few differ: they are counted by their value."""

    def __init__(self) -> None:
        # Invariant: the second counts the values of the first.
        self._of: dict[WorkerKey, Ability] = {}
        self._counts: Counter[Ability] = Counter()

    def __contains__(self, key: WorkerKey) -> bool:
        return key in self._of

    def put(self, key: WorkerKey, ability: Ability) -> None:
        if self._of.get(key) != ability:
            self.discard(key)
            self._of[key] = ability
            self._counts[ability] += 1

    def discard(self, key: WorkerKey) -> None:
        if (before := self._of.pop(key, None)) is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]

    @property
    def max_context(self) -> int | None:
        """Tokens that all can hold; `None` where none has said."""
        return min((a.max_context for a in self._counts if a.max_context), default=None)

    @property
    def protocol(self) -> int | None:
        """The newest number that all speak; `None` where there is no worker."""
        return min((a.protocol for a in self._counts), default=None)
