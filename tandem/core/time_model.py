"""A cluster's workers as numbers: their model, their processor, their room for KV, and so how long their steps take.

A YAML file says it. A simulation is told so what to simulate, and workers of a simulated engine how long to wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tandem.core.config_tree import build, did_you_mean, key, named, read_yaml
from tandem.core.dtypes import PAGE_DTYPES, kv_head_bytes
from tandem.core.errors import ConfigError
from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.layer_groups import KeptPages, kept_pages
from tandem.core.step_table import read_table
from tandem.core.step_times import Card, Fitted, ModelSize, Roofline, StepTimes
from tandem.core.windows import Windows, windows_in
from tandem.core.worker_types import TYPE_EXAMPLE, TypeSpec, check_types

_GIGA, _TERA = 1e9, 1e12

SIMULATED_TOKEN_BYTES = 64
"""Of the pages of a simulated engine, which stand for the real ones."""

_TOKENS = 100_000  # for which a worker of no type has room

#: What a scenario of `tandem sim` says beside: a simulated engine reads its file too, and has no use for it.
OF_SIMULATIONS = (
    "pools", "cores", "network", "node", "faults", "load", "tenants", "classes", "refuses", "tandem", "seed"
)  # fmt: skip


@dataclass(frozen=True)
class GroupSpec:
    """Workers of one type, beside those of others in their pool."""

    workers: int = key(1, "How many.", minimum=1)
    type: str = key("", "Which of `types` they are.")
    tokens: int = key(0, "Tokens of KV for which one has room; 0: what its type's memory has room for.", minimum=0)


@dataclass(frozen=True)
class PoolSpec:
    """Workers of one role, all alike but for `others`."""

    workers: int = key(1, "How many; 0 of prefill: decode workers compute all prompts.", minimum=0)
    tokens: int = key(
        0,
        "Tokens of KV for which one has room; 0: what its type's memory has room for, without a type 100,000.",
        minimum=0,
    )
    type: str = key("", "Which of `types` they are; empty: what `card` says.")
    others: tuple[GroupSpec, ...] = key((), "Workers of other types in this pool.")

    @property
    def groups(self) -> tuple[PoolSpec | GroupSpec, ...]:
        """Those whose type a worker has that is started later, then the others."""
        return self, *self.others

    @property
    def num_workers(self) -> int:
        """Of all types."""
        return sum(group.workers for group in self.groups)


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

    @property
    def card(self) -> Card:
        return Card(
            self.tflops * _TERA, self.gb_per_s * _GIGA, self.flops_share, self.bytes_share, self.overhead_ms * 1e-3
        )


@dataclass(frozen=True)
class FittedSpec:
    """Seconds of a step as a sum, measured elsewhere. No token takes less than nothing."""

    base_ms: float = key(10.0, "Of a step.", minimum=0)
    only_prompts_ms: float = key(0.0, "Of a step that generates for nobody, beside base_ms.", minimum=0)
    token_us: float = key(0.0, "Of each token that is computed.", minimum=0)
    row_us: float = key(0.0, "Of each sequence that generates, beside its token; below 0: such a token costs less.")
    read_ns: float = key(0.0, "Of each token of context that is read.", minimum=0)
    pair_ns: float = key(0.0, "Of each pair of a computed token and one that it attends to.", minimum=0)
    rows_ms: tuple[tuple[float, ...], ...] = key(
        (), "What sequences that generate add, with their tokens: pairs of a number of them and the ms of so many, "
        "between which it is a line. Empty: token_us and row_us say it."
    )  # fmt: skip
    prompts_ms: tuple[tuple[float, ...], ...] = key(
        (), "What tokens of prompts add: pairs of a number of them and the ms of so many. Empty: token_us says it."
    )

    @property
    def times(self) -> Fitted:
        """Of a model without windows."""
        of_rows, of_prompts = (
            tuple((number, ms * 1e-3) for number, ms in pairs) for pairs in (self.rows_ms, self.prompts_ms)
        )
        return Fitted(
            self.base_ms * 1e-3, self.token_us * 1e-6, self.row_us * 1e-6, self.read_ns * 1e-9, self.pair_ns * 1e-9,
            of_rows=of_rows, of_prompts=of_prompts, only_prompts_s=self.only_prompts_ms * 1e-3,
        )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("rows_ms", "prompts_ms"):
            before = (0.0, 0.0)
            for pair in getattr(self, name):
                if len(pair) != 2 or pair[0] <= before[0] or pair[1] < before[1]:
                    raise ConfigError(
                        f"fitted.{name} has {list(pair)} behind {list(before)}; each must be a number and its ms, both "
                        "more than those before it (the ms may be the same)",
                        key=f"fitted.{name}",
                    )
                before = pair[0], pair[1]
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
    types: Mapping[str, TypeSpec] = named("Of workers, by name: their cards, prices and powers.", TYPE_EXAMPLE)

    def __post_init__(self) -> None:
        if not self.decode.num_workers:
            raise ConfigError("decode.workers is 0, must be at least 1: somebody generates", key="decode.workers")
        if self.times == "table" and not self.table:
            raise ConfigError("times: table needs a profile of steps; name its file", key="table")
        check_types(self.types)
        for role in WORKER_ROLES:
            for number, group in enumerate(self.pool(role).groups):
                self._check_type(role, group.type, f"others[{number - 1}].type" if number else "type")
        self._check_card()

    def _check_type(self, role: Role, name: str, key: str) -> None:
        full, known = f"{role.value}.{key}", ", ".join(self.types)
        if not name:
            if self.types and self.pool(role).num_workers:
                raise ConfigError(f"{full} is missing, and there are types: name one of {known}", key=full)
            if not self.types and key != "type":
                raise ConfigError(f"{full} is missing; name one, and say of it in types what it is", key=full)
            return
        if name not in self.types:
            remedy = f"{did_you_mean(name, self.types)}known: {known}"
            remedy = remedy if known else f"add types: {{{name}: {TYPE_EXAMPLE}}}"
            raise ConfigError(f"{full} is {name!r}, which is none of types; {remedy}", key=full)
        if not self.types[name].may_serve(role):
            roles = self.types[name].roles
            raise ConfigError(
                f"{full} is {name!r}, which serves as {roles} alone; name another one, or set types.{name}.roles to "
                "both",
                key=full,
            )

    def _check_card(self) -> None:
        """What is said of all workers must not be what is said of their types."""
        if not self.types:
            return
        if self.times != "roofline":
            used = {group.type for role in WORKER_ROLES for group in self.pool(role).groups if group.type}
            if len({self.types[name].of_steps for name in used}) > 1:
                raise ConfigError(
                    f"times: {self.times} is of all workers, and these are of types with other cards; take times: "
                    "roofline, or one card for all types",
                    key="times",
                )
        if replace(self.card, is_cpu=False) != CardSpec():
            raise ConfigError(
                "card says something of all workers, and these have types; say it of the types, or leave it out",
                key="card",
            )

    def pool(self, role: Role) -> PoolSpec:
        return self.prefill if role is Role.PREFILL else self.decode

    def on_cpu(self, group: PoolSpec | GroupSpec) -> bool:
        """Whether its workers are on CPUs. Raises `ConfigError` for a card that is not known."""
        return self.types[group.type].machine.card.is_cpu if group.type else self.card.is_cpu

    def kept_pages(self, page_size: int, *, mixed: bool, max_context: float = math.inf) -> KeptPages:
        """Of which tokens its workers keep K and V, and how; `mixed`, `max_context`: as of `kept_pages`.

        Raises:
            ConfigError: some keep other pages than others, and so could not hand them on.
        """
        model = self.model
        groups = (group for role in WORKER_ROLES for group in self.pool(role).groups if group.workers)
        found = {
            kept_pages(
                model.windows, model.layers, page_size, on_cpu=self.on_cpu(group), mixed=mixed, max_context=max_context
            )
            for group in groups
        }
        if len(found) > 1:
            raise ConfigError(
                "types has workers on CPUs and on GPUs, which keep other pages of this model behind its windows and "
                "cannot hand them on; take one kind, or cache.mixed_windows: false where some layers see all",
                key="types",
            )
        return found.pop()

    def tokens(self, group: PoolSpec | GroupSpec) -> int:
        """For which a worker has room. Raises `ConfigError` where the weights leave none."""
        if group.tokens or not group.type:
            return group.tokens or _TOKENS
        room = self.types[group.type].machine.kv_room(self._weight_bytes, self._token_bytes)
        if room < 1:
            raise ConfigError(
                f"types.{group.type}: its memory has no room for the weights of the model "
                f"({self._weight_bytes / _GIGA:,.0f} GB) and pages; give it more cards, or weights fewer bits",
                key=f"types.{group.type}.cards",
            )
        return room

    @property
    def _weight_bytes(self) -> float:
        return self.model.parameters * self.model.weight_bits / 8

    @property
    def _token_bytes(self) -> int:
        model = self.model
        return 2 * model.layers * model.kv_heads * kv_head_bytes(model.kv_dtype, model.head_dim)

    def step_times(self, type: str = "") -> StepTimes:
        """Of workers of a type; empty: of those that have none. Raises `ConfigError` for a profile that cannot be
        used."""
        if self.times == "table":
            return read_table(Path(self.table))
        model = self.model
        if self.times == "fitted":
            return replace(self.fitted.times, windows=model.windows)
        size = ModelSize(
            model.parameters, self._weight_bytes, self._token_bytes, model.layers, model.hidden_size, model.windows
        )
        return Roofline(size, self.types[type].machine.times if type else self.card.card)


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
