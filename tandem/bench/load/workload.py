"""What to send: prompts of exact lengths, and when each is to arrive. The same seed gives the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tandem.bench.load.block_names import BlockNames
from tandem.bench.load.trace_entry import TraceEntry
from tandem.core.errors import ConfigError
from tandem.core.tokenizer import Tokenizer

#: Token ids that are in every vocabulary and name no special token in the usual ones.
DEFAULT_VOCABULARY = range(128, 256)

_NUM_DRAWN = 4  # ids in the front of a recorded text


@dataclass(frozen=True)
class Job:
    """One request to come."""

    number: int
    prompt_ids: tuple[int, ...]  # none where a text is sent
    num_output: int
    arrival_s: float | None = None  # from the beginning; `None`: when its turn comes
    num_repeated: int | None = 0  # leading tokens of the prompt that were sent or answered before; `None`: not known
    turn: int | None = None  # of its conversation, from 1


def plain_vocabulary(tokenizer: Tokenizer) -> list[int]:
    """All ids but those of special tokens."""
    return [token_id for token_id in range(tokenizer.vocab_size) if not tokenizer.is_special(token_id)]


def fixed_lengths(num: int, num_input: int, num_output: int) -> list[TraceEntry]:
    """`num` requests of the same lengths."""
    return [TraceEntry(num_input, num_output)] * num


def make_jobs(entries: Sequence[TraceEntry], *, vocabulary: Sequence[int], seed: str) -> list[Job]:
    """A prompt for each entry. Prompts share a prefix only where the trace says so.

    Of recorded texts, which may begin alike, the first ids are drawn too.
    Two runs with one seed send the same prompts; the server may then have the second's in its prefix cache.

    Raises:
        ConfigError: the vocabulary is empty.
    """
    if not vocabulary:
        raise ConfigError("the vocabulary to draw prompts from is empty", key="--vocab")
    names = BlockNames()
    return [
        Job(
            number, _prompt(entry, number, vocabulary, seed), entry.num_output, entry.arrival_s,
            _num_repeated(entry, names),
        )
        for number, entry in enumerate(entries)
    ]  # fmt: skip


def _num_repeated(entry: TraceEntry, names: BlockNames) -> int:
    _, num_blocks = names.keys(entry.block_ids)
    return min(entry.num_input, num_blocks * entry.block_size)


def _prompt(entry: TraceEntry, number: int, vocabulary: Sequence[int], seed: str) -> tuple[int, ...]:
    if entry.token_ids:
        return _recorded(entry, f"{seed}:{number}", vocabulary)
    ids: list[int] = []
    for block in entry.block_ids:
        ids += random.Random(f"{seed}:block:{block}").choices(vocabulary, k=entry.block_size)
    missing = max(0, entry.num_input - len(ids))
    ids += random.Random(f"{seed}:{number}").choices(vocabulary, k=missing)
    return tuple(ids[: entry.num_input])


def _recorded(entry: TraceEntry, seed: str, vocabulary: Sequence[int]) -> tuple[int, ...]:
    """The recorded text, cut or repeated to the scaled length. Its first ids are others with each seed, so that no
    server has it in its prefix cache.
    """
    repeats = -(-entry.num_input // len(entry.token_ids))
    ids = (entry.token_ids * repeats)[: entry.num_input]
    start = entry.num_special
    drawn = random.Random(seed).choices(vocabulary, k=min(_NUM_DRAWN, max(0, len(ids) - start)))
    return (*ids[:start], *drawn, *ids[start + len(drawn) :])


def poisson_arrivals(num: int, rate: float, seed: str) -> list[float]:
    """Arrival times in seconds of a Poisson process, stretched so that the `num`th falls on `num / rate`.

    vLLM's generator stretches likewise. One seed gives the same pattern at every rate.
    """
    generator = random.Random(f"{seed}:arrivals")
    times = list(accumulate(generator.expovariate(1.0) for _ in range(num)))
    return [time * num / rate / times[-1] for time in times]


def body_of(job: Job, model: str, *, ignore_eos: bool) -> bytes:
    """The JSON of a streamed greedy completion with usage."""
    fields = completion_fields(model, job.num_output, ignore_eos=ignore_eos) | {"prompt": job.prompt_ids}
    return json.dumps(fields, separators=(",", ":")).encode()


def completion_fields(model: str, num_output: int, *, ignore_eos: bool) -> dict[str, Any]:
    """What all requests have but the prompt: greedy, streamed, with usage."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": num_output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:  # not OpenAI's: left out where it is not wanted
        fields["ignore_eos"] = True
    return fields


def warm_up_jobs(num: int, like: Job, *, vocabulary: Sequence[int], seed: str) -> list[Job]:
    """Requests as long as `like` with prompts of their own, so that they warm no prefix of the run."""
    entries = [TraceEntry(len(like.prompt_ids), like.num_output)] * num
    return make_jobs(entries, vocabulary=vocabulary, seed=f"{seed}:warm-up")
