"""What a request asks of sampling, what sampling gives, and the random numbers that it uses.

The random number of a token depends only on (seed, choice, position), so a request that moves to another worker,
is retried or recovered goes on with the same random numbers.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from tandem.core.errors import InvalidRequestError
from tandem.core.token_ids import TokenIds, token_ids

#: Below this temperature, dividing logits by it only loses precision: the choice is the arg max.
GREEDY_TEMPERATURE = 1e-5

_MASK_64 = (1 << 64) - 1

#: Which tokens may come next: bit `i % 8` of byte `i // 8` is that of token `i`. What lies behind it may not come.
TokenMask = bytes


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; the meaning of each field is vLLM's.

    Raises `InvalidRequestError`, naming the field, when a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]; relative to the likeliest token
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none, 0: of the chosen token, k: and of the k likeliest
    grammar: str = ""  # of the output, as llguidance takes it (`tandem.core.grammar`); empty: any text goes
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is chosen; empty: no such bound
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that no output may have in a row

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), name, "must be finite", getattr(self, name))
        _require(self.temperature >= 0, "temperature", "must be 0 or more", self.temperature)
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]", self.min_p)
        _require(self.repetition_penalty > 0, "repetition_penalty", "must be above 0", self.repetition_penalty)
        _require(self.max_tokens >= 1, "max_tokens", "must be 1 or more", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "must be 0 or more", self.min_tokens)
        _require(self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens", self.min_tokens)
        _require(self.num_logprobs >= -1, "num_logprobs", "must be -1 (none) or more", self.num_logprobs)
        _require(all(self.bad_words), "bad_words", "must not hold an empty sequence", self.bad_words)
        for token_id, bias in self.logit_bias:
            _require(token_id >= 0 and not math.isnan(bias), "logit_bias", "needs (id >= 0, number)", (token_id, bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without a random number."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on tokens that were seen before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise InvalidRequestError(f"{name} {rule}, got {value!r}", field=name)


class SequenceState:
    """What the penalties and the bad words of one choice need.

    Args:
        prompt_ids: kept, and not to change until `seen` has been asked for.

    Attributes:
        output_counts: the tokens of the output alone, with how often each occurs.
        output_ids: the tokens of the output, in order.
        bounds: what the sampler has made of the choice's parameters, which it keeps here.
    """

    __slots__ = ("_known", "_prompt_ids", "_seen", "bounds", "output_counts", "output_ids")

    def __init__(self, prompt_ids: Collection[int], output_ids: Iterable[int] = ()) -> None:
        self._prompt_ids = prompt_ids
        # Both once `seen` has been asked for: the same tokens, in order and to be looked up.
        self._seen: TokenIds[int] | None = None
        self._known: dict[int, None] = {}
        self.output_counts: Counter[int] = Counter()
        self.output_ids: list[int] = []
        self.bounds: object = None
        for token_id in output_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Note one generated token."""
        self.output_counts[token_id] += 1
        self.output_ids.append(token_id)
        if self._seen is not None and token_id not in self._known:
            self._known[token_id] = None
            self._seen.append(token_id)

    @property
    def seen(self) -> TokenIds[int]:
        """The different tokens of prompt and output, in the order in which they came first.

        They are looked for when this is first asked for: only repetition penalties ask, and prompts may be long.
        """
        if self._seen is None:
            self._known = dict.fromkeys(chain(self._prompt_ids, self.output_ids))
            self._seen = token_ids(self._known)
            self._prompt_ids = ()
        return self._seen


class Guide(Protocol):
    """Knows what a grammar lets follow the tokens of one choice."""

    def allowed(self) -> TokenMask:
        """What may come next, at least one token; of the ends of text all where the output may end. It is not changed.

        Raises:
            TandemError: the grammar has become too complex, or the tokens do not follow it.
        """


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class SampleRow:
    """Whose token a row of logits becomes."""

    state: SequenceState
    params: SamplingParams
    choice: int = 0  # index of the choice in its request
    position: int = 0  # index of the generated token in its choice
    guide: Guide | None = None  # where `params` have a grammar


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class SampledToken:
    """One chosen token. `logprob` is `None` and `top_logprobs` empty unless `num_logprobs` asks for them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number in [0, 1) for one token: the same on every machine and in every process.

    `seed` is any integer (taken modulo 2^64), `choice` the index of the choice in its request, `position` the index
    of the generated token in that choice.
    """
    key = struct.pack("<3Q", seed & _MASK_64, choice & _MASK_64, position & _MASK_64)
    digest = hashlib.blake2b(key, digest_size=8, person=b"tandem.uniform").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
