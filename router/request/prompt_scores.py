"""The log-probabilities of one prompt's tokens, gathered over all attempts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import InternalError
from tandem.core.prompt_scores import TokenScore


class PromptScores:
    """A worker that computes the prompt tells of its tokens in order, before the first token of a choice.

    Attributes:
        num_top: likeliest tokens that are wanted at each place.
        tokens: of the leading tokens; the first has nothing before it, so it has none.
    """

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self.num_top = num_top
        # Invariant: at most as many as the prompt has tokens; what is in it never changes.
        self.tokens: list[TokenScore | None] = [None]
        self.was_given = False  # to the client
        self._num_prompt_tokens = num_prompt_tokens

    def accept(self, first: int, tokens: Sequence[TokenScore]) -> None:
        """Take in those from token number `first` on; what is known already is dropped.

        Raises:
            InternalError: they do not follow what is known, or go beyond the prompt.
        """
        num_known = len(self.tokens)
        if first > num_known or first + len(tokens) > self._num_prompt_tokens:
            raise InternalError(
                f"a worker sent log-probabilities of {len(tokens)} prompt tokens from number {first} on; "
                f"{num_known} of {self._num_prompt_tokens} were known"
            )
        self.tokens.extend(tokens[num_known - first :])

    def give(self) -> tuple[TokenScore | None, ...]:
        """All of them, once the first token of a choice has come.

        Raises:
            InternalError: some are missing: the worker is of a version that knows nothing of them.
        """
        if len(self.tokens) < self._num_prompt_tokens:
            raise InternalError(
                f"a worker gave a token, but log-probabilities of only {len(self.tokens) - 1} of the "
                f"{self._num_prompt_tokens - 1} prompt tokens that have one; is it of an older version?"
            )
        self.was_given = True
        return tuple(self.tokens)
