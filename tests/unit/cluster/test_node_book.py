"""What the supervisor knows of nodes, and what it decides from it."""

from __future__ import annotations

from collections import Counter

import pytest

from tandem.cluster.supervisor import nodes
from tandem.cluster.supervisor.nodes import Aim, Node, NodeBook
from tandem.core.identity import Role
from tandem.core.machine import HostBoot


def node(name: str, *, prefill: int = 0, decode: int = 0) -> Node:
    return Node(name, f"10.0.0.{name}", 6000, {Role.PREFILL: prefill, Role.DECODE: decode, Role.ROUTER: 0})


def book(*listed: Node) -> NodeBook:
    book = NodeBook()
    book.take_list(listed)
    return book


def boot(number: int, address: str = "10.0.0.1", machine: str = "m") -> HostBoot:
    return HostBoot(address, machine, f"boot-{number}")


# --- where a process goes -------------------------------------------------------------------------------------------


def test_a_process_goes_to_the_node_of_its_role_that_has_most_room() -> None:
    known = book(node("1", prefill=8), node("2", decode=2), node("3", decode=4))
    assert known.aim(Role.DECODE, {}) == Aim("3")
    assert known.aim(Role.DECODE, {"3": 3}) == Aim("2")
    assert known.aim(Role.PREFILL, {"1": 7}) == Aim("1")


def test_where_no_node_has_room_ray_may_find_one() -> None:
    assert book(node("1", decode=1)).aim(Role.DECODE, {"1": 1}) == Aim("")
    assert book().aim(Role.DECODE, {}) == Aim("")


def test_nothing_goes_to_a_node_that_does_not_answer_until_it_answers_again() -> None:
    known = book(node("1", decode=4), node("2", decode=1))
    known.take_knock("1", answered=False)
    assert known.aim(Role.DECODE, {}) == Aim("2", frozenset({"1"}))
    assert known.aim(Role.DECODE, {"2": 1}) == Aim("", frozenset({"1"}))
    known.take_knock("1", answered=True)
    assert known.aim(Role.DECODE, {}) == Aim("1")


def test_a_node_on_which_it_did_not_come_up_is_the_last_choice() -> None:
    known = book(node("1", decode=4), node("2", decode=1))
    assert known.aim(Role.DECODE, {}, tried=["1"]) == Aim("2")
    assert known.aim(Role.DECODE, {"2": 1}, tried=["1"]) == Aim("1")


def test_64_nodes_are_filled_evenly_and_a_lost_rack_is_spread_over_the_rest() -> None:
    known = book(*(node(str(n), decode=8) for n in range(64)))
    taken: Counter[str] = Counter()
    for _ in range(4 * 64):
        taken[known.aim(Role.DECODE, taken).node_id] += 1
    assert set(taken.values()) == {4}
    rack = [str(n) for n in range(16)]
    for name in rack:
        known.take_knock(name, answered=False)
    for name in rack:
        for _ in range(taken.pop(name)):
            taken[known.aim(Role.DECODE, taken).node_id] += 1
    assert sum(taken.values()) == 4 * 64
    assert set(taken) == {str(n) for n in range(16, 64)}
    assert max(taken.values()) - min(taken.values()) <= 1


# --- who is knocked at ----------------------------------------------------------------------------------------------


def test_a_node_is_knocked_at_when_a_process_there_is_missed_and_as_long_as_it_does_not_answer() -> None:
    known = book(node("1", decode=1), node("2", decode=1))
    assert known.to_knock() == []
    known.miss("1")
    assert [each.node_id for each in known.to_knock()] == ["1"]
    known.take_knock("1", answered=False)
    assert known.is_suspect("1")
    assert [each.node_id for each in known.to_knock()] == ["1"]
    known.take_knock("1", answered=True)
    assert known.to_knock() == []


def test_a_stopped_process_does_not_make_its_node_suspect() -> None:
    """Its heartbeats are missed, but the node answers: the successor may start there."""
    known = book(node("1", decode=1))
    for _ in range(5):
        known.miss("1")
        known.take_knock("1", answered=True)
    assert known.aim(Role.DECODE, {}) == Aim("1")


def test_a_node_that_ray_has_given_up_is_forgotten() -> None:
    known = book(node("1", decode=1), node("2", decode=1))
    known.take_knock("1", answered=False)
    known.take_list([node("2", decode=1)])
    assert known.to_knock() == []
    assert known.aim(Role.DECODE, {}) == Aim("2")


# --- what is started anew elsewhere ---------------------------------------------------------------------------------


def test_what_waits_for_a_node_that_falls_silent_goes_elsewhere() -> None:
    known = book(node("1", decode=1), node("2", decode=1))
    then = known.aim(Role.DECODE, {"2": 1})
    assert then == Aim("1")
    assert not known.is_better(known.aim(Role.DECODE, {"2": 1}), then)
    known.take_knock("1", answered=False)
    assert known.is_better(known.aim(Role.DECODE, {"2": 1}), then)  # even where it can only wait
    known.take_list([node("2", decode=1)])
    assert known.is_better(known.aim(Role.DECODE, {}), then)  # Ray has given the node up


def test_what_waits_for_any_node_takes_one_that_answers_again() -> None:
    known = book(node("1", decode=1))
    known.take_knock("1", answered=False)
    then = known.aim(Role.DECODE, {})
    assert then == Aim("", frozenset({"1"}))
    assert not known.is_better(known.aim(Role.DECODE, {}), then)
    known.take_knock("1", answered=True)
    assert known.is_better(known.aim(Role.DECODE, {}), then)


def test_what_waits_for_any_node_is_left_to_ray_when_a_new_one_comes() -> None:
    known = book(node("1", decode=1))
    then = known.aim(Role.DECODE, {"1": 1})
    known.take_list([node("1", decode=1), node("2", decode=1)])
    assert not known.is_better(known.aim(Role.DECODE, {"1": 1}), then)


def test_what_waits_for_any_node_does_not_get_one_that_falls_silent_meanwhile() -> None:
    known = book(node("1", decode=1))
    then = known.aim(Role.DECODE, {"1": 1})
    known.take_knock("1", answered=False)
    assert known.is_better(known.aim(Role.DECODE, {}), then)


# --- whose end is proven --------------------------------------------------------------------------------------------


def test_a_machine_that_is_back_under_a_new_boot_proves_the_end_of_all_that_ran_before() -> None:
    known = book()
    known.meet("old", boot(1))
    assert known.leave_unproven("a", boot(1)) == []
    assert known.leave_unproven("b", boot(1)) == []
    assert known.leave_unproven("c", boot(1, "10.0.0.2")) == []
    assert known.meet("new", boot(2)) == ["a", "b"]
    assert list(known.unproven) == ["c"]
    assert known.meet("new", boot(2)) == []


def test_a_loss_that_is_noticed_after_the_machine_is_back_is_proven_at_once() -> None:
    known = book()
    known.meet("old", boot(1))
    known.meet("new", boot(2))
    assert known.leave_unproven("a", boot(1)) == ["a"]
    assert known.leave_unproven("b", boot(2)) == []


def test_late_news_of_an_earlier_boot_proves_nothing_of_the_present_one() -> None:
    known = book()
    known.meet("old", boot(1))
    known.meet("new", boot(2))
    known.leave_unproven("a", boot(2))
    assert known.meet("old", boot(1)) == []
    assert list(known.unproven) == ["a"]


def test_the_same_boot_again_proves_nothing() -> None:
    """The machine was cut off, and its processes may have gone on."""
    known = book()
    known.meet("old", boot(1))
    known.leave_unproven("a", boot(1))
    assert known.meet("new", boot(1)) == []
    assert list(known.unproven) == ["a"]


def test_another_machine_at_the_same_address_proves_nothing() -> None:
    known = book()
    known.leave_unproven("a", boot(1))
    assert known.meet("new", boot(2, machine="another")) == []
    assert known.meet("new", boot(2, machine="")) == []
    assert list(known.unproven) == ["a"]


def test_an_end_on_a_machine_that_nothing_tells_from_others_waits_for_no_proof() -> None:
    known = book()
    known.meet("old", boot(1, machine=""))
    assert known.leave_unproven("a", boot(1, machine="")) == []
    assert known.unproven == {}
    assert known.meet("new", boot(2, machine="")) == []


def test_only_a_node_at_an_address_where_something_was_lost_is_asked_which_machine_it_is() -> None:
    known = book(node("1", decode=1), node("2", decode=1))
    assert known.to_meet == []
    known.leave_unproven("a", boot(1, "10.0.0.2"))
    assert [each.node_id for each in known.to_meet] == ["2"]
    known.take_knock("2", answered=False)
    assert known.to_meet == []
    known.take_knock("2", answered=True)
    known.meet("2", boot(1, "10.0.0.2"))
    assert known.to_meet == []  # it is known, and the same boot


def test_ends_that_wait_for_a_proof_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MAX_UNPROVEN", 2)
    known = book()
    for incarnation in "abc":
        known.leave_unproven(incarnation, boot(1))
    assert list(known.unproven) == ["b", "c"]
