"""A ragged batch: what each sequence computes now, and the same thing as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tandem.core.pages import PageTable, page_table
from tandem.engine.block_tables import BlockTables
from tandem.engine.device import to_device
from tandem.engine.layout import KVLayout

#: Of who lays out a batch for himself: as many pages as an int32 can tell apart.
_ANY_PAGES = 1 << 31


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class SequenceInput:
    """What one sequence computes in this forward: a chunk of a prompt, or one generated token.

    The KV of tokens `[0, start)` is in the pages already; this forward adds `[start, start + len(token_ids))`.
    """

    token_ids: Sequence[int]
    start: int
    # Block table: page i holds the slots [i * page_size, (i + 1) * page_size). Only a `PageTable` is kept from step to
    # step: see `BlockTables`.
    pages: Sequence[int]
    num_logits: int = 1  # how many of the last rows get logits
    # Of a mixed model, whose `pages` are those of the layers that see all: the pages of the others, so many for each
    # place as `LayerPlaces.num_windowed` says. Those behind the window may be any of the arena.
    windowed: PageTable = field(default_factory=page_table)

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
    num_logits: int  # how many of the last rows get logits

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
    # [rows, P] int32: each sequence has one of the rows. What stands behind its pages, or where it has hidden ones, are
    # pages of the arena that no reader reaches.
    block_tables: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    plan: dict[Any, Any] = field(default_factory=dict)  # what an attention backend prepares once for all layers
    shared: dict[Any, Any] = field(default_factory=dict)  # as `plan`, of what is the same in all of `windowed` too
    # Of a mixed model: the same with the pages of each group of layers with a window. This one has those of the others.
    windowed: tuple[PagedBatch, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[1]


def check_sequence(
    sequence: SequenceInput, layout: KVLayout, vocab_size: int, limit: int, num_windowed: int = 0
) -> None:
    """Raise `ValueError` for a sequence that would read or write outside of its pages or of the model.

    `limit` is the greatest context, in tokens; `num_windowed` as of `LayerPlaces`. Which pages they are is looked at by
    `BlockTables.rows`.
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
    if len(sequence.windowed) < used * num_windowed:
        raise ValueError(f"{len(sequence.windowed)} pages of layers with a window do not hold {sequence.end} tokens")
    if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= vocab_size:
        raise ValueError(f"a token is outside of the vocabulary of {vocab_size}")


def is_decode_step(sequences: Sequence[SequenceInput], most: int) -> bool:
    """Whether each sequence computes one token, with logits, and there are 1 to `most` of them."""
    return 0 < len(sequences) <= most and all(
        len(sequence.token_ids) == 1 == sequence.num_logits for sequence in sequences
    )


def build_batch(
    sequences: Sequence[SequenceInput], page_size: int, device: torch.device, tables: BlockTables | None = None
) -> PagedBatch:
    """Lay checked sequences behind one another, their pages in `tables`, of which the batch holds a view; `None`: in
    tables of its own, as of a model whose layers all see alike.

    Raises as `BlockTables.rows` does.
    """
    if tables is None:
        width = max(-(-sequence.end // page_size) for sequence in sequences)
        tables = BlockTables(width, _ANY_PAGES, device=device, num_rows=len(sequences))
    rows = tables.rows(sequences)
    # Lists: a step of a few tokens takes less time so than with arrays.
    tokens: list[int] = []
    positions: list[int] = []
    write_pages: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceRows] = []
    for index, sequence in zip(rows, sequences, strict=True):
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
        spans.append(SequenceRows(index, row, length, sequence.start, sequence.num_logits))

    columns = np.array([tokens, positions, write_pages, positions], dtype=np.int64)
    columns[3] %= page_size
    on_device = to_device(columns, device)
    batch = PagedBatch(
        token_ids=on_device[0:1],
        positions=on_device[1:2],
        write_pages=on_device[2],
        write_slots=on_device[3],
        logit_rows=to_device(np.array(logit_rows, dtype=np.int64), device),
        block_tables=tables.tensor[0],
        sequences=tuple(spans),
    )
    if tables.num_groups > 1:
        of_tokens = np.repeat(rows, [span.num_rows for span in spans])
        written = tables.host[1:, of_tokens, columns[1] // page_size].astype(np.int64, order="C")
        batch.windowed = with_pages(batch, zip(to_device(written, device), tables.tensor[1:], strict=True))
    return batch


def with_pages(batch: PagedBatch, groups: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[PagedBatch, ...]:
    """The same rows with other pages: of each group of layers those that are written, `[T]` int64, and tables."""
    return tuple(
        replace(batch, write_pages=written, block_tables=tables, plan={}, windowed=()) for written, tables in groups
    )
