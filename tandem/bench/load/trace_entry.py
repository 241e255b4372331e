"""One request of a recorded load."""

from __future__ import annotations

from dataclasses import dataclass

MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class TraceEntry:
    """One recorded request."""

    num_input: int
    num_output: int
    arrival_s: float | None = None  # from the first one's; `None`: not recorded
    block_ids: tuple[int, ...] = ()  # equal ids stand for equal content, one for each `block_size` tokens
    block_size: int = MOONCAKE_BLOCK
    token_ids: tuple[int, ...] = ()  # of the recorded text, where there is one
    num_special: int = 0  # of these, how many special ones stand before the text
