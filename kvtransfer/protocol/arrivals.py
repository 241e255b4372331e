"""The tag of a write, and the digests that its receiver takes as it arrives. Pure.

A write's tag names the grant and the extents that it fills. The transport delivers it when the write has arrived; then
the receiver reads these extents once and remembers their digests, with which it compares parts and commits. A tag is a
hint; the commit is the truth. An extent without a digest is read when the commit names it. Where one digest differs,
only what lies in memory by then counts.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.extents import TakeDigests

_HEAD = struct.Struct("<QIQH")
_RUN = struct.Struct("<HII")


class ExtentRun(NamedTuple):
    """Extents of one layer in neighbouring pages, counted from the first page of the prompt or of the grant."""

    layer: int
    first_index: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class WriteTag:
    """Of one write.

    Attributes:
        handoff: the sender's own number for the handoff.
        write_id: of the write in its handoff.
        epoch: of the grant.
        runs: what the write fills, counted from the grant's first page.
    """

    handoff: int
    write_id: int
    epoch: int
    runs: tuple[ExtentRun, ...]

    def pack(self) -> bytes:
        head = _HEAD.pack(self.handoff, self.write_id, self.epoch, len(self.runs))
        return head + b"".join(_RUN.pack(*run) for run in self.runs)

    @classmethod
    def unpack(cls, tag: bytes) -> WriteTag:
        """Raises `ValueError` for what no sender packs."""
        if len(tag) < _HEAD.size:
            raise ValueError(f"{len(tag)} bytes are no tag of a write")
        handoff, write_id, epoch, num_runs = _HEAD.unpack_from(tag)
        if len(tag) != _HEAD.size + num_runs * _RUN.size:
            raise ValueError(f"{len(tag)} bytes are no tag of {num_runs} runs")
        return cls(handoff, write_id, epoch, tuple(ExtentRun(*run) for run in _RUN.iter_unpack(tag[_HEAD.size :])))


class ArrivedDigests:
    """Digests of one grant's extents as they arrived.

    Args:
        pages: the grant's.
    """

    def __init__(self, pages: Sequence[int], num_layers: int) -> None:
        self._pages = pages
        # By layer and index into `pages`; `None`: not read yet.
        self._rows: list[list[int | None]] = [[None] * len(pages) for _ in range(num_layers)]
        self.num_changed = 0  # extents that held something else when they were read again

    def covers(self, runs: Sequence[ExtentRun]) -> bool:
        """Whether these are extents of the grant, no more of them than it has."""
        num_pages, num_layers = len(self._pages), len(self._rows)
        inside = all(run.layer < num_layers and run.first_index + run.num_pages <= num_pages for run in runs)
        return inside and sum(run.num_pages for run in runs) <= num_pages * num_layers

    def read(self, runs: Sequence[ExtentRun], take: TakeDigests) -> None:
        """A write into `runs`, which are covered, has arrived. One that comes again replaces what was remembered."""
        found = take([(run.layer, self._pages[run.first_index : run.first_index + run.num_pages]) for run in runs])
        for (layer, first, num_pages), digests in zip(runs, found, strict=True):
            self._rows[layer][first : first + num_pages] = digests

    def find_mismatches(
        self, first_index: int, digests: Sequence[Sequence[int]], take: TakeDigests
    ) -> tuple[tuple[int, int], ...]:
        """Compare with what the sender sealed.

        Args:
            first_index: of the first page that is compared, in the grant.
            digests: `[layer][index - first_index]`, of all layers.

        Returns:
            `(layer, page)` of every extent whose bytes are not what its sender sealed.
        """
        last = first_index + len(digests[0])
        self._read_missing(first_index, last, take)
        if self._agree(first_index, last, digests):
            return ()
        # Something went wrong, or a digest was taken too early: what was remembered proves nothing any more.
        pages, mismatches = self._pages[first_index:last], list[tuple[int, int]]()
        again = take([(layer, pages) for layer in range(len(self._rows))])
        for layer, (row, found, wanted) in enumerate(zip(self._rows, again, digests, strict=True)):
            remembered, row[first_index:last] = row[first_index:last], found
            self.num_changed += sum(map(operator.ne, remembered, found))
            mismatches += [(layer, page) for page, a, b in zip(pages, found, wanted, strict=True) if a != b]
        return tuple(mismatches)

    def _read_missing(self, first: int, last: int, take: TakeDigests) -> None:
        missing = {
            layer: [index for index in range(first, last) if row[index] is None]
            for layer, row in enumerate(self._rows)
            if None in row[first:last]
        }
        found = take([(layer, [self._pages[index] for index in indices]) for layer, indices in missing.items()])
        for (layer, indices), digests in zip(missing.items(), found, strict=True):
            for index, digest in zip(indices, digests, strict=True):
                self._rows[layer][index] = digest

    def _agree(self, first: int, last: int, digests: Sequence[Sequence[int]]) -> bool:
        return all(row[first:last] == list(wanted) for row, wanted in zip(self._rows, digests, strict=True))
