"""One choice of one request, as the batch scheduler sees it. Pure: no tensors, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

from tandem.core.page_keys import PageKeys
from tandem.core.pages import PageTable, Shortage, next_page_keys, page_table, salted
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import TokenIds
from tandem.worker.prompt_pooling import PromptPooling
from tandem.worker.prompt_scoring import PromptScoring


class FinishReason(Enum):
    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens or the context's end


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of which a prefix has its KV in pages, and the rest is still to compute.

    token_ids:  [ prompt ................ | output ......... ]
                [ 0, num_computed) in pages | to compute: one token (a decode) or more (a chunk)
    """

    request_id: str
    attempt: int
    choice: int
    turn: float  # lower goes first: `tandem.worker.turn`
    arrival: int  # position in the order of arrival at this worker
    token_ids: TokenIds[int]
    num_prompt: int
    params: SamplingParams
    # False: only KV is wanted, nothing is sampled when all is computed (a prompt whose choices have journals).
    samples: bool = True
    num_computed: int = 0
    # Invariant: covers [0, num_computed); page i holds slots [i * page_size, (i + 1) * page_size). No token sees the
    # first `num_hidden` any more: they are given back, and stand here as page 0, which nobody reads.
    pages: PageTable = field(default_factory=page_table)
    num_hidden: int = 0
    # Of a mixed model (`tandem.core.layer_groups`) `pages` are those of the layers that see all, and none of them is
    # hidden; these are the others, some for each place, of which those of the first `num_hidden` places are given back.
    windowed: PageTable = field(default_factory=page_table)
    # Keys of the leading full pages; grows with the tokens, see `extend_keys`.
    keys: PageKeys = field(default_factory=PageKeys)
    num_published: int = 0  # leading pages offered to the prefix cache
    num_cached: int = 0  # tokens found in the prefix cache at the last admission
    num_preemptions: int = 0
    shortage: Shortage | None = None  # of its last try for pages
    # A prompt that takes only what time steps have, since others generate beside it: `BatchScheduler`.
    paced: bool = False
    # A prompt whose chunks leave the others of a step the time in which their tokens are wanted.
    yields: bool = False
    tpot_s: float = math.inf  # in which its own are wanted, each after the one before
    # Memory elsewhere waits for what this one computes: it goes before all others. Set by `BatchScheduler.promote`.
    promoted: bool = False
    # Log-probabilities of the prompt's tokens are wanted; `None`: they are not.
    scoring: PromptScoring | None = None
    # A vector of the prompt is wanted, and no token; `None`: it is not.
    pooling: PromptPooling | None = None
    # Tokens that the next step computes behind the newest one, in case they are what comes; `tandem.worker.guesses`.
    guesses: tuple[int, ...] = ()
    guesser: Any = None
    guessed_by: Any = None  # `tandem.worker.guesses.Judged`, of the newest guesses
    cache_salt: str = ""  # its cached pages are found under an equal one only
    owner: Any = None  # what the role keeps beside it

    @property
    def order(self) -> tuple[bool, float, int, int]:
        """Who goes first: the promoted ones; then whose turn is earlier; then first come first served."""
        return (not self.promoted, self.turn, self.arrival, self.choice)

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_to_score(self) -> bool:
        """Whether log-probabilities of prompt tokens are still wanted."""
        return self.scoring is not None and self.scoring.num_known < self.num_prompt

    @property
    def num_cacheable(self) -> int:
        """How many leading tokens need not be computed where their KV is cached: no logits after them are needed."""
        if self.pooling is not None:
            return self.pooling.num_cacheable(self.num_prompt)
        if self.scoring is not None and self.is_to_score:
            return self.scoring.num_known - 1
        return len(self.token_ids) - 1

    @property
    def is_decode(self) -> bool:
        """Whether the next step computes just the newest token, in order to sample after it."""
        return self.num_to_compute == 1 and self.num_computed >= self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :].tolist()

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def extend_keys(self, page_size: int, salt: bytes, num_tokens: int) -> None:
        """Make `keys` cover the full pages of the first `num_tokens` tokens."""
        num_missing = num_tokens // page_size - len(self.keys)
        if num_missing > 0:
            # A page that has filled costs one hash, however long the context is.
            following = next_page_keys(self.token_ids, page_size, salted(salt, self.cache_salt), self.keys)
            self.keys.extend(islice(following, num_missing))

    def __repr__(self) -> str:
        return f"<{self.request_id}#{self.attempt}/{self.choice} {self.num_computed}/{len(self.token_ids)}>"


def finish_reason(
    params: SamplingParams, token_id: int, num_output: int, num_tokens: int, eos: frozenset[int], max_context: int
) -> FinishReason | None:
    """Whether a choice ends with `token_id`, its `num_output`th token and the `num_tokens`th in all."""
    is_eos = token_id in eos and not params.ignore_eos
    # Before `min_tokens` a grammar lets its end come only where nothing else may.
    if (is_eos or token_id in params.stop_token_ids) and (num_output >= params.min_tokens or params.grammar):
        return FinishReason.STOP
    if num_output >= params.max_tokens or num_tokens >= max_context:
        return FinishReason.LENGTH
    return None
