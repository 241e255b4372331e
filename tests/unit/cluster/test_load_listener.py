"""What the laws of sizes hear of routers that are late, silent, lost and back: what is unknown is not idle."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tandem.cluster.supervisor.autoscale import Decision, PoolLaw, PoolSize, Range, Settings
from tandem.cluster.supervisor.demand import Demand
from tandem.cluster.supervisor.load_figures import LoadFigures, RouterReport, WorkerReport
from tandem.cluster.supervisor.load_listener import SILENT_BEATS, Heard, LoadListener
from tandem.core.identity import Role
from tandem.rpc.v1.common_pb2 import WorkerStatus
from tandem.rpc.v1.control_pb2 import RequestLoad

BEAT_S, DELAY_S = 5.0, 20.0
RATE, TOKENS = 10.0, 100.0
"""Requests a second that come to each router, and tokens of each; one worker computes `OF_ONE` a second."""
OF_ONE = 500.0


@dataclass
class Cluster:
    """Routers to which requests come evenly, and prefill workers that compute what comes, looked at each heartbeat."""

    num_workers: int = 3
    rate: float = RATE
    now_s: float = 1000.0
    told: dict[str, RouterReport] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    decided: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = LoadListener(Demand(2.0, 0.1, DELAY_S), LoadFigures(16), BEAT_S)
        self.law = PoolLaw(Role.PREFILL, Range(1, 8), Settings(0.7, DELAY_S))
        self.busy_s = 0.0

    def tell(self, life: str, ago_s: float = 0.0) -> None:
        """What it had counted so long ago."""
        told_s = self.now_s - ago_s
        num = self.rate * (told_s - self.began_s.setdefault(life, told_s))
        self.told[life] = RouterReport(life, told_s, RequestLoad(num_requests=round(num), prompt_tokens=num * TOKENS))

    def look(self, *telling: str, ago_s: float = 0.0) -> Heard:
        """A heartbeat later; these routers have told so long before."""
        self.now_s += BEAT_S
        self.busy_s += self.rate * TOKENS * BEAT_S / OF_ONE
        for life in telling:
            self.tell(life, ago_s)
        status = WorkerStatus(
            steps=int(self.busy_s * 10), busy_s=self.busy_s, prompt_tokens_computed=int(self.busy_s * OF_ONE)
        )
        heard = self.listener.hear(
            [WorkerReport(Role.PREFILL, "worker", 100.0, status)], list(self.told.values()), self.now_s
        )
        if heard is not Heard.NOTHING_NEW:
            ready = frozenset(f"life-{number}" for number in range(self.num_workers))
            load = self.listener.of(Role.PREFILL, self.num_workers)
            self.decided.append(self.law.decide(load, PoolSize(self.num_workers, ready), self.now_s))
        return heard

    @property
    def rates(self) -> tuple[float, float, float]:
        """Of tokens, that the law is told: recent and likely; and that it believes."""
        load = self.listener.of(Role.PREFILL, self.num_workers)
        assert load is not None
        return load.recent * OF_ONE, load.likely * OF_ONE, load.certain * OF_ONE


def test_a_router_that_is_silent_under_load_and_heard_again_changes_no_size() -> None:
    """What it let in meanwhile came in all of that time."""
    cluster = Cluster()
    for _ in range(12):
        assert cluster.look("router") is Heard.NEWS
    heard = [cluster.look() for _ in range(8)]
    assert heard == [Heard.NOTHING_NEW] * SILENT_BEATS + [Heard.SILENCE] * (8 - SILENT_BEATS)
    for _ in range(12):
        assert cluster.look("router") is Heard.NEWS
        assert cluster.rates[:2] == pytest.approx((RATE * TOKENS,) * 2)
        assert cluster.rates[2] < RATE * TOKENS
    assert not [decision.why for decision in cluster.decided if decision.is_change]


def test_a_pool_shrinks_only_when_it_was_heard_for_all_of_the_delay() -> None:
    cluster = Cluster(num_workers=6)
    for _ in range(3):
        cluster.look("router")
    for _ in range(6):
        cluster.look()
    assert cluster.decided[-1].why == "there are no figures now"
    while not cluster.decided[-1].is_change:
        assert cluster.look("router") is Heard.NEWS
    assert cluster.decided[-1].wanted == 5
    back_s = 1000.0 + 10 * BEAT_S
    assert cluster.now_s == back_s + DELAY_S


@pytest.mark.parametrize("of_report_s", [5.1, 6.0, 9.9])
def test_reports_that_come_more_slowly_than_looks_make_no_rate_rise_or_fall(of_report_s: float) -> None:
    cluster, next_s = Cluster(), 1003.0
    for number in range(100):
        coming_s = cluster.now_s + BEAT_S
        if next_s <= coming_s:
            cluster.look("router", ago_s=coming_s - next_s)
            next_s += of_report_s
        else:
            assert cluster.look() is Heard.NOTHING_NEW
        if number > 3:
            assert cluster.rates[:2] == pytest.approx((RATE * TOKENS,) * 2)
    assert not [decision.why for decision in cluster.decided if decision.is_change]


def test_of_several_routers_each_is_waited_for_until_it_is_lost() -> None:
    cluster = Cluster(rate=RATE / 2)
    for _ in range(6):
        cluster.look("a", "b")
    assert [cluster.look("a") for _ in range(2)] == [Heard.NOTHING_NEW] * 2
    cluster.look("a", "b")
    assert cluster.rates[:2] == pytest.approx((RATE * TOKENS,) * 2), "of both, over the time of both"
    cluster.look("a")
    del cluster.told["b"]
    assert cluster.look("a") is Heard.NEWS


def test_the_time_without_any_router_counts_as_none() -> None:
    cluster = Cluster()
    for _ in range(12):
        cluster.look("router")
    del cluster.told["router"]
    assert [cluster.look() for _ in range(6)] == [Heard.SILENCE] * 6
    for _ in range(4):
        assert cluster.look("its successor") is Heard.NEWS
        assert cluster.rates[:2] == pytest.approx((RATE * TOKENS,) * 2)
    assert not [decision.why for decision in cluster.decided if decision.is_change]
