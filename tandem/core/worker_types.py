"""Types of workers: their cards, and what they cost to rent and to run. As a plan and a scenario name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.cards import CardSheet, find_card
from tandem.core.config_tree import key
from tandem.core.errors import ConfigError
from tandem.core.identity import Role
from tandem.core.step_times import Card

_GIGA = 1e9
_HOUR_S = 3600.0
_MILLION = 1e6

TYPE_EXAMPLE = "{card: h100, price: 4.0}"


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker: cards that share a model.

    Attributes:
        num_cards: they share all work evenly, at no cost.
        flops_share, bytes_share: of the peaks, that are reached.
        overhead_s: of a step, beside computing.
        memory_share: of the cards' memory, for weights and pages.
    """

    card: CardSheet
    num_cards: int = 1
    flops_share: float = 0.6
    bytes_share: float = 0.8
    overhead_s: float = 0.002
    memory_share: float = 0.9

    @property
    def memory_bytes(self) -> float:
        return self.num_cards * self.card.memory_gb * _GIGA * self.memory_share

    @property
    def watts(self) -> float:
        return self.num_cards * self.card.watts

    @property
    def times(self) -> Card:
        """Of its cards as one."""
        return self.card.times(self.num_cards, self.flops_share, self.bytes_share, self.overhead_s)

    def kv_room(self, weight_bytes: float, token_bytes: float) -> int:
        """Tokens for whose K and V there is room beside the weights; 0 or less: not even these fit."""
        return math.floor((self.memory_bytes - weight_bytes) / token_bytes)


@dataclass(frozen=True)
class TypeSpec:
    """One worker of a type."""

    card: str = key("h100", "Its cards, by the names of `tandem plan roofline`.")
    cards: int = key(1, "How many cards one worker has, which share its work evenly.", minimum=1)
    price: float = key(1.0, "Of one worker for an hour.", minimum=0)
    watts: float = key(0.0, "Of one worker while it computes; 0: by the data sheet of its cards.", minimum=0)
    idle_watts: float = key(0.0, "Of one that computes nothing; 0: as much as while it computes.", minimum=0)
    roles: str = key("both", "What it may serve as.", choices=("both", "prefill", "decode"))
    instance: str = key("", "What the cloud calls the node; for the cluster.yaml that is written.")
    workers_of_node: int = key(1, "How many workers a node of this type has room for.", minimum=1)
    flops_share: float = key(0.6, "Of the peak that is reached.", minimum=0.01, maximum=1)
    bytes_share: float = key(0.8, "Of the peak that is reached.", minimum=0.01, maximum=1)
    overhead_ms: float = key(2.0, "Of a step, beside computing.", minimum=0)

    @property
    def machine(self) -> Machine:
        """Raises `ConfigError` for a card that is not known."""
        return Machine(find_card(self.card), self.cards, self.flops_share, self.bytes_share, self.overhead_ms * 1e-3)

    @property
    def power(self) -> Power:
        """Raises `ConfigError` for a card that is not known."""
        watts = self.watts or self.machine.watts
        return Power(watts, self.idle_watts or watts)

    def may_serve(self, role: Role) -> bool:
        return self.roles in ("both", role.value)

    @property
    def of_steps(self) -> tuple[object, ...]:
        """What decides how long its steps take."""
        return self.card, self.cards, self.flops_share, self.bytes_share, self.overhead_ms


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of one worker: while it computes, and while it does not."""

    busy: float
    idle: float

    def watt_hours(self, busy_s: float, all_s: float) -> float:
        """Of a worker that was there for `all_s`, and computed for `busy_s` of these."""
        return (self.busy * busy_s + self.idle * (all_s - busy_s)) / _HOUR_S


def check_types(types: Mapping[str, TypeSpec]) -> None:
    """Raises `ConfigError`, which names the type, where its card is not known or its watts cannot be."""
    for name, spec in types.items():
        try:
            power = spec.power
        except ConfigError as error:
            raise ConfigError(f"types.{name}: {error.message}", key=f"types.{name}.card") from error
        if power.idle > power.busy:
            raise ConfigError(
                f"types.{name}.idle_watts is {power.idle:g}, more than the {power.busy:g} of a worker that computes; "
                "lower it, or raise watts",
                key=f"types.{name}.idle_watts",
            )


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """At this price, for a million tokens at this rate; infinite where none come."""
    return price_per_hour / (tokens_per_s * _HOUR_S / _MILLION) if tokens_per_s > 0 else math.inf
