"""Several routers that know nothing of each other place nearly as well as one: scripted workers, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.placement.command import PlacementCase, measure
from benchmarks.placement.section import GOAL, section
from benchmarks.placement.world import PlacementSpec, PlacementWorld

pytestmark = pytest.mark.long


@pytest.mark.faults
def test_requests_queue_hardly_longer_with_four_routers_than_with_one() -> None:
    """Were they told of requests at intervals only, all four would send theirs to the worker that was idle last."""
    cases = [PlacementCase(8, 1), PlacementCase(8, 4), PlacementCase(8, 4, is_prompt=False)]
    content = measure(cases, (1, 2), 3000, lambda _: None)
    one, four, late = content["cases"]
    assert one["ratio"] == 1.0
    assert GOAL.is_reached_by(four["ratio"]), four
    assert max(four["ratios"]) < 1.3
    assert four["mean_s"] < 1.1 * one["mean_s"]
    assert late["ratio"] > 1.5
    page = "\n".join(section({"code": {"digest": "abc"}, **content}))
    assert f"{four['ratio']:.2f}" in page
    assert "≤ 1.15: reached" in page


@pytest.mark.faults
def test_eight_routers_keep_64_pairs_busy_without_long_queues() -> None:
    """A prompt takes 0.2 s to compute on average; with one router hardly any waits. Were a lot to decide between idle
    workers, a few requests of a hundred would meet another's there, and the p99 would be four times as long."""
    content = measure([PlacementCase(64, 1), PlacementCase(64, 8)], (1,), 3000, lambda _: None)
    one, eight = content["cases"]
    assert one["mean_s"] < eight["mean_s"] < 0.005
    assert eight["p99_s"] < 0.1
    assert eight["ratio"] < 2.0


@pytest.mark.parametrize("num_pages", [8192, 400])
def test_all_ends_in_the_simulated_cluster(num_pages: int) -> None:
    """Also where decode has pages for a few prompts only."""
    spec = PlacementSpec(2, 2, num_routers=3, num_requests=200, num_pages=num_pages, seed=7)
    requests = PlacementWorld(spec).run()
    assert len(requests) == 200
    for request in requests:
        assert request.came_s < request.began_s < request.computed_s < request.admitted_s
