"""A study: one scenario, one setting of it with several values, and what is compared under each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.studies.simulate import SCENARIOS, simulated
from tandem.core.config_tree import build, read_yaml
from tandem.sim.machine import SchedulerMaker
from tandem.sim.scenario import Scenario

Tree = Mapping[str, Any]
"""Keys of a scenario, some of them."""

Found = Mapping[tuple[str, str], Mapping[str, Any]]
"""Figures (`Figures.as_json`) by the labels of variant and value."""


@dataclass(frozen=True, slots=True)
class Value:
    """What the setting is set to. `tree`: the keys of the scenario that this changes."""

    label: str
    tree: Tree = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compared under each value. `make_scheduler`: what plans its steps, where that is not what ships."""

    label: str
    tree: Tree = field(default_factory=dict)
    make_scheduler: SchedulerMaker | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """Attributes:
    name: of its plot, and of `--only`.
    scenario: a file of `scenarios/`.
    setting: what the values are of.
    columns: the figures of its table.
    panels: the figures that are drawn, over the values; where `over_time`, those of `Sample`, over the time of the last
        value.
    says: three sentences on what was found.
    """

    name: str
    title: str
    scenario: str
    setting: str
    values: Sequence[Value]
    variants: Sequence[Variant]
    columns: Sequence[str]
    panels: Sequence[str]
    says: Callable[[Found], str]
    over_time: bool = False

    def measure(self) -> Iterator[dict[str, Any]]:
        """Each point: plain data. Raises `ConfigError` where the scenario is none."""
        base, of_samples = read_yaml(SCENARIOS / self.scenario), self.panels if self.over_time else ()
        for variant in self.variants:
            for value in self.values:
                scenario = build(Scenario, merged(merged(base, variant.tree), value.tree))
                figures = simulated(scenario, variant.make_scheduler)
                yield {"variant": variant.label, "value": value.label, **figures.as_json(of_samples)}


def by_labels(points: Sequence[Mapping[str, Any]]) -> Found:
    return {(point["variant"], point["value"]): point for point in points}


def merged(base: Tree, changes: Tree) -> dict[str, Any]:
    """`base` with each leaf of `changes` in its place."""
    found = dict(base)
    for key, value in changes.items():
        found[key] = merged(found.get(key) or {}, value) if isinstance(value, Mapping) else value
    return found
