"""Grammars: what an output has to look like, which tokens may come next, and what that may cost. By llguidance.

A grammar is one text, llguidance's own JSON with a JSON schema or a Lark grammar in it. The router makes and checks it;
it travels with the sampling parameters, and each worker compiles it once for all who ask for it.

What may come next follows from the grammar and the tokens so far alone, so it is the same on every worker. An end of
text may come exactly where the output may end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.core.errors import InternalError, InvalidRequestError
from tandem.core.sampling import TokenMask

if TYPE_CHECKING:
    import llguidance

_MAX_ERROR_CHARS = 400
# What llguidance advises, and what can be done here.
_ADVICE = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "where more than one part may hold; use anyOf, or parts that exclude each other",
)


def import_llguidance() -> Any:
    """The package. Raises `InvalidRequestError` where it is not installed: a worker may do without grammars."""
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise InvalidRequestError("no grammar is served here: the worker lacks the package llguidance") from error
    return llguidance


@functools.cache
def limits() -> llguidance.LLParserLimits:
    """Bounds of one compilation and of one mask; what needs more is refused. They are counts and not times, so they
    are the same on every machine."""
    made: llguidance.LLParserLimits = import_llguidance().LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_items_in_row=1_000,
        max_lexer_states=25_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )
    return made


class CompiledGrammar:
    """A grammar, ready for any number of outputs. Texts that others write go through `tandem.core.grammar_compiler`.

    Attributes:
        first_mask: what an output may begin with.
        is_worn: an output has become too complex. All outputs share the states of the lexer, which only become more, so
            those that begin now have to follow another one.
    """

    def __init__(self, text: str, tokens: llguidance.LLTokenizer) -> None:
        """Raises `InvalidRequestError`: it is no grammar, is too complex, or nothing follows it."""
        self.is_worn = False
        self._matcher: llguidance.LLMatcher = import_llguidance().LLMatcher(tokens, text, log_level=0, limits=limits())
        _check(self._matcher)
        self.first_mask: TokenMask = self._matcher.compute_bitmask()
        _check(self._matcher)

    def try_out(self) -> None:
        """Make the first mask at which something is to be chosen: some are too complex from there on.

        Raises `InvalidRequestError`.
        """
        matcher = self.new_matcher()
        matcher.take(matcher.inner.compute_ff_tokens())
        matcher.inner.compute_bitmask()
        matcher.check()

    def new_matcher(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self)


class Matcher:
    """Follows one output, token by token. One thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, grammar: CompiledGrammar) -> None:
        self.inner = matcher
        self._grammar = grammar

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens.

        Raises:
            InternalError: they do not follow the grammar.
            InvalidRequestError: it has become too complex.
        """
        num_taken = self.inner.try_consume_tokens(list(token_ids))
        self.check()
        if num_taken < len(token_ids):
            raise InternalError(f"token {token_ids[num_taken]} was given out and does not follow the grammar")

    def mask(self) -> TokenMask:
        """What may come next. Raises `InvalidRequestError` where the grammar has become too complex."""
        made: TokenMask = self.inner.compute_bitmask()
        self.check()
        return made

    def check(self) -> None:
        """Raises `InvalidRequestError` where the grammar has become too complex."""
        if self.inner.is_error():
            self._grammar.is_worn = True
        _check(self.inner)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidRequestError(_error_text(matcher.get_error()))


def _error_text(said: str) -> str:
    """What llguidance says of a grammar, on one line of bounded length."""
    text = " ".join(said.split()).replace(*_ADVICE)
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[: _MAX_ERROR_CHARS - 3]}..."
