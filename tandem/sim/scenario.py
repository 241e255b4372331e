"""What is simulated: a YAML file, of which every key is known and every value possible."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtransfer.layout import KvFormat, LayoutId
from tandem.bench.load.traces import load_trace
from tandem.core.config import Config
from tandem.core.config_tree import build, key, read_yaml
from tandem.core.dtypes import DTYPE_BYTES
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.sim.load import Arrival, Lengths, drawn, recorded
from tandem.sim.times import Card, Fitted, ModelSize, Roofline, StepTimes
from tandem.sim.world import PoolShape, WorldShape
from tandem.worker.limits import Site, mixed_step_tokens, scheduler_limits

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class PoolSpec:
    """Workers of one role, all alike."""

    workers: int = key(1, "How many.", minimum=1)
    tokens: int = key(100_000, "Tokens of KV for which one has room.", minimum=1)


@dataclass(frozen=True)
class ModelSpec:
    """The shape of the model: 8 billion parameters where nothing is said."""

    parameters: float = key(8.0e9, "With which each token is multiplied.", minimum=1)
    layers: int = key(32, "Of attention.", minimum=1)
    hidden_size: int = key(4096, "Of a token between layers.", minimum=1)
    kv_heads: int = key(8, "Of K and V.", minimum=1)
    head_dim: int = key(128, "Of a head.", minimum=1)
    weight_bits: int = key(16, "Of a parameter.", minimum=1)
    kv_dtype: str = key("bfloat16", "Of K and V.", choices=("float32", "float16", "bfloat16"))


@dataclass(frozen=True)
class CardSpec:
    """The processor of each worker: an H100 where nothing is said."""

    tflops: float = key(989.0, "Peak, of the type that is multiplied; 10^12 operations a second.", minimum=0.001)
    gb_per_s: float = key(3350.0, "Peak of its memory; 10^9 bytes a second.", minimum=0.001)
    flops_share: float = key(0.6, "Of the peak that is reached.", minimum=0.01, maximum=1)
    bytes_share: float = key(0.8, "Of the peak that is reached.", minimum=0.01, maximum=1)
    overhead_ms: float = key(2.0, "Of a step, beside computing.", minimum=0)
    is_cpu: bool = key(False, "Limits of steps are those of CPUs.")


@dataclass(frozen=True)
class FittedSpec:
    """Seconds of a step as a sum, measured elsewhere."""

    base_ms: float = key(10.0, "Of a step.", minimum=0)
    token_us: float = key(0.0, "Of each token that is computed.", minimum=0)
    row_us: float = key(0.0, "Of each sequence that generates, beside its token.", minimum=0)
    read_ns: float = key(0.0, "Of each token of context that is read.", minimum=0)
    pair_ns: float = key(0.0, "Of each pair of a computed token and one that it attends to.", minimum=0)


@dataclass(frozen=True)
class NetworkSpec:
    """Ways between processes."""

    gb_per_s: float = key(25.0, "Out of a prefill worker; 10^9 bytes a second.", minimum=0.000001)
    latency_us: float = key(100.0, "Of the last bytes of a handoff.", minimum=0)
    message_us: float = key(500.0, "From the router to a worker, or back.", minimum=0)
    report_ms: float = key(50.0, "A worker that computes tells of itself so often.", minimum=0)


@dataclass(frozen=True)
class LoadSpec:
    """Requests: of a trace, or drawn."""

    trace: str = key("", "A trace as of `tandem bench run --trace`, relative to this file; empty: they are drawn.")
    limit: int = key(0, "Requests of the trace; 0: all.", minimum=0)
    speed: float = key(1.0, "Times as fast as it was recorded.", minimum=0.001)
    requests: int = key(1000, "How many are drawn.", minimum=1)
    rate: float = key(10.0, "Requests a second that are drawn, at random times.", minimum=0.000001)
    input_median: float = key(1000.0, "Tokens of a prompt that is drawn: lognormal around this.", minimum=1)
    input_spread: float = key(0.8, "Standard deviation of their logarithm.", minimum=0)
    output_median: float = key(200.0, "Tokens of an output that is drawn: lognormal around this.", minimum=1)
    output_spread: float = key(0.8, "Standard deviation of their logarithm.", minimum=0)


@dataclass(frozen=True)
class Scenario:
    """All that a simulation needs."""

    prefill: PoolSpec = field(default_factory=PoolSpec)
    decode: PoolSpec = field(default_factory=PoolSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    times: str = key("roofline", "How long steps take.", choices=("roofline", "fitted"))
    card: CardSpec = field(default_factory=CardSpec)
    fitted: FittedSpec = field(default_factory=FittedSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    load: LoadSpec = field(default_factory=LoadSpec)
    tandem: Config = field(default_factory=Config)
    seed: int = key(0, "Of what is drawn.", minimum=0)

    def shape(self) -> WorldShape:
        """The cluster. Of `tandem`, which has the keys of a `tandem.yaml`, counts what docs/simulator.md names."""
        config, network = self.tandem, self.network
        return WorldShape(
            prefill=self._pool(Role.PREFILL, self.prefill),
            decode=self._pool(Role.DECODE, self.decode),
            kv_format=self._kv_format,
            times=self._step_times(),
            bytes_per_s=network.gb_per_s * _GIGA,
            latency_s=network.latency_us * 1e-6,
            message_s=network.message_us * 1e-6,
            report_s=network.report_ms * 1e-3,
            mixed_pool_tokens=config.scheduling.mixed_prompt_tokens if config.scheduling.mixed_pool else 0,
        )

    @property
    def _kv_format(self) -> KvFormat:
        model = self.model
        layout = LayoutId(
            "0" * 64, model.kv_dtype, model.layers, model.kv_heads, model.head_dim, self.tandem.cache.page_size
        )
        return KvFormat(layout, "simulated")

    def _pool(self, role: Role, pool: PoolSpec) -> PoolShape:
        site = Site(role, on_cpu=self.card.is_cpu)
        return PoolShape(
            pool.workers,
            max(1, pool.tokens // self.tandem.cache.page_size),
            # A real worker refuses beyond its bound; here all wait.
            replace(scheduler_limits(self.tandem, site, pool.tokens), queue_bound=sys.maxsize),
            mixed_step_tokens(self.tandem, site),
        )

    def _step_times(self) -> StepTimes:
        if self.times == "fitted":
            fitted = self.fitted
            return Fitted(
                fitted.base_ms * 1e-3,
                fitted.token_us * 1e-6,
                fitted.row_us * 1e-6,
                fitted.read_ns * 1e-9,
                fitted.pair_ns * 1e-9,
            )
        model, card = self.model, self.card
        token_bytes = 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[model.kv_dtype]
        size = ModelSize(
            model.parameters, model.parameters * model.weight_bits / 8, token_bytes, model.layers, model.hidden_size
        )
        return Roofline(
            size,
            Card(
                card.tflops * _TERA, card.gb_per_s * _GIGA, card.flops_share, card.bytes_share, card.overhead_ms * 1e-3
            ),
        )


def read_scenario(path: Path) -> Scenario:
    """Raises `ConfigError`, which names file and key."""
    try:
        return build(Scenario, read_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", key=error.key) from error


def arrivals(scenario: Scenario, directory: Path) -> list[Arrival]:
    """The load; traces are named relative to `directory`. Raises `ConfigError`."""
    load = scenario.load
    if load.trace:
        return recorded(load_trace(directory / load.trace, limit=load.limit or None, key="load.trace"), load.speed)
    inputs, outputs = Lengths(load.input_median, load.input_spread), Lengths(load.output_median, load.output_spread)
    return drawn(load.requests, load.rate, inputs, outputs, scenario.seed)
