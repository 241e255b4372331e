"""When a request would have its first token, and by when one is wanted."""

from __future__ import annotations

import pytest

from router.policy.first_token import first_token_in_s
from router.policy.gate import Room
from router.request.targets import Targets
from tandem.core.config import load

ROOM = Room(num_computing=2, tokens_per_s=100.0, num_decode=1, num_places=4, most_pages=9, page_size=16)


def test_it_waits_for_those_in_front_at_all_workers_and_is_computed_by_one() -> None:
    assert first_token_in_s(400, 50, 0.0, ROOM) == pytest.approx(2.5)


def test_it_waits_for_a_place_meanwhile() -> None:
    assert first_token_in_s(400, 50, 1.0, ROOM) == pytest.approx(2.5)
    assert first_token_in_s(400, 50, 7.0, ROOM) == pytest.approx(7.5)


def test_before_the_speed_is_known_nothing_is_said_of_it() -> None:
    slow = Room(num_computing=2, tokens_per_s=0.0, num_decode=1, num_places=4, most_pages=9, page_size=16)
    assert first_token_in_s(10**6, 10**6, 0.0, slow) == 0.0


def test_targets_are_of_the_request_or_the_tenant_or_the_cluster_or_the_device() -> None:
    cpu, gpu = Targets.of(load(None)), Targets.of(load(None, {"pools.decode.gpus": 1}))
    assert cpu.ttft_s > gpu.ttft_s
    assert cpu.tpot_s > gpu.tpot_s
    assert Targets.of(load(None), on_gpu=True) == gpu
    own = Targets.of(load(None, {"slo.ttft_ms": 300}))
    assert own == Targets(0.3, cpu.tpot_s)
    assert own.but(0, 20) == Targets(0.3, 0.02)
    assert own.but(100, 0).but(0, 0) == Targets(0.1, cpu.tpot_s)


def test_a_request_has_others_give_way_for_no_less_than_its_tenants_target() -> None:
    tenants = Targets(1.0, 0.2)
    assert tenants.asked(0, 1.0).tpot_beside_prompts_s == 0.2
    assert tenants.asked(0, 500.0).tpot_beside_prompts_s == 0.5
    assert tenants.asked(0, 1.0).tpot_s == 0.001, "what metrics call late is its own"
