"""What a router asks of a worker, and what a worker says of it: plain data, the same for both roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.protocol.messages import AttemptKey
from tandem.core.pooling import Pooling
from tandem.core.prompt_scores import TokenScore
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.worker.prompt_scoring import PromptScoring
from tandem.worker.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class ChoiceJournal:
    """What the client has of one choice; `finished`: nothing may follow."""

    choice: int
    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt at one request, as its router describes it to either role."""

    key: AttemptKey
    priority: int  # lower is more urgent
    prompt_ids: Sequence[int]
    params: SamplingParams
    num_choices: int = 1
    journal: tuple[ChoiceJournal, ...] = ()  # choices that have tokens are not sampled again
    age_s: float = 0.0  # since the router took the request in, over all attempts
    scoring: PromptScoring | None = None  # set where the prompt's log-probabilities are wanted
    cache_salt: str = ""
    pools: bool = False  # a vector of the prompt is wanted, and no token
    slack_s: float = 0.0  # of the prompt: see `tandem.worker.turn`
    tpot_s: float = math.inf  # in which each further token is wanted


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a model and the configuration make of a request.

    Attributes:
        vocab_size: token ids are `[0, vocab_size)`.
        max_context: greatest number of tokens of a sequence, prompt and output.
        eos: ids that end a text.
        max_choices: of one request.
        priority_ageing_s: what a level of priority is worth; see `tandem.worker.turn`.
        pooling: how the model pools; `None`: it generates.
    """

    vocab_size: int
    max_context: int
    eos: frozenset[int]
    max_choices: int
    priority_ageing_s: float = 0.0
    pooling: Pooling | None = None


@dataclass(slots=True)  # one for each row of each step: a frozen one takes six times as long to make
class TokenSampled:
    """The `index`th token of a choice; `ended` is set on its last one."""

    key: AttemptKey
    choice: int
    index: int
    token: SampledToken
    ended: FinishReason | None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of tokens of a prompt, from number `first` on."""

    key: AttemptKey
    first: int
    tokens: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class PromptPooled:
    """The numbers that the model makes of a prompt, before they are normalised or squashed."""

    key: AttemptKey
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt ends here with this error."""

    key: AttemptKey
    error: BaseException
