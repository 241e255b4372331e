"""What is planned: a YAML file, of which every key is known and every value possible."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.core.config import Config
from tandem.core.config_tree import build, build_named, key, read_yaml
from tandem.core.dtypes import PAGE_DTYPES
from tandem.core.errors import ConfigError
from tandem.core.worker_types import TYPE_EXAMPLE, TypeSpec, check_types
from tandem.plan.calculators import Served, kv_room
from tandem.plan.shapes import find_shape
from tandem.sim.scenario import LoadSpec, NetworkSpec

CHEAPEST, LEAST_POWER, MOST_GOODPUT = "cheapest", "least_power", "most_goodput"


@dataclass(frozen=True)
class ServedSpec:
    """The model, and how it is served."""

    name: str = key("llama-3-8b", "A known model, or a directory with a config.json.")
    weight_bits: float = key(16.0, "Of a parameter in memory.", minimum=1)
    kv_dtype: str = key("bfloat16", "Of K and V.", choices=PAGE_DTYPES)


@dataclass(frozen=True)
class TargetsSpec:
    """What requests are to keep."""

    ttft_ms: float = key(1000.0, "Time to first token, queueing included.", minimum=0.001)
    tpot_ms: float = key(50.0, "Time per token after the first.", minimum=0.001)
    share: float = key(0.9, "Of the requests that keep both.", minimum=0.01, maximum=1)


@dataclass(frozen=True)
class Plan:
    """All that a plan needs; `types` by name."""

    model: ServedSpec = field(default_factory=ServedSpec)
    load: LoadSpec = field(default_factory=LoadSpec)
    slo: TargetsSpec = field(default_factory=TargetsSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    tandem: Config = field(default_factory=Config)
    goal: str = key(
        CHEAPEST, "What is looked for; `most_goodput` within `budget`.", choices=(CHEAPEST, LEAST_POWER, MOST_GOODPUT)
    )
    budget: float = key(0.0, "The most that an hour of all workers may cost, for `most_goodput`.", minimum=0)
    most: int = key(64, "Workers of a role, at most.", minimum=1)
    seed: int = key(0, "Of what is drawn.", minimum=0)
    directory: str = key(".", "Traces are named relative to it; the file's own where nothing is said.")

    @property
    def served(self) -> Served:
        """Raises `ConfigError` for a model that is not known."""
        model = self.model
        return Served(find_shape(model.name), model.weight_bits, model.kv_dtype, self.tandem.cache)


def read_plan(path: Path) -> tuple[Plan, dict[str, TypeSpec]]:
    """The plan and its types by name. Raises `ConfigError`, which names file and key."""
    try:
        tree = {"directory": str(path.parent), **read_yaml(path, "FILE")}
        types = _types(tree.pop("types", None))
        plan = build(Plan, tree)
        _check(plan, types)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", key=error.key) from error
    return plan, types


def _types(tree: Any) -> dict[str, TypeSpec]:
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(
            "types must name one type of worker or more: `types: {h100: {card: h100, price: 4.0}}`", key="types"
        )
    types = build_named(TypeSpec, tree, "types", TYPE_EXAMPLE)
    check_types(types)
    return types


def _check(plan: Plan, types: dict[str, TypeSpec]) -> None:
    served = plan.served
    for name, spec in types.items():
        if kv_room(served, spec.machine) < plan.tandem.cache.page_size:
            raise ConfigError(
                f"types.{name}: its memory has no room for {plan.model.name} and its pages; give it more cards, or "
                "weights fewer bits",
                key=f"types.{name}.cards",
            )
    for role in ("prefill", "decode"):
        if not any(spec.roles in ("both", role) for spec in types.values()):
            raise ConfigError(f"no type may serve as {role}; set roles of one to both or {role}", key="types")
    if plan.goal == MOST_GOODPUT and plan.budget <= 0:
        raise ConfigError("goal is most_goodput, which needs a budget above 0", key="budget")
