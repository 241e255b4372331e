"""Pools follow their load on nodes that Ray's autoscaler brings and takes, as the live benchmark runs them."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.autoscale.live import Plan, measure

pytestmark = [pytest.mark.timeout(900), pytest.mark.faults]


def test_nodes_come_with_the_load_and_go_with_it_and_what_has_none_is_said() -> None:
    """Prefill wants three workers however slowly they start, and may have two nodes."""
    plan = Plan(
        phases=((0.7, 15.0), (6.0, 90.0), (0.5, 60.0)),
        most={"prefill": 3, "decode": 2},
        nodes={"prefill": 2, "decode": 2},
        shrink_delay_s=15.0,
    )
    found = asyncio.run(measure(plan, print))  # it ends once pools and nodes are as few as at first
    live = found["live"]
    wanted, ready = (max(size[place] for size in live["sizes"]["prefill"]) for place in (1, 2))
    assert (wanted, ready) == (3, 2)
    # Of the two that are asked for at once either may have the node that is free.
    assert sum(name.startswith("prefill") for name in live["num_steps"]) >= 2, "who came has served"
    assert any("prefill-" in said and "Everything else goes on" in said for said in live["unplaced"])
    assert max(num for _, num in live["nodes"]) > 2
    assert live["nodes"][-1][1] == 2
    assert [size[-1][1:] for size in live["sizes"].values()] == [(1, 1), (1, 1)]
