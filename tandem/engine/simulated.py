"""An engine that computes nothing: steps take as long as a model of them says, and tokens come from their keys.

Everything around it is real: pages are taken, handed off, sealed and freed as ever, so that a cluster of many workers
can be had on few cores, for clients to be developed against and for routers to be measured with. A page is small: the
room that the time model gives for tokens costs `SIMULATED_TOKEN_BYTES` each.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tandem.core.dtypes import DTYPE_BYTES
from tandem.core.errors import ConfigError, TandemError
from tandem.core.identity import Role
from tandem.core.pooling import read_pooling
from tandem.core.sampling import SampledToken, SampleRow, uniform
from tandem.core.step_times import Terms
from tandem.core.time_model import SIMULATED_TOKEN_BYTES, PoolSpec, read_time_model
from tandem.core.tokenizer import Tokenizer
from tandem.engine import loader
from tandem.engine.arena import KVArena
from tandem.engine.batch import SequenceInput
from tandem.engine.layout import KVLayout
from tandem.engine.loader import Types
from tandem.engine.sampler import Logits
from tandem.engine.torch_sampler import TorchSampler

_log = logging.getLogger(__name__)

#: Whose random numbers say where a text ends, beside those of its tokens.
_OF_ENDS = 1 << 32


class SimulatedEngine:
    """Has what workers use of an `Engine`, and its meaning.

    Args:
        model_dir: a checkpoint's directory; its `config.json` and its tokenizer are enough.
        time_model: a file as of `tandem.core.time_model`.
        role: whose room for tokens it has.
        max_context: a limit below the model's own, in tokens.
        mixed: as of `Engine.load`.

    Raises:
        ConfigError: the time model is wrong, or there is no room for a page.
        ModelLoadError: the directory has no readable `config.json` or tokenizer.
    """

    shared = None
    pooling = None

    def __init__(
        self,
        model_dir: Path,
        time_model: Path,
        role: Role,
        *,
        page_size: int,
        max_context: int | None,
        mixed: bool = False,
    ) -> None:
        config, spec = loader.load_config(model_dir), read_time_model(time_model)
        if read_pooling(model_dir) is not None:
            raise ConfigError(f"{model_dir} embeds or scores, and the simulated engine generates", key="model.engine")
        room = spec.tokens(spec.pool(role))
        if room < page_size:
            raise ConfigError(
                f"{time_model}: {role.value}.tokens is {room}, which is not a page of {page_size} tokens",
                key=f"{role.value}.tokens",
            )
        self.max_context = loader.context_of(config, max_context)
        kept = spec.kept_pages(page_size, mixed=mixed, max_context=self.max_context)
        head_dim = SIMULATED_TOKEN_BYTES // (2 * DTYPE_BYTES["float32"])
        self.layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, page_size=page_size, dtype="float32")
        self.arena = KVArena(self.layout, kept.num_pages(room))
        self.num_pages = self.arena.num_pages
        self.vocab_size = int(config.get_text_config(decoder=True).vocab_size)
        self.eos_token_ids = loader.eos_of(model_dir, config)
        self.window, self.num_windowed = kept.groups.window, kept.groups.num_windowed
        self.types = Types.all_of(self.layout.dtype)
        # Both roles read one file; whose times differ must not share a cluster by mistake.
        shape = repr((replace(spec, prefill=PoolSpec(workers=0)), self.vocab_size, self.max_context))
        self.weights_sha256 = hashlib.sha256(b"simulated" + shape.encode()).hexdigest()
        self.on_cpu = spec.on_cpu(spec.pool(role))
        self.computes_apart = not self.on_cpu
        self._done_s = 0.0  # when the last step is computed, on the monotonic clock
        self._times = spec.step_times(spec.pool(role).type)
        self.windows = self._times.windows
        self._mean_output = spec.model.output_tokens
        special = Tokenizer.from_dir(model_dir).special_ids | set(self.eos_token_ids)
        self._ordinary = [token_id for token_id in range(self.vocab_size) if token_id not in special]
        if not self._ordinary:
            raise ConfigError(f"{model_dir}: its vocabulary has no token of text", key="model.path")
        _log.warning("SIMULATED: steps take what %s says, and tokens mean nothing", time_model)

    def sampler(self) -> SimulatedSampler:
        return SimulatedSampler(self._ordinary, self.vocab_size, self.eos_token_ids, self._mean_output, self.finish)

    def device_digests(self) -> None:
        """Its pages lie on the host."""

    def forward(self, sequences: Sequence[SequenceInput], on_layer: Callable[[int], None] | None = None) -> Logits:
        """Begin a step, and take its time where it computes as a CPU does, or somebody waits for its layers. The logits
        are 0 each: its sampler has no need of them, but waits until they would be there."""
        began_s = time.monotonic()
        parts = ((one.start, len(one.token_ids), len(one.token_ids) == one.num_logits) for one in sequences)
        seconds = self._times.seconds(Terms.of(parts, self.windows))
        self._done_s = began_s + seconds
        if not self.computes_apart or on_layer is not None:
            self.finish()
        if on_layer is not None:
            on_layer(0)
        # One number for all: what is read of it is its shape.
        return torch.zeros(1).expand(sum(one.num_logits for one in sequences), self.vocab_size)

    def finish(self) -> None:
        """Wait until the step is computed."""
        left_s = self._done_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)

    def warmup(self, max_num_seqs: int = 0) -> None:
        """Nothing is cold."""


class SimulatedSampler:
    """Tokens by (seed, choice, position), as any worker would draw them: of text, until the text ends by itself.

    What a request asks of its tokens holds: a row that has a grammar, allowed tokens, penalties or log-probabilities
    gets logits by its key, and goes the way of all.

    Args:
        ordinary: ids of the tokens that are text.
        mean_output: tokens after which a text ends on average; 0: never by itself.
        wait: until the logits are there.
    """

    def __init__(
        self,
        ordinary: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        mean_output: int,
        wait: Callable[[], None],
    ) -> None:
        self._ordinary, self._vocab_size, self._eos = ordinary, vocab_size, eos_token_ids
        self._mean_output = mean_output
        self._wait = wait
        self._real = TorchSampler(eos_token_ids)  # compiles nothing

    def __call__(self, _logits: Logits, rows: Sequence[Sequence[SampleRow]]) -> list[list[SampledToken | TandemError]]:
        self._wait()
        return [[self._token(row) for row in of_one] for of_one in rows]

    def _token(self, row: SampleRow) -> SampledToken | TandemError:
        seed = _seed(row)
        if self._ends(row, seed):
            return SampledToken(self._eos[0])
        number = uniform(seed, row.choice, row.position)
        token_id = self._ordinary[int(number * len(self._ordinary))]
        if _is_plain(row):
            return SampledToken(token_id)
        return self._real(self._logits(number, token_id, ends=row.guide is not None), [[row]])[0][0]

    def _ends(self, row: SampleRow, seed: int) -> bool:
        params = row.params
        if not (self._mean_output and self._eos) or params.ignore_eos or row.position < params.min_tokens:
            return False
        if row.guide is not None or params.allowed_token_ids or params.num_logprobs >= 0:
            return False  # these end as their logits have it
        return uniform(seed, row.choice, row.position + _OF_ENDS) < 1 / self._mean_output

    def _logits(self, number: float, token_id: int, *, ends: bool) -> Logits:
        """`[1, vocab]`: `token_id` where it may come, else any text, else what is special. `ends`: the end of the text
        comes before all, where it may: a grammar's output is at its end then."""
        logits = np.full((1, self._vocab_size), -60.0, np.float32)
        numbers = np.random.Generator(np.random.Philox(int(number * 2**53)))
        logits[0, self._ordinary] = numbers.standard_normal(len(self._ordinary), np.float32)
        logits[0, token_id] = 60.0
        if ends:
            logits[0, list(self._eos)] = 90.0
        return torch.from_numpy(logits)


def _seed(row: SampleRow) -> int:
    """A greedy text has one way to go, whatever the seed."""
    return 0 if row.params.is_greedy else row.params.seed


def _is_plain(row: SampleRow) -> bool:
    """Whether any token of text will do."""
    params = row.params
    return (
        row.guide is None
        and params.num_logprobs < 0
        and not params.logit_bias
        and not params.allowed_token_ids
        and not params.bad_words
        and not params.has_penalties
    )
