"""From the tokens of one choice to what its client is shown: text, stop strings, the reason for the end."""

from __future__ import annotations

from collections.abc import Sequence

from router.request.request import Delta, Request, TokenGiven
from router.request.stop_strings import StopMatcher
from tandem.core.detokenizer import detokenizer_for
from tandem.core.tokenizer import Tokenizer


class ChoiceText:
    """Turns accepted tokens into deltas. Tokens whose text is held back wait for the delta that shows it."""

    def __init__(self, tokenizer: Tokenizer, request: Request, choice: int) -> None:
        self._choice = choice
        self._min_tokens = request.sampling.min_tokens
        self._gives_output = request.gives_output
        self._shows_stop = request.shows_stop
        self._detokenizer = detokenizer_for(tokenizer, request.prompt_ids, request.shown_ids)
        self._matcher = StopMatcher(request.stop, shows_stop=request.shows_stop)
        self._waiting: list[TokenGiven] = []
        self.num_tokens = 0
        self.is_finished = False

    def push(self, tokens: Sequence[TokenGiven]) -> list[Delta]:
        """The deltas that `tokens` (in order) make. Tokens after the end of the choice are left out."""
        if not self._gives_output:
            self.is_finished = True
            return [Delta(self._choice, "", [], "length")]
        deltas = []
        for token in tokens:
            delta = self._push(token)
            if delta is not None:
                deltas.append(delta)
            if self.is_finished:
                break
        return deltas

    def _push(self, token: TokenGiven) -> Delta | None:
        self.num_tokens += 1
        self._waiting.append(token)
        # The token that ended the choice (end-of-sequence, stop token) counts, but is not shown unless it is asked for.
        is_hidden = token.finish_reason == "stop" and not self._shows_stop
        text = "" if is_hidden else self._detokenizer.push(token.token_id)
        shown = self._watched(text)
        reason = "stop" if self._matcher.is_stopped else token.finish_reason
        if reason is not None and not self._matcher.is_stopped:
            shown += self._watched(self._detokenizer.flush())
            shown += "" if self._matcher.is_stopped else self._matcher.flush()
            reason = "stop" if self._matcher.is_stopped else reason
        if not shown and reason is None:
            return None
        self.is_finished = reason is not None
        tokens, self._waiting = self._waiting, []
        return Delta(self._choice, shown, tokens, reason, self._matcher.stopped_by)

    def _watched(self, text: str) -> str:
        """What may be shown of `text`. The text of the first `min_tokens` tokens is not searched for stop strings."""
        if self.num_tokens <= self._min_tokens:
            return text
        return self._matcher.push(text)
