"""Block tables that stay between steps: only what sequences have got since is written.

A step gives most sequences no page and some of them one. So a sequence has a row, as long as it is computed in step
after step, and what a step costs does not grow with the contexts. A row is written anew when its sequence comes, has
come back with other pages, or pages in its table were replaced (`PageTable.num_edits`). Nobody says when a sequence
ends: who comes gets the row of whoever has not been computed for longest.

Kernels find a sequence's row by its number, so rows need not stand in the order of a batch. A row that nobody writes
stays as it is under a step that is being computed. On a GPU writes go to a copy there, on the stream of the steps: they
come behind those that were launched before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tandem.core.pages import PageTable, page_table
from tandem.engine.device import to_device

#: So many pages are written one by one: calls of numpy's cost more.
_FEW_PAGES = 4


class HasPages(Protocol):
    """Of one sequence; both as of `tandem.engine.batch.SequenceInput`."""

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def windowed(self) -> PageTable: ...


@dataclass(slots=True, eq=False)
class _Row:
    """Who has a row, and what of it is written."""

    index: int
    step: int = 0  # the last one that it was used in
    pages: PageTable | None = None  # by which its sequence is known; `None`: nobody's
    num_pages: int = 0
    num_edits: int = 0
    windowed: PageTable = field(default_factory=page_table)
    num_windowed: int = 0
    num_windowed_edits: int = 0

    def is_written(self, pages: PageTable) -> bool:
        return self.num_pages == len(pages) and self.num_edits == pages.num_edits

    def is_windowed_written(self, windowed: PageTable) -> bool:
        return (
            self.windowed is windowed
            and self.num_windowed == len(windowed)
            and self.num_windowed_edits == windowed.num_edits
        )


class BlockTables:
    """Of all sequences that one thread computes over one arena.

    Args:
        width: pages of the longest sequence.
        num_pages: sequences may have the pages before this one.
        num_windowed: of a mixed model the pages of a place for layers with a window; else 0.
        device: of those who read them.
        num_rows: that there are from the beginning; there are more once a step has more sequences.
        is_copied: whether readers have a copy of what is written, by default where they are no CPUs.

    Attributes:
        tensor: `[1 + num_windowed, rows, width]` int32, on the device. First the pages of the layers that see all, then
            those of the other groups. Behind a row's own pages, and where its sequence's are hidden, stand some pages
            of the arena. It is another tensor when there are more rows.
        num_written: pages written so far.
    """

    def __init__(
        self,
        width: int,
        num_pages: int,
        *,
        num_windowed: int = 0,
        device: torch.device,
        num_rows: int = 0,
        is_copied: bool | None = None,
    ) -> None:
        self._width = width
        self._num_pages = num_pages
        self._num_windowed = num_windowed
        self._device = device
        self._is_copied = device.type != "cpu" if is_copied is None else is_copied
        self._rows: list[_Row] = []
        self._of: dict[int, _Row] = {}  # by the identity of the table that a row keeps alive
        self._step = 0
        self._unsent: list[tuple[int, int, int, int]] = []  # group, row, first and last page
        self.num_written = 0
        self._host = np.zeros((1 + num_windowed, 0, width), np.int32)
        self.tensor = torch.zeros(self._host.shape, dtype=torch.int32, device=device)
        self._add_rows(num_rows)

    @property
    def num_groups(self) -> int:
        return len(self._host)

    @property
    def host(self) -> np.ndarray:
        """As `tensor`, for who reads single pages on the host."""
        return self._host

    def rows(self, sequences: Sequence[HasPages]) -> list[int]:
        """The rows in which the pages of `sequences` stand now.

        Those whose `pages` are no `PageTable` are written as a whole: nobody can tell what has changed in them.

        Raises:
            ValueError: a page is outside of the arena. A wrong block table would otherwise become another request's KV.
        """
        self._step += 1
        step, of, mixed = self._step, self._of, self._num_windowed > 0
        found: list[int] = []
        missing: list[int] = []
        for place, sequence in enumerate(sequences):
            pages = sequence.pages
            row = of.get(id(pages))
            if row is None:
                missing.append(place)
                found.append(-1)
                continue
            row.step = step
            found.append(row.index)
            if not row.is_written(pages) or (mixed and not row.is_windowed_written(sequence.windowed)):  # type: ignore[arg-type] # rows are found by such alone
                self._write(row, sequence)
        if missing:
            self._place([sequences[place] for place in missing], missing, found)
        if self._unsent:
            self._send()
        return found

    def _place(self, sequences: Sequence[HasPages], places: Sequence[int], found: list[int]) -> None:
        """Give rows to those that have none; `found[place]` becomes the row of each."""
        idle = [row for row in self._rows if row.step < self._step]
        if len(idle) < len(sequences):
            self._add_rows(max(len(self._rows) + len(sequences) - len(idle), 2 * len(self._rows)))
            idle = [row for row in self._rows if row.step < self._step]
        idle.sort(key=lambda row: (row.pages is not None, row.step))
        free = iter(idle)
        for place, sequence in zip(places, sequences, strict=True):
            pages = sequence.pages
            row = self._of.get(id(pages))  # it may stand twice in a batch
            if row is None:
                row = next(free)
                self._forget(row)
                row.step = self._step
                if isinstance(pages, PageTable):
                    row.pages = pages
                    self._of[id(pages)] = row
                self._write(row, sequence)
            found[place] = row.index

    def _add_rows(self, num_rows: int) -> None:
        """Have so many rows in all."""
        before = len(self._rows)
        shape = (self.num_groups, num_rows, self._width)
        is_cuda = self._device.type == "cuda"
        host = np.zeros(shape, np.int32)
        host[:, :before] = self._host
        if self._is_copied:
            tensor = torch.zeros(shape, dtype=torch.int32, device=self._device)
            tensor[:, :before].copy_(self.tensor, non_blocking=is_cuda)
        else:
            tensor = to_device(host, self._device)  # the same memory
        # All at once: a device may have no room for more, and what there was goes on.
        self._host, self.tensor = host, tensor
        self._rows += [_Row(index) for index in range(before, num_rows)]

    def _forget(self, row: _Row) -> None:
        if row.pages is not None:
            del self._of[id(row.pages)]
        row.pages, row.windowed = None, page_table()
        row.num_pages = row.num_edits = row.num_windowed = row.num_windowed_edits = 0

    def _write(self, row: _Row, sequence: HasPages) -> None:
        """Write what of its pages is not in its row yet."""
        try:
            self._write_pages(row, sequence.pages)
            if self._num_windowed:
                self._write_windowed(row, sequence.windowed)
        except ValueError:
            self._forget(row)
            raise

    def _write_pages(self, row: _Row, pages: Sequence[int]) -> None:
        num_edits = pages.num_edits if isinstance(pages, PageTable) else 0
        num, width = len(pages), self._width
        first, last = row.num_pages if row.num_edits == num_edits and row.num_pages <= num else 0, min(num, width)
        if 0 < last - first <= _FEW_PAGES:
            line = self._host[0, row.index]
            for place in range(first, last):
                page = pages[place]
                if not 0 <= page < self._num_pages:
                    raise _outside(page, self._num_pages)
                line[place] = page
        elif first < last:
            values = np.array(pages[first:last], np.int32)
            self._check(values)
            self._host[0, row.index, first:last] = values
        row.num_pages, row.num_edits = num, num_edits
        self._wrote(0, 1, row.index, first, last)

    def _write_windowed(self, row: _Row, windowed: PageTable) -> None:
        num, num_groups = len(windowed), self._num_windowed
        is_same = row.windowed is windowed and row.num_windowed_edits == windowed.num_edits and row.num_windowed <= num
        first, last = row.num_windowed // num_groups if is_same else 0, min(num // num_groups, self._width)
        if first < last:
            # A copy: while numpy looks at the sequence's own table, that cannot grow.
            values = np.array(windowed[first * num_groups : last * num_groups], np.int32)
            self._check(values)
            self._host[1:, row.index, first:last] = values.reshape(-1, num_groups).T
        row.windowed, row.num_windowed, row.num_windowed_edits = windowed, num, windowed.num_edits
        self._wrote(1, self.num_groups, row.index, first, last)

    def _check(self, pages: np.ndarray) -> None:
        # As unsigned numbers those below 0 are too great.
        greatest = int(pages.view(np.uint32).max(initial=0))
        if greatest >= self._num_pages:
            raise _outside(int(np.uint32(greatest).view(np.int32)), self._num_pages)

    def _wrote(self, first_group: int, last_group: int, row: int, first: int, last: int) -> None:
        if first < last:
            self.num_written += (last_group - first_group) * (last - first)
            if self._is_copied:
                self._unsent += [(group, row, first, last) for group in range(first_group, last_group)]

    def _send(self) -> None:
        """Copy what was written to the readers' tensor, without a wait, whatever it was: by one call of a kernel."""
        num_rows = len(self._rows)
        begins = [((group * num_rows + row) * self._width, first, last) for group, row, first, last in self._unsent]
        places = np.concatenate([np.arange(begin + first, begin + last) for begin, first, last in begins])
        columns = to_device(np.stack([places, self._host.reshape(-1)[places]]), self._device)  # int64
        self.tensor.view(-1).index_copy_(0, columns[0], columns[1].to(torch.int32))
        self._unsent = []  # not before: what could not be sent goes with the next step


def _outside(page: int, num_pages: int) -> ValueError:
    return ValueError(f"page {page} is outside of the arena of {num_pages} pages")
