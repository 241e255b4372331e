"""A cluster's workers as numbers: their model, their processor, their room for KV, and so how long their steps take.

A YAML file says it. A simulation is told so what to simulate, and workers of a simulated engine how long to wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tandem.core.config_tree import build, key, read_yaml
from tandem.core.dtypes import PAGE_DTYPES, kv_head_bytes
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.core.layer_groups import KeptPages, kept_pages
from tandem.core.step_table import read_table
from tandem.core.step_times import Card, Fitted, ModelSize, Roofline, StepTimes
from tandem.core.windows import Windows, windows_in

_GIGA, _TERA = 1e9, 1e12

SIMULATED_TOKEN_BYTES = 64
"""Of the pages of a simulated engine, which stand for the real ones."""

#: What a scenario of `tandem sim` says beside: a simulated engine reads its file too, and has no use for it.
OF_SIMULATIONS = (
    "pools", "cores", "network", "node", "faults", "load", "tenants", "classes", "refuses", "tandem", "seed"
)  # fmt: skip


@dataclass(frozen=True)
class PoolSpec:
    """Workers of one role, all alike."""

    workers: int = key(1, "How many; 0 of prefill: decode workers compute all prompts.", minimum=0)
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
    kv_dtype: str = key("bfloat16", "Of K and V.", choices=PAGE_DTYPES)
    window: int = key(
        0, "The last tokens that a token sees, itself included, in layers with a window; 0: all.", minimum=0
    )
    full_layers: int = key(0, "Of the layers, those that see all tokens where the others have a window.", minimum=0)
    output_tokens: int = key(200, "After which a simulated engine ends a text on average; 0: never.", minimum=0)

    def __post_init__(self) -> None:
        if self.full_layers and not self.window:
            raise ConfigError(
                f"model.full_layers is {self.full_layers}, and without model.window all layers see all tokens; set "
                "that, or leave this out",
                key="model.full_layers",
            )
        if self.window and self.full_layers >= self.layers:
            raise ConfigError(
                f"model.full_layers is {self.full_layers} of {self.layers} layers, so none has a window; leave "
                "model.window out, or name fewer",
                key="model.full_layers",
            )

    @property
    def windows(self) -> Windows:
        return windows_in(self.window, self.layers, self.full_layers)


@dataclass(frozen=True)
class CardSpec:
    """The processor of each worker: an H100 where nothing is said."""

    tflops: float = key(989.0, "Peak, of the type that is multiplied; 10^12 operations a second.", minimum=0.001)
    gb_per_s: float = key(3350.0, "Peak of its memory; 10^9 bytes a second.", minimum=0.001)
    flops_share: float = key(0.6, "Of the peak that is reached.", minimum=0.01, maximum=1)
    bytes_share: float = key(0.8, "Of the peak that is reached.", minimum=0.01, maximum=1)
    overhead_ms: float = key(2.0, "Of a step, beside computing.", minimum=0)
    is_cpu: bool = key(
        False, "Limits of steps, targets that `slo` leaves open, and pages behind a window are those of CPUs."
    )


@dataclass(frozen=True)
class FittedSpec:
    """Seconds of a step as a sum, measured elsewhere. No token takes less than nothing."""

    base_ms: float = key(10.0, "Of a step.", minimum=0)
    token_us: float = key(0.0, "Of each token that is computed.", minimum=0)
    row_us: float = key(0.0, "Of each sequence that generates, beside its token; below 0: such a token costs less.")
    read_ns: float = key(0.0, "Of each token of context that is read.", minimum=0)
    pair_ns: float = key(0.0, "Of each pair of a computed token and one that it attends to.", minimum=0)

    def __post_init__(self) -> None:
        if self.token_us + self.row_us < -1e-9:
            raise ConfigError(
                f"a token that is generated would take {self.token_us + self.row_us:g} us; raise row_us",
                key="fitted.row_us",
            )


@dataclass(frozen=True)
class TimeModel:
    """How long the steps of workers take, and how many tokens of KV they have room for."""

    prefill: PoolSpec = field(default_factory=PoolSpec)
    decode: PoolSpec = field(default_factory=PoolSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    times: str = key("roofline", "How long steps take.", choices=("roofline", "fitted", "table"))
    card: CardSpec = field(default_factory=CardSpec)
    fitted: FittedSpec = field(default_factory=FittedSpec)
    table: str = key("", "A profile of steps (CSV), relative to this file.")

    def __post_init__(self) -> None:
        if not self.decode.workers:
            raise ConfigError("decode.workers is 0, must be at least 1: somebody generates", key="decode.workers")
        if self.times == "table" and not self.table:
            raise ConfigError("times: table needs a profile of steps; name its file", key="table")

    def pool(self, role: Role) -> PoolSpec:
        return self.prefill if role is Role.PREFILL else self.decode

    def kept_pages(self, page_size: int, *, mixed: bool, max_context: float = math.inf) -> KeptPages:
        """Of which tokens a worker keeps K and V, and how; `mixed`, `max_context`: as of `kept_pages`."""
        model, on_cpu = self.model, self.card.is_cpu
        return kept_pages(model.windows, model.layers, page_size, on_cpu=on_cpu, mixed=mixed, max_context=max_context)

    def step_times(self) -> StepTimes:
        """Raises `ConfigError` where the profile cannot be used."""
        if self.times == "table":
            return read_table(Path(self.table))
        model, card = self.model, self.card
        if self.times == "fitted":
            fitted = self.fitted
            return Fitted(
                fitted.base_ms * 1e-3,
                fitted.token_us * 1e-6,
                fitted.row_us * 1e-6,
                fitted.read_ns * 1e-9,
                fitted.pair_ns * 1e-9,
                model.windows,
            )
        token_bytes = 2 * model.layers * model.kv_heads * kv_head_bytes(model.kv_dtype, model.head_dim)
        weight_bytes = model.parameters * model.weight_bits / 8
        size = ModelSize(model.parameters, weight_bytes, token_bytes, model.layers, model.hidden_size, model.windows)
        return Roofline(
            size,
            Card(
                card.tflops * _TERA, card.gb_per_s * _GIGA, card.flops_share, card.bytes_share, card.overhead_ms * 1e-3
            ),
        )


_Model = TypeVar("_Model", bound=TimeModel)


def beside(path: Path, model: _Model) -> _Model:
    """The model of the file at `path`, whose profile is looked for from there."""
    return replace(model, table=str(path.parent / model.table)) if model.table else model


def read_time_model(path: Path) -> TimeModel:
    """Of a file of its own, or of a scenario. Raises `ConfigError`, which names file and key."""
    try:
        tree = read_yaml(path, "--time-model (model.time_model)")
        model = build(TimeModel, {name: value for name, value in tree.items() if name not in OF_SIMULATIONS})
        return beside(path, model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", key=error.key or "model.time_model") from error
