"""What a grammar lets follow the tokens of one choice. Pure: no threads; `tandem.worker.guides` brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from tandem.core.errors import InternalError, TandemError
from tandem.core.grammar import CompiledGrammar, Matcher
from tandem.core.sampling import TokenMask
from tandem.worker.mask_budget import MaskBudget

Mask = Future[TokenMask | TandemError]
"""A mask that is being made: it becomes the mask, or why there is none."""


class Guide:
    """The grammar of one choice, and how far its output has come.

    Its tokens are noted at once and matched later, when the next mask is made: beside the forward of a step.

    Args:
        used_s: what the thread that calls it has taken of a processor, in seconds.
    """

    __slots__ = ("_grammar", "_mask", "_matcher", "_new", "_used_s", "budget")

    def __init__(self, grammar: CompiledGrammar, used_s: Callable[[], float]) -> None:
        self._grammar = grammar
        self._used_s = used_s
        self._matcher: Matcher | None = None  # none as long as nothing was matched
        self._new: list[int] = []  # not yet matched
        self._mask: Mask | None = None  # that follows all that was taken by `begin`
        self.budget = MaskBudget()

    def anew(self) -> Guide:
        """Of another choice with the same grammar, from its beginning."""
        return Guide(self._grammar, self._used_s)

    def push(self, token_id: int) -> None:
        """Note the next token."""
        self._new.append(token_id)

    def replay(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Go on behind these tokens, which another run gave out, one at each call of `next`.

        It makes a mask behind each, as that run did. They are dropped, but only they renew what a step may cost: many
        tokens at once would have to do with the cost of one. Raises as `next_mask`.
        """
        for number, token_id in enumerate(token_ids):
            if number:
                self.next_mask([token_id])
            else:
                self._match([token_id])
            yield

    def begin(self) -> tuple[Mask, list[int]] | None:
        """The next mask, which is to be made of what `next_mask` gets; `None`: it is there, or being made."""
        if not self._new and (self._matcher is None or self._mask is not None):
            return None
        new, self._new = self._new, []
        self._mask = Future()
        return self._mask, new

    def next_mask(self, token_ids: Sequence[int]) -> TokenMask:
        """Go on behind these tokens. One thread at a time, while nothing else is asked of the guide but `pending`.

        Raises:
            InternalError: they do not follow the grammar.
            InvalidRequestError: it has become too complex, or takes too long.
        """
        began_s = self._used_s()
        mask = self._match(token_ids).mask()
        self.budget.spend(len(token_ids), self._used_s() - began_s)
        return mask

    def _match(self, token_ids: Sequence[int]) -> Matcher:
        if self._matcher is None:
            self._matcher = self._grammar.new_matcher()
        if token_ids:
            self._matcher.take(token_ids)
        return self._matcher

    @property
    def pending(self) -> Mask | None:
        """The next mask, where it is not there yet."""
        return None if self._mask is None or self._mask.done() else self._mask

    def allowed(self) -> TokenMask:
        """As `tandem.core.sampling.Guide`; waits for the mask."""
        if self._mask is None:
            return self._grammar.first_mask
        mask = self._mask.result()
        if isinstance(mask, TandemError):
            raise mask
        return mask


def made_of(guide: Guide, token_ids: Sequence[int]) -> TokenMask | TandemError:
    """As `Guide.next_mask`, which raises; nothing that goes wrong is lost on the way to whoever waits."""
    try:
        return guide.next_mask(token_ids)
    except TandemError as error:
        return error
    except Exception as error:  # noqa: BLE001 - it goes to whoever waits
        return InternalError(f"a mask could not be made: {type(error).__name__}: {error}")


class GuideMaker(Protocol):
    """Makes guides and their masks beside the steps."""

    def prepare(
        self,
        grammar: str,
        outputs: Sequence[Sequence[int]],
        then: Callable[[list[Guide] | TandemError], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Compile `grammar` and match what the outputs have so far: a guide for each. `then` gets them, or the reason
        why there are none, on the runner's thread. `is_wanted` is asked on some other one; once it is false,
        `CancelledError` is that reason. From any thread."""

    def begin(self, guides: Sequence[Guide]) -> None:
        """Begin to make the next masks of these guides. On the runner's thread."""

    def late(self, guides: Sequence[Guide | None], *, awaits_one: bool) -> set[int]:
        """Which of those that are to be sampled now have no mask yet, by index, so that nobody waits for them.

        Args:
            awaits_one: never all: where all are late it waits for one.

        On the runner's thread.
        """
