"""The calculators of `tandem plan`: memory, roofline, batch and cost. Pure: numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.config import CacheConfig
from tandem.core.layer_groups import KeptPages, kept_pages
from tandem.core.step_times import Roofline, Terms
from tandem.core.windows import NO_WINDOWS, Windows
from tandem.core.worker_types import Machine
from tandem.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Served:
    """A model as it is served.

    Attributes:
        cache: of its workers; what counts are `page_size` and `mixed_windows`.
    """

    shape: ModelShape
    weight_bits: float = 16
    kv_dtype: str = "bfloat16"
    cache: CacheConfig = field(default_factory=CacheConfig)

    @property
    def weight_bytes(self) -> float:
        return self.shape.weight_bytes(self.weight_bits)

    @property
    def token_bytes(self) -> int:
        """Of K and V, in all layers."""
        return self.shape.kv_bytes_per_token(self.kv_dtype)

    def kept(self, *, on_cpu: bool = False) -> KeptPages:
        """Of which tokens of a sequence a worker keeps K and V, and how."""
        shape, cache = self.shape, self.cache
        return kept_pages(shape.windows, shape.layers, cache.page_size, on_cpu=on_cpu, mixed=cache.mixed_windows)

    def sequence_bytes(self, num_tokens: int, *, on_cpu: bool = False) -> float:
        """Of K and V that are kept of a sequence of so many tokens: of mixed models by whole pages, whose layers do not
        always divide evenly."""
        kept = self.kept(on_cpu=on_cpu)
        if kept.is_mixed:
            return kept.groups.num_seen(num_tokens) * kept.page_bytes(self.token_bytes)
        return self.token_bytes * min(num_tokens, kept.groups.window or num_tokens)

    def num_sequences(self, room: int, num_tokens: int, *, on_cpu: bool) -> int:
        """Of so many tokens each that memory holds which has room for K and V of `room` tokens in all layers."""
        kept = self.kept(on_cpu=on_cpu)
        if kept.is_mixed:
            return kept.num_pages(max(0, room)) // kept.groups.num_seen(num_tokens)
        return max(0, room) // min(num_tokens, kept.groups.window or num_tokens)


def roofline(model: Served, machine: Machine) -> Roofline:
    """Its steps' times."""
    return Roofline(model.shape.size(model.weight_bits, model.kv_dtype), machine.times)


def kv_room(model: Served, machine: Machine) -> int:
    """Tokens for whose K and V in all layers there is room beside the weights; 0 or less: not even these fit."""
    return machine.kv_room(model.weight_bytes, model.token_bytes)


def prefill_terms(num_tokens: int, windows: Windows = NO_WINDOWS) -> Terms:
    """Of a whole prompt in one step."""
    return Terms.of([(0, num_tokens, False)], windows)


def decode_terms(batch: int, context: int, windows: Windows = NO_WINDOWS) -> Terms:
    """Of a step that generates one token for each of `batch` sequences of `context` tokens."""
    num_seen = batch * windows.seen(context)
    return Terms(batch, batch, num_seen, float(num_seen))


@dataclass(frozen=True, slots=True)
class Phase:
    """A step on the roofline.

    Attributes:
        intensity: operations a byte.
        is_compute_bound: its computing takes longer than its reading, with the shares of the peaks that are reached.
        seconds: with the step's overhead.
    """

    flops: float
    num_bytes: float
    is_compute_bound: bool
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.num_bytes


def phase(times: Roofline, terms: Terms) -> Phase:
    flops, num_bytes, card = times.model.flops(terms), times.model.num_bytes(terms), times.card
    is_compute_bound = flops / (card.flops * card.flops_share) > num_bytes / (card.bytes_per_s * card.bytes_share)
    return Phase(flops, num_bytes, is_compute_bound, times.seconds(terms))


@dataclass(frozen=True, slots=True)
class Batch:
    """How many sequences one decode worker generates for.

    Attributes:
        of_memory: for whose K and V there is room.
        of_tpot: with which a step takes no longer than the target; `None`: there is no target.
    """

    of_memory: int
    of_tpot: int | None

    @property
    def most(self) -> int:
        return self.of_memory if self.of_tpot is None else min(self.of_memory, self.of_tpot)

    @property
    def bound(self) -> str:
        """What is hit first."""
        return "KV memory" if self.of_tpot is None or self.of_memory <= self.of_tpot else "time per token"


def largest_batch(model: Served, machine: Machine, context: int, tpot_s: float | None = None) -> Batch:
    """Of sequences of `context` tokens each."""
    of_memory = model.num_sequences(kv_room(model, machine), context, on_cpu=machine.card.is_cpu)
    if tpot_s is None:
        return Batch(of_memory, None)
    times = roofline(model, machine)

    def holds(batch: int) -> bool:
        return times.seconds(decode_terms(batch, context, times.windows)) <= tpot_s

    low, high = 0, 1
    while holds(high) and high <= of_memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Batch(of_memory, low)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one worker of each role gives where it is always busy, tokens a second."""

    prefill: float  # of prompts
    decode: float  # of output
    batch: Batch


def rates(model: Served, machine: Machine, num_input: int, num_output: int, tpot_s: float | None) -> Rates:
    """`num_input`, `num_output`: of a request. A sequence has half of its output on average."""
    times = roofline(model, machine)
    context = num_input + max(1, num_output // 2)
    batch = largest_batch(model, machine, num_input + num_output, tpot_s)
    prefill_s = times.seconds(prefill_terms(num_input, times.windows))
    decode_s = times.seconds(decode_terms(batch.most, context, times.windows))
    return Rates(num_input / prefill_s, batch.most / decode_s if batch.most else 0.0, batch)
