"""A ragged batch: what each sequence computes now, and the same thing as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tandem.core.pages import PageTable, page_table
from tandem.engine.device import to_device
from tandem.engine.layer_places import LayerPlaces
from tandem.engine.layout import KVLayout


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class SequenceInput:
    """What one sequence computes in this forward: a chunk of a prompt, or one generated token.

    The KV of tokens `[0, start)` is in the pages already; this forward adds `[start, start + len(token_ids))`.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]  # block table: page i holds the slots [i * page_size, (i + 1) * page_size)
    num_logits: int = 1  # how many of the last rows get logits
    # Of a mixed model, whose `pages` are those of the layers that see all: the pages of the others, so many for each
    # place as `LayerPlaces.num_windowed` says. Those behind the window may be any.
    windowed: PageTable[int] = field(default_factory=page_table)

    @property
    def end(self) -> int:
        """Number of tokens whose KV is in the pages after this forward."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class SequenceRows:
    """Where one sequence lies in the flat batch: rows `[row, row + num_rows)` are tokens `[start, end)`."""

    index: int  # row of the block table
    row: int
    num_rows: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(slots=True)
class PagedBatch:
    """A batch as the model and the attention take it; T tokens of N sequences lie behind one another."""

    token_ids: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64
    write_pages: torch.Tensor  # [T] int64: where the K and V of each token go
    write_slots: torch.Tensor  # [T] int64
    logit_rows: torch.Tensor  # [R] int64
    block_tables: np.ndarray  # [N, P] int32, padded with page 0, which no reader reaches
    sequences: tuple[SequenceRows, ...]
    plan: dict[Any, Any] = field(default_factory=dict)  # what an attention backend prepares once for all layers
    shared: dict[Any, Any] = field(default_factory=dict)  # as `plan`, of what is the same in all of `windowed` too
    # Of a mixed model: the same with the pages of each group of layers with a window. This one has those of the others.
    windowed: tuple[PagedBatch, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]


def check_sequence(
    sequence: SequenceInput, layout: KVLayout, num_pages: int, vocab_size: int, limit: int, num_windowed: int = 0
) -> None:
    """Raise `ValueError` for a sequence that would read or write outside of its pages or of the model.

    `limit` is the greatest context, in tokens; `num_windowed` as of `LayerPlaces`. Of the pages only those are looked
    at that this forward does not use: `check_pages` looks at the others, of all sequences at once.
    """
    num_tokens = len(sequence.token_ids)
    if num_tokens < 1:
        raise ValueError("a sequence computes at least one token")
    if sequence.start < 0 or sequence.end > limit:
        raise ValueError(f"tokens [{sequence.start}, {sequence.end}) are outside of the context [0, {limit})")
    if not 0 <= sequence.num_logits <= num_tokens:
        raise ValueError(f"num_logits {sequence.num_logits} of {num_tokens} tokens")
    used = layout.num_pages_for(sequence.end)
    if len(sequence.pages) < used:
        raise ValueError(f"{len(sequence.pages)} pages of {layout.page_size} slots do not hold {sequence.end} tokens")
    if len(sequence.pages) > used and not all(0 <= page < num_pages for page in sequence.pages[used:]):
        raise ValueError(f"a page of {list(sequence.pages)} is outside of the arena of {num_pages} pages")
    if len(sequence.windowed) < used * num_windowed:
        raise ValueError(f"{len(sequence.windowed)} pages of layers with a window do not hold {sequence.end} tokens")
    if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= vocab_size:
        raise ValueError(f"a token is outside of the vocabulary of {vocab_size}")


def is_decode_step(sequences: Sequence[SequenceInput], most: int) -> bool:
    """Whether each sequence computes one token, with logits, and there are 1 to `most` of them."""
    return 0 < len(sequences) <= most and all(
        len(sequence.token_ids) == 1 == sequence.num_logits for sequence in sequences
    )


def fill_tables(tables: np.ndarray, sequences: Sequence[SequenceInput], page_size: int) -> np.ndarray:
    """Write the pages that each of `sequences` uses into its row of `tables`, int32 `[>= N, >= pages used]`.

    Returns the part in which they lie; behind a row's own pages it has what was there before.
    """
    width = 0
    for row, sequence in enumerate(sequences):
        used = -(-sequence.end // page_size)
        tables[row, :used] = sequence.pages[:used]
        width = max(width, used)
    return tables[: len(sequences), :width]


def check_pages(tables: np.ndarray, num_pages: int) -> None:
    """Raise `ValueError` where `tables` names a page outside of the arena, and clear it. A wrong block table would
    otherwise become another request's KV."""
    # As unsigned numbers those below 0 are too great.
    greatest = int(tables.view(np.uint32).max(initial=0))
    if greatest >= num_pages:
        page = int(np.uint32(greatest).view(np.int32))
        tables[:] = 0
        raise ValueError(f"page {page} is outside of the arena of {num_pages} pages")


def fill_windowed_tables(
    tables: np.ndarray, sequences: Sequence[SequenceInput], page_size: int, window: int, num_pages: int
) -> np.ndarray:
    """As `fill_tables`, of the layers with a window: `tables` is int32 `[num_windowed, >= N, >= places used]`.

    Pages behind the window are passed over, so a step of a long context costs no more. Raises as `check_pages` does.
    """
    num_windowed, width = len(tables), 0
    for row, sequence in enumerate(sequences):
        first = max(0, sequence.start - window + 1) // page_size
        used = -(-sequence.end // page_size)
        # A copy: while numpy looks at the sequence's own table, that cannot grow.
        seen = np.frombuffer(sequence.windowed[first * num_windowed : used * num_windowed], np.int32)
        check_pages(seen, num_pages)
        tables[:, row, first:used] = seen.reshape(-1, num_windowed).T
        width = max(width, used)
    return tables[:, : len(sequences), :width]


def build_batch(
    sequences: Sequence[SequenceInput],
    page_size: int,
    device: torch.device,
    places: LayerPlaces | None = None,
    num_pages: int = 0,
) -> PagedBatch:
    """Lay checked sequences behind one another. A mixed model has `places`; its sequences may have the pages before
    `num_pages`, else `ValueError` is raised."""
    width = max(-(-sequence.end // page_size) for sequence in sequences)
    tables = np.zeros((len(sequences), width), dtype=np.int32)
    fill_tables(tables, sequences, page_size)
    # Lists: a step of a few tokens takes less time so than with arrays.
    tokens: list[int] = []
    positions: list[int] = []
    write_pages: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceRows] = []
    for index, sequence in enumerate(sequences):
        row, length = len(tokens), len(sequence.token_ids)
        tokens.extend(sequence.token_ids)
        if length == 1:
            positions.append(sequence.start)
            write_pages.append(sequence.pages[sequence.start // page_size])
        else:
            span = range(sequence.start, sequence.end)
            positions.extend(span)
            write_pages.extend(sequence.pages[position // page_size] for position in span)
        logit_rows.extend(range(row + length - sequence.num_logits, row + length))
        spans.append(SequenceRows(index, row, length, sequence.start))

    columns = np.array([tokens, positions, write_pages, positions], dtype=np.int64)
    columns[3] %= page_size
    on_device = to_device(columns, device)
    batch = PagedBatch(
        token_ids=on_device[0:1],
        positions=on_device[1:2],
        write_pages=on_device[2],
        write_slots=on_device[3],
        logit_rows=to_device(np.array(logit_rows, dtype=np.int64), device),
        block_tables=tables,
        sequences=tuple(spans),
    )
    if places is not None:
        wide = np.zeros((places.num_windowed, *tables.shape), dtype=np.int32)
        fill_windowed_tables(wide, sequences, page_size, places.window, num_pages)
        rows = np.repeat(np.arange(len(spans)), [span.num_rows for span in spans])
        written = to_device(wide[:, rows, columns[1] // page_size].astype(np.int64, order="C"), device)
        batch.windowed = with_pages(batch, zip(written, wide, strict=True))
    return batch


def with_pages(batch: PagedBatch, groups: Iterable[tuple[torch.Tensor, np.ndarray]]) -> tuple[PagedBatch, ...]:
    """The same rows with other pages: of each group of layers those that are written, `[T]` int64, and tables."""
    return tuple(
        replace(batch, write_pages=written, block_tables=tables, plan={}, windowed=()) for written, tables in groups
    )
