"""Tokens that may come next, guessed from where the newest ones came before: prompt lookup. Pure.

A step that reads all weights for one token computes a few more rows at hardly more cost. So it computes the guesses
behind the newest token too, and samples at each place as it would without them. Guesses are taken as far as they are
what was sampled: outputs are the same, and only their number in a step changes. Text that is copied from a prompt, as
edits of code are, comes several tokens a step.
Reference: Saxena, "Prompt Lookup Decoding", 2023; Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", ICML 2023.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SeqOf
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import ClassVar, Protocol

from tandem.core.token_ids import TokenIds
from tandem.worker.batch import Batch
from tandem.worker.sequence import Sequence

# So many tokens in a row tell where a text goes on: the longer run if it came before, else the shorter one.
_RUNS = (6, 3)
# Tokens that one step takes into account, of one sequence: a long prompt is looked through over several steps.
_MOST_TO_NOTE = 256
# After guesses that were all wrong, the next ones wait for a step, then for twice as many each time, up to so many.
_MOST_TO_WAIT = 64


class Source(Enum):
    """Who guessed."""

    LOOKUP = "lookup"  # where a text came before
    DRAFT = "draft"  # a small model that reads along


class Judged(Protocol):
    """Hears how good guesses of its own were."""

    source: ClassVar[Source]

    def judge(self, num: int, num_right: int) -> None:
        """Of `num` guesses the first `num_right` were right."""


class Proposer(Protocol):
    """Guesses where lookup has none; see `tandem.worker.drafts.Drafts`."""

    def keep(self, running: Iterable[Sequence]) -> None: ...

    def propose(self, sequences: SeqOf[tuple[Sequence, int]], room: int, num_running: int) -> None: ...

    def step_took(self, seconds: float, *, is_checked: bool) -> None: ...


@dataclass(slots=True)
class Lookup:
    """Where each run of tokens came last in one sequence.

    Args:
        token_ids: the sequence's own, which grow.
        most_tokens: to which they can grow.
    """

    token_ids: TokenIds[int]
    most_tokens: InitVar[int]
    # By the hash of a run: the position behind it, which is one of `token_ids`; 0: none. Of runs that share a place the
    # newest stands there: a few are not found, and a text takes 16 to 32 bytes a token, where a dictionary takes 200.
    _behind: array[int] = field(init=False)
    _num_noted: int = field(default=min(_RUNS), init=False)

    def __post_init__(self, most_tokens: int) -> None:
        num_places = 1 << (2 * len(_RUNS) * most_tokens - 1).bit_length()  # a power of two: at most half are taken
        self._behind = array("I", bytes(num_places * array("I").itemsize))

    def note(self, most: int) -> None:
        """Take up to `most` tokens more into account."""
        end = min(len(self.token_ids), self._num_noted + most)
        for place in range(self._num_noted, end):
            for run in _RUNS:
                if run <= place:
                    self._behind[self._place_of(self.token_ids[place - run : place])] = place
        self._num_noted = max(self._num_noted, end)

    def next_tokens(self, num: int) -> list[int]:
        """Up to `num` that came behind the newest run when it came before; a text that repeats itself goes on so."""
        place = next((place for run in _RUNS if (place := self._find(self.token_ids[-run:])) is not None), None)
        if place is None:
            return []
        found = self.token_ids[place : place + num]
        return [found[index % len(found)] for index in range(num)]

    def _find(self, run: TokenIds[int]) -> int | None:
        """The position behind it where it came last."""
        place = self._behind[self._place_of(run)]
        return place if place and self.token_ids[place - len(run) : place] == run else None

    def _place_of(self, run: TokenIds[int]) -> int:
        return hash(tuple(run)) & (len(self._behind) - 1)


@dataclass(slots=True)
class Guesser:
    """Guesses for one sequence, more of them the better they were."""

    lookup: Lookup
    _num: int = 2
    _num_wrong: int = 0  # times in a row that none was right
    _num_to_wait: int = 0  # steps

    source = Source.LOOKUP

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow."""
        self.lookup.note(_MOST_TO_NOTE)
        if self._num_to_wait:
            self._num_to_wait -= 1
            return []
        return self.lookup.next_tokens(min(self._num, most)) if most > 0 else []

    def judge(self, num: int, num_right: int) -> None:
        """Of `num` guesses the first `num_right` were right."""
        if num_right:
            self._num_wrong = 0
            self._num = 2 * num if num_right == num else num_right + 1
        else:
            self._num_to_wait = min(2**self._num_wrong, _MOST_TO_WAIT)
            self._num_wrong += 1
            self._num = 1


@dataclass(slots=True)
class Guesses:
    """Guesses for the sequences of a batch.

    Args:
        most: of one sequence in a step, from where its newest tokens came before; 0: none.
        num_rows: a step has no guesses beyond so many rows, which cost hardly more than one.
        page_size: guesses stay within the page of the newest token, so they take none.
        ends: tokens that end a text are not guessed.
        drafts: guesses where lookup has none; `None`: nothing does.
    """

    most: int
    num_rows: int
    page_size: int
    max_context: int
    ends: Collection[int]
    drafts: Proposer | None = None

    def plan(self, running: Iterable[Sequence]) -> None:
        """Set what the next step computes behind the newest token of each sequence.

        While a prompt is computed there are none: it takes the room.
        """
        running = list(running)
        for sequence in running:
            sequence.guesses = ()
        if self.drafts is not None:
            self.drafts.keep(running)
        room = self.num_rows - len(running)
        if room < 1 or not all(sequence.is_decode for sequence in running):
            return
        if self.most:
            room -= self._look_up(running, room)
        if self.drafts is not None and room > 0:
            others = [(sequence, self._num_possible(sequence)) for sequence in running if not sequence.guesses]
            if others:
                self.drafts.propose(others, room, len(running))

    def step_took(self, batch: Batch, seconds: float) -> None:
        """So long took a step, proposals not counted."""
        if self.drafts is not None and not batch.num_chunk_tokens and not batch.num_paced_tokens:
            self.drafts.step_took(seconds, is_checked=any(item.guesses for item in batch.items))

    def _look_up(self, running: list[Sequence], room: int) -> int:
        """Set guesses from where the newest tokens came before; returns how many."""
        left = room
        for num_behind, sequence in zip(range(len(running) - 1, -1, -1), running, strict=True):
            most = min(self.most, left - min(num_behind, left - 1), self._num_possible(sequence))
            guesser = sequence.guesser = sequence.guesser or self._guesser(sequence)
            guesses = guesser.guess(most)
            ends = (index for index, token in enumerate(guesses) if may_end(sequence, token, self.ends))
            sequence.guesses, sequence.guessed_by = tuple(guesses[: next(ends, len(guesses))]), guesser
            left -= len(sequence.guesses)
            if left < 1:
                break
        return room - left

    def _guesser(self, sequence: Sequence) -> Guesser:
        most_tokens = min(self.max_context, sequence.num_prompt + sequence.params.max_tokens)
        return Guesser(Lookup(sequence.token_ids, most_tokens))

    def _num_possible(self, sequence: Sequence) -> int:
        """Before its page, its output or its context ends."""
        in_page = self.page_size - 1 - sequence.num_computed % self.page_size
        in_output = sequence.params.max_tokens - sequence.num_output - 1
        return min(in_page, in_output, self.max_context - len(sequence.token_ids) - 1)


def may_end(sequence: Sequence, token: int, ends: Collection[int]) -> bool:
    """Whether the text may end with this token: then nothing is guessed behind it."""
    return token in ends or token in sequence.params.stop_token_ids
