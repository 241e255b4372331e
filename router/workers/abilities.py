"""What every worker that takes requests can do. Pure; asking costs the same however many there are."""

from __future__ import annotations

from typing import NamedTuple

from tandem.core.identity import WorkerKey
from tandem.core.tally import Tally


class Ability(NamedTuple):
    """Of one worker.

    Attributes:
        max_context: tokens of prompt and output that it can hold; 0: it has not said.
        protocol: the newest number of the protocol that it speaks.
    """

    max_context: int
    protocol: int


class Abilities(Tally[WorkerKey, Ability]):
    """Those of each worker."""

    @property
    def max_context(self) -> int | None:
        """Tokens that all can hold; `None` where none has said."""
        return min((a.max_context for a in self.num if a.max_context), default=None)

    @property
    def protocol(self) -> int | None:
        """The newest number that all speak; `None` where there is no worker."""
        return min((a.protocol for a in self.num), default=None)
