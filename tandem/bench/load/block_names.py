"""Which prompts begin alike, by the names of their blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class BlockNames:
    """Gives each beginning of a prompt a number, so that equal ids behind different beginnings stay apart."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """Different beginnings."""
        return len(self._numbers)

    def keys(self, block_ids: Iterable[int]) -> tuple[list[int], int]:
        """A key for each block, chained over those before it; and how many leading ones had been named before."""
        keys, num_before, previous = [], len(self._numbers), -1
        num_seen = 0
        for block in block_ids:
            previous = self._numbers.setdefault((previous, block), len(self._numbers))
            keys.append(previous)
            num_seen += previous < num_before
        return keys, num_seen
