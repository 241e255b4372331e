"""What tokens count for is entered together, and nothing of it is lost: pure, with times that the test gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.lifecycle.request_load import RequestLoad
from router.lifecycle.tenants import Tenants
from router.lifecycle.token_tally import LATE_S, Counted, TokenTally
from router.lifecycle.turns import Turns
from router.observe.recorder import Recorder
from router.policy.gate import Room
from router.request.mailbox import Mailbox
from router.request.request import BACKGROUND_PRIORITY, Request
from router.request.tenant import Tenant
from tandem.core.clock import VirtualClock
from tandem.core.metrics import ManyDurations, RouterMetrics
from tandem.core.sampling import SamplingParams
from tests.support.work import num_instructions

ROOM = Room(num_computing=1, tokens_per_s=1000.0, num_decode=1, num_places=8, most_pages=8, page_size=16)


class Counting:
    """A tally, and all that it enters tokens into."""

    def __init__(self) -> None:
        self.metrics, self.recorder, self.load = RouterMetrics(), Recorder(), RequestLoad()
        clock = VirtualClock()
        self.tenants, self.turns = Tenants(self.metrics, clock, lambda: 1), Turns(lambda: ROOM, 10.0, clock)
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.tally = TokenTally(
            self.metrics, self.recorder, self.load, self.tenants, self.turns, lambda *timer: self.timers.append(timer)
        )
        self.num_news = 0
        self.turns.on_news = self._note_news

    def _note_news(self) -> None:
        self.num_news += 1

    def request(self, owner: str = "a", *, session: str = "", priority: int = 0, per_minute: int = 0) -> Counted:
        tenant = Tenant(owner, owner, "", tokens_per_minute=per_minute)
        asked = Request(
            f"{owner}-{session}", (1, 2, 3), SamplingParams(), 0.0, priority=priority, tenant=tenant, session=session
        )
        self.tenants.check(tenant)
        return Counted(asked, self.turns.join(asked, Mailbox()))

    def exported(self) -> dict[str, float]:
        samples = [sample for metric in self.metrics.registry.collect() for sample in metric.samples]
        return {f"{s.name}{s.labels.get('le', '')}": s.value for s in samples if s.name.startswith("tandem_")}


def test_tokens_of_a_moment_are_entered_together_and_a_timer_sees_to_it() -> None:
    counting = Counting()
    one, other = counting.request(), counting.request("b")
    counting.num_news = 0
    for now_s in (1.0, 1.002, 1.004):
        counting.tally.gave(one, now_s, 1, 0.02)
        counting.tally.gave(other, now_s, 1, 0.2)
    assert (counting.load.output_tokens, counting.num_news) == (0, 0)
    ((delay_s, late),) = counting.timers
    assert delay_s == LATE_S
    late()
    assert (counting.load.output_tokens, counting.num_news) == (6, 1)
    counting.tally.gave(one, 1.0 + LATE_S, 1, 0.02)
    assert len(counting.timers) == 2, "each moment has one, and idle there is none"
    counting.tally.settle()
    assert (counting.load.output_tokens, counting.num_news) == (7, 2)
    counting.tally.settle()
    assert counting.num_news == 2
    found = counting.exported()
    assert found["tandem_output_tokens_total"] == found["tandem_itl_seconds_count"] == 7
    assert (found["tandem_itl_seconds_bucket0.01"], found["tandem_itl_seconds_bucket0.02"]) == (0, 4)
    assert found["tandem_itl_seconds_sum"] == pytest.approx(4 * 0.02 + 3 * 0.2)
    second = counting.recorder.history.at(1.5)
    assert (second.num_tokens, second.itl.counts.total()) == (7, 7)


def test_first_tokens_have_no_gap_and_those_that_come_with_another_have_none_to_it() -> None:
    counting = Counting()
    counting.tally.gave(counting.request(), 1.0, 3, None)
    counting.tally.settle()
    found = counting.exported()
    assert (found["tandem_output_tokens_total"], found["tandem_itl_seconds_count"]) == (3, 2)
    assert found["tandem_itl_seconds_bucket0.0005"] == 2


def test_what_comes_after_somebody_has_looked_is_of_its_own_second() -> None:
    """Whoever looked was told the second before, and is never told it again."""
    counting = Counting()
    one = counting.request()
    counting.tally.gave(one, 100.9955, 1, None)
    counting.tally.settle()
    counting.tally.gave(one, 101.003, 1, 0.0075)
    counting.tally.settle()
    assert [second.num_tokens for second in counting.recorder.history.since(100, 102)] == [1, 1]
    assert len(counting.timers) == 1, "that of the first is still to come"


def test_each_tenant_and_session_pays_for_its_own() -> None:
    counting = Counting()
    chats = [counting.request("a", session=name) for name in ("s", "s", "t")]
    limited, batch = counting.request("b", per_minute=60), counting.request("c", priority=BACKGROUND_PRIORITY)
    for number, counted in enumerate([*chats, limited, batch], start=1):
        counting.tally.gave(counted, 1.0, number, 0.1)
    counting.tally.settle()
    queue = counting.turns._queue  # what it has noted shows only in later orders
    prompts = {"a": 3 * 3, "b": 3, "c": 3}  # each had its turn at once
    assert {owner: queue.tell(owner).given - prompts[owner] for owner in "abc"} == {"a": 6, "b": 4, "c": 5}
    assert dict(queue._sessions) == {("a", "s"): 2 * 3 + 3, ("a", "t"): 3 + 3}
    assert counting.tenants.headers(limited.request.tenant)["x-ratelimit-remaining-tokens"] == "56"
    assert counting.load.output_tokens == 10  # a batch's are not asked of the pools


def test_a_token_costs_as_much_however_many_requests_are_open() -> None:
    def instructions(num_open: int) -> int:
        counting = Counting()
        requests = [counting.request() for _ in range(num_open)]
        for counted in requests:
            counting.tally.gave(counted, 1.0, 1, 0.1)
        return num_instructions(lambda: counting.tally.gave(requests[0], 1.0, 1, 0.1))

    assert instructions(1000) == instructions(10)


def test_durations_are_counted_in_the_bucket_that_bounds_them() -> None:
    durations = ManyDurations("d_seconds", "About", (0.1, 1.0))
    durations.observe([0.1, 0.10001, 1.0, 2.0])
    durations.observe([])
    (family,) = durations.collect()
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("d_seconds_bucket", {"le": "0.1"}, 1), ("d_seconds_bucket", {"le": "1.0"}, 3),
        ("d_seconds_bucket", {"le": "+Inf"}, 4), ("d_seconds_count", {}, 4),
        ("d_seconds_sum", {}, pytest.approx(3.20001)),
    ]  # fmt: skip
