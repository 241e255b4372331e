"""Both ends of the handoff, page accounting and journal under 10,000 schedules of faults that nobody would think of."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support import protocol_prefill
from tests.support.protocol_world import FAULTS, World
from tests.support.scripted_model import LAYOUT

pytestmark = pytest.mark.long

NUM_EXAMPLES = 10_000
SEEDS = (1, *(pytest.param(number, marks=pytest.mark.faults) for number in range(2, 9)))
# More than two in a hundred schedules meet each fault; what they lead to is rarer.
AT_LEAST = dict.fromkeys(FAULTS, 10) | {"late writer": 1}
LED_TO = {"retry": 250, "digest mismatch": 25, "kept pages": 10, "cache hit": 10, "killed by the protocol": 10}


@pytest.mark.timeout(600)  # shrinking a failure takes its time
@pytest.mark.parametrize("number", SEEDS)
def test_no_schedule_breaks_an_invariant(number: int) -> None:
    count: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=NUM_EXAMPLES // len(SEEDS),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(st.binary(min_size=120, max_size=360))
    def hold(choices: bytes) -> None:
        world = World(choices).run()
        count.update(world.count)
        count.update(client.ended or "" for client in world.clients.values())
        count["schedules"] += 1
        count["admitted"] += len(world.admitted)

    hold()
    print(f"\nseed {number}: " + ", ".join(f"{n} {what}" for what, n in count.most_common()))
    rare = {what: count[what] for what, wanted in (AT_LEAST | LED_TO).items() if count[what] < wanted}
    assert not rare, f"the adversary hardly does this: {rare}"
    assert count["finished"] > count["schedules"], "the adversary lets too little through: the schedules prove little"


def test_no_schedule_breaks_an_invariant_when_each_extent_is_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    size = LAYOUT.extent_bytes
    limits = replace(protocol_prefill.SENDER_LIMITS, batch_bytes=size, last_batch_bytes=size)
    monkeypatch.setattr(protocol_prefill, "SENDER_LIMITS", limits)
    worlds = [World(random.Random(number).randbytes(360)).run() for number in range(500)]
    assert sum(len(world.admitted) for world in worlds) > 250
    assert sum(world.count["kept pages"] for world in worlds) > 2
    assert sum(world.count["digest mismatch"] for world in worlds) > 5


def test_without_faults_every_request_is_admitted_once_and_finished() -> None:
    world = World()
    for number in range(3):
        world.new_client(number)
    world.settle()
    assert {client.ended for client in world.clients.values()} == {"finished"}
    assert len(world.admitted) == 3
    assert not world.count["retry"]
