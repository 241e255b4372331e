"""What the router tells the supervisor of what is asked for, and what its metrics say of the pools' sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.lifecycle.request_load import RequestLoad
from router.lifecycle.turns import Turns
from router.policy.gate import Room
from router.request.mailbox import Mailbox
from router.request.request import BACKGROUND_PRIORITY, Request
from router.request.targets import Targets
from tandem.core.clock import VirtualClock
from tandem.core.sampling import SamplingParams
from tandem.rpc.v1 import common_pb2
from tandem.rpc.v1.control_pb2 import PoolSize, RouterStatusRequest
from tandem.rpc.v1.control_pb2 import RequestLoad as Told
from tests.support.router_site import Site

MakeSite = Callable[..., Site]


def request(number: int = 0, num_tokens: int = 10, priority: int = 0) -> Request:
    return Request(
        f"request-{number}",
        tuple(range(num_tokens)),
        SamplingParams(),
        0.0,
        priority=priority,
        targets=Targets(1.0, 0.1),
    )


def told(site: Site) -> Told:
    return site.pool.control.RouterStatus(RouterStatusRequest(), timeout=15).load


def test_requests_and_their_tokens_are_counted(make_site: MakeSite) -> None:
    site = make_site()
    assert told(site) == Told()
    assert site.post(prompt=[5] * 7, max_tokens=3).status_code == 200
    assert site.post(prompt=[5] * 5, max_tokens=1, slo={"ttft_ms": 1e-6, "tpot_ms": 1}).status_code == 200
    load = told(site)
    assert load.num_requests == load.num_ended == load.num_first == 2
    assert load.prompt_tokens == pytest.approx(12, rel=0.02), "less what is found in caches"
    assert load.output_tokens == load.ended_tokens == 4
    assert load.num_first_late == 1
    assert load.num_timed == 1, "of one token there is no time of a token"
    assert load.waiting_tokens == load.num_held_for_decode == 0


def test_what_is_late_by_its_own_targets_counts_as_late() -> None:
    load = RequestLoad()
    load.gave_first(request(), 0.9)
    load.gave_first(request(), 1.1)
    load.ended(request(), 5, 0.09)
    load.ended(request(), 5, 0.11)
    load.ended(request(), 1, 0.0)
    assert (load.num_first, load.num_first_late, load.num_timed, load.num_timed_late) == (2, 1, 2, 1)
    assert (load.num_ended, load.ended_tokens) == (3, 11)


def test_requests_of_batches_ask_for_nothing() -> None:
    load, batch = RequestLoad(), request(priority=BACKGROUND_PRIORITY)
    load.came(batch, 1.0)
    load.gave(batch, 3)
    load.gave_first(batch, 100.0)
    load.ended(batch, 3, 100.0)
    assert load == RequestLoad()


def turns_with(room: Room) -> Turns:
    """Three requests have come."""
    turns = Turns(lambda: room, 10.0, VirtualClock())
    for number in range(3):
        turns.join(request(number), Mailbox())
    return turns


ROOM = Room(num_computing=1, tokens_per_s=1000.0, num_decode=1, num_places=8, most_pages=8, page_size=16)


def test_what_waits_waits_for_prefill_or_for_decode() -> None:
    busy = turns_with(Room(**{**as_fields(ROOM), "tokens_per_s": 4.0}))
    assert (busy.num_waiting_tokens_to_compute, busy.num_held_for_decode) == (10, 0)
    full = turns_with(Room(**{**as_fields(ROOM), "num_places": 1}))
    assert (full.num_waiting_tokens_to_compute, full.num_held_for_decode) == (0, 2)
    free = turns_with(ROOM)
    assert (free.num_waiting_tokens_to_compute, free.num_held_for_decode) == (0, 0)


def as_fields(room: Room) -> dict[str, float]:
    return {name: getattr(room, name) for name in Room.__dataclass_fields__}


def test_metrics_tell_the_sizes_of_the_pools(make_site: MakeSite) -> None:
    site = make_site()
    size = PoolSize(
        role=common_pb2.ROLE_PREFILL, wanted=3, least=1, most=4, num_grown=5, num_shrunk=2, num_refused=1, num_taken=6
    )
    site.pool.sizes = [size]
    site.pool.push()
    told = {name: value for name, value in site.metrics().items() if name.startswith("tandem_pool_")}
    assert {name: value for name, value in told.items() if "_created" not in name} == {
        'tandem_pool_workers{bound="wanted",role="prefill"}': 3,
        'tandem_pool_workers{bound="least",role="prefill"}': 1,
        'tandem_pool_workers{bound="most",role="prefill"}': 4,
        'tandem_pool_changes_total{outcome="grown",role="prefill"}': 5,
        'tandem_pool_changes_total{outcome="shrunk",role="prefill"}': 2,
        'tandem_pool_changes_total{outcome="taken",role="prefill"}': 6,
        'tandem_pool_changes_total{outcome="refused",role="prefill"}': 1,
    }
