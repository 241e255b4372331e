"""What the workers of a simulation cost to rent and to run, where their types say it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from tandem.core.identity import WORKER_ROLES, Role
from tandem.core.worker_types import cost_per_million
from tandem.sim.shape import WorkerType
from tandem.sim.world import World

_HOUR_S = 3600.0


def costs(world: World, end_s: float, num_tokens: int, num_output: int) -> dict[str, Any] | None:
    """Plain data; prices in their own unit, energy in watt-hours. `None`: workers have no types.

    `num_tokens`: of prompts and outputs of the requests that did not fail; `num_output`: of outputs alone.
    """
    types = world.shape.types
    groups = [
        _group(world, role, types[name], end_s)
        for role in WORKER_ROLES
        for name in dict.fromkeys(life.type for life in world.fleet.lives if life.role is role)
        if name
    ]
    if not groups:
        return None
    price, watt_hours = (sum(group[key] for group in groups) for key in ("price", "watt_hours"))
    hours = end_s / _HOUR_S
    return {
        "price": price,
        "price_per_hour": price / hours,
        "price_per_million_tokens": cost_per_million(price / hours, num_tokens / end_s),
        "price_per_million_output_tokens": cost_per_million(price / hours, num_output / end_s),
        "watt_hours": watt_hours,
        "watts": watt_hours / hours,
        "watt_hours_per_million_tokens": cost_per_million(watt_hours / hours, num_tokens / end_s),
        "watt_hours_per_million_output_tokens": cost_per_million(watt_hours / hours, num_output / end_s),
        "groups": groups,
    }


def _group(world: World, role: Role, worker_type: WorkerType, end_s: float) -> dict[str, Any]:
    """Of the workers of one type in one role, from when each was asked for until it was gone."""
    lives = [life for life in world.fleet.lives if life.role is role and life.type == worker_type.name]
    paid_s = [life.worked_s(end_s) for life in lives]
    done_s = [life.machine.work.busy_s if life.machine is not None else 0.0 for life in lives]
    # What requests that fail have taken may be beyond the end.
    busy_s = [min(done, paid) for done, paid in zip(done_s, paid_s, strict=True)]
    each = zip(busy_s, paid_s, strict=True)
    return {
        "role": role.value,
        "type": worker_type.name,
        "worker_hours": sum(paid_s) / _HOUR_S,
        "busy_share": sum(busy_s) / sum(paid_s) if sum(paid_s) else 0.0,
        "price": worker_type.price * sum(paid_s) / _HOUR_S,
        "watt_hours": sum(worker_type.power.watt_hours(busy, paid) for busy, paid in each),
    }


def cost_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "cost",
        f"{found['price']:,.2f} in all, {found['price_per_hour']:,.2f} an hour; a million tokens "
        f"{found['price_per_million_tokens']:,.3f}, of output alone {found['price_per_million_output_tokens']:,.3f}",
    )
    yield (
        "energy",
        f"{found['watt_hours']:,.1f} Wh in all, {found['watts']:,.0f} W; a million tokens "
        f"{found['watt_hours_per_million_tokens']:,.1f} Wh, of output alone "
        f"{found['watt_hours_per_million_output_tokens']:,.1f} Wh",
    )


def cost_table(found: dict[str, Any]) -> Table:
    """Workers by role and type."""
    table = Table("workers", "type", "hours", "busy", "cost", "Wh", box=None)
    for group in found["groups"]:
        table.add_row(
            group["role"], group["type"], f"{group['worker_hours']:,.2f}", f"{group['busy_share']:.0%}",
            f"{group['price']:,.2f}", f"{group['watt_hours']:,.1f}",
        )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    return table
