"""What every tier below the page pool is: a store of pages by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class TierCounters:
    """Counts of one tier since it started, in pages. Written by the tiers' threads, read by any."""

    num_read: int = 0
    num_written: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_lost: int = 0  # that could not be written
    read_s: float = 0.0
    write_s: float = 0.0


class TierStore(Protocol):
    """Pages of one layout. A page that is damaged, or gone, is not there: nothing of that is an error."""

    name: str
    counters: TierCounters
    guessed_bytes_per_s: float  # at which it is read, until that is learnt
    on_change: Callable[[Iterable[bytes]], None]  # hears of keys after they have come or gone, on whichever thread

    def has(self, key: bytes) -> bool:
        """Whether a page is there; from any thread, at once."""

    def use(self, keys: Sequence[bytes]) -> None:
        """A prompt has these pages, in this order: they go last."""

    def held(self) -> tuple[int, int]:
        """Pages and bytes; from any thread."""

    def find(self) -> None:
        """Enter what an earlier life of the worker has left."""

    def get(self, key: bytes, into: memoryview) -> bool:
        """Copy one page to `into`; `False`: it is not there."""

    def put(self, key: bytes, parent: bytes, data: memoryview) -> None:
        """Keep a copy of one page; what was used least recently makes room."""

    def discard(self, key: bytes) -> None:
        """Remove one page, if it is there."""

    def close(self) -> None:
        """Let `find` end early, and give back memory; from any thread."""
