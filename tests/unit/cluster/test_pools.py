"""The supervisor's decisions, by feeding events."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tandem.cluster.supervisor.events import (
    Adopted,
    ClockJumped,
    ClosingBegun,
    ClusterOpened,
    Drain,
    Drained,
    DrainOrdered,
    DrainProcess,
    Ending,
    EndingsTaken,
    Event,
    Exited,
    Instruction,
    Intent,
    KillProcess,
    LoadingHeard,
    LoadReported,
    NoteEnded,
    OtherRouter,
    Placed,
    Placement,
    ProcessEnded,
    PublishMembership,
    ShutdownRequested,
    Started,
    StartProcess,
    StopProcess,
    Tick,
    WantedChanged,
    WriterSuspected,
)
from tandem.cluster.supervisor.news import MAX_ENDED
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.slots import MAX_UNTOLD, Phase, Policy, Slot
from tandem.core.identity import Role
from tandem.core.machine import HostBoot

HERE = Placement("node-a", 100)
KILLED = Ending("worker_lost", "its process was killed or crashed")


def wanting(prefill: int = 1, decode: int = 1, routers: int = 1) -> Intent:
    return Intent({Role.PREFILL: prefill, Role.DECODE: decode, Role.ROUTER: routers})


class Story:
    """A cluster, a clock and everything it was told to do."""

    def __init__(self, prefill: int = 1, decode: int = 1, *, routers: int = 1, ready: bool = True) -> None:
        names = (f"life-{n}" for n in itertools.count())
        self.cluster = PoolState(policy=Policy(), new_incarnation=lambda: next(names))
        self.now = 0.0
        self.last = self.feed(ClusterOpened(wanting(prefill, decode, routers)))
        if ready:
            for name in self.cluster.routers:
                self.start_router(name)
            for worker_id in list(self.cluster.workers):
                self.start(worker_id)

    def feed(self, event: Event, after_s: float = 0.0) -> list[Instruction]:
        self.now += after_s
        self.last = self.cluster.handle(event, self.now)
        return self.last

    def life(self, worker_id: str) -> str:
        return self.cluster.workers[worker_id].incarnation

    def start(self, worker_id: str) -> list[Instruction]:
        return self.feed(Started(worker_id, self.life(worker_id), "127.0.0.1:1", HERE))

    def router(self, name: str = "router-0") -> Slot:
        return self.cluster.routers[name]

    def start_router(self, name: str = "router-0") -> list[Instruction]:
        return self.feed(Started(name, self.router(name).incarnation, "127.0.0.1:2", HERE, "http://127.0.0.1:8000"))

    def exit_router(self, name: str = "router-0", error: Ending | None = KILLED) -> list[Instruction]:
        return self.feed(Exited(name, self.router(name).incarnation, error))

    def hear_routers(self) -> list[Instruction]:
        routers = list(self.cluster.routers.values())
        return [step for r in routers for step in self.feed(LoadReported(r.name, r.incarnation, 0))]

    def exit(self, worker_id: str, error: Ending | None = KILLED, after_s: float = 0.0) -> list[Instruction]:
        return self.feed(Exited(worker_id, self.life(worker_id), error), after_s)

    def load(self, worker_id: str, num_requests: int) -> None:
        self.feed(LoadReported(worker_id, self.life(worker_id), num_requests))

    def pass_time(self, seconds: float) -> list[Instruction]:
        """All that listens is heard at the end of it; everything that is said then."""
        self.now += seconds
        out: list[Instruction] = []
        for worker_id, slot in self.cluster.workers.items():
            if slot.listens:
                out += self.feed(LoadReported(worker_id, slot.incarnation, slot.num_requests))
            elif slot.phase is Phase.STARTING:
                out += self.feed(LoadingHeard(worker_id, slot.incarnation))
        out += self.hear_routers()
        return out + self.feed(Tick())

    def phases(self) -> dict[str, Phase]:
        return {worker_id: slot.phase for worker_id, slot in self.cluster.workers.items()}


def of(kind: type, instructions: list[Instruction]) -> list[Instruction]:
    return [step for step in instructions if isinstance(step, kind)]


def of_routers(kind: type, instructions: list[Instruction]) -> list[Instruction]:
    return [step for step in of(kind, instructions) if step.name.startswith("router-")]


def of_workers(kind: type, instructions: list[Instruction]) -> list[Instruction]:
    return [step for step in of(kind, instructions) if not step.name.startswith("router-")]


def test_opening_starts_the_router_and_every_wanted_worker() -> None:
    story = Story(1, 2, ready=False)
    started = [(step.role, step.name) for step in of_workers(StartProcess, story.last)]
    assert started == [(Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0"), (Role.DECODE, "decode-1")]
    assert len(of_routers(StartProcess, story.last)) == 1
    assert not story.cluster.settled


def test_settled_when_all_are_ready() -> None:
    assert Story(2, 2).cluster.settled


def test_membership_is_published_with_growing_versions_and_only_to_a_router_that_listens() -> None:
    story = Story(ready=False)
    assert not of(PublishMembership, story.feed(Placed("prefill-0", story.life("prefill-0"), HERE)))
    (first,) = story.start_router()
    (second,) = story.start("decode-0")
    assert isinstance(first, PublishMembership)
    assert isinstance(second, PublishMembership)
    assert first.version < second.version
    assert {member.worker_id: member.state for member in second.members} == {
        "prefill-0": "starting",
        "decode-0": "ready",
    }


def test_a_restarted_router_is_told_the_same_membership_again() -> None:
    story = Story()
    version = story.cluster.version
    old = story.router().incarnation
    (start,) = story.exit_router()
    assert isinstance(start, StartProcess)
    assert start.incarnation != old
    (again,) = story.start_router()
    assert isinstance(again, PublishMembership)
    assert again.version == version
    assert len(again.members) == 2


def test_changes_while_the_router_is_away_reach_the_next_one() -> None:
    story = Story()
    story.exit_router()
    assert not of(PublishMembership, story.exit("decode-0"))
    (told,) = story.start_router()
    assert isinstance(told, PublishMembership)
    assert [m.state for m in told.members if m.role is Role.DECODE] == ["starting"]


def test_a_worker_that_dies_is_started_again_at_once_under_a_new_incarnation() -> None:
    story = Story()
    old = story.life("prefill-0")
    start, publish = story.exit("prefill-0", after_s=100)
    assert isinstance(start, StartProcess)
    assert (start.name, start.role) == ("prefill-0", Role.PREFILL)
    assert start.incarnation != old
    assert isinstance(publish, PublishMembership)
    assert not story.cluster.settled
    story.start("prefill-0")
    assert story.cluster.settled


def test_each_router_is_told_which_of_those_that_serve_it_is() -> None:
    """Those that are alike then take different workers of equal load."""
    story = Story(routers=3)

    def numbers(out: list[Instruction]) -> dict[str, tuple[int, int]]:
        told = [step for step in out if isinstance(step, PublishMembership)]
        return {step.name: (step.router_number, step.num_routers) for step in told}

    assert numbers(story.feed(Tick())) == {}
    assert numbers(story.exit_router("router-0")) == {"router-1": (0, 2), "router-2": (1, 2)}
    assert numbers(story.start_router("router-0")) == {"router-0": (0, 3), "router-1": (1, 3), "router-2": (2, 3)}


@pytest.mark.parametrize(
    ("num_decode", "expected"),
    [(2, [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]), (1, [0, 0.5, 1, 2, 4, 5, 5, 5, 5, 5])],
    ids=["while another serves", "alone"],
)
def test_back_off_doubles_up_to_its_limit_while_it_dies_at_once(num_decode: int, expected: list[float]) -> None:
    story = Story(1, num_decode)

    def tick(after_s: float) -> list[Instruction]:
        story.now += after_s
        if num_decode > 1:
            story.load("decode-1", 0)
        return story.feed(Tick())

    waits = []
    for _ in range(10):
        story.exit("decode-0")
        due = story.cluster.workers["decode-0"].retry_at
        waits.append(0.0 if due is None else due - story.now)
        if due is not None:
            assert story.phases()["decode-0"] is Phase.WAITING
            assert not any(of_workers(StartProcess, tick((due - story.now) / 4)) for _ in range(3))
            assert of_workers(StartProcess, tick(due - story.now))
    assert waits == expected


def wait_of(story: Story, worker_id: str) -> float | None:
    due = story.cluster.workers[worker_id].retry_at
    return None if due is None else due - story.now


def test_a_pool_that_has_nobody_any_more_waits_for_the_first_of_its_workers_only() -> None:
    story = Story(1, 2)
    for slot in story.cluster.workers.values():
        slot.failures = 9
    story.exit("decode-0")
    assert wait_of(story, "decode-0") == 30, "decode-1 serves"
    story.exit("decode-1", after_s=1)
    assert wait_of(story, "decode-0") == 5, "it would have been the first to start"
    assert wait_of(story, "decode-1") == 30
    story.feed(Tick(), after_s=5)
    assert story.phases()["decode-0"] is Phase.STARTING
    story.exit("decode-0", after_s=1)
    assert (wait_of(story, "decode-0"), wait_of(story, "decode-1")) == (30, 5)


def test_one_that_leaves_serves_nobody_new() -> None:
    story = Story(1, 2)
    story.feed(WantedChanged(Role.DECODE, 1))
    assert Phase.DRAINING in story.phases().values()
    (stays,) = [w for w, phase in story.phases().items() if w.startswith("decode") and phase is Phase.READY]
    story.cluster.workers[stays].failures = 9
    story.exit(stays)
    assert wait_of(story, stays) == 5


def test_a_new_supervisor_of_a_pool_without_anybody_does_not_let_it_wait_anew() -> None:
    story = Story(ready=False)
    later = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    intent = replace(wanting(1, 2), failures={"decode-0": 9, "decode-1": 9, "prefill-0": 9})
    later.handle(ClusterOpened(intent), story.now)
    waits = {worker_id: slot.retry_at for worker_id, slot in later.workers.items()}
    assert waits == {"prefill-0": 5, "decode-0": 5, "decode-1": 30}


def test_a_stable_run_clears_the_failures() -> None:
    story = Story()
    for _ in range(3):
        story.exit("decode-0")
        story.feed(Tick(), after_s=60)
        story.start("decode-0")
    assert story.cluster.workers["decode-0"].failures == 3
    assert of_workers(StartProcess, story.exit("decode-0", after_s=story.cluster.policy.stable_s))
    assert story.cluster.workers["decode-0"].failures == 1


def test_the_reason_of_a_failed_start_is_kept_until_the_next_one() -> None:
    story = Story(ready=False)
    story.start_router()
    life = story.life("decode-0")
    start, _ = story.feed(Exited("decode-0", life, Ending("model_load", "no such file")))
    assert isinstance(start, StartProcess)
    assert start.incarnation != life
    assert story.cluster.workers["decode-0"].last_error == Ending("model_load", "no such file")


def test_one_that_fails_to_start_while_it_is_killed_leaves() -> None:
    story = Story(1, 2)
    story.exit("decode-1")
    (kill,) = of(KillProcess, story.feed(WantedChanged(Role.DECODE, 1)))
    assert kill.name == "decode-1"
    story.exit("decode-1", Ending("model_load", "no such file"))
    assert set(story.phases()) == {"prefill-0", "decode-0"}
    assert story.cluster.settled


def test_stale_events_change_nothing() -> None:
    story = Story()
    old = story.life("prefill-0")
    story.exit("prefill-0")
    before = (story.phases(), story.cluster.version)
    for event in (
        Exited("prefill-0", old, KILLED),
        Started("prefill-0", old, "127.0.0.1:9", HERE),
        Drained("prefill-0", old),
        WriterSuspected("prefill-0", old),
        Exited("router-0", "never-was", KILLED),
    ):
        assert story.feed(event) == []
    assert (story.phases(), story.cluster.version) == before


def test_an_exit_seen_twice_counts_once() -> None:
    story = Story()
    story.exit("decode-0")
    story.exit("decode-0")
    assert story.phases()["decode-0"] is Phase.WAITING
    assert story.exit("decode-0") == []
    assert story.cluster.workers["decode-0"].failures == 2


def test_scale_up_adds_the_lowest_free_numbers() -> None:
    story = Story(1, 3)
    story.load("decode-0", 5)
    story.load("decode-2", 5)
    story.feed(WantedChanged(Role.DECODE, 2))
    story.feed(Drained("decode-1", story.life("decode-1")))
    story.exit("decode-1", error=None)
    started = of_workers(StartProcess, story.feed(WantedChanged(Role.DECODE, 4)))
    assert [step.name for step in of_workers(StartProcess, started)] == ["decode-1", "decode-3"]


def test_scale_down_drains_the_least_loaded_and_of_equals_the_latest() -> None:
    story = Story(1, 4)
    story.load("decode-0", 3)
    story.load("decode-1", 1)
    story.load("decode-2", 2)
    story.load("decode-3", 1)
    drains = of(DrainProcess, story.feed(WantedChanged(Role.DECODE, 3)))
    assert [step.name for step in drains if isinstance(step, DrainProcess)] == ["decode-3"]
    drains = of(DrainProcess, story.feed(WantedChanged(Role.DECODE, 1)))
    assert [step.name for step in drains if isinstance(step, DrainProcess)] == ["decode-1", "decode-2"]
    assert story.phases()["decode-0"] is Phase.READY


def test_scale_down_takes_what_does_not_serve_first() -> None:
    story = Story(1, 2)
    story.load("decode-1", 0)
    story.feed(WantedChanged(Role.DECODE, 3))
    assert story.phases()["decode-2"] is Phase.STARTING
    for _ in range(2):
        story.exit("decode-0")
    assert story.phases()["decode-0"] is Phase.WAITING
    out = story.feed(WantedChanged(Role.DECODE, 1))
    assert [step.name for step in of_workers(KillProcess, out)] == ["decode-2"]
    assert story.phases() == {
        "prefill-0": Phase.READY,
        "decode-1": Phase.READY,
        "decode-2": Phase.STOPPING,
    }


def test_a_removed_worker_drains_then_stops_then_is_gone() -> None:
    story = Story(2, 1)
    out = story.feed(WantedChanged(Role.PREFILL, 1))
    assert [type(step) for step in out] == [DrainProcess, PublishMembership]
    life = story.life("prefill-1")
    published = out[1]
    assert isinstance(published, PublishMembership)
    assert {m.worker_id: m.state for m in published.members}["prefill-1"] == "draining"
    assert story.feed(Drained("prefill-1", life)) == [StopProcess("prefill-1", life)]
    (gone,) = story.exit("prefill-1", error=None)
    assert isinstance(gone, PublishMembership)
    assert [m.worker_id for m in gone.members] == ["prefill-0", "decode-0"]
    assert story.cluster.settled


def test_a_worker_that_dies_while_it_drains_is_not_replaced() -> None:
    story = Story(2, 1)
    story.feed(WantedChanged(Role.PREFILL, 1))
    assert not of_workers(StartProcess, story.exit("prefill-1"))
    assert "prefill-1" not in story.cluster.workers


def test_scaling_up_while_one_drains_starts_another() -> None:
    story = Story(2, 1)
    story.feed(WantedChanged(Role.PREFILL, 1))
    (start,) = of_workers(StartProcess, story.feed(WantedChanged(Role.PREFILL, 2)))
    assert isinstance(start, StartProcess)
    assert start.name == "prefill-2"


def test_a_worker_that_will_not_stop_is_killed() -> None:
    story = Story(2, 1)
    story.feed(WantedChanged(Role.PREFILL, 1))
    story.feed(Drained("prefill-1", story.life("prefill-1")))
    assert story.cluster.workers["prefill-1"].deadline == story.now + story.cluster.policy.stop_s
    assert story.cluster.wake_at() == story.now + story.cluster.policy.stop_s
    (kill,) = of_workers(KillProcess, story.pass_time(story.cluster.policy.stop_s))
    assert isinstance(kill, KillProcess)
    assert kill.name == "prefill-1"


def test_a_silent_worker_is_killed_once_and_replaced() -> None:
    story = Story()
    silence_s = story.cluster.policy.silence_s
    story.now += silence_s
    story.load("prefill-0", 0)
    story.hear_routers()
    (kill,) = of_workers(KillProcess, story.feed(Tick()))
    assert isinstance(kill, KillProcess)
    assert kill.name == "decode-0"
    assert not of_workers(KillProcess, story.feed(Tick()))
    assert of_workers(StartProcess, story.exit("decode-0"))


def test_one_that_is_being_killed_is_not_drained_when_its_pool_is_made_smaller() -> None:
    story = Story(1, 2)
    story.feed(WriterSuspected("decode-1", story.life("decode-1")))
    assert not of(DrainProcess, story.feed(WantedChanged(Role.DECODE, 1)))
    assert story.cluster.workers["decode-1"].member.state == "failed"
    assert not of(StartProcess, story.exit("decode-1"))
    assert set(story.cluster.workers) == {"prefill-0", "decode-0"}


def test_a_worker_that_is_stopped_while_it_loads_is_killed_and_replaced() -> None:
    story = Story(ready=False)
    story.feed(Placed("decode-0", story.life("decode-0"), HERE), after_s=1000)  # a node came late
    silence_s = story.cluster.policy.loading_silence_s
    assert story.cluster.wake_at() == story.now + silence_s
    story.feed(LoadingHeard("decode-0", story.life("decode-0")), after_s=silence_s - 1)
    assert not of_workers(KillProcess, story.feed(Tick(), after_s=silence_s - 1))
    (kill,) = of_workers(KillProcess, story.feed(Tick(), after_s=1))
    assert isinstance(kill, KillProcess)
    assert kill.name == "decode-0"
    assert of_workers(StartProcess, story.exit("decode-0"))


def test_a_suspected_writer_is_killed_and_replaced() -> None:
    story = Story()
    suspected = WriterSuspected("prefill-0", story.life("prefill-0"))
    (kill,) = of_workers(KillProcess, story.feed(suspected))
    assert isinstance(kill, KillProcess)
    assert story.feed(suspected) == []  # the router says so again and again
    assert of_workers(StartProcess, story.exit("prefill-0"))
    assert story.feed(suspected) == []


def test_the_router_backs_off_too() -> None:
    story = Story()
    for _ in range(2):
        story.exit_router()
    assert story.router().phase is Phase.WAITING
    assert not of_routers(StartProcess, story.feed(Tick(), after_s=0.4))
    assert of_routers(StartProcess, story.feed(Tick(), after_s=0.1))


def test_shutdown_stops_everything_and_replaces_nothing() -> None:
    story = Story(2, 1)
    out = story.feed(ShutdownRequested())
    assert len(of_workers(StopProcess, out)) == 3
    assert len(of_routers(StopProcess, out)) == 1
    for worker_id in list(story.cluster.workers):
        assert not of_workers(StartProcess, story.exit(worker_id, error=None))
    assert not story.cluster.closed
    assert not of_routers(StartProcess, story.exit_router(error=None))
    assert story.cluster.closed


def test_a_cluster_that_closes_is_not_settled_though_all_of_it_still_runs() -> None:
    story = Story()
    assert story.feed(ClosingBegun(30.0)) == []
    assert set(story.phases().values()) == {Phase.READY}
    assert not story.cluster.settled
    assert not story.cluster.stopping


def test_shutdown_kills_what_still_starts_and_forgets_what_waits() -> None:
    story = Story(ready=False)
    story.exit("decode-0")
    story.exit("decode-0")
    assert story.phases()["decode-0"] is Phase.WAITING
    out = story.feed(ShutdownRequested())
    assert [step.name for step in of_workers(KillProcess, out)] == ["prefill-0"]
    assert set(story.cluster.workers) == {"prefill-0"}
    assert not of_workers(StartProcess, story.feed(WantedChanged(Role.DECODE, 5)))


def test_a_restarted_supervisor_adopts_and_starts_only_what_is_missing() -> None:
    cluster = PoolState(policy=Policy(), new_incarnation=lambda: "new", version=2 << 32)
    for event in (
        Adopted("prefill-1", "old-1", "127.0.0.1:1", HERE, draining=False),
        Adopted("decode-0", "old-2", "", HERE, draining=False),
        Adopted("router-0", "old-3"),
    ):
        assert cluster.handle(event, 0.0) == []
    out = cluster.handle(ClusterOpened(wanting(2, 1)), 0.0)
    assert out == [StartProcess("prefill-0", "new", Role.PREFILL)]
    cluster.handle(Started("decode-0", "old-2", "127.0.0.1:3", HERE), 1.0)
    (told,) = cluster.handle(Started("router-0", "old-3", "127.0.0.1:2", HERE, "http://127.0.0.1:8000"), 1.0)
    assert isinstance(told, PublishMembership)
    assert told.version > 2 << 32
    assert {m.worker_id: m.state for m in told.members} == {
        "prefill-1": "ready",
        "decode-0": "ready",
        "prefill-0": "starting",
    }


def test_an_adopted_worker_that_drains_goes_on_draining() -> None:
    cluster = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    adopted = Adopted("decode-1", "old", "127.0.0.1:1", HERE, draining=True)
    assert cluster.handle(adopted, 0.0) == [DrainProcess("decode-1", "old")]
    out = cluster.handle(ClusterOpened(wanting()), 0.0)
    assert [step.name for step in of_workers(StartProcess, out)] == ["prefill-0", "decode-0"]


# --- draining one worker by an order --------------------------------------------------------------------------------


def order(story: Story, worker_id: str, *, replace_first: bool = True, timeout_s: float = 60.0) -> list[Instruction]:
    return story.feed(DrainOrdered(worker_id, replace_first, timeout_s))


def drain_to_the_end(story: Story, worker_id: str) -> list[Instruction]:
    """It has drained, stops and ends."""
    assert story.feed(Drained(worker_id, story.life(worker_id)))[0] == StopProcess(worker_id, story.life(worker_id))
    return story.exit(worker_id, error=None)


def test_an_order_starts_the_successor_and_the_old_one_serves_until_it_is_ready() -> None:
    story = Story()
    (start,) = of_workers(StartProcess, order(story, "decode-0"))
    assert isinstance(start, StartProcess)
    assert start.name == "decode-1"
    assert story.phases()["decode-0"] is Phase.READY
    assert not story.cluster.settled
    (drain,) = of(DrainProcess, story.start("decode-1"))
    assert drain == DrainProcess("decode-0", story.life("decode-0"))
    assert not of_workers(StartProcess, drain_to_the_end(story, "decode-0"))
    assert story.phases() == {"prefill-0": Phase.READY, "decode-1": Phase.READY}
    assert story.cluster.settled


def test_without_replace_first_the_place_is_filled_when_it_is_empty() -> None:
    story = Story()
    assert [type(step) for step in order(story, "decode-0", replace_first=False)] == [DrainProcess, PublishMembership]
    (start,) = of_workers(StartProcess, drain_to_the_end(story, "decode-0"))
    assert isinstance(start, StartProcess)
    assert start.name == "decode-0"
    story.start("decode-0")
    assert story.cluster.settled


def test_a_successor_that_finds_no_node_in_time_comes_after() -> None:
    story = Story()
    order(story, "decode-0")
    place_s = story.cluster.policy.place_s
    assert not of(DrainProcess, story.pass_time(place_s - 1))
    assert story.cluster.wake_at() == story.now + 1
    (drain,) = of(DrainProcess, story.pass_time(1))
    assert drain == DrainProcess("decode-0", story.life("decode-0"))
    assert "no node has room" in story.cluster.workers["decode-0"].note
    assert not of_workers(StartProcess, drain_to_the_end(story, "decode-0"))  # it waits in Ray already
    story.start("decode-1")
    assert story.cluster.settled


def test_a_successor_that_loads_for_long_is_awaited() -> None:
    story = Story()
    order(story, "decode-0")
    story.feed(Placed("decode-1", story.life("decode-1"), HERE))
    assert not of(DrainProcess, story.pass_time(10 * story.cluster.policy.place_s))
    assert story.phases()["decode-0"] is Phase.READY


def test_a_successor_that_cannot_start_leaves_all_as_it_was() -> None:
    story = Story()
    order(story, "decode-0")
    for _ in range(story.cluster.policy.max_successor_failures):
        story.feed(Tick(), after_s=1)
        story.feed(Exited("decode-1", story.life("decode-1"), Ending("model_load", "no such file")))
    assert story.phases() == {"prefill-0": Phase.READY, "decode-0": Phase.READY}
    assert "decode-1 cannot start (no such file)" in story.cluster.workers["decode-0"].note
    assert not of(DrainProcess, story.pass_time(1000))
    assert story.cluster.settled
    assert of_workers(StartProcess, story.exit("decode-0"))  # it is replaced as ever when it ends


def test_a_successor_that_crashes_once_while_it_starts_is_awaited_again() -> None:
    story = Story()
    order(story, "decode-0")
    assert of_workers(StartProcess, story.exit("decode-1"))
    assert story.phases()["decode-0"] is Phase.READY
    assert of(DrainProcess, story.start("decode-1"))


def test_a_worker_that_crashes_while_its_successor_starts_is_not_started_again() -> None:
    story = Story()
    order(story, "decode-0")
    assert not of_workers(StartProcess, story.exit("decode-0"))
    story.start("decode-1")
    assert story.phases() == {"prefill-0": Phase.READY, "decode-1": Phase.READY}
    assert story.cluster.settled


@pytest.mark.parametrize("replace_first", [True, False])
def test_a_worker_that_crashes_while_it_drains_is_replaced_once(replace_first: bool) -> None:
    story = Story()
    order(story, "decode-0", replace_first=replace_first)
    if replace_first:
        story.start("decode-1")
    assert story.phases()["decode-0"] is Phase.DRAINING
    assert len(of_workers(StartProcess, story.exit("decode-0"))) == (0 if replace_first else 1)
    assert len([slot for slot in story.cluster.workers.values() if slot.role is Role.DECODE]) == 1


def test_a_drain_that_takes_too_long_ends_in_a_kill() -> None:
    story = Story()
    order(story, "decode-0", replace_first=False, timeout_s=60.0)
    assert not of_workers(KillProcess, story.pass_time(59))
    (kill,) = of_workers(KillProcess, story.pass_time(1))
    assert kill == KillProcess("decode-0", story.life("decode-0"), "it did not drain within 60 s")
    assert not of_workers(KillProcess, story.pass_time(1))
    assert of_workers(StartProcess, story.exit("decode-0"))


def test_a_pool_made_smaller_during_a_drain_takes_the_successor_back() -> None:
    story = Story(1, 2)
    order(story, "decode-1")
    out = story.feed(WantedChanged(Role.DECODE, 1))
    assert [step.name for step in of_workers(KillProcess, out)] == ["decode-2"]
    assert [step.name for step in out if isinstance(step, DrainProcess)] == ["decode-1"]
    story.exit("decode-2")
    drain_to_the_end(story, "decode-1")
    assert story.cluster.settled
    assert set(story.phases()) == {"prefill-0", "decode-0"}


def test_a_pool_made_smaller_during_a_drain_without_successor_just_lets_it_go() -> None:
    story = Story(1, 2)
    order(story, "decode-1", replace_first=False)
    out = story.feed(WantedChanged(Role.DECODE, 1))
    assert [step for step in out if not isinstance(step, PublishMembership)] == []
    assert not of_workers(StartProcess, drain_to_the_end(story, "decode-1"))
    assert set(story.phases()) == {"prefill-0", "decode-0"}


def test_a_pool_made_larger_during_a_drain_gets_just_that_many_more() -> None:
    story = Story()
    order(story, "decode-0")
    started = of_workers(StartProcess, story.feed(WantedChanged(Role.DECODE, 2)))
    assert [step.name for step in of_workers(StartProcess, started)] == ["decode-2"]
    story.start("decode-1")
    story.start("decode-2")
    drain_to_the_end(story, "decode-0")
    assert story.cluster.settled


def test_two_drains_at_once_have_a_successor_each() -> None:
    story = Story(1, 2)
    order(story, "decode-0")
    order(story, "decode-1")
    assert set(story.phases()) == {"prefill-0", "decode-0", "decode-1", "decode-2", "decode-3"}
    assert [s.name for s in of(DrainProcess, story.start("decode-3")) if isinstance(s, DrainProcess)] == ["decode-1"]
    story.start("decode-2")
    drain_to_the_end(story, "decode-0")
    drain_to_the_end(story, "decode-1")
    assert story.cluster.settled


def test_a_second_order_and_one_for_a_worker_that_is_not_ready_change_nothing() -> None:
    story = Story()
    order(story, "decode-0")
    assert order(story, "decode-0", replace_first=False) == []
    assert order(story, "decode-1") == []
    assert order(story, "nobody-9") == []
    assert story.phases()["decode-0"] is Phase.READY


def test_shutdown_ends_a_drain_too() -> None:
    story = Story()
    order(story, "decode-0")
    out = story.feed(ShutdownRequested())
    assert {step.name for step in of_workers(StopProcess, out)} == {"prefill-0", "decode-0"}
    assert [step.name for step in of_workers(KillProcess, out)] == ["decode-1"]
    for worker_id in list(story.cluster.workers):
        assert not of_workers(StartProcess, story.exit(worker_id, error=None))
    assert not of(DrainProcess, story.last)


def adopt(story: Story, *, draining: tuple[str, ...] = ()) -> tuple[PoolState, list[Instruction]]:
    """The supervisor dies; the next one adopts all that is placed, with what was remembered."""
    intent = story.cluster.intent
    later = PoolState(policy=Policy(), new_incarnation=lambda: "new", version=9 << 32)
    out: list[Instruction] = []
    for slot in story.cluster.workers.values():
        if slot.placement:
            is_draining = slot.name in draining
            adopted = Adopted(slot.name, slot.incarnation, slot.address, slot.placement, is_draining)
            out += later.handle(adopted, story.now)
    return later, out + later.handle(ClusterOpened(intent), story.now)


def test_a_drain_that_waits_for_its_successor_survives_the_supervisor() -> None:
    story = Story(1, 2)
    order(story, "decode-0", timeout_s=77.0)
    story.feed(Placed("decode-2", story.life("decode-2"), HERE))
    later, out = adopt(story)
    assert not of_workers(KillProcess, out)
    assert not of_workers(StartProcess, out)
    out = later.handle(Started("decode-2", story.life("decode-2"), "127.0.0.1:3", HERE), story.now)
    assert [step.name for step in out if isinstance(step, DrainProcess)] == ["decode-0"]
    assert later.workers["decode-0"].drain_s == 77.0


@pytest.mark.parametrize("told", [True, False], ids=["told to drain", "not told yet"])
@pytest.mark.parametrize("replace_first", [True, False])
def test_a_drain_under_way_survives_the_supervisor(told: bool, replace_first: bool) -> None:
    story = Story(1, 2)
    order(story, "decode-0", replace_first=replace_first, timeout_s=77.0)
    if replace_first:
        story.start("decode-2")
    later, out = adopt(story, draining=("decode-0",) if told else ())
    assert [step.name for step in out if isinstance(step, DrainProcess)] == ["decode-0"]
    assert later.workers["decode-0"].deadline == story.now + 77.0
    life = story.life("decode-0")
    later.handle(Drained("decode-0", life), story.now)
    out = later.handle(Exited("decode-0", life, None), story.now)
    assert len(of_workers(StartProcess, out)) == (0 if replace_first else 1)
    assert len(later.workers) == 3


def test_wanted_sizes_and_back_off_survive_the_supervisor() -> None:
    story = Story(1, 1)
    story.feed(WantedChanged(Role.PREFILL, 2))
    story.start("prefill-1")
    for _ in range(3):
        story.exit("decode-0")
        story.feed(Tick(), after_s=story.cluster.policy.delay(story.cluster.workers["decode-0"].failures))
    story.exit("decode-0")
    assert story.cluster.intent.failures == {"decode-0": 4}
    story.cluster.workers["decode-0"].placement = None  # it waits: there is no process to adopt
    later, out = adopt(story)
    assert not of_workers(StartProcess, out)
    assert later.workers["decode-0"].retry_at == story.now + later.policy.delay(4)
    assert of_workers(StartProcess, later.handle(Tick(), story.now + later.policy.delay(4)))
    assert later.wanted == {Role.PREFILL: 2, Role.DECODE: 1, Role.ROUTER: 1}


def test_an_intent_is_of_what_still_holds() -> None:
    story = Story()
    assert story.cluster.intent == wanting()
    order(story, "decode-0", timeout_s=5.0)
    drain = Drain(story.life("decode-0"), 5.0, refill=False, successor="decode-1")
    assert story.cluster.intent.drains == {"decode-0": drain}
    story.start("decode-1")
    drain_to_the_end(story, "decode-0")
    assert story.cluster.intent == wanting()


# --- proof of an end ------------------------------------------------------------------------------------------------


def told(instructions: list[Instruction]) -> dict[str, tuple[str, ...]]:
    return {step.name: step.ended for step in instructions if isinstance(step, NoteEnded)}


def take(story: Story, worker_id: str, *ended: str) -> None:
    assert story.feed(EndingsTaken(worker_id, story.life(worker_id), ended)) == []


def test_every_other_worker_is_told_of_an_end_until_it_has_taken_it() -> None:
    story = Story(1, 2)
    ended = story.life("prefill-0")
    story.exit("prefill-0")
    assert told(story.feed(ProcessEnded(ended))) == {"decode-0": (ended,), "decode-1": (ended,)}
    take(story, "decode-0", ended)
    story.load("decode-0", 1)
    assert told(story.last) == {}
    story.load("decode-1", 1)
    assert told(story.last) == {"decode-1": (ended,)}
    take(story, "decode-1", ended)
    story.load("decode-1", 1)
    assert told(story.last) == {}


def known_to_routers(story: Story) -> tuple[dict[str, str], tuple[str, ...]]:
    """What routers were told last: the states of the workers, and the ends that are proven."""
    *_, newest = of(PublishMembership, story.last)
    assert isinstance(newest, PublishMembership)
    return {member.worker_id: member.state for member in newest.members}, newest.ended


def test_routers_are_told_of_an_end_when_it_is_proven_and_not_when_it_is_decided_on() -> None:
    """A host that is cut off: its workers get no more requests, have successors, and may live on for long."""
    story = Story()
    lives = {worker_id: story.life(worker_id) for worker_id in ("prefill-0", "decode-0")}
    story.now += story.cluster.policy.silence_s
    story.hear_routers()
    story.feed(Tick())
    assert known_to_routers(story) == ({"prefill-0": "failed", "decode-0": "failed"}, ())
    story.exit("prefill-0")
    assert known_to_routers(story) == ({"prefill-0": "starting", "decode-0": "failed"}, ())
    story.feed(ProcessEnded(lives["decode-0"]))
    assert known_to_routers(story) == ({"prefill-0": "starting", "decode-0": "failed"}, (lives["decode-0"],))
    story.exit("decode-0")
    story.feed(ProcessEnded(lives["prefill-0"]))
    assert known_to_routers(story)[1] == (lives["decode-0"], lives["prefill-0"])
    assert not of(PublishMembership, story.feed(ProcessEnded(lives["prefill-0"]))), "that was known"


def test_the_ends_that_routers_are_told_of_are_bounded() -> None:
    story = Story()
    for n in range(MAX_ENDED + 10):
        story.feed(ProcessEnded(f"gone-{n}"))
    assert known_to_routers(story)[1] == tuple(f"gone-{n}" for n in range(10, MAX_ENDED + 10))


def test_an_end_may_be_proved_before_ray_tells_of_it() -> None:
    story = Story()
    ended = story.life("prefill-0")
    assert told(story.feed(ProcessEnded(ended))) == {"decode-0": (ended,)}
    assert of_workers(StartProcess, story.exit("prefill-0"))


def test_several_ends_are_told_together_and_forgotten_one_by_one() -> None:
    story = Story(2, 1)
    story.feed(ProcessEnded("first"))
    story.feed(ProcessEnded("second"))
    take(story, "decode-0", "first")
    story.load("decode-0", 0)
    assert told(story.last) == {"decode-0": ("second",)}


def test_a_worker_that_still_starts_is_told_when_it_listens() -> None:
    """It may be an adopted one that only seems to start, and deal with others already."""
    story = Story()
    story.feed(ProcessEnded("gone"))
    take(story, "decode-0", "gone")
    story.exit("decode-0")
    assert told(story.feed(ProcessEnded("gone-too"))) == {"prefill-0": ("gone-too",)}
    assert told(story.start("decode-0")) == {"decode-0": ("gone-too",)}


def test_a_later_life_owes_nothing_to_what_its_predecessor_missed() -> None:
    story = Story()
    story.feed(ProcessEnded("gone"))
    story.exit("decode-0")
    assert told(story.start("decode-0")) == {}


def test_what_is_kept_for_a_worker_that_takes_nothing_is_bounded() -> None:
    story = Story()
    for n in range(MAX_UNTOLD + 10):
        story.feed(ProcessEnded(f"life-{n}"))
    untold = list(story.cluster.workers["decode-0"].untold)
    assert len(untold) == MAX_UNTOLD
    assert untold[-1] == f"life-{MAX_UNTOLD + 9}"


# --- a router that does not react -----------------------------------------------------------------------------------


def test_a_router_that_falls_silent_while_it_starts_is_killed() -> None:
    story = Story(ready=False)
    story.feed(Placed("router-0", story.router().incarnation, HERE))
    silence_s = story.cluster.policy.loading_silence_s
    assert not of_routers(KillProcess, story.feed(Tick(), after_s=silence_s - 1))
    assert of_routers(KillProcess, story.feed(Tick(), after_s=1))
    assert of_routers(StartProcess, story.exit_router())


def test_a_silent_router_is_killed_once_and_started_again() -> None:
    story = Story()
    old = story.router().incarnation
    story.pass_time(5)
    assert story.cluster.wake_at() == story.now + story.cluster.policy.router_silence_s
    (kill,) = of_routers(KillProcess, story.feed(Tick(), after_s=story.cluster.policy.router_silence_s))
    assert isinstance(kill, KillProcess)
    assert kill.incarnation == old
    assert not of_routers(KillProcess, story.feed(Tick(), after_s=0.5))
    assert not of(PublishMembership, story.exit("decode-0"))
    (start,) = of_routers(StartProcess, story.exit_router())
    assert isinstance(start, StartProcess)
    assert start.incarnation != old
    assert story.router().last_error
    assert "it answered no heartbeat for 10 s" in story.router().last_error.message


def test_what_was_killed_on_purpose_says_why() -> None:
    story = Story()
    story.feed(WriterSuspected("prefill-0", story.life("prefill-0")))
    story.exit("prefill-0")
    error = story.cluster.workers["prefill-0"].last_error
    assert error is not None
    assert "silent beyond its lease" in error.message


def test_a_worker_that_gave_up_by_itself_counts_as_failed() -> None:
    story = Story()
    stuck = Ending("internal", "more than a quarter of its pages are in quarantine")
    story.exit("decode-0", error=stuck)
    story.exit("decode-0", error=stuck)
    assert story.cluster.workers["decode-0"].failures == 2
    assert story.phases()["decode-0"] is Phase.WAITING


@pytest.mark.parametrize("failures", range(40))
def test_the_delay_never_shrinks_and_never_exceeds_its_limit(failures: int) -> None:
    policy = Policy()
    assert 0 <= policy.delay(failures) <= policy.delay(failures + 1) <= policy.max_delay_s


# --- time that nobody is to blame for -------------------------------------------------------------------------------


def test_after_a_clock_jump_nobody_has_been_silent() -> None:
    story = Story()
    story.pass_time(5)
    story.now += 600.0
    assert story.feed(ClockJumped(600.0)) == []
    assert story.feed(Tick()) == []
    assert story.cluster.settled
    assert story.cluster.wake_at() == story.now + story.cluster.policy.router_silence_s
    out = story.feed(Tick(), after_s=story.cluster.policy.silence_s)  # now they really are
    assert len(of_workers(KillProcess, out)) == 2
    assert len(of_routers(KillProcess, out)) == 1


def test_a_clock_jump_puts_nobody_into_the_future() -> None:
    story = Story()
    story.feed(ClockJumped(600.0))
    assert {slot.heard_at for slot in story.cluster.workers.values()} == {story.now}


def test_a_clock_jump_is_not_part_of_a_drain_or_of_the_wait_for_a_node() -> None:
    story = Story(1, 2)
    order(story, "decode-0", replace_first=False, timeout_s=60.0)
    order(story, "prefill-0")
    story.now += 600.0
    story.feed(ClockJumped(600.0))
    assert story.feed(Tick()) == []
    assert not of_workers(KillProcess, story.pass_time(59))
    assert story.phases()["prefill-0"] is Phase.DRAINING  # its successor found no node within 30 s
    (kill,) = of_workers(KillProcess, story.pass_time(1))
    assert isinstance(kill, KillProcess)
    assert kill.name == "decode-0"


# --- what a later supervisor goes on with ---------------------------------------------------------------------------


@pytest.mark.parametrize("refill", [True, False])
def test_one_that_was_to_leave_and_is_adopted_late_leaves_when_it_answers(refill: bool) -> None:
    later = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    later.handle(Adopted("decode-0", "old", "", None, draining=False), 0.0)
    drain = Drain("old", 77.0, refill=refill, successor="")
    later.handle(ClusterOpened(replace(wanting(1, 1), drains={"decode-0": drain})), 0.0)
    assert later.intent.drains == {"decode-0": drain}
    out = later.handle(Started("decode-0", "old", "127.0.0.1:1", HERE), 1.0)
    assert of(DrainProcess, out) == [DrainProcess("decode-0", "old")]
    assert later.workers["decode-0"].deadline == 78.0


def test_one_that_waits_for_its_successor_and_is_adopted_late_waits_on() -> None:
    later = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    for worker_id in ("decode-0", "decode-1"):
        later.handle(Adopted(worker_id, "old", "", HERE, draining=False), 0.0)
    drain = Drain("old", 77.0, refill=False, successor="decode-1")
    later.handle(ClusterOpened(replace(wanting(0, 1), drains={"decode-0": drain})), 0.0)
    assert not of(DrainProcess, later.handle(Started("decode-0", "old", "127.0.0.1:1", HERE), 1.0))
    assert later.workers["decode-0"].place_by == 1.0 + later.policy.place_s
    out = later.handle(Started("decode-1", "old", "127.0.0.1:2", HERE), 2.0)
    assert of(DrainProcess, out) == [DrainProcess("decode-0", "old")]


def test_a_shutdown_survives_the_supervisor_and_brings_nothing_back() -> None:
    story = Story(2, 1)
    story.feed(ClosingBegun(30.0))
    assert story.cluster.intent.closing_s == 30.0
    story.feed(ClosingBegun(5.0))
    story.feed(ClosingBegun(60.0))
    assert story.cluster.intent.closing_s == 5.0
    del story.cluster.slots["prefill-1"]  # it ended with the supervisor, and so did the router
    later, out = adopt(story)
    assert out == []
    assert later.closing
    assert not later.settled
    stopped = later.handle(ShutdownRequested(), story.now)
    assert {step.name for step in of_workers(StopProcess, stopped)} == {"prefill-0", "decode-0"}


def test_a_second_shutdown_stops_the_router_no_second_time() -> None:
    story = Story()
    assert of_routers(StopProcess, story.feed(ShutdownRequested()))
    assert story.feed(ShutdownRequested()) == []


# --- what the router is told of a worker that is being killed ---------------------------------------------------------


def published(instructions: list[Instruction], worker_id: str) -> str:
    (membership,) = [step for step in instructions if isinstance(step, PublishMembership)]
    (state,) = [member.state for member in membership.members if member.worker_id == worker_id]
    return state


def test_a_ready_worker_that_is_killed_is_published_as_failed_at_once() -> None:
    story = Story()
    out = story.feed(WriterSuspected("prefill-0", story.life("prefill-0")))
    assert of_workers(KillProcess, out)
    assert published(out, "prefill-0") == "failed"


def test_a_draining_worker_that_is_killed_is_published_as_failed_at_once() -> None:
    story = Story(1, 2)
    assert published(order(story, "decode-0", replace_first=False, timeout_s=60.0), "decode-0") == "draining"
    out = story.pass_time(60)
    assert of_workers(KillProcess, out)
    assert published(out, "decode-0") == "failed"


def test_a_worker_that_stops_in_order_is_published_as_draining_to_its_end() -> None:
    story = Story(1, 2)
    order(story, "decode-0", replace_first=False)
    story.feed(Drained("decode-0", story.life("decode-0")))
    (member,) = [slot.member for slot in story.cluster.workers.values() if slot.name == "decode-0"]
    assert (story.phases()["decode-0"], member.state) == (Phase.STOPPING, "draining")


# --- several routers --------------------------------------------------------------------------------------------------


def test_one_router_dies_and_the_other_goes_on() -> None:
    story = Story(routers=2)
    assert story.cluster.settled
    other = story.router("router-1").incarnation
    out = story.exit_router("router-0")
    (start,) = of(StartProcess, out)
    assert (start.role, start.name) == (Role.ROUTER, "router-0")
    assert not of(KillProcess, out) + of(StopProcess, out)
    assert (story.router("router-1").incarnation, story.router("router-1").phase) == (other, Phase.READY)
    assert not story.cluster.settled
    story.start_router("router-0")
    assert story.cluster.settled


def test_restarts_of_one_router_do_not_count_against_another() -> None:
    story = Story(routers=2)
    for _ in range(9):
        story.exit_router("router-0")
        if story.router("router-0").phase is Phase.WAITING:
            story.now = story.router("router-0").retry_at
            story.feed(Tick())
    assert [story.router(name).failures for name in ("router-0", "router-1")] == [9, 0]
    assert story.cluster.intent.failures == {"router-0": 9}
    assert of(StartProcess, story.exit_router("router-1")), "its first end: at once"


def test_a_membership_reaches_every_router_that_listens_with_the_share_that_it_has() -> None:
    story = Story(routers=2)

    def told(out: list[Instruction]) -> list[tuple[str, str, int, int]]:
        return [(step.name, step.incarnation, step.version, step.num_routers) for step in of(PublishMembership, out)]

    lives = [story.router(name).incarnation for name in ("router-0", "router-1")]
    version = story.cluster.version
    assert told(story.feed(WantedChanged(Role.DECODE, 2))) == [
        ("router-0", lives[0], version + 1, 2),
        ("router-1", lives[1], version + 1, 2),
    ]
    assert told(story.exit_router("router-0")) == [("router-1", lives[1], version + 2, 1)]
    back = told(story.start_router("router-0"))
    assert [each[0] for each in back] == ["router-0", "router-1"]
    assert {each[2:] for each in back} == {(version + 3, 2)}


def test_each_router_that_listens_is_told_of_the_others_and_which_are_on_its_host() -> None:
    story = Story(routers=2)
    out = story.feed(WantedChanged(Role.ROUTER, 3))
    (start,) = of(StartProcess, out)
    there = Placement("other", 77, "other-id", HostBoot("10.0.0.2", "", "a boot"))
    story.feed(Placed(start.name, start.incarnation, there))
    out = story.feed(Started(start.name, start.incarnation, "other:1", there, "http://o"))
    told = {step.name: step.others for step in of(PublishMembership, out)}
    first, second = (story.router(name).address for name in ("router-0", "router-1"))
    assert told == {
        "router-0": (OtherRouter("router-1", second, True), OtherRouter("router-2", "other:1", False)),
        "router-1": (OtherRouter("router-0", first, True), OtherRouter("router-2", "other:1", False)),
        "router-2": (OtherRouter("router-0", first, False), OtherRouter("router-1", second, False)),
    }
    out = story.exit_router("router-2")
    assert [len(step.others) for step in of(PublishMembership, out)] == [1, 1]


def test_routers_of_two_nodes_of_one_host_share_its_port() -> None:
    boot = HostBoot("10.0.0.1", "machine", "a boot")
    cluster = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    for number in (0, 1):
        cluster.handle(Adopted(f"router-{number}", f"old{number}"), 0.0)
    cluster.handle(ClusterOpened(wanting(0, 0, routers=2)), 0.0)
    for number in (0, 1):
        placement = Placement("node", 100 + number, f"node-{number}", boot)
        out = cluster.handle(Started(f"router-{number}", f"old{number}", f"a:{number}", placement, "http://a"), 1.0)
    told = [other for step in of(PublishMembership, out) for other in step.others]
    assert [(other.name, other.shares_port) for other in told] == [("router-1", True), ("router-0", True)]


def test_a_writer_that_either_router_has_heard_of_is_told_to_both_as_failed() -> None:
    story = Story(routers=2)
    out = story.feed(WriterSuspected("prefill-0", story.life("prefill-0")))
    assert len(of_workers(KillProcess, out)) == 1
    assert [step.name for step in of(PublishMembership, out)] == ["router-0", "router-1"]
    for step in of(PublishMembership, out):
        assert {m.worker_id: m.state for m in step.members}["prefill-0"] == "failed"


def test_a_silent_router_is_killed_and_another_that_answers_is_not() -> None:
    story = Story(routers=2)
    story.pass_time(5)
    silence_s = story.cluster.policy.router_silence_s
    story.now += silence_s
    other = story.router("router-1")
    story.feed(LoadReported("router-1", other.incarnation, 3))
    (kill,) = of_routers(KillProcess, story.feed(Tick()))
    assert kill.name == "router-0"
    assert story.cluster.wake_at() is not None
    assert other.phase is Phase.READY


def test_a_clock_jump_is_held_against_no_router() -> None:
    story = Story(routers=2)
    story.pass_time(1)
    story.now += 100
    story.feed(ClockJumped(100))
    assert not of(KillProcess, story.feed(Tick()))


def test_a_shutdown_ends_every_router_and_waits_for_all() -> None:
    story = Story(routers=3)
    story.exit_router("router-2")
    out = story.feed(ShutdownRequested())
    assert [step.name for step in of_routers(StopProcess, out)] == ["router-0", "router-1"]
    assert [step.name for step in of_routers(KillProcess, out)] == ["router-2"], "it starts, and serves nobody"
    for name in list(story.cluster.workers):
        story.exit(name, None)
    for name in ("router-0", "router-1", "router-2"):
        assert not story.cluster.closed
        assert not of(StartProcess, story.exit_router(name, None))
    assert story.cluster.closed


def test_a_router_that_will_not_stop_is_killed() -> None:
    story = Story(routers=2)
    story.feed(ShutdownRequested())
    story.exit_router("router-0", None)
    (kill,) = of_routers(KillProcess, story.feed(Tick(), after_s=story.cluster.policy.stop_s))
    assert (kill.name, kill.reason) == ("router-1", "it did not stop in time")


def test_a_pool_of_routers_grows_and_shrinks() -> None:
    story = Story()
    (start,) = of(StartProcess, story.feed(WantedChanged(Role.ROUTER, 2)))
    assert start.name == "router-1"
    story.start_router("router-1")
    assert story.cluster.settled
    (drain,) = of(DrainProcess, story.feed(WantedChanged(Role.ROUTER, 1)))
    assert drain.name == "router-1"
    (stop,) = of(StopProcess, story.feed(Drained("router-1", drain.incarnation)))
    assert stop.name == "router-1"
    assert not of(StartProcess, story.exit_router("router-1", None))
    assert story.cluster.settled


def test_a_router_that_drains_hears_of_the_workers_and_has_no_share() -> None:
    story = Story(routers=2)
    out = story.feed(WantedChanged(Role.ROUTER, 1))
    assert [(step.name, step.num_routers) for step in of(PublishMembership, out)] == [("router-0", 1), ("router-1", 1)]
    out = story.exit("decode-0")
    assert [step.name for step in of(PublishMembership, out)] == ["router-0", "router-1"]


def test_while_all_routers_drain_each_keeps_its_share() -> None:
    """They still serve what they have, and together no more than is allowed for all."""
    story = Story(routers=2)
    assert not of(PublishMembership, story.feed(WantedChanged(Role.ROUTER, 0)))
    assert {slot.phase for slot in story.cluster.routers.values()} == {Phase.DRAINING}
    out = story.exit("decode-0")
    told = [(step.name, step.router_number, step.num_routers) for step in out if isinstance(step, PublishMembership)]
    assert told == [("router-0", 0, 2), ("router-1", 1, 2)]


def test_a_router_is_replaced_by_an_order_and_drains_once_its_successor_serves() -> None:
    story = Story()
    (start,) = of(StartProcess, order(story, "router-0", timeout_s=60.0))
    assert (start.role, start.name) == (Role.ROUTER, "router-1")
    assert story.cluster.slots.staying_beside("router-1") == [], "its place is that of the one that leaves"
    for _ in range(5):
        assert not of(DrainProcess, story.pass_time(story.cluster.policy.place_s / 4)), "it needs no free node"
    old = story.router("router-0").incarnation
    (drain,) = of(DrainProcess, story.start_router("router-1"))
    assert (drain.name, drain.incarnation) == ("router-0", old)
    story.feed(Drained("router-0", old))
    assert not of(StartProcess, story.exit_router("router-0", None))
    assert set(story.cluster.routers) == {"router-1"}
    assert story.cluster.settled


def test_the_only_router_stays_where_its_successor_cannot_start() -> None:
    story = Story()
    order(story, "router-0")
    for _ in range(story.cluster.policy.max_successor_failures):
        story.exit_router("router-1")
        retry_at = story.router("router-1").retry_at if "router-1" in story.cluster.routers else None
        if retry_at is not None:
            story.now = max(story.now, retry_at)
            story.feed(Tick())
    slot = story.router("router-0")
    assert (slot.phase, slot.leaving) == (Phase.READY, False)
    assert "router-1 cannot start" in slot.note


def test_a_router_that_does_not_drain_in_time_is_killed() -> None:
    story = Story(routers=2)
    story.feed(WantedChanged(Role.ROUTER, 1))
    drain_s = story.cluster.policy.drain_s
    for _ in range(30):
        story.pass_time(drain_s / 31)
    (kill,) = of_routers(KillProcess, story.pass_time(drain_s / 31 + 0.1))
    assert (kill.name, kill.reason) == ("router-1", f"it did not drain within {drain_s:.0f} s")


def test_of_two_routers_on_one_node_one_goes_before_the_only_one_of_another() -> None:
    """Each node has a port of its own, whose clients find nobody once its last router has gone."""
    story = Story(routers=3, ready=False)
    for name, node in (("router-0", "a"), ("router-1", "a"), ("router-2", "b")):
        life = story.router(name).incarnation
        story.feed(Started(name, life, f"{node}:2", Placement(node, 1), f"http://{node}:8000"))
    story.feed(LoadReported("router-1", story.router("router-1").incarnation, 9))
    story.feed(LoadReported("router-0", story.router("router-0").incarnation, 10))
    (drain,) = of(DrainProcess, story.feed(WantedChanged(Role.ROUTER, 2)))
    assert drain.name == "router-1"
    (drain,) = of(DrainProcess, story.feed(WantedChanged(Role.ROUTER, 1)))
    assert drain.name == "router-2", "it holds less"


@pytest.mark.parametrize("told", [True, False], ids=["told to drain", "not told yet"])
def test_the_drain_of_a_router_survives_the_supervisor(told: bool) -> None:
    story = Story(routers=2)
    story.feed(WantedChanged(Role.ROUTER, 1))
    life = story.router("router-1").incarnation
    later = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    for name in ("router-0", "router-1"):
        later.handle(Adopted(name, story.router(name).incarnation), 0.0)
    later.handle(ClusterOpened(story.cluster.intent), 0.0)
    later.handle(Started("router-0", story.router("router-0").incarnation, "a:1", HERE, "http://a"), 0.0)
    out = later.handle(Started("router-1", life, "b:1", HERE, "http://b", draining=told), 0.0)
    assert [step.name for step in of(DrainProcess, out)] == ["router-1"]
    assert later.slots["router-1"].drain_s == story.cluster.policy.drain_s
    assert of_routers(StopProcess, later.handle(Drained("router-1", life), 1.0))
    later.handle(Exited("router-1", life, None), 2.0)
    assert set(later.routers) == {"router-0"}


@pytest.mark.parametrize("told", [True, False], ids=["told to drain", "not told yet"])
def test_the_drain_of_a_router_that_answers_at_once_survives_the_supervisor(told: bool) -> None:
    story = Story(routers=2)
    story.feed(WantedChanged(Role.ROUTER, 1))
    later = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    out = []
    for name in ("router-0", "router-1"):
        router = story.router(name)
        is_draining = told and name == "router-1"
        out += later.handle(
            Adopted(name, router.incarnation, f"{name}:1", HERE, draining=is_draining, url="http://a"), 0.0
        )
    assert not of(PublishMembership, out), "not before all are known"
    out += later.handle(ClusterOpened(story.cluster.intent), 0.0)
    assert {step.name for step in of(DrainProcess, out)} == {"router-1"}
    assert {step.name: (step.num_routers, step.others) for step in of(PublishMembership, out)} == {
        "router-0": (1, (OtherRouter("router-1", "router-1:1", True),)),
        "router-1": (1, (OtherRouter("router-0", "router-0:1", True),)),
    }
    later.handle(Drained("router-1", story.router("router-1").incarnation), 1.0)
    later.handle(Exited("router-1", story.router("router-1").incarnation, None), 2.0)
    assert set(later.routers) == {"router-0"}


def test_a_router_that_drains_though_nobody_remembers_why_is_replaced() -> None:
    """The supervisor that ordered it died before it could keep the order; the router takes no new connections."""
    cluster = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    cluster.handle(Adopted("router-0", "old"), 0.0)
    cluster.handle(ClusterOpened(wanting(0, 0)), 0.0)
    out = cluster.handle(Started("router-0", "old", "a:1", HERE, "http://a", draining=True), 1.0)
    assert [step.name for step in of(DrainProcess, out)] == ["router-0"]
    assert [step.name for step in of(StartProcess, out)] == ["router-1"]


def test_a_restarted_supervisor_adopts_every_router_that_it_finds() -> None:
    cluster = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    cluster.handle(Adopted("router-1", "old"), 0.0)
    out = cluster.handle(ClusterOpened(wanting(0, 0, routers=2)), 0.0)
    assert out == [StartProcess("router-0", "new", Role.ROUTER)]
    (told,) = of(PublishMembership, cluster.handle(Started("router-1", "old", "b:1", HERE, "http://b"), 1.0))
    assert told.name == "router-1"


# -- no prefill workers


def told_colocated(story: Story) -> bool:
    *_, newest = of(PublishMembership, story.last)
    assert isinstance(newest, PublishMembership)
    return newest.colocated


def test_a_cluster_that_opens_without_prefill_workers_is_colocated() -> None:
    story = Story(0, 1)
    assert told_colocated(story)
    assert story.cluster.settled
    assert set(story.cluster.workers) == {"decode-0"}


def test_routers_hear_at_once_that_the_last_prefill_worker_leaves_for_good() -> None:
    """From then on it takes no prompts; it may drain for long."""
    story = Story(1, 1)
    assert not told_colocated(story)
    story.feed(WantedChanged(Role.PREFILL, 0))
    assert story.phases()["prefill-0"] is Phase.DRAINING
    assert told_colocated(story)


def test_it_stays_colocated_until_a_prefill_worker_is_ready() -> None:
    story = Story(0, 1)
    story.feed(WantedChanged(Role.PREFILL, 1))
    assert story.phases()["prefill-0"] is Phase.STARTING
    assert story.cluster.colocated, "prompts do not wait for it"
    story.start("prefill-0")
    assert not told_colocated(story)


def test_a_split_cluster_whose_prefill_workers_die_stays_one() -> None:
    """Decode is not to be slowed for whoever generates there: prompts wait for the next worker."""
    story = Story(1, 1)
    story.exit("prefill-0")
    assert not told_colocated(story)


def test_the_next_supervisor_knows_that_none_of_the_wanted_has_been_ready() -> None:
    story = Story(0, 1)
    story.feed(WantedChanged(Role.PREFILL, 1))
    successor = PoolState(policy=Policy(), new_incarnation=lambda: "new")
    successor.handle(ClusterOpened(story.cluster.intent), 0.0)
    assert successor.colocated
