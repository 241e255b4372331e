"""Ordered pools give the routes that a scan of all workers gives, but for ties."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose, choose_prefill
from router.policy.pool import ALONE, Order, Pool, Share
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import IncompatibleError, NoWorkerError
from tandem.core.identity import Role, WorkerKey
from tandem.core.pages import pages_for
from tandem.core.step_times import PromptSteps

PAGE = 16
FEW = 8  # of a pool are looked at, at most


def format_of(layout: str) -> KvFormat:
    return KvFormat(LayoutId("w", layout, num_layers=1, num_kv_heads=1, head_dim=8, page_size=PAGE), "ucx")


FORMATS = {name: format_of(name) for name in "ab"}


def load(
    name: str,
    *,
    active: int = 0,
    queued: int = 0,
    pages: int = 100,
    stepping: int = 0,
    mixed: int = 0,
    layout: str = "a",
) -> WorkerLoad:
    return WorkerLoad(WorkerKey(name, "1"), FORMATS[layout], PAGE, active, queued, pages, stepping, PromptSteps(mixed))


# -- the scan


@dataclass(frozen=True)
class Scan:
    """Each decision over all workers, as plainly as it can be said. Of several equally good routes it gives all."""

    prefill: Collection[WorkerLoad]
    decode: Collection[WorkerLoad]
    facts: RequestFacts
    wishes: Wishes

    def routes(self) -> set[Route]:
        wishes, facts = self.wishes, self.facts
        if wishes.max_local_tokens and any(worker.key == wishes.decode for worker in self.decode):
            assert wishes.decode is not None
            return {Route(None, wishes.decode, wishes.max_local_tokens, Why.KEPT)}
        if alone := self._alone():
            return {Route(None, key, facts.num_prompt_tokens, Why.MIXED_POOL) for key in alone}
        prefills, decodes = self._taken(self.prefill), self._taken(self.decode)
        if not prefills or not decodes:
            raise NoWorkerError("an empty pool")
        formats = {worker.kv_format for worker in prefills}
        pairable = [worker for worker in decodes if worker.kv_format in formats]
        if not pairable:
            raise IncompatibleError("no two pair")
        wished_format = next((worker.kv_format for worker in prefills if worker.key == wishes.prefill), None)

        def rank(worker: WorkerLoad) -> tuple[Any, ...]:
            is_off = wished_format is not None and worker.kv_format != wished_format
            own = (worker.key in wishes.avoid, worker.key != wishes.decode, is_off)
            return (*own, not self._has_room(worker), worker.num_active, -worker.num_available_pages)

        return {
            Route(prefill, decode.key, 0, self._why(prefill, decode.key))
            for decode in least(pairable, rank)
            for prefill in self.prefills(decode.kv_format)
        }

    def prefills(self, kv_format: KvFormat) -> set[WorkerKey]:
        def rank(worker: WorkerLoad) -> tuple[Any, ...]:
            own = worker.key in self.wishes.avoid, worker.key != self.wishes.prefill
            return (*own, worker.num_queued_tokens, worker.num_active)

        able = [worker for worker in self._taken(self.prefill) if worker.kv_format == kv_format]
        return {worker.key for worker in least(able, rank)}

    def _alone(self) -> set[WorkerKey]:
        facts = self.facts
        may_be_slow = facts.is_first_attempt and facts.priority >= 0
        if not may_be_slow or not 0 < facts.num_prompt_tokens <= facts.mixed_pool_tokens:
            return set()
        formats = {worker.kv_format for worker in self.prefill} & {worker.kv_format for worker in self.decode}
        able = [worker for worker in self.prefill if worker.kv_format in formats]
        costs = {worker.key: self._local_cost(worker) for worker in self.decode if worker.kv_format in formats}
        best = min(costs.values(), default=float("inf"))
        if not costs:
            return set()
        if best >= 2 * min(worker.num_queued_tokens for worker in able) + facts.num_prompt_tokens:
            return set()
        return {key for key, cost in costs.items() if cost == best}

    def _local_cost(self, worker: WorkerLoad) -> float:
        if not worker.prompt_steps.num_tokens or not self._has_room(worker):
            return float("inf")
        num_tokens, queued = self.facts.num_prompt_tokens, worker.num_queued_tokens
        return 1.2 * (queued + num_tokens) + worker.num_stepping * num_tokens + queued

    def _has_room(self, worker: WorkerLoad) -> bool:
        return pages_for(self.facts.num_prompt_tokens, worker.page_size) <= worker.num_available_pages

    def _taken(self, workers: Iterable[WorkerLoad]) -> list[WorkerLoad]:
        return [worker for worker in workers if worker.key not in self.wishes.exclude]

    def _why(self, prefill: WorkerKey, decode: WorkerKey) -> Why:
        return Why.KEPT if decode == self.wishes.decode or prefill == self.wishes.prefill else Why.LOAD


def least(workers: Collection[WorkerLoad], rank: Any) -> list[WorkerLoad]:
    best = min(map(rank, workers))
    return [worker for worker in workers if rank(worker) == best]


# -- any pools


def loads_of(role: str, max_size: int) -> st.SearchStrategy[list[WorkerLoad]]:
    """Few different figures, so that ties are common; more than one load for a worker, of which the last one holds."""
    one = st.builds(
        lambda n, a, q, p, s, m, y: load(f"{role}{n}", active=a, queued=q, pages=p, stepping=s, mixed=m, layout=y),
        st.integers(0, FEW - 1),
        st.integers(0, 4),
        st.sampled_from([0, 0, 16, 300, 5000]),
        st.integers(-2, 12),
        st.integers(0, 13),
        st.sampled_from([0, 12, 12, 8]),
        st.sampled_from("aab"),
    )
    return st.lists(one, max_size=max_size)


names = st.builds(lambda role, n: WorkerKey(f"{role}{n}", "1"), st.sampled_from("pd"), st.integers(0, FEW))
some = st.frozensets(names, max_size=3)
wishes_of_any = st.builds(
    Wishes, st.none() | names, st.none() | names, st.sampled_from([0, 0, 64]), some, some
) | st.just(Wishes())
facts_of_any = st.builds(
    RequestFacts,
    st.integers(0, 180),
    st.sampled_from([-1, 0, 0]),
    mixed_pool_tokens=st.sampled_from([0, 100, 500]),
    is_first_attempt=st.booleans(),
)


def followed(role: Role, loads: Iterable[WorkerLoad], gone: Collection[WorkerKey]) -> tuple[Pool, list[WorkerLoad]]:
    """A pool that has heard of each load in turn, and the workers that are left."""
    pool, left = Pool(role), dict[WorkerKey, WorkerLoad]()
    for worker in loads:
        pool.put(worker)
        left[worker.key] = worker
    for key in gone:
        pool.discard(key)
        left.pop(key, None)
    return pool, list(left.values())


shares = st.sampled_from([ALONE, *(Share(number, of) for of in (2, 3, 8) for number in range(of))])


@pytest.mark.long
@given(loads_of("p", 16), loads_of("d", 16), some, facts_of_any, wishes_of_any, shares)
def test_a_route_is_one_that_the_scan_of_all_finds_best(
    prefills: list[WorkerLoad],
    decodes: list[WorkerLoad],
    gone: frozenset[WorkerKey],
    facts: RequestFacts,
    wishes: Wishes,
    share: Share,
) -> None:
    prefill, prefills = followed(Role.PREFILL, prefills, gone)
    decode, decodes = followed(Role.DECODE, decodes, gone)
    snapshot, scan = Snapshot(prefill, decode, share=share), Scan(prefills, decodes, facts, wishes)
    try:
        expected = scan.routes()
    except (NoWorkerError, IncompatibleError) as error:
        with pytest.raises(type(error)):
            choose(snapshot, facts, wishes)
        return
    assert choose(snapshot, facts, wishes) in expected
    for worker in decodes:
        if best := _prefills_for(scan, worker):
            assert choose_prefill(snapshot, facts, worker.key, worker.kv_format, wishes) in best


def _prefills_for(scan: Scan, decode: WorkerLoad) -> set[WorkerKey]:
    try:
        return scan.prefills(decode.kv_format)
    except ValueError:  # there is none
        return set()


@pytest.mark.long
@given(loads_of("d", 16), some, shares)
def test_each_order_has_all_workers_by_their_newest_loads(
    loads: list[WorkerLoad], gone: frozenset[WorkerKey], share: Share
) -> None:
    pool, left = followed(Role.DECODE, loads, gone)
    assert sorted(worker.key for worker in pool) == sorted(worker.key for worker in left)
    assert set(pool.formats) == {worker.kv_format for worker in left}
    for order, rank in (
        (Order.LOAD, lambda worker: (worker.num_active, -worker.num_available_pages)),
        (Order.ROOM, lambda worker: -worker.num_available_pages),
    ):
        walked = list(pool.walk(order, pool.formats, share))
        assert sorted(walked, key=lambda worker: worker.key) == sorted(left, key=lambda worker: worker.key)
        assert [rank(worker) for worker in walked] == sorted(rank(worker) for worker in left)
    able = [worker for worker in left if worker.prompt_steps.num_tokens]
    mixed = list(pool.walk(Order.MIXED, pool.formats, share))
    assert sorted(worker.key for worker in mixed) == sorted(worker.key for worker in able)


# -- beyond the few


def routes(snapshot: Snapshot, num_routers: int) -> list[Route]:
    """Of each router, which know the same."""
    shares = [Share(number, num_routers) for number in range(num_routers)]
    return [choose(replace(snapshot, share=share), RequestFacts(10)) for share in shares]


def test_each_router_takes_its_share_of_equals_and_only_of_them() -> None:
    idle = [load(f"p{n}") for n in range(4)]
    snapshot = Snapshot.of([*idle, load("p9", active=1)], [load(f"d{n}", active=n // 2) for n in range(6)])
    found = routes(snapshot, 4)
    assert [route.prefill for route in found] == [worker.key for worker in idle]
    assert [route.decode.worker_id for route in found] == ["d0", "d0", "d1", "d1"]
    assert choose(snapshot, RequestFacts(10)) == found[0], "one alone takes the first by name"
    assert [route.prefill for route in routes(snapshot, 2)] == [idle[0].key, idle[2].key]


def test_where_more_routers_choose_than_workers_are_idle_those_that_are_so_soon_count_too() -> None:
    """Of a prefill worker that computes 1,000 tokens in a second, 50 are hardly anything."""
    queues = {"p0": 300, "p1": 0, "p2": 40, "p3": 50, "p4": 51, "p5": 10}
    prefill = [load(name, active=min(queued, 1), queued=queued) for name, queued in queues.items()]
    snapshot = Snapshot.of(prefill, [load("d0")], prefill_tokens_per_s=1000.0)

    def chosen(num_routers: int, at: Snapshot = snapshot) -> list[str]:
        return [route.prefill.worker_id for route in routes(at, num_routers) if route.prefill]

    assert chosen(1) == ["p1"]
    assert chosen(2) == ["p1", "p5"]
    assert chosen(4) == ["p1", "p5", "p2", "p3"]
    assert chosen(8) == ["p1", "p1", "p5", "p5", "p2", "p2", "p3", "p3"]
    assert set(chosen(8, replace(snapshot, prefill_tokens_per_s=0.0))) == {"p1"}, "how long tokens take is not known"


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), min_size=FEW + 1, max_size=40), st.integers(1, 180))
def test_where_the_smallest_batches_have_no_room_it_goes_to_one_of_the_roomiest(
    figures: list[tuple[int, int]], num_tokens: int
) -> None:
    """And among more workers than the few that are looked at, nobody without room gets what another has room for."""
    decodes = [load(f"d{n}", active=active, pages=pages) for n, (active, pages) in enumerate(figures)]
    route = choose(Snapshot.of([load("p0")], decodes), RequestFacts(num_tokens))
    (chosen,) = [worker for worker in decodes if worker.key == route.decode]
    able = [worker for worker in decodes if worker.num_available_pages >= pages_for(num_tokens, PAGE)]
    assert chosen in (able or decodes)
    by_load = sorted(decodes, key=lambda worker: (worker.num_active, -worker.num_available_pages))
    if not able:
        assert chosen.num_active == by_load[0].num_active
    elif any(worker in able for worker in by_load[:FEW]):
        assert chosen.num_active == min(worker.num_active for worker in able)
    else:
        most = sorted((worker.num_available_pages for worker in able), reverse=True)[:FEW][-1]
        assert chosen.num_available_pages >= most
