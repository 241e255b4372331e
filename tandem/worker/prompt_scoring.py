"""Log-probabilities of a prompt's own tokens: which rows of a step's logits give them. Pure.

    tokens   0   1   2   3   4 │ 5        the logits after token i - 1 say how likely token i was;
    rows     └─1 └─2 └─3 └─4 └───5        the first token has nothing before it

They are taken step by step, so that no more logits are there at a time than those of a chunk. A cached prefix has no
logits: what precedes a token whose log-probability is still wanted is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import InternalError
from tandem.core.prompt_scores import TokenScore

# So many rows are looked at together, and told of in one message: each step through them needs memory for as many
# rows of the vocabulary's size.
_ROWS_AT_ONCE = 64


@dataclass(slots=True)
class PromptScoring:
    """What is wanted of one prompt.

    Attributes:
        num_top: the log-probabilities of so many likeliest tokens at each place, beside its own token's.
        num_known: of so many leading tokens they are known; the first has none.
    """

    num_top: int
    num_known: int = 1

    def in_step(self, start: int, num_tokens: int, num_prompt: int) -> range:
        """The tokens whose log-probabilities a step gives that computes [start, start + num_tokens)."""
        return range(max(start + 1, self.num_known), min(start + num_tokens + 1, num_prompt))


ScoreTokens = Callable[[Any, Sequence[int], int], list[TokenScore] | InternalError]
"""From rows of logits, the token of each, and a number of likeliest tokens; see `tandem.engine.scorer.score_rows`."""

Scored = Callable[[Any, int, list[TokenScore] | InternalError], None]
"""Takes an item of the batch, the first of some tokens of its prompt, and their log-probabilities or an error."""


def take_scores(items: Sequence[Any], logits: Any, score: ScoreTokens, scored: Scored) -> Any:
    """Score what a step's logits say of prompts.

    Args:
        items: of the step's batch.
        logits: `[sum of num_logits, vocab]`.

    Returns the rows that are sampled from, those of each item that samples.
    """
    first_row = 0
    sampled_from: list[int] = []
    for item in items:
        sequence = item.sequence
        for first in range(item.scored.start, item.scored.stop, _ROWS_AT_ONCE):
            token_ids = sequence.token_ids[first : min(first + _ROWS_AT_ONCE, item.scored.stop)]
            row = first_row + first - item.scored.start
            scored(item, first, score(logits[row : row + len(token_ids)], token_ids, sequence.scoring.num_top))
        first_row += item.num_logits
        sampled_from += range(first_row - item.num_to_sample, first_row)
    return logits[sampled_from]
