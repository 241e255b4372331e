"""One attempt of a sender: its states, its limits, and what it remembers of extents and batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class SenderState(Enum):
    WAITING = "waiting"  # no grant yet; sealed extents pile up
    SENDING = "sending"  # granted: extents are posted as they are sealed
    COMMITTED = "committed"  # every extent is written; waiting for the answer
    DRAINING = "draining"  # failed, and writes are outstanding
    DONE = "done"  # released everything


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """Times in seconds.

    Attributes:
        lease_margin_s: nothing is posted this close to the end of the lease.
        write_timeout_s: a batch may take this long; a stopped receiver shows as "in progress" for ever.
        resend_s: between repeated commits while no answer comes.
        answer_timeout_s: how long the first commit may go unanswered.
        grace_s: how long the writes of an attempt that failed may go on without being the worker's concern.
        quarantine_cap_pages: more pages than this under such writes for longer, and the worker must be replaced.
    """

    lease_margin_s: float = 0.5
    write_timeout_s: float = 10.0
    resend_s: float = 1.0
    answer_timeout_s: float = 10.0
    grace_s: float = 15.0
    quarantine_cap_pages: int = 1024


@dataclass(frozen=True, slots=True)
class SealedExtent:
    local_page: int
    digest: int


class SealedExtents:
    """Extents whose bytes will not change any more, as (layer, index of the page in the prompt)."""

    def __init__(self, num_layers: int, num_pages: int) -> None:
        self._num_layers = num_layers
        self._num_pages = num_pages
        # Invariant: never changes an entry, so a digest is of the bytes that were posted.
        self._extents: dict[tuple[int, int], SealedExtent] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every extent of the prompt is sealed: nothing is left to compute but the first tokens."""
        return len(self._extents) == self._num_layers * self._num_pages

    def add(
        self, layer: int, first_index: int, local_pages: Sequence[int], digests: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Enter extents and return those that are new; a repeated one is fine as long as it says the same.

        Raises:
            ValueError: an extent is not of this prompt, or was sealed before with other contents.
        """
        fresh = []
        for index, (page, digest) in enumerate(zip(local_pages, digests, strict=True), start=first_index):
            extent, sealed = (layer, index), SealedExtent(page, digest)
            if not (0 <= layer < self._num_layers and 0 <= index < self._num_pages):
                raise ValueError(f"extent {extent} is not of this prompt")
            if self._extents.setdefault(extent, sealed) is sealed:
                fresh.append(extent)
            elif self._extents[extent] != sealed:
                raise ValueError(f"extent {extent} was sealed before with other contents")
        return fresh

    def from_page(self, first_index: int) -> list[tuple[int, int]]:
        """All of them in pages from `first_index` on, in the order in which they were sealed."""
        return [extent for extent in self._extents if extent[1] >= first_index]

    def local_page(self, extent: tuple[int, int]) -> int:
        return self._extents[extent].local_page

    def digests(self, indices: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Of these pages, as `[layer][index]`."""
        wanted = tuple(indices)
        return tuple(tuple(self._extents[layer, i].digest for i in wanted) for layer in range(self._num_layers))


@dataclass(slots=True)
class Batch:
    """One `PostWrites` that is not settled."""

    extents: tuple[tuple[int, int], ...]  # (layer, index)
    pages: frozenset[int]
    since_s: float  # issued, or posted when that is known


class WrittenExtents:
    """Extents whose bytes are in the receiver's memory, as (layer, index of the page in the prompt)."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._extents: set[tuple[int, int]] = set()
        # Invariant: by index, how many layers of the page are in _extents.
        self._num_layers_of: Counter[int] = Counter()

    def add(self, extents: Iterable[tuple[int, int]]) -> None:
        fresh = set(extents) - self._extents
        self._extents |= fresh
        self._num_layers_of.update(index for _, index in fresh)

    def end_of_run(self, first: int, last: int) -> int:
        """Where the run of pages that are written in all layers ends, which begins at `first`; at most `last`."""
        while first < last and self._num_layers_of[first] == self._num_layers:
            first += 1
        return first

    def missing(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """Extents of these pages that are not written."""
        wanted = list(indices)
        return [(la, i) for la in range(self._num_layers) for i in wanted if (la, i) not in self._extents]
