"""Handoffs of gigabytes over links that are slow, change, stall and die, in virtual time."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.messages import FailureReason
from tests.support.link import LinkSpec
from tests.support.slow_world import GRACE_S, LEASE_S, PAGE_BYTES, PAGES_OF_4_GIB, RECEIVER, SlowWorld

GIB, MB = 1 << 30, 1e6
RATES = [pytest.param(rate, id=f"{rate / 1e9:g} GB a second") for rate in (10 * MB, 100 * MB, 350 * MB, 10_000 * MB)]


def over(bytes_per_s: float, *changes: tuple[float, float]) -> SlowWorld:
    """Workers on two hosts, with so fast a link between them."""
    spec = LinkSpec(
        latency_s=0.001, jitter_s=0.004, bytes_per_s=bytes_per_s, call_timeout_s=LEASE_S, changes=changes
    )
    return SlowWorld(spec)


def check_nobody_is_blamed(world: SlowWorld) -> None:
    assert not world.killed_s
    assert not world.replaced


@pytest.mark.long
@pytest.mark.parametrize("bytes_per_s", RATES)
def test_a_handoff_of_4_gib_ends_well_and_the_link_is_full_all_the_time(bytes_per_s: float) -> None:
    world = over(bytes_per_s)
    told = world.told[world.start()]
    world.run_until(lambda: told.succeeded_s or told.failed_s)
    assert told.why is None
    assert told.succeeded_s is not None
    assert told.succeeded_s < 1.1 * 4 * GIB / bytes_per_s + 0.1
    check_nobody_is_blamed(world)
    (link,) = world.sending.links
    assert link.receiver == RECEIVER
    assert 0.7 * bytes_per_s < link.bytes_per_s < 1.4 * bytes_per_s


@pytest.mark.long
@pytest.mark.parametrize("bytes_per_s", RATES)
def test_a_handoff_that_is_cancelled_at_half_drains_well_within_the_grace(bytes_per_s: float) -> None:
    world = over(bytes_per_s)
    told = world.told[key := world.start()]
    world.run_until(lambda: world.num_bytes_written >= 2 * GIB)
    cancelled_s = world.now_s
    world.cancel(key)
    world.run_until(lambda: told.closed_s and told.lifted_s)
    assert told.why is FailureReason.CANCELLED
    assert told.lifted_s is not None
    assert told.lifted_s - cancelled_s < GRACE_S / 2
    assert world.num_bytes_written < 2 * GIB + bytes_per_s * GRACE_S / 2
    world.run_for(2 * (LEASE_S + GRACE_S))
    check_nobody_is_blamed(world)


@pytest.mark.long
def test_handoffs_of_one_pair_share_its_link_fairly() -> None:
    world = over(100 * MB)
    told = [world.told[world.start(PAGES_OF_4_GIB // 8)] for _ in range(8)]
    world.run_until(lambda: all(one.succeeded_s or one.failed_s for one in told))
    ends_s = [one.succeeded_s for one in told if one.succeeded_s is not None]
    assert len(ends_s) == 8
    assert max(ends_s) < 1.1 * 4 * GIB / (100 * MB)
    assert min(ends_s) > 0.9 * max(ends_s), "none waits for another to end"
    check_nobody_is_blamed(world)


def test_a_short_handoff_does_not_wait_for_the_end_of_a_long_one() -> None:
    world = over(100 * MB)
    long = world.told[world.start()]
    world.run_for(5.0)
    begun_s, short = world.now_s, world.told[world.start(1)]
    world.run_until(lambda: short.succeeded_s)
    assert short.succeeded_s is not None
    assert short.succeeded_s - begun_s < 1.5, "32 MiB of half the link, and what was under way"
    assert long.succeeded_s is None


@pytest.mark.parametrize("factor", [10, 100])
def test_a_link_that_becomes_slower_in_mid_transfer_delays_and_fails_nothing(factor: int) -> None:
    world = over(100 * MB, (10.0, 100 * MB / factor))
    told = world.told[world.start(PAGES_OF_4_GIB // 3)]
    world.run_until(lambda: told.succeeded_s or told.failed_s)
    assert told.why is None
    check_nobody_is_blamed(world)


def test_a_link_that_becomes_faster_is_filled_again() -> None:
    world = over(10 * MB, (10.0, 1000 * MB))
    told = world.told[world.start()]
    world.run_until(lambda: told.succeeded_s or told.failed_s)
    assert told.succeeded_s is not None
    assert told.succeeded_s < 10 + 1.5 * 4 * GIB / (1000 * MB)


def test_a_link_that_stalls_for_five_seconds_goes_on_where_it_was() -> None:
    world = over(100 * MB, (10.0, 0.0), (15.0, 100 * MB))
    told = world.told[world.start()]
    world.run_until(lambda: told.succeeded_s or told.failed_s)
    assert told.why is None
    assert told.succeeded_s is not None
    assert told.succeeded_s < 5 + 1.15 * 4 * GIB / (100 * MB)
    check_nobody_is_blamed(world)


@pytest.mark.parametrize("num_handoffs", [1, 8])
def test_a_dead_link_fails_every_handoff_within_the_lease_and_a_second(num_handoffs: int) -> None:
    """The routes of control live: only pages do not arrive."""
    died_s = 10.0
    world = over(100 * MB, (died_s, 0.0))
    world.link.messages_pass = True
    told = [world.told[world.start(PAGES_OF_4_GIB // num_handoffs)] for _ in range(num_handoffs)]
    world.run_until(lambda: all(one.failed_s for one in told))
    assert {one.why for one in told} == {FailureReason.WRITE_TIMEOUT}
    assert world.now_s < died_s + LEASE_S + 1
    world.run_until(lambda: world.killed_s)
    assert world.now_s < died_s + 2 * LEASE_S + GRACE_S + 2, "it answers, and gets no further"


def test_where_nothing_passes_a_handoff_fails_with_its_lease() -> None:
    died_s = 10.0
    world = over(100 * MB, (died_s, 0.0))
    told = world.told[world.start()]
    world.run_until(lambda: told.failed_s)
    assert world.now_s < died_s + LEASE_S + 1
    world.run_until(lambda: told.quarantined_s)
    assert world.now_s < died_s + LEASE_S + 1
    world.run_until(lambda: world.killed_s)
    assert world.now_s < died_s + LEASE_S + GRACE_S + 2


def test_a_writer_is_waited_for_as_long_as_it_drains_further() -> None:
    """What was under way at 100 MB/s takes over half a minute at a quarter of a megabyte."""
    world = over(100 * MB, (10.0, 0.25 * MB))
    told = world.told[key := world.start()]
    world.run_for(10.1)
    world.cancel(key)
    world.run_until(lambda: told.lifted_s or world.killed_s)
    assert world.now_s > 10 + LEASE_S + GRACE_S + 5, "else it proves nothing"
    check_nobody_is_blamed(world)


def test_a_writer_that_drains_for_ever_is_killed_in_the_end() -> None:
    world = over(100 * MB, (10.0, 0.02 * MB))
    told = world.told[key := world.start()]
    world.run_for(10.1)
    world.cancel(key)
    driver, left = world.receiving.driver, iter(range(1000, 0, -1))
    grant_id = f"{RECEIVER}/1"

    def say_less() -> None:
        driver.writer_draining(grant_id, "prefill-0#1", next(left))
        world.kernel.after(1.0, say_less)

    say_less()
    world.run_until(lambda: world.killed_s)
    assert told.quarantined_s is not None
    assert 60 <= world.killed_s[0] - told.quarantined_s < 60 + GRACE_S + 2


@pytest.mark.parametrize(
    ("bytes_per_s", "died_s"),
    [pytest.param(100 * MB, 10.0, id="in the middle"), pytest.param(1 * MB, 0.03, id="with its first write")],
)
@pytest.mark.parametrize("num_others", [0, 3])
def test_what_hangs_of_a_cancelled_handoff_is_settled_by_closing_its_connection(
    bytes_per_s: float, died_s: float, num_others: int
) -> None:
    """Nobody waits for it but its pages; the writer is healthy, and is not killed for it."""
    world = over(bytes_per_s, (died_s, 0.0))
    world.link.messages_pass = world.closes_what_hangs = True
    told = world.told[key := world.start(PAGES_OF_4_GIB // 4)]
    others = [world.told[world.start(PAGES_OF_4_GIB // 4)] for _ in range(num_others)]
    world.run_for(died_s)
    world.cancel(key)
    world.run_until(lambda: (told.closed_s and told.lifted_s) or world.killed_s)
    check_nobody_is_blamed(world)
    assert told.why in (FailureReason.CANCELLED, FailureReason.STOP_ASKED), "whichever comes first"
    assert world.now_s < died_s + LEASE_S + GRACE_S + 2
    assert all(other.failed_s for other in others), "what carries nothing for one carries nothing for all"
    world.run_for(2 * (LEASE_S + GRACE_S))
    check_nobody_is_blamed(world)


@pytest.mark.parametrize("bytes_per_s", [10 * MB, 100 * MB])
@pytest.mark.parametrize("cancelled", [(0,), (1, 4, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_of_eight_handoffs_those_that_go_on_get_the_room_of_those_that_are_cancelled(
    bytes_per_s: float, cancelled: tuple[int, ...]
) -> None:
    world, num_pages = over(bytes_per_s), PAGES_OF_4_GIB // 32
    keys = [world.start(num_pages) for _ in range(8)]
    share_s = num_pages * PAGE_BYTES / bytes_per_s
    for number in cancelled:
        world.run_for(share_s / 8)
        world.cancel(keys[number])
    told = [world.told[key] for key in keys]
    world.run_until(lambda: all(one.closed_s for one in told))
    assert [one.succeeded_s is None for one in told] == [number in cancelled for number in range(8)]
    num_left = 8 - len(cancelled)
    assert world.now_s < (num_left + 0.5 * len(cancelled)) * share_s * 1.1 + 1, "nothing of the others was sent in vain"
    world.run_until(lambda: all(told[number].lifted_s for number in cancelled))
    world.run_for(2 * (LEASE_S + GRACE_S))
    check_nobody_is_blamed(world)
    link = world.sending.driver._links.get(RECEIVER)
    assert link is not None
    assert (link.window.num_bytes, link.next_deadline_s(), link.next_turn()) == (0, None, None)
    assert world.sending.timer.due_s is None
