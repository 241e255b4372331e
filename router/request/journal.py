"""What a client has been given: for each choice the ids of its tokens, in order and each exactly once.

Two workers report tokens on two streams, so they come in any order; after a fault they may come twice, or from an
attempt that is over. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from router.request.prompt_scores import PromptScores
from router.request.request import TokenGiven
from tandem.core.errors import InternalError


@dataclass
class ChoiceRecord:
    """What the client has of one choice."""

    # Invariant: token_ids[i] was given out once, with index i; never changed afterwards.
    token_ids: list[int] = field(default_factory=list)
    # Invariant: all keys are above len(token_ids); emptied when the attempt changes.
    early: dict[int, TokenGiven] = field(default_factory=dict)
    is_finished: bool = False


class Journal:
    """The record of one request over all its attempts."""

    def __init__(self, num_choices: int, prompt_scores: PromptScores | None = None) -> None:
        """`prompt_scores`: where the client wants those of its prompt."""
        self.attempt = 1
        self.prompt_scores = prompt_scores
        self.choices = [ChoiceRecord() for _ in range(num_choices)]
        self._num_open = num_choices  # that have not ended
        #: How many tokens were not given out, by why: "stale", "repeated", "finished"; "disagreed" counts
        #: those among the repeated that had another id.
        self.dropped: Counter[str] = Counter()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._num_open

    @property
    def num_tokens(self) -> int:
        """Tokens given out so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def has_first_tokens(self) -> bool:
        """Whether every choice has its first token."""
        return all(choice.token_ids for choice in self.choices)

    def accept(self, token: TokenGiven) -> list[TokenGiven]:
        """Take in `token`; return what can be given out now, in index order.

        The caller gives out all of it, or calls `finish` for the choice part-way and gives out nothing more of it.

        Raises:
            InternalError: the request has no such choice.
        """
        if token.attempt != self.attempt:
            self.dropped["stale"] += 1
            return []
        if not 0 <= token.choice < len(self.choices):
            raise InternalError(f"a worker sent a token of choice {token.choice}; there are {len(self.choices)}")
        choice = self.choices[token.choice]
        if choice.is_finished:
            self.dropped["finished"] += 1
            return []
        num_given = len(choice.token_ids)
        if token.index != num_given:
            self._out_of_order(choice, token)
            return []
        ready = [token]
        while (following := choice.early.pop(num_given + len(ready), None)) is not None:
            ready.append(following)
        return self._give_out(choice, ready)

    def _out_of_order(self, choice: ChoiceRecord, token: TokenGiven) -> None:
        if token.index < len(choice.token_ids):
            known = choice.token_ids[token.index]
        elif token.index in choice.early:
            known = choice.early[token.index].token_id
        else:
            choice.early[token.index] = token
            return
        self.dropped["repeated"] += 1
        if known != token.token_id:
            self.dropped["disagreed"] += 1

    def _give_out(self, choice: ChoiceRecord, ready: list[TokenGiven]) -> list[TokenGiven]:
        for count, token in enumerate(ready, start=1):
            choice.token_ids.append(token.token_id)
            if token.finish_reason is not None:
                if count < len(ready):
                    self.dropped["finished"] += len(ready) - count
                self.finish(token.choice)
                return ready[:count]
        return ready

    def finish(self, choice: int, num_tokens: int | None = None) -> None:
        """The choice has ended; `num_tokens` cuts its record where the client's text ended earlier (stop string)."""
        record = self.choices[choice]
        self._num_open -= not record.is_finished
        record.is_finished = True
        record.early.clear()
        if num_tokens is not None:
            del record.token_ids[num_tokens:]

    def next_attempt(self) -> int:
        """The attempt is over: forget what came early and expect tokens of the next one. Returns its number."""
        self.attempt += 1
        for choice in self.choices:
            choice.early.clear()
        return self.attempt
