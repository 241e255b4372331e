"""A live run of pools that follow their load: what is read from what its supervisor tells, its simulation, its plot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.autoscale.live import Plan, Watched, simulated
from benchmarks.autoscale.live_section import plot, section
from tandem.core.errors import OverloadedError
from tandem.rpc.v1 import common_pb2, control_pb2, supervisor_pb2

PLAN = Plan(phases=((0.7, 60.0), (4.0, 120.0), (0.7, 120.0)))


def told(*, wanted: int, ready: int, unplaced: int = 0) -> supervisor_pb2.Cluster:
    """Of a cluster whose prefill pool has this size."""
    names = [f"prefill-{number}" for number in range(wanted)]
    workers = [
        supervisor_pb2.ClusterWorker(
            member=control_pb2.Member(
                worker_id=name,
                role=common_pb2.ROLE_PREFILL,
                state="ready" if number < ready else "starting",
                pid=0 if number >= wanted - unplaced else 1,
            ),
            load=common_pb2.WorkerStatus(steps=7) if number < ready else None,
        )
        for number, name in enumerate(names)
    ]
    pools = [
        supervisor_pb2.Pool(role=common_pb2.ROLE_PREFILL, wanted=wanted, ready=ready),
        supervisor_pb2.Pool(role=common_pb2.ROLE_DECODE, wanted=1, ready=1),
    ]
    return supervisor_pb2.Cluster(workers=workers, pools=pools)


def test_starts_take_from_when_a_worker_was_asked_for_until_it_served() -> None:
    watched = Watched()
    for at_s, wanted, ready in ((0, 1, 1), (10, 3, 1), (12, 4, 1), (30, 4, 2), (31, 4, 2), (45, 4, 4), (90, 3, 3)):
        watched.hear(told(wanted=wanted, ready=ready), at_s)
    assert watched.sizes["prefill"] == [(0, 1, 1), (10, 3, 1), (12, 4, 1), (30, 4, 2), (45, 4, 4), (90, 3, 3)]
    assert watched.starts_s() == [20, 35, 33]
    assert watched.num_steps == {f"prefill-{number}": 7 for number in range(4)}


def test_a_worker_that_was_given_up_before_it_served_is_no_start() -> None:
    watched = Watched()
    for at_s, wanted, ready in ((0, 1, 1), (10, 3, 1), (20, 2, 1), (30, 2, 2), (40, 3, 2), (55, 3, 3)):
        watched.hear(told(wanted=wanted, ready=ready), at_s)
    assert watched.starts_s() == [20, 15]


def test_more_may_be_given_up_than_were_asked_for() -> None:
    watched = Watched()
    for at_s, wanted, ready in ((0, 4, 4), (10, 5, 4), (20, 2, 4), (25, 2, 2), (30, 3, 2), (42, 3, 3)):
        watched.hear(told(wanted=wanted, ready=ready), at_s)
    assert watched.starts_s() == [12]


@pytest.mark.long
def test_its_simulation_refuses_what_the_router_refuses_and_counts_it() -> None:
    """Where no worker starts in time."""
    plan = replace(PLAN, max_queued_requests=4)
    said = simulated(plan, 1000.0)
    assert said["failures"].keys() == {OverloadedError.code}
    assert said["kept_share"] <= 1 - said["failures"][OverloadedError.code] / len(plan.arrivals())


@pytest.mark.long
@pytest.mark.parametrize("start_s", [20.0, 60.0])
def test_a_load_of_more_than_two_workers_wants_three_however_long_they_take_to_start(start_s: float) -> None:
    """As the test on nodes has it, where the third has no node."""
    plan = Plan(((0.7, 15.0), (6.0, 90.0), (0.5, 60.0)), {"prefill": 3, "decode": 2}, shrink_delay_s=15.0)
    assert max(size for _, size, _ in simulated(plan, start_s)["sizes"]["prefill"]) == 3


def test_what_has_no_node_is_noted_once() -> None:
    watched = Watched()
    for unplaced in (0, 1, 1):
        watched.hear(told(wanted=3, ready=1, unplaced=unplaced), 1.0)
    (said,) = watched.unplaced
    assert said.startswith("Ray has no free node for prefill-2.")


def test_it_is_back_when_pools_and_nodes_are() -> None:
    watched = Watched()
    watched.hear(told(wanted=1, ready=1), 0.0)
    watched.nodes.append((0.0, 3))
    assert not watched.is_back()
    watched.nodes.append((9.0, 2))
    assert watched.is_back()
    watched.hear(told(wanted=2, ready=1), 10.0)
    assert not watched.is_back()


@pytest.mark.long
def test_its_simulation_grows_and_shrinks_and_is_drawn_beside_it() -> None:
    said = simulated(PLAN, 20.0)
    for role, most in PLAN.most.items():
        wanted = [size for _, size, _ in said["sizes"][role]]
        assert wanted[0] == wanted[-1] == 1
        assert 2 <= max(wanted) <= most
    live: dict[str, Any] = {
        "sizes": said["sizes"],
        "kept_share": 0.9,
        "failures": {"a": 2},
        "nodes": [(0.0, 2), (60.0, 5), (200.0, 2)],
    }
    content = {
        "plan": {"phases": PLAN.phases, "most": PLAN.most, "shrink_delay_s": 30.0, "num_input": 400, "num_output": 48},
        "num_requests": 600,
        "start_s": 20.0,
        "starts_s": [18.0, 20.0, 25.0],
        "live": live,
        "simulated": said,
        "code": {"digest": "d"},
    }
    text = " ".join(section(content))
    assert "There were 5 nodes at most, and 2 at the end." in text.replace("\n", " ")
    assert "2 of the requests failed; 90.0% kept" in text.replace("\n", " ")
    assert "| prefill | 1 → 2" in text
    drawn = plot(content)
    assert all(f">{label}</text>" in drawn for label in ("ready, live", "wanted, simulated", "decode workers"))
