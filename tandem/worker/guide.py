"""What a grammar lets follow the tokens of one choice. Pure: no threads; `tandem.worker.guides` brings them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tandem.core.errors import TandemError
from tandem.core.grammar import CompiledGrammar, Matcher
from tandem.core.sampling import TokenMask


class Guide:
    """The grammar of one choice, and how far its output has come.

    Its tokens are noted at once and matched later, when the next mask is made: beside the forward of a step.
    """

    __slots__ = ("_grammar", "_new", "_wait", "matcher")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self.matcher: Matcher | None = None  # none as long as nothing was matched
        self._new: list[int] = []  # not yet matched
        self._wait: Callable[[], TokenMask | TandemError] | None = None

    def anew(self) -> Guide:
        """Of another choice with the same grammar, from its beginning."""
        return Guide(self._grammar)

    def push(self, token_id: int) -> None:
        """Note the next token."""
        self._new.append(token_id)

    def match(self, token_ids: Sequence[int]) -> Matcher:
        """Go on behind these tokens. Raises as `Matcher.take`."""
        if self.matcher is None:
            self.matcher = self._grammar.new_matcher()
        if token_ids:
            self.matcher.take(token_ids)
        return self.matcher

    def replay(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens, which another run gave out. Raises as `Matcher.take`."""
        self.match([]).replay(token_ids)

    def take_new(self) -> list[int] | None:
        """What is to be matched for the next mask; `None`: the output begins, and its mask is there."""
        if self.matcher is None and not self._new:
            return None
        new, self._new = self._new, []
        return new

    def await_mask(self, wait: Callable[[], TokenMask | TandemError]) -> None:
        """The next mask is being made; `wait` returns it, or why there is none."""
        self._wait = wait

    def allowed(self) -> TokenMask:
        """As `tandem.core.sampling.Guide`; waits for the mask."""
        if self._wait is None:
            return self._grammar.first_mask
        mask = self._wait()
        if isinstance(mask, TandemError):
            raise mask
        return mask


class GuideMaker(Protocol):
    """Makes guides and their masks beside the steps."""

    def prepare(
        self, grammar: str, outputs: Sequence[Sequence[int]], then: Callable[[list[Guide] | TandemError], None]
    ) -> None:
        """Compile `grammar` and match what the outputs have so far: a guide for each. `then` gets them, or the reason
        why there are none, on the runner's thread. From any thread."""

    def begin(self, guides: Sequence[Guide]) -> None:
        """Begin to make the next masks of these guides; each waits for its own. On the runner's
        thread."""
