"""The numbers of the wire protocol that a process speaks, and the one that two of them speak with each other. Pure.

A version speaks its own number and the one before, so that a cluster can change from one version to the next while it
serves. Fields that a receiver may ignore need no new number.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import IncompatibleError

# 2: parts and commits come behind the pages; answers name the grant. 1 is not spoken any more.
# 3: outputs follow a grammar, allowed tokens and bad words; prompts have a salt and log-probabilities. A worker of 2
# would ignore all that.
OLDEST = 2
NEWEST = 3


@dataclass(frozen=True, slots=True)
class Protocols:
    """From `oldest` to `newest`; zeros: a process that has not said."""

    oldest: int = OLDEST
    newest: int = NEWEST

    def common(self, others: Protocols) -> int | None:
        """The highest number that both speak; `None`: there is none."""
        highest = min(self.newest, others.newest)
        return highest if highest >= max(self.oldest, others.oldest) else None

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"


def agree(a: Protocols, a_name: str, b: Protocols, b_name: str) -> int:
    """The number that the two speak with each other.

    Raises:
        IncompatibleError: there is none; names both.
    """
    if (number := a.common(b)) is None:
        raise IncompatibleError(
            f"{a_name} speaks protocols {a}, {b_name} speaks {b}; bring both to versions that follow each other"
        )
    return number
