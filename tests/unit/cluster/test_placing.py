"""Where the lives of slots go, and what is done when a node does not begin one: by feeding events."""

from __future__ import annotations

import itertools

from tandem.cluster.supervisor.events import (
    ClusterOpened,
    Ending,
    EndUnproven,
    Event,
    Exited,
    HeartbeatMissed,
    Instruction,
    Intent,
    KillProcess,
    NodeKnocked,
    NodeMet,
    NodesListed,
    NoteEnded,
    Placed,
    Placement,
    Started,
    StartProcess,
    Tick,
    WantedChanged,
)
from tandem.cluster.supervisor.nodes import Aim, Node
from tandem.cluster.supervisor.placing import looks_for_nodes, to_knock
from tandem.cluster.supervisor.pools import PoolState
from tandem.cluster.supervisor.slots import Phase, Policy
from tandem.core.identity import Role
from tandem.core.machine import HostBoot

KILLED = Ending("worker_lost", "the connection to its process broke")


def node(name: str, *, prefill: int = 0, decode: int = 0) -> Node:
    return Node(name, f"10.0.0.{name}", 6000, {Role.PREFILL: prefill, Role.DECODE: decode})


class Story:
    """One prefill worker and some decode workers, on nodes with room for one each."""

    def __init__(self, decode: int, nodes: int) -> None:
        names = (f"life-{n}" for n in itertools.count())
        self.cluster = PoolState(policy=Policy(), new_incarnation=lambda: next(names))
        self.now = 0.0
        self.nodes = [node("p", prefill=1), *(node(f"d{n}", decode=1) for n in range(nodes))]
        self.feed(ClusterOpened(Intent({Role.PREFILL: 1, Role.DECODE: decode, Role.ROUTER: 0})))
        self.list_nodes()

    def feed(self, event: Event, after_s: float = 0.0) -> list[Instruction]:
        self.now += after_s
        return self.cluster.handle(event, self.now)

    def list_nodes(self) -> list[Instruction]:
        return self.feed(NodesListed(tuple(self.nodes)))

    def life(self, name: str) -> str:
        return self.cluster.slots[name].incarnation

    def aim(self, name: str) -> Aim:
        aim = self.cluster.aim(name)
        self.cluster.slots[name].ask(self.now, self.cluster.policy)
        return aim

    def start(self, name: str) -> str:
        """Where it starts, and serves."""
        aim = self.aim(name)
        place = Placement(f"10.0.0.{aim.node_id}", 1, aim.node_id, HostBoot(f"10.0.0.{aim.node_id}", aim.node_id, "b1"))
        self.feed(Placed(name, self.life(name), place))
        self.feed(Started(name, self.life(name), "x:1", place))
        return aim.node_id

    def exit(self, name: str) -> list[Instruction]:
        return self.feed(Exited(name, self.life(name), KILLED))


def of(kind: type, instructions: list[Instruction]) -> list[str]:
    return [step.name for step in instructions if isinstance(step, kind)]


def test_two_that_start_at_once_get_a_node_each() -> None:
    story = Story(decode=2, nodes=2)
    assert {story.aim("decode-0").node_id, story.aim("decode-1").node_id} == {"d0", "d1"}


def test_the_successor_of_a_worker_on_a_dead_host_goes_elsewhere() -> None:
    story = Story(decode=1, nodes=2)
    assert story.start("decode-0") == "d0"
    story.feed(HeartbeatMissed("decode-0", story.life("decode-0")))
    assert [each.node_id for each in story.cluster.book.to_knock()] == ["d0"]
    story.feed(NodeKnocked("d0", answered=False))
    assert of(StartProcess, story.exit("decode-0")) == ["decode-0"]
    assert story.aim("decode-0") == Aim("d1", frozenset({"d0"}))


def test_where_no_other_node_has_room_it_waits_and_goes_back_to_the_host_that_heals() -> None:
    story = Story(decode=1, nodes=1)
    story.start("decode-0")
    story.feed(NodeKnocked("d0", answered=False))
    story.exit("decode-0")
    assert story.aim("decode-0") == Aim("", frozenset({"d0"}))
    assert story.list_nodes() == []
    assert of(KillProcess, story.feed(NodeKnocked("d0", answered=True))) == ["decode-0"]
    failures = story.cluster.slots["decode-0"].failures
    assert of(StartProcess, story.exit("decode-0")) == ["decode-0"]
    assert story.aim("decode-0") == Aim("d0")
    assert story.cluster.slots["decode-0"].failures == failures  # to go elsewhere is no failure


def test_what_was_sent_to_a_node_that_falls_silent_is_taken_back() -> None:
    story = Story(decode=1, nodes=2)
    assert story.aim("decode-0") == Aim("d0")
    assert of(KillProcess, story.feed(NodeKnocked("d0", answered=False))) == ["decode-0"]
    story.exit("decode-0")
    assert story.aim("decode-0").node_id == "d1"


def test_a_node_that_does_not_begin_it_in_time_is_left_for_another() -> None:
    story = Story(decode=1, nodes=2)
    assert story.aim("decode-0") == Aim("d0")
    assert story.cluster.wake_at() == Policy().place_try_s
    assert of(KillProcess, story.feed(Tick(), after_s=Policy().place_try_s)) == ["decode-0"]
    assert of(StartProcess, story.exit("decode-0")) == ["decode-0"]
    assert story.aim("decode-0") == Aim("d1")
    for _ in range(10):  # both are slow: it stays where it is
        assert story.feed(Tick(), after_s=Policy().place_try_s) == []


def test_where_no_other_has_room_a_slow_node_is_awaited() -> None:
    story = Story(decode=1, nodes=1)
    assert story.aim("decode-0") == Aim("d0")
    for _ in range(10):
        assert story.feed(Tick(), after_s=Policy().place_try_s) == []
    assert story.cluster.slots["decode-0"].phase is Phase.STARTING


def test_one_that_is_placed_in_time_is_left_alone_however_long_it_loads() -> None:
    story = Story(decode=1, nodes=2)
    story.aim("decode-0")
    story.feed(Placed("decode-0", story.life("decode-0"), Placement("10.0.0.d0", 1, "d0")))
    assert story.feed(NodeKnocked("d0", answered=False)) == []
    assert story.feed(Tick(), after_s=Policy().place_try_s) == []


def test_nodes_are_looked_for_only_while_something_waits_for_one_or_one_is_silent() -> None:
    story = Story(decode=1, nodes=2)
    assert looks_for_nodes(story.cluster.slots, story.cluster.book)
    for name in ("prefill-0", "decode-0"):
        story.start(name)
    assert not looks_for_nodes(story.cluster.slots, story.cluster.book)
    story.feed(NodeKnocked("d1", answered=False))
    assert looks_for_nodes(story.cluster.slots, story.cluster.book)
    story.feed(NodeKnocked("d1", answered=True))
    story.feed(WantedChanged(Role.DECODE, 3))
    assert looks_for_nodes(story.cluster.slots, story.cluster.book)


def test_the_end_of_what_ran_on_a_host_is_told_to_all_when_the_host_is_back_under_a_new_boot() -> None:
    story = Story(decode=2, nodes=3)
    for name in ("prefill-0", "decode-0", "decode-1"):
        story.start(name)
    lost, boot = story.life("decode-0"), HostBoot("10.0.0.d0", "d0", "b1")
    story.feed(NodeKnocked("d0", answered=False))
    story.exit("decode-0")
    story.start("decode-0")
    assert story.feed(EndUnproven(lost, boot)) == []
    assert story.cluster.intent.unproven == {lost: boot}
    told = story.feed(NodeMet("d0-again", HostBoot("10.0.0.d0", "d0", "b2")))
    assert sorted(of(NoteEnded, told)) == ["decode-0", "decode-1", "prefill-0"]
    assert {step.ended for step in told if isinstance(step, NoteEnded)} == {(lost,)}
    assert story.cluster.intent.unproven == {}


def test_each_worker_is_told_at_once_of_all_that_a_host_proves_which_is_back() -> None:
    story = Story(decode=2, nodes=3)
    for name in ("prefill-0", "decode-0", "decode-1"):
        story.start(name)
    boot = HostBoot("10.0.0.d0", "d0", "b1")
    for lost in ("one", "another"):
        story.feed(EndUnproven(lost, boot))
    told = story.feed(NodeMet("d0-again", HostBoot("10.0.0.d0", "d0", "b2")))
    assert sorted(of(NoteEnded, told)) == ["decode-0", "decode-1", "prefill-0"]
    assert {step.ended for step in told if isinstance(step, NoteEnded)} == {("one", "another")}


def test_a_worker_that_starts_on_the_host_that_is_back_proves_the_same() -> None:
    story = Story(decode=1, nodes=1)
    for name in ("prefill-0", "decode-0"):
        story.start(name)
    lost = story.life("decode-0")
    story.exit("decode-0")
    story.feed(EndUnproven(lost, HostBoot("10.0.0.d0", "d0", "b1")))
    back = Placement("10.0.0.d0", 1, "d0-again", HostBoot("10.0.0.d0", "d0", "b2"))
    told = story.feed(Placed("decode-0", story.life("decode-0"), back))
    assert of(NoteEnded, told) == ["prefill-0"]  # the one that starts is told when it listens


def test_a_later_supervisor_knows_which_ends_are_unproven() -> None:
    boot = HostBoot("10.0.0.d0", "d0", "b1")
    cluster = PoolState(policy=Policy(), new_incarnation=lambda: "x")
    cluster.handle(ClusterOpened(Intent(dict.fromkeys(Role, 0), unproven={"lost": boot})), 0.0)
    assert cluster.book.unproven == {"lost": boot}
    assert cluster.intent.unproven == {"lost": boot}


def test_a_choice_that_is_still_looked_at_is_changed_without_ending_anything() -> None:
    """The node is chosen, but its process is not asked for yet: it is knocked at first."""
    story = Story(decode=1, nodes=2)
    assert story.cluster.aim("decode-0") == Aim("d0")
    assert story.feed(NodeKnocked("d0", answered=False)) == []
    assert story.cluster.aim("decode-0").node_id == "d1"


def test_a_node_that_was_told_to_begin_a_process_is_knocked_at_until_it_has() -> None:
    story = Story(decode=1, nodes=1)
    story.start("prefill-0")
    story.aim("decode-0")
    assert [each.node_id for each in to_knock(story.cluster.slots, story.cluster.book)] == ["d0"]
    story.feed(Placed("decode-0", story.life("decode-0"), Placement("10.0.0.d0", 1, "d0")))
    assert to_knock(story.cluster.slots, story.cluster.book) == []
