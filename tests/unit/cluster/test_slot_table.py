"""What the table of slots keeps is what a look at all of them finds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.cluster.supervisor.events import INSTALLED, Build, Drain, Placement
from tandem.cluster.supervisor.nodes import Aim
from tandem.cluster.supervisor.slot_table import SlotTable
from tandem.cluster.supervisor.slots import Phase, Policy, Slot
from tandem.core.identity import WORKER_ROLES, Role

POLICY = Policy()
BUILDS = [INSTALLED, INSTALLED, Build("a", "1"), Build("b", "2")]
TIMES = [None, None, 1.0, 5.0, 20.0]


def change(table: SlotTable, chance: random.Random, number: int) -> None:
    """Something that may happen: one comes, goes or lives on."""
    role = chance.choice(list(Role))
    index = chance.choice([table.free_index(role), chance.randrange(6)])
    slot = Slot(role, index, incarnation=f"new-{number}")
    if slot.name not in table:
        assert index >= table.free_index(role)
        table[slot.name] = slot
    elif chance.random() < 0.1:
        del table[slot.name]
        return
    slot = table[slot.name]
    settings = {
        "phase": chance.choice(list(Phase)),
        "incarnation": f"life-{number}",
        "placement": chance.choice([None, Placement("host", number, f"n{chance.randrange(3)}")]),
        "aim": Aim(chance.choice(["", "n0", "n1"])),
        "build": chance.choice(BUILDS),
        "failures": chance.randrange(3),
        "leaving": chance.random() < 0.3,
        "refill": chance.random() < 0.3,
        "successor": chance.choice(["", "decode-9"]),
        "note": chance.choice(["", "it stays"]),
        "heard_at": float(number),
        **{name: chance.choice(TIMES) for name in ("retry_at", "deadline", "place_by", "aim_by")},
    }
    for name in chance.sample(sorted(settings), chance.randrange(1, len(settings))):
        setattr(slot, name, settings[name])


def check(table: SlotTable, now: float) -> None:
    """Every answer against a look at all slots."""
    slots = list(table.values())
    workers = [slot for slot in slots if slot.role in WORKER_ROLES]
    assert table.members == tuple(slot.member for slot in workers)
    assert list(table.workers.values()) == workers
    for role in Role:
        pool = [slot for slot in slots if slot.role is role]
        assert list(table.of(role).values()) == pool
        assert table.num_on(role) == Counter(slot.node_id for slot in pool)
        assert table.num_counted(role) == sum(slot.counts for slot in pool)
        taken = {slot.index for slot in pool}
        assert table.free_index(role) == next(index for index in range(len(taken) + 1) if index not in taken)
    leaving = [slot for slot in slots if slot.leaving and slot.phase is not Phase.STOPPING]
    assert table.drains == {s.name: Drain(s.incarnation, s.drain_s, s.refill, s.successor) for s in leaving}
    assert table.failures == {slot.name: slot.failures for slot in slots if slot.failures}
    assert table.builds == {slot.incarnation: slot.build for slot in slots if slot.build != INSTALLED}
    for build in BUILDS:
        assert table.all_run(build) == all(slot.build == build for slot in slots)
    starting = [slot for slot in slots if slot.phase is Phase.STARTING]
    assert table.unbegun == [slot for slot in starting if slot.placement is None]
    assert table.replaced == [slot for slot in slots if slot.successor]
    assert table.has_moving == any(slot.leaving or (slot in starting and slot.placement) for slot in slots)
    assert table.all_ready == all(slot.phase is Phase.READY for slot in slots)
    times = {slot.name: slot.next_time(POLICY) for slot in slots}
    assert table.first_time() == min((at for at in times.values() if at is not None), default=None)
    assert table.due(now) == [slot for slot in slots if (at := times[slot.name]) is not None and at <= now]


@pytest.mark.parametrize("seed", range(20))
def test_it_knows_what_a_look_at_all_slots_finds_whatever_happens(seed: int) -> None:
    table, chance = SlotTable(POLICY), random.Random(seed)
    for number in range(150):
        change(table, chance, number)
        if chance.random() < 0.5:
            check(table, now=chance.choice([0.0, 2.0, 10.0, float(number)]))


def test_what_people_see_has_a_new_revision_and_what_a_heartbeat_changes_has_none() -> None:
    table = SlotTable(POLICY)
    slot = table["decode-0"] = Slot(Role.DECODE, 0, phase=Phase.READY)
    seen = {table.revision}
    slot.heard_at, slot.num_requests, slot.deadline = 3.0, 7, 4.0
    assert {table.revision} == seen
    for name, value in {"phase": Phase.DRAINING, "note": "a", "leaving": True, "failures": 1, "address": "b"}.items():
        setattr(slot, name, value)
        seen.add(table.revision)
    slot.note = "a"
    seen.add(table.revision)
    assert len(seen) == 6
    del table["decode-0"]
    assert table.revision not in seen


def test_one_that_has_gone_changes_nothing_any_more() -> None:
    table = SlotTable(POLICY)
    gone = table["decode-0"] = Slot(Role.DECODE, 0)
    table["decode-0"] = Slot(Role.DECODE, 0, incarnation="new")
    gone.failures = 3
    assert table.failures == {}
    assert [member.incarnation for member in table.members] == ["new"]
