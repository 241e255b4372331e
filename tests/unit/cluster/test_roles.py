"""Workers that go from one pool to the other: by feeding events."""

from __future__ import annotations

import itertools

import pytest

from tandem.cluster.following import node_advice
from tandem.cluster.supervisor import events as ev
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.slots import Phase, Policy, Slot
from tandem.cluster.supervisor.wire import fill_cluster
from tandem.core.identity import Role
from tandem.rpc.v1 import supervisor_pb2

NODE = ev.Placement("node-a", 100, "a")


def cluster_of(flexible: int) -> PoolState:
    names = (f"life-{n}" for n in itertools.count())
    return PoolState(policy=Policy(flexible=flexible), new_incarnation=lambda: next(names))


class Story:
    """Two prefill workers and one decode worker, all ready."""

    def __init__(self, flexible: int = 1) -> None:
        self.cluster = cluster_of(flexible)
        self.now = 0.0
        self.feed(ev.ClusterOpened(ev.Intent({Role.PREFILL: 2, Role.DECODE: 1, Role.ROUTER: 0})))
        for name in list(self.cluster.workers):
            self.start(name)

    def feed(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Instruction]:
        self.now += after_s
        return self.cluster.handle(event, self.now)

    def slot(self, name: str) -> Slot:
        return self.cluster.slots[name]

    def start(self, name: str) -> None:
        self.feed(ev.Placed(name, self.slot(name).incarnation, NODE))
        self.feed(ev.Started(name, self.slot(name).incarnation, "x:1", NODE))

    def scale(self, prefill: int, decode: int) -> list[ev.Instruction]:
        """As the supervisor does it: who shrinks first."""
        wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
        order = sorted(wanted, key=lambda role: wanted[role] - self.cluster.wanted[role])
        return [step for role in order for step in self.feed(ev.WantedChanged(role, wanted[role]))]

    def drained(self, name: str) -> ev.StopProcess:
        (stop,) = self.feed(ev.Drained(name, self.slot(name).incarnation))
        assert isinstance(stop, ev.StopProcess)
        return stop

    def exit(self, name: str) -> list[ev.Instruction]:
        return self.feed(ev.Exited(name, self.slot(name).incarnation, None))

    def change(self, name: str, to: str) -> None:
        """All of it, once it drains."""
        then = self.drained(name).then
        assert then is not None
        assert then.worker_id == to
        assert self.feed(ev.RoleChanged(name, self.slot(name).incarnation)) == []
        self.start(to)


def started(instructions: list[ev.Instruction]) -> list[str]:
    return [step.name for step in instructions if isinstance(step, ev.StartProcess)]


def test_what_one_pool_gives_up_the_other_takes_over_once_it_has_drained() -> None:
    story = Story()
    out = story.scale(1, 2)
    assert out == [ev.DrainProcess("prefill-1", "life-1")]  # and nothing is started
    assert story.slot("decode-1").phase is Phase.STARTING
    assert not story.cluster.settled
    assert story.drained("prefill-1").then == ev.NextLife(Role.DECODE, "decode-1", story.slot("decode-1").incarnation)
    assert story.slot("decode-1").incarnation != "life-1"
    story.feed(ev.RoleChanged("prefill-1", "life-1"))
    assert "prefill-1" not in story.cluster.slots
    assert story.slot("decode-1").placement == NODE
    story.start("decode-1")
    assert story.cluster.settled


def test_its_place_on_its_node_stays_that_of_the_role_it_was_started_in() -> None:
    story = Story()
    story.scale(1, 2)
    story.change("prefill-1", "decode-1")
    assert story.cluster.slots.num_on(Role.PREFILL)["a"] == 2
    assert story.cluster.slots.num_on(Role.DECODE)["a"] == 1


def test_no_more_than_are_flexible_change_and_the_others_end() -> None:
    story = Story(flexible=1)
    story.scale(3, 1)
    story.start("prefill-2")
    assert started(story.scale(1, 3)) == ["decode-2"]
    leaving = [name for name, slot in story.cluster.workers.items() if slot.leaving]
    assert len(leaving) == 2
    assert sorted(story.drained(name).then is None for name in leaving) == [False, True]


def test_none_changes_where_none_is_flexible() -> None:
    story = Story(flexible=0)
    assert started(story.scale(1, 2)) == ["decode-1"]
    assert story.drained("prefill-1").then is None


def test_who_is_away_goes_home_first_though_another_holds_less() -> None:
    story = Story(flexible=1)
    story.scale(1, 2)
    story.change("prefill-1", "decode-1")
    story.feed(ev.LoadReported("decode-1", story.slot("decode-1").incarnation, 5))
    story.scale(2, 1)
    assert [name for name, slot in story.cluster.workers.items() if slot.leaving] == ["decode-1"]


def test_one_that_goes_home_makes_room_for_another() -> None:
    story = Story(flexible=1)
    for _ in range(3):
        story.scale(1, 2)
        (leaving,) = (name for name, slot in story.cluster.workers.items() if slot.leaving)
        story.change(leaving, "decode-1")
        assert story.cluster.slots.num_changed == 1
        assert started(story.scale(2, 1)) == []
        story.change("decode-1", "prefill-0" if leaving == "prefill-0" else "prefill-1")
        assert story.cluster.slots.num_changed == 0


@pytest.mark.parametrize("when", ["drains", "stops"])
def test_where_its_process_ends_before_it_has_changed_another_is_started(when: str) -> None:
    story = Story()
    story.scale(1, 2)
    if when == "stops":
        story.drained("prefill-1")
    promised = story.slot("decode-1").incarnation
    assert started(story.exit("prefill-1")) == ["decode-1"]
    assert story.slot("decode-1").incarnation != promised
    assert story.slot("decode-1").seat is Role.DECODE
    story.start("decode-1")
    assert story.cluster.settled


def test_one_that_does_not_drain_in_time_is_killed_and_another_is_started() -> None:
    story = Story()
    story.scale(1, 2)
    killed: list[ev.KillProcess] = []
    while not killed:
        assert story.now < 2 * story.cluster.policy.drain_s
        for name in ("prefill-0", "prefill-1", "decode-0"):
            story.feed(ev.LoadReported(name, story.slot(name).incarnation, 1))
        killed = [step for step in story.feed(ev.Tick(), after_s=5) if isinstance(step, ev.KillProcess)]
    assert [step.name for step in killed] == ["prefill-1"]
    assert started(story.exit("prefill-1")) == ["decode-1"]


def test_one_that_died_in_its_new_role_is_started_again_in_that_role_with_a_place_of_it() -> None:
    story = Story()
    story.scale(1, 2)
    story.change("prefill-1", "decode-1")
    assert started(story.feed(ev.Exited("decode-1", story.slot("decode-1").incarnation, None))) == ["decode-1"]
    assert story.slot("decode-1").seat is Role.DECODE
    assert story.cluster.slots.num_changed == 0


def test_the_order_may_be_taken_back_while_it_drains() -> None:
    story = Story()
    story.scale(1, 2)
    assert story.scale(1, 1) == []
    assert "decode-1" not in story.cluster.slots
    assert story.drained("prefill-1").then is None
    story.exit("prefill-1")
    assert story.cluster.settled


def test_one_that_changed_for_nobody_is_forgotten() -> None:
    story = Story()
    story.scale(1, 2)
    assert story.drained("prefill-1").then is not None
    story.scale(1, 1)
    story.feed(ev.RoleChanged("prefill-1", "life-1"))  # the supervisor kills the process then
    assert set(story.cluster.workers) == {"prefill-0", "decode-0"}
    assert story.cluster.settled


def test_one_that_somebody_drains_is_replaced_in_its_pool_and_ends() -> None:
    story = Story()
    story.feed(ev.DrainOrdered("prefill-1", replace_first=False, timeout_s=60))
    assert started(story.feed(ev.WantedChanged(Role.DECODE, 2))) == ["decode-1"]
    assert story.drained("prefill-1").then is None


def test_a_shutdown_waits_for_no_change() -> None:
    story = Story()
    story.scale(1, 2)
    story.feed(ev.ShutdownRequested())
    assert "decode-1" not in story.cluster.slots
    for name in list(story.cluster.workers):
        assert started(story.exit(name)) == []
    assert story.cluster.closed


def test_the_next_supervisor_lets_a_change_go_on() -> None:
    story = Story()
    story.scale(1, 2)
    later = cluster_of(1)
    for name in ("prefill-0", "prefill-1", "decode-0"):
        adopted = ev.Adopted(name, story.slot(name).incarnation, "x:1", NODE, draining=name == "prefill-1")
        later.handle(adopted, 0.0)
    assert started(later.handle(ev.ClusterOpened(story.cluster.intent), 0.0)) == []
    (stop,) = later.handle(ev.Drained("prefill-1", "life-1"), 1.0)
    assert isinstance(stop, ev.StopProcess)
    assert stop.then == ev.NextLife(Role.DECODE, "decode-1", later.slots["decode-1"].incarnation)


def test_the_next_supervisor_knows_whose_place_it_takes() -> None:
    later = cluster_of(1)
    later.handle(ev.Adopted("decode-7", "life-x", "x:1", NODE, seat=Role.PREFILL), 0.0)
    assert later.slots.num_changed == 1
    assert later.slots.num_on(Role.PREFILL)["a"] == 1


def test_growth_that_is_taken_over_needs_no_room() -> None:
    story = Story(flexible=1)
    assert story.cluster.num_to_take_over(Role.DECODE, {Role.DECODE: 2, Role.PREFILL: -2}) == 1
    assert story.cluster.num_to_take_over(Role.DECODE, {Role.DECODE: 2}) == 0
    assert story.cluster.num_to_take_over(Role.ROUTER, {Role.ROUTER: 1, Role.PREFILL: -1}) == 0
    story.scale(1, 2)
    story.change("prefill-1", "decode-1")
    assert story.cluster.num_to_take_over(Role.DECODE, {Role.DECODE: 1, Role.PREFILL: -1}) == 0
    assert story.cluster.num_to_take_over(Role.PREFILL, {Role.PREFILL: 1, Role.DECODE: -1}) == 1


# --- as their loads ask for it ----------------------------------------------------------------------------------------


def following() -> Story:
    story = Story()
    story.feed(ev.WantedChanged(Role.PREFILL, 1, 2))
    story.feed(ev.WantedChanged(Role.DECODE, 1, 3))
    return story


def test_one_that_a_pool_gives_goes_on_in_the_other() -> None:
    story = following()
    out = story.feed(ev.RoleGiven(Role.PREFILL, Role.DECODE))
    assert out == [ev.DrainProcess("prefill-1", "life-1")]
    assert story.cluster.is_changing_role
    assert not story.cluster.may_go(Role.PREFILL, Role.DECODE), "only one is flexible"
    story.drained("prefill-1")
    story.feed(ev.RoleChanged("prefill-1", "life-1"))
    assert story.cluster.is_changing_role, "it does not serve yet"
    story.start("decode-1")
    assert not story.cluster.is_changing_role
    assert story.cluster.settled
    assert story.cluster.wanted[Role.PREFILL] == 1
    assert story.cluster.sizes.told[1].num_taken == 1
    assert story.cluster.may_go(Role.DECODE, Role.PREFILL), "home it may always go"


def test_in_place_of_one_that_waits_for_a_node_it_goes_on() -> None:
    story = following()
    assert started(story.feed(ev.LoadFollowed(Role.DECODE, 2))) == ["decode-1"]
    out = story.feed(ev.RoleGiven(Role.PREFILL, Role.DECODE, instead=True))
    waiting = story.slot("decode-1").incarnation
    assert out[0] == ev.DrainProcess("prefill-1", "life-1")
    assert [step.name for step in out if isinstance(step, ev.KillProcess)] == ["decode-1"]
    assert started(out) == []
    assert story.cluster.wanted[Role.DECODE] == 2
    story.feed(ev.Exited("decode-1", waiting, None))
    story.change("prefill-1", "decode-2")
    assert story.cluster.settled


def test_one_that_serves_goes_also_where_another_waits_for_a_node() -> None:
    story = following()
    story.feed(ev.WantedChanged(Role.PREFILL, 1, 3))
    assert started(story.feed(ev.LoadFollowed(Role.PREFILL, 3))) == ["prefill-2"]
    assert story.cluster.may_go(Role.PREFILL, Role.DECODE)
    assert story.feed(ev.RoleGiven(Role.PREFILL, Role.DECODE)) == [ev.DrainProcess("prefill-1", "life-1")]
    story.change("prefill-1", "decode-1")
    assert story.slot("prefill-2").phase is Phase.STARTING
    assert story.cluster.wanted[Role.PREFILL] == 2


def test_none_goes_that_runs_another_build_than_is_wanted() -> None:
    """The other pool could not take it over, and would start one, which may have no room."""
    story = following()
    assert story.cluster.may_go(Role.PREFILL, Role.DECODE)
    story.feed(ev.BuildChanged(ev.Build("new")))
    assert not story.cluster.may_go(Role.PREFILL, Role.DECODE)
    assert story.feed(ev.RoleGiven(Role.PREFILL, Role.DECODE)) == []
    assert story.cluster.wanted[Role.PREFILL] == 2


def test_a_pool_of_a_fixed_size_gives_none() -> None:
    story = Story()
    story.feed(ev.WantedChanged(Role.DECODE, 1, 3))
    assert story.feed(ev.RoleGiven(Role.PREFILL, Role.DECODE)) == []
    assert story.feed(ev.RoleGiven(Role.PREFILL, Role.DECODE, instead=True)) == []
    assert story.cluster.wanted[Role.PREFILL] == 2
    assert story.cluster.settled


def test_one_that_drains_already_may_be_taken_over_until_somebody_awaits_it() -> None:
    story = Story()
    assert story.cluster.num_given_up(Role.DECODE) == 0
    story.feed(ev.WantedChanged(Role.PREFILL, 1))
    assert story.cluster.num_given_up(Role.DECODE) == 1
    assert story.cluster.num_given_up(Role.PREFILL) == 0
    story.feed(ev.WantedChanged(Role.DECODE, 2))
    assert story.cluster.num_given_up(Role.DECODE) == 0


def test_one_that_awaits_another_s_process_asks_for_no_node() -> None:
    story = Story()
    story.scale(1, 2)
    told = supervisor_pb2.Cluster()
    fill_cluster(told, story.cluster, {}, {}, story.now)
    (heir,) = (worker for worker in told.workers if worker.member.worker_id == "decode-1")
    assert heir.awaits == "prefill-1"
    assert heir.detail == "goes on in the process of prefill-1 once that has drained"
    assert node_advice(told, "") == []
    story.exit("prefill-1")  # before it has drained
    told = supervisor_pb2.Cluster()
    fill_cluster(told, story.cluster, {}, {}, story.now)
    (anew,) = (worker for worker in told.workers if worker.member.worker_id == "decode-1")
    assert (anew.awaits, anew.detail) == ("", "waits for a node with a free `decode` in Ray")
    assert node_advice(told, "")
