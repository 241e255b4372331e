"""What following a grammar may cost, by one output. Pure: it is told of times, and reads none.

The bounds by count in `tandem.core.grammar` end most masks within some tens of milliseconds. A grammar that makes each
one take so long would have all threads for itself that make masks. What real schemas take is a twentieth of this.
"""

from __future__ import annotations

from tandem.core.errors import SlowGrammarError

#: Seconds of a processor for an output, and for each of its tokens. The first is for what is made once, as states of a
#: lexer, and may come all at once.
BASE_S, TOKEN_S = 1.0, 0.005
#: After a mask that took so long others are expected to; less so with each that does not.
SLOW_S = 0.002


class MaskBudget:
    """What the masks of one output have taken.

    Attributes:
        expected_s: what its next mask is expected to take of a processor, in seconds: as the last one did, or half of
            what that was expected to take.
    """

    __slots__ = ("_num_tokens", "_spent_s", "expected_s")

    def __init__(self) -> None:
        self._num_tokens = 0
        self._spent_s = 0.0
        self.expected_s = 0.0

    @property
    def is_slow(self) -> bool:
        return self.expected_s >= SLOW_S

    def spend(self, num_tokens: int, seconds: float) -> None:
        """To go on by so many tokens, and to tell what comes next, took so much of a processor.

        Raises:
            SlowGrammarError: all took more than it may.
        """
        self._num_tokens += num_tokens
        self._spent_s += seconds
        self.expected_s = max(seconds, self.expected_s / 2)
        if self._spent_s > BASE_S + TOKEN_S * self._num_tokens:
            raise SlowGrammarError(
                f"the grammar takes too much computation: its first {self._num_tokens} tokens took {self._spent_s:.1f} "
                f"s to choose, and may take {1e3 * TOKEN_S:g} ms each beside {BASE_S:g} s once; use shorter texts and "
                "fewer or smaller repetitions in it"
            )
