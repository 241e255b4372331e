"""A model without numbers: KV that names the tokens it stands for, tokens that follow from seed, choice and position.

A slot of KV is a hash of its layer and of all tokens up to its own. So whoever reads KV can tell whether it is what
its sequence needs, wherever it came from; and a retry goes on alike, whoever samples.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xxhash
from tokenizers import decoders, models

from kvtransfer.extents import ArenaShape
from kvtransfer.layout import LayoutId
from tandem.core.errors import InternalError, TandemError
from tandem.core.pages import PagePool, PageState, num_hidden_pages
from tandem.core.prompt_scores import TokenScore
from tandem.core.sampling import SampledToken, SampleRow, TokenMask
from tandem.core.tokenizer import Tokenizer
from tandem.core.vocabulary import Vocabulary
from tandem.worker.sequence import Sequence
from tests.support.arena import Arena

PAGE, NUM_LAYERS, VOCAB, EOS = 4, 2, 64, 0
LAYOUT = LayoutId("ab" * 32, "float32", num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=1, page_size=PAGE)
_SLOT_BYTES = LAYOUT.extent_bytes // PAGE

Slots = npt.NDArray[np.uint64]


def token_of(seed: int, choice: int, position: int) -> int:
    """The token at `position` of a choice's output."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QII", seed, choice, position)) % VOCAB


def allowed_token(mask: TokenMask, seed: int, choice: int, position: int) -> int:
    """The same among those that a grammar allows."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    return int(allowed[token_of(seed, choice, position) % len(allowed)])


def sample(_: Any, rows: Seq[Seq[SampleRow]]) -> list[list[SampledToken | TandemError]]:
    """As `tandem.worker.step.SampleTokens`, without logits."""
    return [[_sampled(row) for row in of_one] for of_one in rows]


def _sampled(row: SampleRow) -> SampledToken | TandemError:
    place = (row.params.seed, row.choice, row.position)
    if row.guide is None:
        return SampledToken(token_of(*place))
    try:
        return SampledToken(allowed_token(row.guide.allowed(), *place))
    except TandemError as error:
        return error


#: What the tokens stand for, in grammars.
TEXTS = "\0abcdefghijklmnopqrstuvwxyz0123456789{}[]\":,-+. _ABCDEFGHIJKLMNO"


@functools.cache
def vocabulary() -> Vocabulary:
    """A character for each token; the first one ends a text."""
    assert len(TEXTS) == VOCAB
    pieces = {char.replace(" ", "Ġ").replace("\0", "</s>"): number for number, char in enumerate(TEXTS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Vocabulary(Tokenizer(backend), (EOS,), VOCAB)


def score(rows: Any, token_ids: Seq[int], num_top: int) -> list[TokenScore] | InternalError:
    """As `tandem.worker.prompt_scoring.ScoreTokens`; a row is the hash of all tokens up to there."""
    return [score_of(int(row), token_id, num_top) for row, token_id in zip(rows, token_ids, strict=True)]


def score_of(row: int, token_id: int, num_top: int) -> TokenScore:
    return TokenScore(-float((row ^ token_id) % 1009), 1 + row % VOCAB, tuple((n, -float(n)) for n in range(num_top)))


def scores_of(prompt: Seq[int], num_top: int) -> list[TokenScore | None]:
    """What is to be told of a whole prompt."""
    hashes = _Chain().of(prompt)
    known = (score_of(int(row), token_id, num_top) for row, token_id in zip(hashes, prompt[1:], strict=False))
    return [None, *known]


class _Chain:
    """The hash of each prefix of one sequence's tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.hashes: list[int] = []

    def of(self, token_ids: Seq[int]) -> Slots:
        known = len(self.token_ids)
        if list(token_ids[:known]) != self.token_ids[: len(token_ids)]:
            self.token_ids, self.hashes, known = [], [], 0
        for token_id in token_ids[known:]:
            before = self.hashes[-1] if self.hashes else 0
            self.hashes.append(xxhash.xxh3_64_intdigest(struct.pack("<QI", before, token_id)))
            self.token_ids.append(token_id)
        return np.array(self.hashes[: len(token_ids)], np.uint64)


class Memory(Arena):
    """An arena whose pages are accounted for, and what computing does with it: a token reads the last `window` of its
    sequence, itself included; 0: all. Of a mixed model, with `num_windowed`, it does so where it reads those pages."""

    def __init__(self, pool: PagePool, window: int = 0, num_windowed: int = 0) -> None:
        assert np.dtype(np.uint64).itemsize == _SLOT_BYTES
        self.pool = pool
        self._window, self._num_windowed = window, num_windowed
        self._slots = np.zeros((NUM_LAYERS, pool.num_pages, PAGE), np.uint64)
        data = memoryview(self._slots.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        super().__init__(ArenaShape(NUM_LAYERS, pool.num_pages, LAYOUT.extent_bytes), data)
        self._chains: dict[tuple[str, int], _Chain] = {}

    def check_source(self, offset: int, num_bytes: int) -> None:
        states = self._states_of(offset, num_bytes)
        assert states <= {PageState.USED, PageState.QUARANTINED}, f"a write reads pages that are {states}"

    def check_target(self, offset: int, num_bytes: int) -> None:
        states = self._states_of(offset, num_bytes)
        assert states <= {PageState.RESERVED, PageState.QUARANTINED}, f"a write lands in pages that are {states}"

    def _states_of(self, offset: int, num_bytes: int) -> set[PageState]:
        first, last = offset // LAYOUT.extent_bytes, (offset + num_bytes - 1) // LAYOUT.extent_bytes
        return {self.pool.state(extent % self.pool.num_pages) for extent in range(first, last + 1)}

    def copy_page(self, source: int, target: int) -> None:
        self._slots[:, target] = self._slots[:, source]

    def kv_of(self, sequence: Sequence, num_tokens: int) -> Slots:
        """What the slots of these tokens shall hold, but for the layer."""
        chain = self._chains.setdefault((sequence.request_id, sequence.choice), _Chain())
        return chain.of(sequence.token_ids[:num_tokens])

    def compute(self, layer: int, wanted: Slots, start: int, pages: Seq[int], windowed: Seq[int] = ()) -> None:
        """One layer of a page, of one item of a step: what its tokens see before them is read, and the new slots are
        written."""
        if not self._num_windowed:
            self._compute(layer, wanted ^ np.uint64(layer), start, pages, self._window)
            return
        self._compute(layer, wanted ^ np.uint64(layer), start, pages, 0)
        for group in range(self._num_windowed):
            of_layer = wanted ^ np.uint64(layer + NUM_LAYERS * (1 + group))
            self._compute(layer, of_layer, start, windowed[group :: self._num_windowed], self._window)

    def _compute(self, layer: int, of_layer: Slots, start: int, pages: Seq[int], window: int) -> None:
        states = {self.pool.state(page) for page in pages[num_hidden_pages(start, PAGE, window) :]}
        assert states <= {PageState.USED}, f"a step uses pages that are {states}"
        last = len(of_layer)
        slots = self._slots[layer, pages].reshape(-1)
        seen = slice(max(0, start - window + 1) if window else 0, start)
        assert (slots[seen] == of_layer[seen]).all(), "a step reads KV that is not its own"
        at = np.arange(start, last)
        self._slots[layer, np.array(pages)[at // PAGE], at % PAGE] = of_layer[start:]

