"""Recorded loads: what was asked when, and how long it was.

azure      Azure LLM inference traces, CSV: TIMESTAMP,ContextTokens,GeneratedTokens
mooncake   Mooncake traces, JSON lines: times, lengths, and the names of the blocks that prompts share (`mooncake.py`)
sharegpt   ShareGPT conversations, JSON: texts without times; their lengths are counted by a tokenizer
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal

from tandem.bench.load import mooncake
from tandem.bench.load.sharegpt import Count, conversations, turn_lengths
from tandem.bench.load.trace_entry import MOONCAKE_BLOCK, TraceEntry
from tandem.core.errors import ConfigError
from tandem.core.pages import pages_for
from tandem.core.tokenizer import Tokenizer

TraceFormat = Literal["azure", "mooncake", "sharegpt"]
FORMATS: tuple[TraceFormat, ...] = ("azure", "mooncake", "sharegpt")

# What a file that is another than it says makes its readers raise.
_MALFORMED = (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def load_trace(
    path: Path,
    format: TraceFormat | None = None,
    *,
    limit: int | None = None,
    tokenizer: Tokenizer | None = None,
    count: Count | None = None,
    block_size: int = MOONCAKE_BLOCK,
    key: str = "--trace",
) -> list[TraceEntry]:
    """The first `limit` requests of a trace, in order of arrival; `format` is detected where it is not given.

    `tokenizer` counts the tokens of formats that hold text, or else `count`, where their ids are not wanted; blocks of
    formats that name some have `block_size` tokens; `key` is the option that named the file.

    Raises:
        ConfigError: the file cannot be read, holds something else, or needs a tokenizer.
    """
    text = read_text(path, key)
    format = format or detect_format(text, path, key)
    try:
        entries = list(islice(_entries(text, format, tokenizer, count, block_size), limit))
    except (csv.Error, *_MALFORMED) as error:
        kind = f"{type(error).__name__}: " if format == "azure" else ""
        raise ConfigError(f"{path} is no {format} trace: {kind}{error}", key=key) from error
    if not entries:
        raise ConfigError(f"{path} holds no request", key=key)
    return _from_first_arrival(entries)


def recorded_turns(path: Path, count: Count, limit: int | None, key: str) -> list[list[tuple[int, int]]]:
    """The first `limit` conversations of a ShareGPT file that have an answer: tokens of each turn's prompt, all that
    was said before, and of its answer. Raises `ConfigError`."""
    try:
        each = (turn_lengths(said, count) for said in conversations(read_text(path, key)))
        found = list(islice((turns for turns in each if turns), limit))
    except _MALFORMED as error:
        raise ConfigError(f"{path} is no sharegpt trace: {error}", key=key) from error
    if not found:
        raise ConfigError(f"{path} holds no conversation with an answer", key=key)
    return found


def read_text(path: Path, key: str = "--trace", most: int = -1) -> str:
    """Of a trace, so many characters at `most`. Raises `ConfigError`; `key` is the option that named the file."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(most)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the trace {path}: {why}; name an existing file with {key}", key=key) from error


def detect_format(text: str, path: Path, key: str = "--trace") -> TraceFormat:
    """By the first characters. Raises `ConfigError` where they fit none; `key` is the option that named the file."""
    first_line = text.lstrip().split("\n", 1)[0].strip()
    if first_line.split(",")[: len(_AZURE_COLUMNS)] == list(_AZURE_COLUMNS):
        return "azure"
    if first_line.startswith("{") and all(f'"{key}"' in first_line for key in mooncake.KEYS):
        return "mooncake"
    if first_line.startswith("["):
        return "sharegpt"
    by = "--format" if key == "--trace" else key  # of files, traces are what they look like
    raise ConfigError(f"{path} looks like none of {', '.join(FORMATS)}; name one with {by}", key=by)


def scaled(entries: Iterable[TraceEntry], *, lengths: float = 1.0, time: float = 1.0) -> list[TraceEntry]:
    """Lengths (at least one token) and arrivals times a factor each; 0.125 makes lengths an eighth."""
    return [
        replace(
            entry,
            num_input=_scaled_length(entry.num_input, lengths),
            num_output=_scaled_length(entry.num_output, lengths),
            block_size=_scaled_length(entry.block_size, lengths),
            arrival_s=None if entry.arrival_s is None else entry.arrival_s * time,
        )
        for entry in entries
    ]


@dataclass(frozen=True)
class Cut:
    """How much of a load was cut off so that it fits into a context of `max_len` tokens."""

    max_len: int
    num_requests: int
    num_cut: int  # of the requests
    input_share: float  # of all prompt tokens, that are left
    output_share: float  # of all output tokens, that are left

    def __str__(self) -> str:
        return (
            f"{self.num_cut:,} of {self.num_requests:,} requests are cut to {self.max_len:,} tokens: "
            f"{self.input_share:.1%} of the prompt tokens and {self.output_share:.1%} of the output tokens are left"
        )


def cut_to(entries: Sequence[TraceEntry], max_len: int) -> tuple[list[TraceEntry], Cut]:
    """The requests, of those longer than `max_len` (at least 2) their beginnings; and what that has cut off.

    An output keeps up to half of `max_len`, and the prompt gets the rest.
    """
    fitting = [_cut_entry(entry, max_len) for entry in entries]
    inputs = [sum(entry.num_input for entry in side) for side in (fitting, entries)]
    outputs = [sum(entry.num_output for entry in side) for side in (fitting, entries)]
    num_cut = sum(kept is not entry for kept, entry in zip(fitting, entries, strict=True))
    return fitting, Cut(max_len, len(entries), num_cut, inputs[0] / inputs[1], outputs[0] / outputs[1])


def _cut_entry(entry: TraceEntry, max_len: int) -> TraceEntry:
    if entry.num_input + entry.num_output <= max_len:
        return entry
    num_output = min(entry.num_output, max(max_len // 2, max_len - entry.num_input))
    num_input = max_len - num_output
    num_blocks = pages_for(num_input, entry.block_size)
    return replace(entry, num_input=num_input, num_output=num_output, block_ids=entry.block_ids[:num_blocks])


def _scaled_length(length: int, factor: float) -> int:
    return max(1, round(length * factor))


def _from_first_arrival(entries: list[TraceEntry]) -> list[TraceEntry]:
    if any(entry.arrival_s is None for entry in entries):
        return entries
    ordered = sorted(entries, key=lambda entry: entry.arrival_s or 0.0)
    first_s = ordered[0].arrival_s or 0.0
    return [replace(entry, arrival_s=(entry.arrival_s or 0.0) - first_s) for entry in ordered]


def _entries(
    text: str, format: TraceFormat, tokenizer: Tokenizer | None, count: Count | None, block_size: int
) -> Iterator[TraceEntry]:
    if format == "azure":
        return _azure(text)
    if format == "mooncake":
        return mooncake.read_mooncake(text.splitlines(), block_size)
    if tokenizer is None and count is None:
        raise ConfigError("a trace of texts needs --tokenizer DIR to count its tokens", key="--tokenizer")
    return _sharegpt(text, tokenizer, count)


def _azure(text: str) -> Iterator[TraceEntry]:
    for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
        try:
            num_input, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            entry = TraceEntry(num_input, num_output, _seconds(row["TIMESTAMP"]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if min(num_input, num_output) < 0:
            raise ValueError(f"line {number}: no prompt or output has {min(num_input, num_output)} tokens")
        yield entry


def _seconds(stamp: str) -> float:
    """The 2023 traces name no zone, those of 2024 UTC."""
    time = datetime.fromisoformat(stamp)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _sharegpt(text: str, tokenizer: Tokenizer | None, count: Count | None) -> Iterator[TraceEntry]:
    """The first question and its answer of each conversation; those without both are left out, as vLLM does."""
    for said in conversations(text):
        if len(said) < 2:
            continue
        question, answer = said[0].text, said[1].text
        if tokenizer is not None:
            token_ids = tokenizer.encode(question)
            num_output = len(tokenizer.encode(answer, add_special_tokens=False))
            if token_ids and num_output:
                num_special = sum(1 for _ in takewhile(tokenizer.is_special, token_ids))
                yield TraceEntry(len(token_ids), num_output, token_ids=tuple(token_ids), num_special=num_special)
        elif count is not None and (num_input := count(question)) and (num_output := count(answer)):
            yield TraceEntry(num_input, num_output)
