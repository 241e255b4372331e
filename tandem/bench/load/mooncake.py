"""Mooncake's traces: a JSON object a line, whose blocks of tokens have names. Strict, since figures are made of them.

    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds. `hash_ids` names each block of `block_size` tokens of the prompt (512 in Mooncake's own
traces); the last one may be part. Prompts that begin with equal ids begin with equal tokens.
Reference: Qin et al., "Mooncake", FAST 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tandem.bench.load.trace_entry import MOONCAKE_BLOCK, TraceEntry
from tandem.core.pages import pages_for

KEYS = ("timestamp", "input_length", "output_length")
_SHOWN = 80
_MOST_MS = 1e15  # thirty thousand years


def read_mooncake(lines: Iterable[str], block_size: int = MOONCAKE_BLOCK) -> Iterator[TraceEntry]:
    """The requests of the lines, in their order; empty lines are passed over.

    Raises:
        ValueError: a line is none of this format; names its number, what is wrong, and what to do where that is known.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _entry(_row(line), block_size)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _row(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON ({error.msg}): {line.strip()[:_SHOWN]}") from error
    if not isinstance(row, dict):
        raise ValueError(f"this is no JSON object: {line.strip()[:_SHOWN]}")
    return row


def _entry(row: Mapping[str, Any], block_size: int) -> TraceEntry:
    for key in KEYS:
        if key not in row:
            raise ValueError(f"{key} is missing")
    entry = TraceEntry(
        num_input=_whole(row, "input_length", 1),
        num_output=_whole(row, "output_length", 0),
        arrival_s=_milliseconds(row["timestamp"]) / 1e3,
        block_ids=_block_ids(row),
        block_size=block_size,
    )
    num_blocks = pages_for(entry.num_input, block_size)
    if "hash_ids" in row and len(entry.block_ids) != num_blocks:
        raise ValueError(
            f"hash_ids names {len(entry.block_ids)} blocks, but {entry.num_input} tokens are {num_blocks} blocks of "
            f"{block_size}; where blocks have another length, give it with --block-size (in a scenario "
            "load.block_size)"
        )
    return entry


def _whole(row: Mapping[str, Any], key: str, least: int) -> int:
    value = row[key]
    if type(value) is not int or value < least:  # no `True`, which is an `int` too
        raise ValueError(f"{key} must be a whole number of at least {least}, not {json.dumps(value)[:_SHOWN]}")
    return value


def _milliseconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_MS:
        raise ValueError(f"timestamp must be a number of milliseconds, not {json.dumps(value)[:_SHOWN]}")
    return float(value)


def _block_ids(row: Mapping[str, Any]) -> tuple[int, ...]:
    """None where the trace does not say."""
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise ValueError(f"hash_ids must be a list of whole numbers, not {json.dumps(ids)[:_SHOWN]}")
    return tuple(ids)
