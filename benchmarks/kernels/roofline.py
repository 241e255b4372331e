"""What a kernel must read and compute, and so what a machine allows: the roofline (Williams et al., CACM 2009).

All counts are of the task, not of how it is done: each weight and each K and V that is needed is read once, a
multiply and an add are two operations, float32 throughout but for what a caller says of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.timing import Timing

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What counts of a dense decoder model, in elements."""

    layer_weights: int  # of all linear layers but the last, in all layers together
    head_weights: int  # of the linear layer that makes the logits
    largest_linear: tuple[int, int]  # in and out features, of those within the layers
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * FLOAT_BYTES

    @property
    def kv_weights(self) -> int:
        """Of the linear layers that make K and V in one layer."""
        hidden = self.head_weights // self.vocab_size
        return 2 * hidden * self.num_kv_heads * self.head_dim

    @property
    def attention_flop(self) -> int:
        """Operations of one query token on one token of its context in one layer: scores, and weighted values."""
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel must do at least."""

    num_bytes: int  # to read
    flop: int


def decode_step(shape: ModelShape, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences; each reads `context` tokens, its own included."""
    weights = shape.layer_weights + shape.head_weights
    attended = batch * context * shape.num_layers
    return Work(
        weights * FLOAT_BYTES + attended * shape.kv_token_bytes,
        2 * batch * weights + attended * shape.attention_flop,
    )


def prefill(shape: ModelShape, num_tokens: int) -> Work:
    """A whole prompt; each token attends to itself and those before it. Only its last token gets logits, so of the
    last layer the others need K and V alone; layers are taken for alike."""
    weights = shape.layer_weights + shape.head_weights
    of_last_token = shape.layer_weights // shape.num_layers - shape.kv_weights + shape.head_weights
    attended = num_tokens * (num_tokens + 1) // 2 * (shape.num_layers - 1) + num_tokens
    return Work(
        weights * FLOAT_BYTES + num_tokens * shape.num_layers * shape.kv_token_bytes,
        2 * num_tokens * (weights - of_last_token) + 2 * of_last_token + attended * shape.attention_flop,
    )


def decode_attention(shape: ModelShape, batch: int, context: int) -> Work:
    """Attention of one layer, one query token for each of `batch` sequences over `context` tokens."""
    attended = batch * context
    return Work(attended * shape.kv_token_bytes, attended * shape.attention_flop)


def linear(num_rows: int, in_features: int, out_features: int, weight_bytes: int | None = None) -> Work:
    """A linear layer: weights and rows. `weight_bytes`: of all weights, scales among them; by default float32."""
    weights = in_features * out_features
    read = weights * FLOAT_BYTES if weight_bytes is None else weight_bytes
    return Work(read + num_rows * in_features * FLOAT_BYTES, 2 * num_rows * weights)


def digest(num_bytes: int) -> Work:
    """A checksum of that many bytes; its operations are no floating-point ones."""
    return Work(num_bytes, 0)


def greedy_sampling(num_rows: int, vocab_size: int) -> Work:
    """The greatest logit of each row; comparisons are not counted."""
    return Work(num_rows * vocab_size * FLOAT_BYTES, 0)


# --- limits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """A library's rate in a task that it is good at: floating-point operations or bytes a second, the best run."""

    name: str
    rate: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What `num_threads` threads of this machine do: the best of the probes."""

    num_threads: int
    products: tuple[Probe, ...]  # large float32 matrix products, operations a second
    reads: tuple[Probe, ...]  # streams far greater than the caches, bytes a second

    @property
    def product_rate(self) -> float:
        return max(probe.rate for probe in self.products)

    @property
    def read_rate(self) -> float:
        return max(probe.rate for probe in self.reads)

    def or_better(self, later: Limits) -> Limits:
        """The better of two measurements for each probe."""
        return Limits(self.num_threads, _better_of(self.products, later.products), _better_of(self.reads, later.reads))

    def seconds(self, work: Work) -> float:
        """The least time of `work`: reading and computing may overlap, so the longer of both."""
        return max(work.num_bytes / self.read_rate, work.flop / self.product_rate)

    def is_memory_bound(self, work: Work) -> bool:
        """Whether reading takes longer than computing."""
        return work.num_bytes / self.read_rate > work.flop / self.product_rate


def _better_of(first: tuple[Probe, ...], second: tuple[Probe, ...]) -> tuple[Probe, ...]:
    return tuple(max(pair, key=lambda probe: probe.rate) for pair in zip(first, second, strict=True))


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """How long one kernel took."""

    kind: str  # "decode", "prefill", "attention", "linear", "sampling" or "digest"
    name: str
    work: Work
    timing: Timing
    goal: float | None = None  # the share of the limit that the project strives for

    def share(self, limits: Limits) -> float:
        """The limit over the median run; above 1 where the kernel beats all probes."""
        return limits.seconds(self.work) / self.timing.median_s

    def rate(self, limits: Limits) -> float:
        """Of the median run: bytes a second where reading limits it, operations a second where computing does."""
        done = self.work.num_bytes if limits.is_memory_bound(self.work) else self.work.flop
        return done / self.timing.median_s


@dataclass(frozen=True, slots=True)
class Report:
    """All kernels on some number of threads."""

    limits: Limits
    figures: tuple[Figure, ...]
    other_load: float  # cores that others used meanwhile

    @property
    def own_product(self) -> Probe:
        """Tandem's linear layer at its best: no limit, but beside them."""
        best = max((f for f in self.figures if f.kind == "linear"), key=lambda f: f.work.flop / f.timing.best_s)
        return Probe(f"Tandem's {best.name}", best.work.flop / best.timing.best_s)
