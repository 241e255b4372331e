"""One attempt of a sender: its states, its limits, and what it remembers of extents and batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from kvtransfer.protocol.arrivals import ExtentRun


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
        write_timeout_s: a write may take this long from when its turn on the wire has come, besides the time that its
            bytes need; a stopped receiver shows as "in progress" for ever.
        resend_s: between repeated commits while no answer comes.
        answer_timeout_s: how long the first commit may go unanswered.
        grace_s: how long the writes of an attempt that failed may go on without being the worker's concern.
        quarantine_cap_pages: more pages than this under such writes for longer, and the worker must be replaced.
        batch_bytes: one write carries at most this much, so that its receiver reads it while the next is under way.
        last_batch_bytes: and at least this much, if there is so much and the link has room.
    """

    lease_margin_s: float = 0.5
    write_timeout_s: float = 10.0
    resend_s: float = 1.0
    answer_timeout_s: float = 10.0
    grace_s: float = 15.0
    quarantine_cap_pages: int = 1024
    batch_bytes: int = 8 << 20
    last_batch_bytes: int = 4 << 20


class SealedExtents:
    """Extents whose bytes will not change any more, by layer and index of the page in the prompt."""

    def __init__(self, num_layers: int, num_pages: int) -> None:
        self._first_sent = 0
        # Invariant: of the pages from `_first_sent` on.
        self._num_unsealed = num_layers * num_pages
        # Invariant: never changes an entry, so a digest is of the bytes that were posted.
        self._pages: list[int | None] = [None] * num_pages  # here, by index
        self._digests: list[list[int | None]] = [[None] * num_pages for _ in range(num_layers)]

    @property
    def is_complete(self) -> bool:
        """Whether every extent that is sent is sealed: nothing is left to compute but the first tokens."""
        return not self._num_unsealed

    def send_from(self, first_index: int) -> None:
        """Pages before this one are not sent. Those that no token to come sees are never sealed either."""
        self._first_sent = first_index
        self._num_unsealed = sum(row[first_index:].count(None) for row in self._digests)

    def add(
        self, first_layer: int, first_index: int, local_pages: Sequence[int], digests: Sequence[Sequence[int]]
    ) -> list[ExtentRun]:
        """Enter extents, `digests[layer - first_layer][index - first_index]`, and return those that are new.

        A repeated one is fine as long as it says the same.

        Raises:
            ValueError: an extent is not of this prompt, or was sealed before with other contents.
        """
        last_layer, last = first_layer + len(digests), first_index + len(local_pages)
        if not (0 <= first_layer <= last_layer <= len(self._digests) and 0 <= first_index <= last <= len(self._pages)):
            raise ValueError(f"layers {first_layer} to {last_layer}, pages {first_index} to {last}: not of this prompt")
        known = self._digests[first_layer:last_layer]
        _check_same(self._pages[first_index:last], local_pages)
        for row, found in zip(known, digests, strict=True):
            _check_same(row[first_index:last], found)
        unsealed = ((layer, row[first_index:last]) for layer, row in enumerate(known, first_layer))
        fresh = [run for layer, row in unsealed for run in _runs_where(layer, first_index, row, is_none=True)]
        self._pages[first_index:last] = local_pages
        for row, found in zip(known, digests, strict=True):
            row[first_index:last] = found
        sent_from = self._first_sent
        self._num_unsealed -= sum(max(0, first + num - max(first, sent_from)) for _, first, num in fresh)
        return fresh

    def from_page(self, first_index: int) -> list[ExtentRun]:
        """All of them in pages from `first_index` on, layer by layer."""
        rows = ((layer, row[first_index:]) for layer, row in enumerate(self._digests))
        return [run for layer, row in rows for run in _runs_where(layer, first_index, row, is_none=False)]

    def local_pages(self, first_index: int, num_pages: int) -> list[int]:
        """The pages here of sealed pages of the prompt."""
        return self._pages[first_index : first_index + num_pages]  # type: ignore[return-value]

    def digests(self, first_index: int, last_index: int) -> tuple[tuple[int, ...], ...]:
        """Of pages that are sealed in all layers, as `[layer][index - first_index]`."""
        return tuple(tuple(row[first_index:last_index]) for row in self._digests)  # type: ignore[arg-type]


def _check_same(known: Sequence[int | None], said: Sequence[int]) -> None:
    """Raises `ValueError` where something else is known already."""
    if len(known) != len(said) or any(a is not None and a != b for a, b in zip(known, said, strict=True)):
        raise ValueError(f"sealed before with other contents: {known[:8]}…, now {said[:8]}…")


def _runs_where(layer: int, first_index: int, row: Sequence[int | None], *, is_none: bool) -> Iterator[ExtentRun]:
    """Where `row`, of pages from `first_index` on, has `None`, or has not."""
    index = first_index
    for found, values in groupby(row, lambda value: value is None):
        num = len(list(values))
        if found is is_none:
            yield ExtentRun(layer, index, num)
        index += num


class UnpostedExtents:
    """What is sealed and not posted yet, in order.

    Attributes:
        num_extents: how many are left.
    """

    def __init__(self, runs: Iterable[ExtentRun] = ()) -> None:
        self._runs: deque[ExtentRun] = deque()
        self.num_extents = 0
        self.add(runs)

    def add(self, runs: Iterable[ExtentRun]) -> None:
        for run in runs:
            self._runs.append(run)
            self.num_extents += run.num_pages

    def cut(self, most: int, least: int) -> tuple[ExtentRun, ...]:
        """Take out the next batch: half of what is left, at most `most` extents, and at least `least` as far as `most`
        allows. So few batches carry nearly all, and little is left for the receiver to read when the last one has
        arrived."""
        left = self.num_extents
        room = min(left, most, max(least, left // 2))
        if left - room < least:  # such a rest is not worth a batch
            room = min(left, most)
        self.num_extents -= room
        batch = []
        while room:
            run = self._runs.popleft()
            num = min(run.num_pages, room)
            batch.append(run._replace(num_pages=num))
            if num < run.num_pages:
                self._runs.appendleft(ExtentRun(run.layer, run.first_index + num, run.num_pages - num))
            room -= num
        return tuple(batch)

    def clear(self) -> None:
        self._runs.clear()
        self.num_extents = 0


@dataclass(slots=True)
class Batch:
    """One `PostWrites` that is not settled."""

    runs: tuple[ExtentRun, ...]  # by index in the prompt
    pages: frozenset[int]
    num_bytes: int


class WrittenExtents:
    """Extents whose bytes are in the receiver's memory, by layer and index of the page in the prompt."""

    def __init__(self, num_layers: int, num_pages: int) -> None:
        self._rows = [bytearray(num_pages) for _ in range(num_layers)]  # 1: written

    def add(self, runs: Iterable[ExtentRun]) -> None:
        for layer, first, num in runs:
            self._rows[layer][first : first + num] = b"\1" * num

    def end_of_run(self, first: int, last: int) -> int:
        """Where the run of pages that are written in all layers ends, which begins at `first`; at most `last`."""
        while first < last and all(row[first] for row in self._rows):
            first += 1
        return first

    def missing(self, first: int, last: int) -> list[tuple[int, int]]:
        """Extents of these pages that are not written, as (layer, index)."""
        return [
            (layer, index)
            for layer, row in enumerate(self._rows)
            if 0 in row[first:last]
            for index in range(first, last)
            if not row[index]
        ]
