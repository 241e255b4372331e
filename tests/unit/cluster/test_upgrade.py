"""An upgrade replaces one process after the other, each by a successor that is ready first, or is taken back."""

from __future__ import annotations

import itertools

from tandem.cluster.supervisor.events import (
    INSTALLED,
    Adopted,
    Build,
    BuildChanged,
    ClusterOpened,
    Drained,
    DrainProcess,
    Ending,
    Event,
    Exited,
    Instruction,
    Intent,
    KillProcess,
    LoadReported,
    Placement,
    ShutdownRequested,
    Started,
    StartProcess,
    StopProcess,
    Tick,
    WantedChanged,
)
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.slots import Policy
from tandem.core.identity import Role

NEXT, AFTER = Build("aa", "0.2.0"), Build("bb", "0.3.0")
HERE = Placement("here", 1)
WANTED = {Role.PREFILL: 1, Role.DECODE: 2, Role.ROUTER: 1}


class Cluster:
    """Processes that start, drain and stop as they are told, but for builds that are broken."""

    def __init__(self) -> None:
        names = (f"life-{n}" for n in itertools.count())
        self.pools = PoolState(policy=Policy(), new_incarnation=lambda: next(names))
        self.broken: set[Build] = set()
        self.now, self.told = 0.0, list[Instruction]()
        self.least_ready = dict.fromkeys(Role, 99)  # fewest that served at once, since the cluster was up
        self.feed(ClusterOpened(Intent(dict(WANTED))))
        self.run()

    def feed(self, event: Event) -> None:
        self.told += self.pools.handle(event, self.now)

    def run(self) -> None:
        """Until nothing is under way; time passes where only that helps."""
        while self.told or self.pools.wake_at() is not None:
            if not self.told:
                due = [slot.retry_at for slot in self.pools.slots.values() if slot.retry_at is not None]
                if not due:
                    return
                self.now = max(self.now, min(due))
                self.feed(Tick())
                continue
            self.carry_out(self.told.pop(0))

    def carry_out(self, step: Instruction) -> None:
        if isinstance(step, StartProcess) and step.build in self.broken:
            self.feed(Exited(step.name, step.incarnation, Ending("config", "it cannot start")))
        elif isinstance(step, StartProcess):
            self.feed(Started(step.name, step.incarnation, f"{step.name}:1", HERE, "http://here"))
        elif isinstance(step, DrainProcess):
            self.count()
            self.feed(Drained(step.name, step.incarnation))
        elif isinstance(step, StopProcess):
            self.feed(Exited(step.name, step.incarnation, None))

    def count(self) -> None:
        for role in Role:
            ready = sum(slot.role is role and slot.phase.value == "ready" for slot in self.pools.slots.values())
            self.least_ready[role] = min(self.least_ready[role], ready)

    @property
    def builds(self) -> list[Build]:
        return [slot.build for slot in self.pools.slots.values()]


def test_every_worker_and_router_is_replaced_and_no_pool_has_fewer_meanwhile() -> None:
    cluster = Cluster()
    assert cluster.builds == [INSTALLED] * 4
    cluster.feed(BuildChanged(NEXT))
    cluster.run()
    assert cluster.builds == [NEXT] * 4
    assert cluster.pools.settled
    assert cluster.least_ready == WANTED


def test_one_is_replaced_at_a_time() -> None:
    cluster = Cluster()
    cluster.feed(BuildChanged(NEXT))
    started = [step for step in cluster.told if isinstance(step, StartProcess)]
    assert [(step.role, step.build) for step in started] == [(Role.PREFILL, NEXT)]
    cluster.told = [step for step in cluster.told if step not in started]
    cluster.feed(Tick())
    assert not [step for step in cluster.told if isinstance(step, StartProcess)]


def test_a_process_that_ends_during_an_upgrade_starts_again_with_the_new_build() -> None:
    cluster = Cluster()
    cluster.feed(BuildChanged(NEXT))
    cluster.feed(Exited("decode-1", cluster.pools.slots["decode-1"].incarnation, Ending("worker_lost", "killed")))
    assert cluster.pools.slots["decode-1"].build == NEXT
    cluster.run()
    assert cluster.builds == [NEXT] * 4


def test_a_build_that_cannot_start_is_taken_back_and_nobody_has_left() -> None:
    cluster = Cluster()
    cluster.broken.add(NEXT)
    before = {name: slot.incarnation for name, slot in cluster.pools.slots.items()}
    cluster.feed(BuildChanged(NEXT))
    cluster.run()
    assert {name: slot.incarnation for name, slot in cluster.pools.slots.items()} == before
    assert cluster.pools.upgrade.wanted == INSTALLED
    assert cluster.pools.upgrade.note == "0.2.0 was taken back: prefill-1 cannot start (it cannot start)"


def test_what_had_been_replaced_goes_back_too() -> None:
    cluster = Cluster()
    cluster.feed(BuildChanged(NEXT))
    while cluster.pools.slots.get("prefill-0"):
        cluster.carry_out(cluster.told.pop(0))
    assert NEXT in cluster.builds
    cluster.broken.add(NEXT)
    cluster.run()
    assert cluster.builds == [INSTALLED] * 4


def test_where_the_way_back_fails_too_both_builds_go_on_side_by_side() -> None:
    cluster = Cluster()
    cluster.feed(BuildChanged(NEXT))
    cluster.run()
    cluster.feed(BuildChanged(AFTER))
    while cluster.pools.slots.get("prefill-1"):
        cluster.carry_out(cluster.told.pop(0))
    cluster.broken |= {AFTER, NEXT}
    cluster.run()
    assert sorted(build.version for build in cluster.builds) == ["0.2.0", "0.2.0", "0.2.0", "0.3.0"]
    assert cluster.pools.settled
    assert cluster.pools.upgrade.is_done(cluster.pools.slots.values()), "the next upgrade may come"


def test_where_there_is_no_room_for_both_a_build_that_cannot_start_costs_one_worker_at_most() -> None:
    cluster = Cluster()
    cluster.broken.add(NEXT)
    cluster.feed(BuildChanged(NEXT))
    cluster.told = [step for step in cluster.told if not isinstance(step, StartProcess)]  # no node has a place
    cluster.now += Policy().place_s
    for slot in cluster.pools.slots.values():
        cluster.feed(LoadReported(slot.name, slot.incarnation, 0))
    cluster.feed(Tick())
    unplaced = cluster.pools.slots["prefill-1"]
    assert unplaced.is_unplaced
    drains = [step for step in cluster.told if isinstance(step, DrainProcess)]
    assert [drain.name for drain in drains] == ["prefill-0"]
    while cluster.told:
        cluster.carry_out(cluster.told.pop(0))
    assert "prefill-0" not in cluster.pools.slots
    cluster.feed(Tick())
    assert not cluster.told, "nobody else goes before it is seen that the build can start"
    cluster.carry_out(StartProcess(unplaced.name, unplaced.incarnation, Role.PREFILL, NEXT))
    cluster.run()
    assert cluster.builds == [INSTALLED] * 4
    assert cluster.pools.settled
    assert cluster.pools.upgrade.note == "0.2.0 was taken back: prefill-1 cannot start (it cannot start)"
    assert cluster.least_ready == {**WANTED, Role.PREFILL: 0}


def test_one_that_waits_for_a_node_is_asked_for_anew_and_holds_up_no_further_upgrade() -> None:
    cluster = Cluster()
    cluster.feed(WantedChanged(Role.DECODE, 3))
    cluster.told.clear()  # no node has a place
    waits = cluster.pools.slots["decode-2"]
    assert (waits.is_unplaced, waits.build) == (True, INSTALLED)
    cluster.feed(BuildChanged(NEXT))
    killed = [step for step in cluster.told if isinstance(step, KillProcess)]
    assert [step.name for step in killed] == ["decode-2"]
    cluster.told.clear()
    cluster.feed(Exited("decode-2", waits.incarnation, None))
    assert (waits.is_unplaced, waits.build, waits.failures) == (True, NEXT, 0)


def test_the_next_supervisor_goes_on_with_an_upgrade() -> None:
    cluster = Cluster()
    cluster.feed(BuildChanged(NEXT))
    while cluster.pools.slots.get("prefill-0"):
        cluster.carry_out(cluster.told.pop(0))
    intent, slots = cluster.pools.intent, list(cluster.pools.slots.values())
    names = (f"later-{n}" for n in itertools.count())
    cluster.pools = PoolState(policy=Policy(), new_incarnation=lambda: next(names))
    cluster.told.clear()
    for slot in slots:
        if slot.phase.value == "ready":
            cluster.feed(Adopted(slot.name, slot.incarnation, f"{slot.name}:1", HERE))
    cluster.feed(ClusterOpened(intent))
    assert [slot.build for slot in cluster.pools.slots.values() if slot.name == "prefill-1"] == [NEXT]
    assert cluster.pools.upgrade.wanted == NEXT


def test_a_cluster_that_stops_replaces_nobody() -> None:
    cluster = Cluster()
    cluster.feed(ShutdownRequested())
    cluster.told.clear()
    cluster.feed(BuildChanged(NEXT))
    assert not [step for step in cluster.told if isinstance(step, StartProcess)]
