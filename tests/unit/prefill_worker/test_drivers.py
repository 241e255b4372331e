"""What the two drivers do together: pages, parts, commits, and what goes wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from kvtransfer.protocol import receiver_events as rev
from kvtransfer.protocol import sender_events as sev
from kvtransfer.protocol.arrivals import ExtentRun, WriteTag
from kvtransfer.protocol.messages import AttemptKey, CommitPart, FailureReason, RefusalReason
from kvtransfer.protocol.sender import SenderHandoff
from kvtransfer.transports.events import PeerId, WriteArrived
from prefill_worker.events import HandoffStats
from tests.support.driver_world import FIRST, KEY, LEASE_S, MINE, RECEIVER, SENDER, THEIRS, World
from tests.support.link import LinkSpec
from tests.support.scripted_model import LAYOUT


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return World(getattr(request, "param", None))


def faulty(fault: str, name: str) -> Any:
    """A link that does this to each write."""
    return pytest.param(LinkSpec(fault_share=1.0, faults=[fault]), id=name)


def num_released(world: World) -> dict[int, int]:
    counts: dict[int, int] = {}
    for what in world.sending.told:
        for page in what[1] if what[0] == "release" else ():
            counts[page] = counts.get(page, 0) + 1
    return counts


@pytest.mark.parametrize("grant_first", [True, False])
def test_pages_are_written_committed_admitted_and_released_once(world: World, grant_first: bool) -> None:
    world.open()
    grant = world.grant()
    if grant_first:
        world.attach(grant)
    world.seal((1, 2), 0)
    world.seal((5,), 2)
    if not grant_first:
        world.attach(grant)
    world.computed()
    stats: HandoffStats = world.sending.wait("succeeded", KEY)[2]
    world.sending.wait("closed", KEY)
    assert (stats.num_extents, stats.num_bytes) == (6, 6 * LAYOUT.extent_bytes)
    assert world.sending.driver.num_bytes_written == stats.num_bytes
    assert stats.num_descriptors <= 6
    assert world.receiving.wait("admit", grant)[2].first_tokens == FIRST
    world.check_bytes((1, 2, 5), (7, 3, 4))
    assert num_released(world) == {1: 1, 2: 1, 5: 1}
    assert world.sending.driver.num_handoffs == 0
    assert not world.receiving.expected
    assert world.receiving.driver.num_refused == 0


def test_times_are_counted_from_the_computation_the_first_post_and_the_commit() -> None:
    post_s, ago_s = 0.05, 60.0  # as over shared memory, where the post itself copies
    world = World(LinkSpec(post_s=post_s))
    begun_s = world.now_s
    world.open()
    grant = world.grant()
    world.seal()
    world.attach(grant)
    world.computed(ago_s)
    stats: HandoffStats = world.sending.wait("succeeded", KEY)[2]
    elapsed_s = world.now_s - begun_s
    assert post_s <= stats.handoff_s <= elapsed_s
    assert ago_s <= stats.exposed_s <= ago_s + elapsed_s
    assert 0 < stats.answer_s < stats.handoff_s - post_s
    assert begun_s + post_s <= world.receiving.wait("admit", grant)[3] <= begun_s + elapsed_s


def test_cached_pages_are_not_written_but_released(world: World) -> None:
    world.open()
    world.attach(world.grant((4,), first_page=2))
    world.seal()
    world.computed()
    assert world.sending.wait("succeeded", KEY)[2].num_extents == 2
    world.check_bytes((5,), (4,))
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}


WRONG_BYTES = [faulty("corrupt write", "corrupt"), faulty("truncated write", "truncate")]


@pytest.mark.parametrize("world", WRONG_BYTES, indirect=True)
def test_bytes_that_arrive_wrong_are_refused(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("failed", FailureReason.REFUSED, RefusalReason.DIGEST_MISMATCH)
    world.receiving.wait("over", (7, 3, 4), RefusalReason.DIGEST_MISMATCH, False)
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}
    assert world.receiving.driver.num_refused == 1


@pytest.mark.parametrize("world", [faulty("lost completion", "lose_completion")], indirect=True)
def test_a_write_that_never_ends_keeps_its_pages_in_quarantine(world: World) -> None:
    world.open()
    grant = world.grant()
    world.attach(grant)
    world.seal()
    world.sending.wait("failed", FailureReason.WRITE_TIMEOUT)
    world.sending.wait("quarantine", (1, 2, 5))
    assert num_released(world) == {}
    world.receiving.wait("over", (7, 3, 4), RefusalReason.LEASE_EXPIRED, True)
    world.receiving.wait("kill_writer")
    assert ("lift", (7, 3, 4)) not in world.receiving.told
    # The receiver's process ends: nothing of this can do harm there any more.
    world.sending.run(lambda: world.sending.driver.receiver_lost(RECEIVER))
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}


def test_a_lease_that_lapses_is_noticed_by_both_ends(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.sending.wait("failed", FailureReason.LEASE_LOST)
    world.receiving.wait("over", (4,), RefusalReason.WRITER_STOPPED, False)
    world.receiving.wait("verified", ((0, 7), (1, 3)))
    assert world.sending.timer.due_s is None


def test_a_silent_writer_is_asked_then_suspected_and_its_exit_lifts_the_quarantine(world: World) -> None:
    world.sending.is_alive = False
    world.open(4)
    world.attach(world.grant((7, 3, 4, 5)))
    world.receiving.run(lambda: world.receiving.driver.happened(rev.RequestCancelled(KEY)))
    world.receiving.wait("over", (7, 3, 4, 5), RefusalReason.CANCELLED, True)
    world.receiving.wait("replace_self", 4)
    world.receiving.wait("kill_writer")
    assert world.receiving.told.count(("ask_to_stop", SENDER)) > 1
    world.receiving.told.clear()
    world.receiving.run(lambda: world.receiving.driver.writer_exited(SENDER, is_here=True))
    world.receiving.wait("lift", (7, 3, 4, 5))


def test_a_cancel_at_the_receiver_stops_the_writer(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0, layers=(0,))
    world.receiving.run(lambda: world.receiving.driver.happened(rev.RequestCancelled(KEY)))
    world.sending.wait("failed", FailureReason.STOP_ASKED)
    world.receiving.wait("lift", (7, 3, 4))
    world.seal((5,), 2)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}, "late pages go straight back"


def test_what_a_step_still_seals_for_an_ended_handoff_is_not_of_one_that_was_opened_after_it(world: World) -> None:
    cancel = world.sending.driver.cancel
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0, layers=(0,))
    world.sending.run(lambda: cancel(KEY))
    world.sending.wait("closed", KEY)
    world.open()
    world.seal((1, 2), 0, layers=(1,))
    world.sending.run(lambda: cancel(KEY))
    assert world.sending.driver.num_handoffs == 0
    assert num_released(world) == {1: 1, 2: 1}


def test_a_receiver_that_is_gone(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.sending.ended.add(RECEIVER)
    world.seal()
    world.sending.wait("failed", FailureReason.WRITE_FAILED)
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1, 5: 1}


def test_a_grant_of_pages_that_do_not_exist_ends_the_attempt_only(world: World) -> None:
    world.open()
    grant = world.grant((7, 3, 12))
    world.sending.run(lambda: world.sending.driver.attached(KEY, grant, world.now_s + LEASE_S))
    world.seal()
    world.sending.wait("failed", FailureReason.WRITE_FAILED)
    world.sending.wait("closed", KEY)


def test_a_commit_is_sent_again_and_given_up_in_the_end(world: World) -> None:
    world.commits_arrive = False
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("commit")
    world.sending.wait("failed", FailureReason.NO_ANSWER)
    assert sum(t[0] == "commit" for t in world.sending.told) > 1
    world.receiving.wait("over", (7, 3, 4), RefusalReason.WRITER_STOPPED, False)


def test_what_comes_for_an_attempt_that_has_ended(world: World) -> None:
    world.open()
    world.open()
    world.sending.run(lambda: world.sending.driver.happened(KEY, sev.CancelRequested()))
    world.sending.wait("closed", KEY)
    world.sending.run(lambda: world.sending.driver.happened(KEY, sev.CancelRequested()))
    world.computed()
    world.attach(grant := world.grant())
    world.sending.wait("confirm_idle", grant.grant_id)
    world.receiving.wait("over", (7, 3, 4), RefusalReason.WRITER_STOPPED, False)


def test_answers_to_those_who_ask_about_the_wrong_grant(world: World) -> None:
    driver, run = world.receiving.driver, world.receiving.run
    grant = world.grant()
    proof, other = grant.capability, "prefill-1#1"
    assert run(lambda: driver.attach("x/1", SENDER, proof, renew=False)).refusal is RefusalReason.UNKNOWN_GRANT
    world.open()
    world.attach(grant)
    assert run(lambda: driver.attach(grant.grant_id, other, proof, renew=False)).refusal is RefusalReason.WRONG_SENDER
    assert run(lambda: driver.attach(grant.grant_id, other, proof, renew=True)).refusal is RefusalReason.WRONG_SENDER
    assert run(lambda: driver.attach(grant.grant_id, SENDER, proof, renew=True)).refusal is None
    assert run(lambda: driver.confirm_idle(grant.grant_id, other, proof)).refusal is RefusalReason.WRONG_SENDER
    assert run(lambda: driver.confirm_idle(grant.grant_id, SENDER, b"guessed")).refusal is RefusalReason.BAD_CAPABILITY
    assert not any(t[0] == "over" for t in world.receiving.told)
    assert driver.num_refused == 5
    assert driver.refusals[RefusalReason.WRONG_SENDER] == 3


def test_a_late_reserve_is_answered_also_when_it_had_a_grant(world: World) -> None:
    world.grant()
    world.receiving.run(lambda: world.receiving.driver.happened(rev.RequestCancelled(KEY)))
    world.receiving.wait("over", (7, 3, 4), RefusalReason.CANCELLED, False)
    world.receiving.run(lambda: world.receiving.driver.happened(rev.ReserveReceived(KEY)))
    world.receiving.wait("refused", KEY, RefusalReason.CANCELLED)


def test_what_is_written_of_a_long_prompt_outlives_its_sender(world: World) -> None:
    world.open(4)
    world.attach(world.grant((7, 3, 4, 8)))
    world.seal((1, 2), 0)
    first: CommitPart = world.sending.wait("part")[1]
    assert (first.first_index, len(first.digests), len(first.digests[0])) == (0, 2, 2)
    world.seal((5,), 2)
    world.sending.wait("part", first)
    world.sending.run(lambda: None)  # its answer is in
    world.receiving.run(lambda: world.receiving.driver.happened(rev.WriterExited(SENDER)))
    world.receiving.wait("over", (8,), RefusalReason.WRITER_EXITED, False)
    world.receiving.wait("verified", ((0, 7), (1, 3), (2, 4)))
    world.check_bytes((1, 2, 5), (7, 3, 4))


def test_lost_parts_cost_nothing(world: World) -> None:
    world.parts_arrive = False
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.sending.wait("part")
    world.seal((5,), 2)
    world.computed()
    world.sending.wait("succeeded", KEY)


# Page 5 in the second layer.
LAST_WRITE_WRONG = pytest.param(LinkSpec(faults_of_writes={3: "corrupt write"}), id="last write")


@pytest.mark.parametrize("world", [LAST_WRITE_WRONG], indirect=True)
def test_a_commit_with_a_wrong_page_reads_again_what_a_part_has_verified(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.sending.wait("part")
    world.receiving.run(lambda: None)
    world.receiving.memory.data[THEIRS.offset(0, 7)] ^= 1  # a write that was not to come any more, and told nobody
    world.seal((5,), 2)
    world.computed()
    world.sending.wait("failed", FailureReason.REFUSED, RefusalReason.DIGEST_MISMATCH)
    world.receiving.wait("over", (7, 4), RefusalReason.DIGEST_MISMATCH, False)
    world.receiving.wait("verified", ((1, 3),))


# ---- digests on arrival


def arrived(world: World, num_writes: int) -> None:
    """Until decode has read what this many writes brought."""
    world.kernel.run_until(lambda: world.receiving.num_arrived >= num_writes)


def test_what_has_arrived_is_not_read_again_by_parts_and_the_commit(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.seal((5,), 2)
    arrived(world, 4)
    assert sorted(world.receiving.memory.reads) == [(layer, page) for layer in range(2) for page in (3, 4, 7)]
    world.computed()
    world.sending.wait("succeeded", KEY)
    assert len(world.receiving.memory.reads) == 6
    assert world.receiving.driver.num_arrivals_ignored == 0


def test_writes_that_nobody_hears_of_are_read_by_the_commit(world: World) -> None:
    world.receiving.hears_arrivals = False
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("succeeded", KEY)
    assert len(world.receiving.memory.reads) == 6


def tag(runs: tuple[ExtentRun, ...], epoch: int = 1) -> bytes:
    return WriteTag(0, 0, epoch, runs).pack()


def test_a_write_that_tells_too_early_costs_a_second_look(world: World) -> None:
    world.open()
    world.attach(world.grant())
    early = WriteArrived(PeerId(SENDER), tag((ExtentRun(0, 0, 3), ExtentRun(1, 0, 3))))
    world.receiving.run(lambda: world.receiving.driver.on_transport(early))
    assert len(world.receiving.memory.reads) == 6
    world.receiving.hears_arrivals = False
    world.seal()
    world.computed()
    world.sending.wait("succeeded", KEY)
    world.check_bytes((1, 2, 5), (7, 3, 4))


def test_a_write_that_is_repeated_is_read_again(world: World) -> None:
    world.open()
    world.attach(world.grant())
    world.seal()
    arrived(world, 2)
    world.receiving.memory.data[THEIRS.offset(1, 3)] ^= 1
    again = WriteArrived(PeerId(SENDER), tag((ExtentRun(1, 1, 1),)))
    world.receiving.run(lambda: world.receiving.driver.on_transport(again))
    world.computed()
    world.sending.wait("failed", FailureReason.REFUSED, RefusalReason.DIGEST_MISMATCH)


@pytest.mark.parametrize(
    ("peer", "runs", "epoch"),
    [
        ("prefill-9#1", (ExtentRun(0, 0, 1),), 1),
        (SENDER, (ExtentRun(0, 2, 2),), 1),
        (SENDER, (ExtentRun(2, 0, 1),), 1),
        (SENDER, (ExtentRun(0, 0, 3),) * 3, 1),
        (SENDER, (ExtentRun(0, 0, 1),), 2),
        (SENDER, None, 1),
    ],
)
def test_what_is_said_of_writes_that_are_not_the_grants_is_ignored_and_counted(
    world: World, peer: str, runs: tuple[ExtentRun, ...] | None, epoch: int
) -> None:
    world.open()
    world.attach(world.grant())
    said = b"\xff garbage" if runs is None else tag(runs, epoch)
    world.receiving.run(lambda: world.receiving.driver.on_transport(WriteArrived(PeerId(peer), said)))
    assert world.receiving.driver.num_arrivals_ignored == 1
    assert world.receiving.memory.reads == []
    world.seal()
    world.computed()
    world.sending.wait("succeeded", KEY)


def test_a_commit_says_when_its_pages_were_verified_and_a_repeated_one_does_not(world: World) -> None:
    driver, run = world.receiving.driver, world.receiving.run
    world.commits_arrive = False
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    commit = world.sending.wait("commit")[1]
    before_s = world.now_s
    first = run(lambda: driver.commit(commit, before_s))
    assert before_s <= first.verified_at_s <= world.now_s
    assert run(lambda: driver.commit(commit, before_s)).verified_at_s == 0.0


@pytest.mark.parametrize("end", ["admitted", "cancelled"])
def test_what_is_said_of_a_grant_that_has_ended_is_ignored(world: World, end: str) -> None:
    world.open()
    world.attach(world.grant())
    if end == "admitted":
        world.seal()
        world.computed()
        world.sending.wait("closed", KEY)
    else:
        world.receiving.run(lambda: world.receiving.driver.happened(rev.RequestCancelled(KEY)))
    late = WriteArrived(PeerId(SENDER), tag((ExtentRun(0, 0, 1),)))
    receiving = world.receiving

    def count() -> tuple[int, int]:
        return receiving.driver.num_arrivals_ignored, len(receiving.memory.reads)

    before, _, after = receiving.run(lambda: (count(), receiving.driver.on_transport(late), count()))
    assert after == (before[0] + 1, before[1])


# ---- digests of what was sealed


def test_a_page_that_is_sent_later_is_not_read_again(world: World) -> None:
    world.open()
    world.seal()
    assert len(world.sending.memory.reads) == 6
    world.attach(world.grant())
    world.computed()
    world.sending.wait("succeeded", KEY)
    assert len(world.sending.memory.reads) == 6


def test_a_page_that_changed_here_after_it_was_sealed_is_refused_there(world: World) -> None:
    world.open()
    world.seal()
    world.sending.memory.data[MINE.offset(1, 2)] ^= 1
    world.attach(world.grant())
    world.computed()
    world.sending.wait("failed", FailureReason.REFUSED, RefusalReason.DIGEST_MISMATCH)


@pytest.mark.parametrize("world", [faulty("corrupt write", "corrupt")], indirect=True)
def test_a_part_that_arrives_wrong_ends_the_attempt(world: World) -> None:
    world.receiving.stops = False
    world.open()
    world.attach(world.grant())
    world.seal((1, 2), 0)
    world.sending.wait("failed", FailureReason.REFUSED, RefusalReason.DIGEST_MISMATCH)
    world.receiving.wait("over", (7, 3, 4), RefusalReason.DIGEST_MISMATCH, True)
    world.receiving.wait("lift", (7, 3, 4))
    world.sending.wait("closed", KEY)
    assert num_released(world) == {1: 1, 2: 1}


def test_a_stop_that_comes_before_the_attach_was_answered(world: World) -> None:
    world.open()
    grant = world.grant()
    driver = world.receiving.driver
    world.receiving.run(lambda: driver.attach(grant.grant_id, SENDER, grant.capability, renew=False))
    world.receiving.run(lambda: driver.happened(rev.RequestCancelled(KEY)))
    world.sending.wait("failed", FailureReason.STOP_ASKED)
    world.receiving.wait("lift", (7, 3, 4))


def test_a_stop_without_the_capability_is_counted_and_changes_nothing(world: World) -> None:
    world.open()
    grant = world.grant()
    world.attach(grant)
    driver = world.sending.driver
    world.sending.run(lambda: driver.stop_asked(KEY, sev.StopAsked(grant.grant_id, RECEIVER, b"made up")))
    assert driver.num_stops_ignored == 1
    world.seal()
    world.computed()
    world.sending.wait("succeeded", KEY)


def test_an_event_of_one_handoff_looks_at_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of each step is one, and hundreds of prompts may wait."""
    looks, look = list[AttemptKey](), SenderHandoff.next_deadline_s

    def watched(handoff: SenderHandoff) -> float | None:
        looks.append(handoff.key)
        return look(handoff)

    monkeypatch.setattr(SenderHandoff, "next_deadline_s", watched)
    for number in range(100):
        world.sending.driver.open(AttemptKey(f"other-{number}", 1), 3, RECEIVER)
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("succeeded", KEY)
    assert set(looks) == {KEY}


@pytest.mark.parametrize("world", [LinkSpec(fault_share=1.0, faults=["lost completion"])], indirect=True)
def test_writes_that_never_end_and_hold_too_much_replace_the_sender_once(world: World) -> None:
    """Their pages are lost to this process: no exit of the other end is known, perhaps its host is gone."""
    world.receiving.stops = False
    world.open()
    world.attach(world.grant())
    world.seal()
    cancelled_s = world.now_s  # before the driver reads its clock
    world.sending.run(lambda: world.sending.driver.happened(KEY, sev.CancelRequested()))
    world.sending.wait("quarantine", (1, 2, 5))
    assert not any(t[0] == "replace_self" for t in world.sending.told), "they may end at once"
    world.sending.wait("replace_self")
    assert world.now_s >= cancelled_s + 0.1
    world.sending.wait("replace_self", 3)
    world.sending.run(world.sending.driver.tick)
    assert [t[0] for t in world.sending.told].count("replace_self") == 1
    world.sending.wait("link_hangs", RECEIVER)
    assert world.sending.timer.due_s is None, "nothing is due any more"
    world.sending.run(lambda: world.sending.driver.receiver_lost(RECEIVER))
    world.sending.wait("closed", KEY)


def test_a_lease_is_renewed_only_while_its_handoff_lasts(world: World) -> None:
    driver = world.sending.driver
    assert not driver.needs_lease(KEY)
    world.open()
    world.attach(world.grant())
    assert driver.needs_lease(KEY)
    world.seal()
    world.computed()
    world.sending.wait("closed", KEY)
    assert not driver.needs_lease(KEY)


def test_the_points_of_a_handoff_are_reached_in_their_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []
    monkeypatch.setattr("tandem.core.fault_points.reach", reached.append)
    world.open()
    world.attach(world.grant())
    world.seal()
    world.computed()
    world.sending.wait("closed", KEY)
    sending = reached.count("prefill.sending")
    assert sending == 2, "one for each batch"
    assert reached == ["prefill.sending"] * 2 + ["prefill.written", "decode.commit", "decode.verified", "prefill.acked"]
