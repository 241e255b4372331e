"""Who is let in, on a clock that we move."""

from __future__ import annotations

import contextlib
import heapq
import random
from collections import deque

import pytest

from router.policy.admission import Admission
from tandem.bench.report.summary import percentile
from tandem.core.clock import VirtualClock
from tandem.core.errors import DrainingError, OverloadedError


def test_the_bound_holds_and_places_come_back() -> None:
    admission = Admission(2, VirtualClock())
    admission.enter(2)
    with pytest.raises(OverloadedError, match="bound is 2"):
        admission.enter()
    with pytest.raises(OverloadedError):
        admission.check()
    admission.leave()
    admission.check()
    admission.enter()
    assert admission.num_waiting == 2


def test_several_prompts_enter_together_or_not_at_all() -> None:
    admission = Admission(3, VirtualClock())
    admission.enter(2)
    with pytest.raises(OverloadedError):
        admission.enter(2)
    assert admission.num_waiting == 2


def test_what_waits_for_a_place_in_a_batch_is_bounded_too() -> None:
    """Their prompts are computed, so they wait no more for that; but no decode worker has room for them."""
    admission = Admission(4, VirtualClock(), lambda: 10)
    for _ in range(14):  # four more than there are places
        admission.enter()
        admission.leave()
    with pytest.raises(OverloadedError):
        admission.enter()
    admission.end(1.0)
    admission.enter()


def test_each_choice_takes_a_place_in_a_batch() -> None:
    admission = Admission(4, VirtualClock(), lambda: 10)
    admission.enter(num_choices=10)
    admission.leave()
    for _ in range(4):
        admission.enter()
        admission.leave()
    with pytest.raises(OverloadedError):
        admission.enter()
    admission.end(1.0, num_choices=10)
    admission.enter()


def test_a_draining_router_takes_nothing() -> None:
    admission = Admission(2, VirtualClock())
    admission.is_draining = True
    with pytest.raises(DrainingError):
        admission.enter()


def test_leaving_an_empty_queue_is_a_defect() -> None:
    with pytest.raises(ValueError, match="nobody"):
        Admission(2, VirtualClock()).leave()


# -- when to come back


def test_retry_after_follows_the_recent_rate() -> None:
    clock = VirtualClock()
    admission = Admission(100, clock)
    assert admission.retry_after_s() == 1.0
    admission.enter(100)
    for _ in range(10):
        clock.advance(0.5)
        admission.leave()
    # One in 0.5 s: the other 90 take 45.
    assert admission.retry_after_s() == 45.0
    clock.advance(10_000)
    admission.leave()
    assert admission.retry_after_s() == 60.0


def test_retry_after_counts_who_was_refused_too() -> None:
    """All of them come back, so one second of a twentyfold overload is asked to stay away for about twenty."""
    cluster = Cluster(rate=50.0, max_waiting=64)
    cluster.run(1000.0, 10.0)
    assert 15 <= max(cluster.retry_after_s) <= 25


# -- places come and go with their workers


class Places:
    """An admission in front of decode workers whose places we change."""

    def __init__(self, num: int = 64, max_waiting: int = 1024) -> None:
        self.num = num
        self.clock = VirtualClock()
        self.admission = Admission(max_waiting, self.clock, lambda: self.num)

    def serve(self, num: int = 1, whole_s: float = 1.0) -> None:
        """Requests, one after the other."""
        for _ in range(num):
            self.admission.enter()
            self.admission.leave()
            self.clock.advance(whole_s)
            self.admission.end(whole_s)

    def refusal(self) -> OverloadedError:
        """What the first one hears that is not let in."""
        while True:
            try:
                self.admission.enter()
                self.admission.leave()
            except OverloadedError as error:
                return error


@pytest.mark.parametrize("num_left", [0, 10], ids=["the last decode worker", "one of two"])
def test_a_decode_worker_that_dies_is_no_gap_between_two_ends(num_left: int) -> None:
    places = Places()
    places.serve(100)
    places.clock.advance(3600)
    places.admission.enter(20)
    places.clock.advance(1)
    places.num = num_left
    places.admission.end(1.0)
    places.num = 64
    assert places.refusal().retry_after_s < 5.0


def test_the_first_end_of_all_without_a_place_is_no_gap() -> None:
    places = Places(num=0)
    places.admission.enter()
    places.clock.advance(1)
    places.admission.end(1.0)
    places.num = 64
    assert places.refusal().retry_after_s == 1.0


def test_the_time_without_any_decode_worker_is_no_gap() -> None:
    places = Places(num=4)
    places.admission.enter(10)
    places.clock.advance(1)
    places.admission.end(1.0)
    places.num = 0
    places.admission.look_at_places()
    places.clock.advance(600)
    places.num = 4
    places.admission.look_at_places()
    places.clock.advance(1)
    places.admission.end(600.0)
    # About one a second; nine wait for their prompts.
    assert places.admission.retry_after_s() <= 10.0


def test_an_end_that_finds_all_places_taken_by_surprise_is_no_sample() -> None:
    places = Places(num=8)
    places.admission.enter(6)
    places.clock.advance(1)
    places.num = 4
    for _ in range(2):
        places.admission.end(1.0)
        places.clock.advance(1)
    assert places.admission.retry_after_s() == 6.0, "the gap is the second between the two ends"


def test_places_that_come_and_go_while_all_are_taken_leave_the_gap_as_it_is() -> None:
    places = Places(num=8)
    places.admission.enter(30)
    for step in range(10):
        places.num = (4, 8, 12)[step % 3]
        places.admission.look_at_places()
        places.clock.advance(0.5)
        places.admission.end(1.0)
    assert places.admission.retry_after_s() == 15.0, "30 wait, and one ends in 0.5 s"


# -- a cluster with one prompt at a time and one batch


class Cluster:
    """Prompts take 1/`rate` s each, in turn; then a place in a batch is needed for `decode_s`."""

    def __init__(self, *, rate: float, max_waiting: int, num_places: int = 1000, decode_s: float = 0.1) -> None:
        self.clock = VirtualClock()
        self.admission = Admission(max_waiting, self.clock, lambda: num_places)
        self.ttft_s: list[float] = []
        self.e2e_s: list[float] = []
        self.retry_after_s: list[float] = []
        self.num_refused = 0
        self._rate, self._num_places, self._decode_s = rate, num_places, decode_s
        self._random = random.Random(1)
        self._prompts: deque[float] = deque()
        self._ready: deque[float] = deque()
        self._num_decoding = 0
        self._is_computing = False
        self._events: list[tuple[float, int, str, float]] = []
        self._number = 0

    def run(self, arrivals_per_s: float, duration_s: float) -> None:
        """Poisson arrivals for so long; the figures begin anew."""
        self.ttft_s, self.e2e_s, self.retry_after_s, self.num_refused = [], [], [], 0
        at_s, end_s = self.clock.now(), self.clock.now() + duration_s
        while (at_s := at_s + self._random.expovariate(arrivals_per_s)) < end_s:
            self._schedule(at_s, "arrived", at_s)
        self._go_on_until(end_s)

    def burst(self, num: int) -> None:
        """So many at once, on top of what there is; the figures begin anew."""
        self.run(1e9, 0.0)
        for _ in range(num):
            self._schedule(self.clock.now(), "arrived", self.clock.now())
        self._go_on_until(self.clock.now() + 1e-6)

    def settle(self) -> None:
        """Nobody comes until all have gone."""
        self._go_on_until(float("inf"))

    def _go_on_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] < end_s:
            at_s, _, what, entered_s = heapq.heappop(self._events)
            self.clock.advance(at_s - self.clock.now())
            getattr(self, f"_{what}")(entered_s)

    def _schedule(self, at_s: float, what: str, entered_s: float) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, what, entered_s))

    def _arrived(self, entered_s: float) -> None:
        try:
            self.admission.check()
            self.admission.enter()
        except OverloadedError as error:
            self.num_refused += 1
            self.retry_after_s.append(error.retry_after_s)
            return
        self._prompts.append(entered_s)
        self._compute()

    def _compute(self) -> None:
        if self._prompts and not self._is_computing:
            self._is_computing = True
            self.admission.leave()
            self._schedule(self.clock.now() + 1 / self._rate, "computed", self._prompts.popleft())

    def _computed(self, entered_s: float) -> None:
        self._is_computing = False
        self.ttft_s.append(self.clock.now() - entered_s)
        self.admission.first_token(self.ttft_s[-1])
        self._ready.append(entered_s)
        self._decode()
        self._compute()

    def _decode(self) -> None:
        if self._ready and self._num_decoding < self._num_places:
            self._num_decoding += 1
            self._schedule(self.clock.now() + self._decode_s, "ended", self._ready.popleft())

    def _ended(self, entered_s: float) -> None:
        self._num_decoding -= 1
        self.e2e_s.append(self.clock.now() - entered_s)
        self.admission.end(self.e2e_s[-1])
        self._decode()


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_a_burst_is_taken_in_whole_by_an_idle_cluster() -> None:
    cluster = Cluster(rate=50.0, max_waiting=256)
    cluster.run(1_000_000.0, 0.000_2)
    assert cluster.num_refused == 0
    assert cluster.admission.num_waiting > 100


def test_a_burst_after_quiet_hours_is_judged_by_what_the_cluster_can_do() -> None:
    cluster = Cluster(rate=50.0, max_waiting=256)
    cluster.run(0.01, 3600.0)
    cluster.settle()
    cluster.run(1_000_000.0, 0.000_03)
    assert cluster.num_refused == 0
    assert cluster.admission.num_waiting > 20


@pytest.mark.parametrize("num_clients", [1, 4, 16, 32])
def test_clients_that_wait_for_their_answers_are_never_refused(num_clients: int) -> None:
    """However slow the cluster is: one prompt at a time, half a second each, then a second beside the others."""
    clock = VirtualClock()
    admission = Admission(256, clock, lambda: 8)
    came_s: dict[int, float] = {}
    free_s = 0.0
    events = [(0.0, n, "ask") for n in range(num_clients)]
    for _ in range(3 * 400):
        now_s, client, what = heapq.heappop(events)
        clock.advance(now_s - clock.now())
        if what == "ask":
            admission.enter()
            came_s[client] = now_s
            free_s = max(free_s, now_s) + 0.5
            heapq.heappush(events, (free_s, client, "computed"))
        elif what == "computed":
            admission.leave()
            admission.first_token(now_s - came_s[client])
            heapq.heappush(events, (now_s + 1.0, client, "end"))
        else:
            admission.end(now_s - came_s[client])
            heapq.heappush(events, (now_s, client, "ask"))


RATES = [0.5, 2.0, 10.0, 50.0, 500.0]


def make_cluster(rate: float, narrow: str) -> Cluster:
    """Serves `rate` a second: prefill does, with many places behind it, or all places of decode together."""
    if narrow == "prefill":
        return Cluster(rate=rate, max_waiting=256, decode_s=max(0.1, 2 / rate))
    return Cluster(rate=4 * rate, max_waiting=256, num_places=8, decode_s=8 / rate)


@pytest.mark.parametrize("narrow", ["prefill", "decode"])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("size", [10, 100, 256])
def test_a_burst_within_the_bound_is_taken_however_slow_the_cluster_is(size: int, rate: float, narrow: str) -> None:
    """Also the next one, as soon as all of the last have been served."""
    cluster = make_cluster(rate, narrow)
    for _ in range(6):
        cluster.burst(size)
        assert cluster.num_refused == 0
        cluster.settle()
    assert max(cluster.e2e_s) < (size + 12) / rate + 0.2, "they were served one after the other"


@pytest.mark.parametrize("narrow", ["prefill", "decode"])
@pytest.mark.parametrize("rate", RATES[:-1])
def test_a_burst_beside_a_steady_load_is_taken_and_so_is_who_comes_behind_it(rate: float, narrow: str) -> None:
    cluster = make_cluster(rate, narrow)
    cluster.run(0.7 * rate, 300 / rate)
    cluster.burst(200)
    assert cluster.num_refused == 0
    cluster.run(0.7 * rate, 300 / rate)
    assert cluster.num_refused == 0


def test_at_a_high_rate_a_burst_beside_a_steady_load_is_taken() -> None:
    """More come than are served in that second, so not all that come behind it are."""
    for narrow in ("prefill", "decode"):
        cluster = make_cluster(500.0, narrow)
        cluster.run(350.0, 10.0)
        cluster.burst(200)
        assert cluster.num_refused == 0


@pytest.mark.parametrize("narrow", ["prefill", "decode"])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("factor", [1.5, pytest.param(2.0, marks=pytest.mark.faults), 5.0])
def test_an_overload_wastes_nothing_and_its_queue_is_bounded(factor: float, rate: float, narrow: str) -> None:
    cluster = make_cluster(rate, narrow)
    cluster.run(0.7 * rate, 300 / rate)
    cluster.run(factor * rate, 2000 / rate)
    assert abs(cluster.num_refused / (factor * 2000) - (1 - 1 / factor)) < 0.1
    assert len(cluster.e2e_s) > 0.9 * 2000
    assert max(cluster.e2e_s) < (256 + 24) / rate + 0.2
    cluster.run(0.7 * rate, 300 / rate)
    cluster.run(0.7 * rate, 300 / rate)
    assert cluster.num_refused == 0, "it was over long ago"


@pytest.mark.long
@pytest.mark.parametrize("narrow", ["prefill", "decode"])
@pytest.mark.parametrize("rate", [50.0, 200.0])
@pytest.mark.parametrize("factor", [1.5, *(pytest.param(factor, marks=pytest.mark.faults) for factor in (2.0, 5.0))])
def test_in_a_lasting_overload_credit_is_spent_and_the_queue_stays_short(
    factor: float, rate: float, narrow: str
) -> None:
    """Where more come in five seconds than a few dozen clients could send that wait for their answers."""
    cluster = make_cluster(rate, narrow)
    cluster.run(0.7 * rate, 10.0)
    cluster.run(factor * rate, 20.0)
    cluster.run(factor * rate, 20.0)
    assert median(cluster.e2e_s) < 64 / rate + 0.15
    assert percentile(sorted(cluster.e2e_s), 99) < 150 / rate + 0.15


def test_beyond_the_bound_a_burst_is_refused_and_the_next_one_is_taken_when_it_has_been_served() -> None:
    cluster = make_cluster(50.0, "prefill")
    cluster.burst(1000)
    assert cluster.num_refused > 700
    cluster.settle()
    cluster.burst(200)
    assert cluster.num_refused == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_places", "decode_s"), [(1000, 0.1), (8, 0.2)], ids=["prefill is the narrow part", "decode is"]
)
def test_a_lasting_overload_is_refused_and_not_served_late(num_places: int, decode_s: float) -> None:
    """The narrow part gives 40 or 50 a second; normal is 80 % of that, overload 20 times."""
    cluster = Cluster(rate=50.0, max_waiting=256, num_places=num_places, decode_s=decode_s)
    cluster.run(32.0, 60.0)
    assert cluster.num_refused == 0
    normal = median(cluster.ttft_s), median(cluster.e2e_s)
    cluster.run(800.0, 60.0)
    assert len(cluster.e2e_s) > 0.95 * 40 * 60, "the cluster stood idle while it refused"
    assert median(cluster.ttft_s) < 2 * normal[0]
    assert median(cluster.e2e_s) < 2 * normal[1]
    assert cluster.num_refused > 40_000
    cluster.run(32.0, 1.0)
    cluster.run(32.0, 60.0)
    assert cluster.num_refused < 0.02 * 32 * 60
    assert median(cluster.e2e_s) < 1.2 * normal[1]


def test_an_overload_does_not_pass_for_normal() -> None:
    """First tokens that come late because too much is under way must not let in more."""
    clock = VirtualClock()
    admission = Admission(8, clock)
    for _ in range(200):
        admission.enter()
        clock.advance(0.05)
        admission.leave()
        clock.advance(0.05)
        admission.first_token(0.1)
        admission.end(0.1)
    for _ in range(200):
        with contextlib.suppress(OverloadedError):
            for _ in range(20):
                admission.enter()
        clock.advance(0.05)
        admission.leave()
        admission.first_token(5.0)
    assert admission.num_waiting <= 1


@pytest.mark.long
def test_after_an_overload_credit_for_bursts_comes_back() -> None:
    cluster = Cluster(rate=50.0, max_waiting=64)
    cluster.run(1000.0, 30.0)
    cluster.settle()
    cluster.run(1_000_000.0, 0.000_04)
    assert cluster.num_refused > 0, "there was credit in the middle of the overload"
    cluster.settle()
    cluster.run(25.0, 20.0)
    cluster.settle()
    cluster.run(1_000_000.0, 0.000_04)
    assert cluster.num_refused == 0


# -- several routers


def test_each_router_lets_its_share_of_the_clusters_queue_wait() -> None:
    num_routers = 3
    routers = [Admission(8, VirtualClock(), num_routers=lambda: num_routers) for _ in range(3)]
    for admission in routers:
        for _ in range(3):  # the share is rounded up
            admission.enter()
        with pytest.raises(OverloadedError, match="bound is 3"):
            admission.enter()
    num_routers = 1  # the others are gone
    for _ in range(5):
        routers[0].enter()
    with pytest.raises(OverloadedError, match="bound is 8"):
        routers[0].enter()


def test_with_more_routers_than_places_in_the_queue_each_still_has_one() -> None:
    admission = Admission(2, VirtualClock(), num_routers=lambda: 8)
    admission.enter()
    with pytest.raises(OverloadedError):
        admission.enter()


def test_all_prompts_of_one_request_are_let_in_where_nobody_waits_however_small_the_share() -> None:
    """It fits the cluster's bound, so it must not be refused for ever."""
    admission = Admission(8, VirtualClock(), num_routers=lambda: 4)
    admission.enter(6)
    with pytest.raises(OverloadedError):
        admission.enter()
    for _ in range(6):
        admission.leave()
        admission.end(1.0)
    admission.enter()
    with pytest.raises(OverloadedError):
        admission.enter(6)


# -- tenants


def test_a_flood_of_one_tenant_leaves_room_for_each_of_the_others() -> None:
    admission = Admission(8, VirtualClock())
    admission.enter(8, owner="flood")
    with pytest.raises(OverloadedError):
        admission.enter(owner="flood")
    with pytest.raises(OverloadedError):
        admission.check("flood")
    admission.check("calm")
    admission.enter(4, owner="calm")  # half of the queue: two tenants wait
    with pytest.raises(OverloadedError):
        admission.enter(owner="calm")
    admission.enter(2, owner="third")
    assert admission.num_waiting == 14


def test_a_share_follows_the_weights() -> None:
    admission = Admission(9, VirtualClock())
    admission.enter(9, owner="flood", weight=2.0)
    admission.enter(3, owner="calm", weight=1.0)
    with pytest.raises(OverloadedError):
        admission.enter(owner="calm", weight=1.0)
    light = Admission(9, VirtualClock())
    light.enter(9, owner="flood", weight=100.0)
    light.enter(owner="calm", weight=0.01)  # one is everybody's
    with pytest.raises(OverloadedError):
        light.enter(owner="calm", weight=0.01)


def test_where_a_tenant_has_left_others_have_its_share() -> None:
    admission = Admission(4, VirtualClock())
    admission.enter(4, owner="flood")
    admission.enter(2, owner="calm")
    for _ in range(4):
        admission.leave("flood")
    admission.enter(2, owner="calm")  # alone now: all of the queue
    with pytest.raises(OverloadedError):
        admission.enter(owner="calm")


def test_draining_holds_for_every_tenant() -> None:
    admission = Admission(4, VirtualClock())
    admission.enter(4, owner="flood")
    admission.is_draining = True
    with pytest.raises(DrainingError):
        admission.enter(owner="calm")


@pytest.mark.long
def test_in_a_lasting_overload_a_tenant_below_its_share_is_not_refused() -> None:
    """The flood of another is; and the queue stays as short as it is without tenants."""
    served = {"flood": 0, "calm": 0}
    refused = {"flood": 0, "calm": 0}
    clock, waiting = VirtualClock(), {"flood": 0, "calm": 0}
    admission = Admission(256, clock)
    longest = 0
    for tick in range(20_000):  # 100 a second are served, by turns; 300 come of one tenant, and 10 of the other
        clock.advance(0.01)
        for owner, every, count in (("flood", 1, 3), ("calm", 10, 1)):
            for _ in range(count if tick % every == 0 else 0):
                try:
                    admission.enter(owner=owner)
                    waiting[owner] += 1
                except OverloadedError:
                    refused[owner] += 1
        if any(waiting.values()):
            owner = "calm" if waiting["calm"] and (tick % 2 or not waiting["flood"]) else "flood"
            waiting[owner] -= 1
            admission.leave(owner)
            admission.first_token(0.05)
            admission.end(0.05)
            served[owner] += 1
        if tick > 5000:
            longest = max(longest, sum(waiting.values()))
    assert refused["calm"] <= 5, (served, refused)
    assert served["calm"] >= 1990
    assert refused["flood"] > 35_000
    assert longest < 64
