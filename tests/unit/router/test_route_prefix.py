"""A prompt goes where its beginning is held, unless that takes longer than to compute it anew."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import choose, choose_prefill
from router.policy.prefix import HeldPrefix, KnownPrefix
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Link, Snapshot, TierReads
from router.policy.worker_load import WorkerLoad
from router.workers.page_index import PageIndex
from tandem.core.identity import WorkerKey
from tandem.core.step_times import PromptSteps

PAGE = 32
PROMPT = 640
FORMAT = KvFormat(LayoutId("w", "float32", num_layers=1, num_kv_heads=1, head_dim=8, page_size=PAGE), "ucx")


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def load(name: str, **figures: Any) -> WorkerLoad:
    known = {"num_active": 0, "num_queued_tokens": 0, "num_available_pages": 1000, **figures}
    return WorkerLoad(key(name), FORMAT, PAGE, **known)


def known(held: dict[str, int]) -> KnownPrefix[WorkerKey]:
    index: PageIndex[int, WorkerKey] = PageIndex()
    for name, num in held.items():
        index.add(key(name), range(num // PAGE))
    return index.prefix(range(PROMPT // PAGE), PAGE)


def facts(
    held: dict[str, int], *, stored: dict[str, int] | None = None, near: dict[str, int] | None = None, **others: Any
) -> RequestFacts:
    """Workers hold so many leading tokens in their pools, so many in tiers below them, and so many in the nearest."""
    return RequestFacts(PROMPT, prefix=HeldPrefix(known(held), known(stored or {}), known(near or {})), **others)


def chosen(route: Route) -> tuple[str | None, str, Why]:
    return route.prefill.worker_id if route.prefill else None, route.decode.worker_id, route.why


def snapshot(
    prefill: list[WorkerLoad] | None = None, decode: list[WorkerLoad] | None = None, **others: Any
) -> Snapshot:
    prefill = prefill or [load(f"p{number}") for number in range(12)]
    decode = decode or [load(f"d{number}") for number in range(12)]
    return Snapshot.of(prefill, decode, **others)


def test_the_holders_serve_although_they_are_not_the_least_loaded() -> None:
    prefill = [load(f"p{number}", num_queued_tokens=100 * number) for number in range(12)]
    decode = [load(f"d{number}", num_active=number) for number in range(12)]
    route = choose(snapshot(prefill, decode), facts({"p5": 608, "d9": 608}))
    assert chosen(route) == ("p5", "d0", Why.PREFIX), "a quick way saves nothing at decode"
    assert {candidate.worker.worker_id for candidate in route.weighed} >= {"p0", "p5", "d0", "d9"}


def test_of_decode_workers_with_equal_batches_the_one_that_lacks_least_is_taken() -> None:
    assert chosen(choose(snapshot(), facts({"p5": 608, "d9": 608}))) == ("p5", "d9", Why.PREFIX)
    crowded = [load(f"d{number}", num_active=3 * (number == 9)) for number in range(12)]
    assert chosen(choose(snapshot(decode=crowded), facts({"p5": 608, "d9": 608})))[1] == "d0"


def test_a_holder_that_is_busy_loses() -> None:
    prefill = [load("p0"), load("p1", num_queued_tokens=5000)]
    assert chosen(choose(snapshot(prefill), facts({"p1": 608})))[0] == "p0"
    assert chosen(choose(snapshot(prefill), facts({"p1": 608})))[2] is Why.LOAD


def test_a_holder_among_more_than_are_looked_at_is_found() -> None:
    prefill = [load(f"p{number:03}") for number in range(300)]
    assert chosen(choose(snapshot(prefill), facts({"p250": 64})))[0] == "p250"


def test_what_little_is_left_is_computed_where_the_rest_lies() -> None:
    decode = [load(f"d{number}", prompt_steps=PromptSteps(8)) for number in range(3)]
    route = choose(snapshot(decode=decode), facts({"d2": 608, "p0": 320}, mixed_pool_tokens=512))
    assert chosen(route) == (None, "d2", Why.PREFIX)
    assert route.max_local_tokens == 2 * (PROMPT - 608), "where the index was wrong, decode asks for a prefill worker"
    slow_steps = [replace(each, prompt_steps=PromptSteps(8, 0.02, 0.0)) for each in decode]
    slow = snapshot(decode=slow_steps, prefill_tokens_per_s=5000.0)
    elsewhere = choose(slow, facts({"d2": 608, "p0": 608}, mixed_pool_tokens=512))
    assert elsewhere.prefill == key("p0"), "its steps take longer than prefill and the way"
    urgent = choose(snapshot(decode=decode), facts({"d2": 608, "p0": 320}, mixed_pool_tokens=512, priority=-1))
    assert urgent.prefill == key("p0")
    much = choose(snapshot(decode=decode), facts({"d2": 64}, mixed_pool_tokens=512))
    assert much.prefill is not None


@pytest.mark.parametrize(
    ("num_active", "token_s", "decides"), [(0, 0.00115, None), (0, 0.00127, "p0"), (1, 0.0009, "p0")]
)
def test_what_nobody_is_in_the_way_of_is_computed_where_it_saves_a_handoff(
    num_active: int, token_s: float, decides: str | None
) -> None:
    """320 tokens are missing on both sides, and their pages cost a twentieth: up to 1.2 times 336 is as soon."""
    decode = [load("d0", num_active=num_active, prompt_steps=PromptSteps(512, 0.0, token_s))]
    speeds = {"prefill_tokens_per_s": 1000.0, "num_prefill_tokens_known": 320.0}
    route = choose(snapshot([load("p0")], decode, **speeds), facts({"p0": 320, "d0": 320}, mixed_pool_tokens=512))
    assert chosen(route)[0] == decides


def test_fewer_pages_go_over_a_slow_way_to_who_holds_most() -> None:
    slow = {(key("p0"), key(name)): Link(5e4) for name in ("d0", "d1")}
    known = snapshot([load("p0")], [load("d0"), load("d1", num_active=3)], links=slow, prefill_tokens_per_s=1000.0)
    assert chosen(choose(known, facts({"d1": 608})))[1] == "d1"


def test_a_broken_way_is_not_taken_for_a_prefix() -> None:
    links = {(key("p0"), key("d0")): Link(is_broken=True)}
    known = snapshot([load("p0"), load("p1", num_queued_tokens=50)], [load("d0")], links=links)
    assert chosen(choose(known, facts({"p0": 608})))[0] == "p1"
    only = snapshot([load("p0")], [load("d0")], links=links)
    assert chosen(choose(only, facts({"p0": 608})))[:2] == ("p0", "d0"), "there is no other"


def test_who_is_excluded_or_wished_for_counts_more_than_a_prefix() -> None:
    known, held = snapshot(), facts({"p5": 608, "d5": 608})
    for others in (Wishes(exclude=frozenset({key("p5")})), Wishes(avoid=frozenset({key("p5")}))):
        assert chosen(choose(known, held, others))[0] != "p5"
    assert chosen(choose(known, held, Wishes(prefill=key("p7"))))[0] == "p7"
    assert choose_prefill(known, held, key("d0"), FORMAT) == key("p5")
    assert choose_prefill(known, held, key("d0"), FORMAT, Wishes(exclude=frozenset({key("p5")}))) != key("p5")


@pytest.mark.parametrize("num", [0, 1, 40])
def test_without_a_known_prefix_the_least_loaded_are_chosen_and_told_with_a_few_others(num: int) -> None:
    known = snapshot([load(f"p{n}", num_queued_tokens=n) for n in range(num + 1)])
    route = choose(known, dataclasses.replace(facts({}), num_prompt_tokens=PROMPT))
    assert chosen(route) == ("p0", "d0", Why.LOAD)
    told = {candidate.worker.worker_id: candidate for candidate in route.weighed}
    assert {"p0", "d0"} <= told.keys()
    assert len(told) <= 8
    assert told["p0"].cost == PROMPT
    assert all(told[f"p{n}"].cost == PROMPT + n for n in range(min(num + 1, 2)))


# -- tiers below the pools


def reads(cost: float, near_cost: float | None = None) -> dict[str, Any]:
    """Of a snapshot: a token is read in the time in which prefill computes so many, and one from the nearest tier in
    that in which it computes `near_cost`."""
    keys = [key(f"{role}{number}") for role in "pd" for number in range(12)]
    each = TierReads((cost if near_cost is None else near_cost) / 1000.0, cost / 1000.0)
    return {"tier_reads": dict.fromkeys(keys, each), "prefill_tokens_per_s": 1000.0}


def test_a_prompt_goes_where_a_tier_has_its_beginning() -> None:
    assert chosen(choose(snapshot(**reads(0.2)), facts({}, stored={"p5": 608})))[::2] == ("p5", Why.PREFIX)


def test_what_is_in_a_pool_goes_before_what_has_to_be_read() -> None:
    told = facts({"p7": 608}, stored={"p5": 608, "p7": 608})
    assert chosen(choose(snapshot(**reads(0.2)), told))[0] == "p7"


@pytest.mark.parametrize("tier_cost", [1.0, 30.0])
def test_a_tier_that_is_slower_than_computing_draws_nobody(tier_cost: float) -> None:
    """Its worker computes the prompt then, as any other would."""
    prefill = [load(f"p{number}", num_queued_tokens=number) for number in range(12)]
    assert chosen(choose(snapshot(prefill, **reads(tier_cost)), facts({}, stored={"p5": 608})))[0] == "p0"


def test_reading_costs_what_it_takes() -> None:
    prefill = [load("p0"), load("p1", num_queued_tokens=400)]
    stored = {"p1": 608}
    assert chosen(choose(snapshot(prefill, **reads(0.2)), facts({}, stored=stored)))[0] == "p1", "122 + 32 + 400 < 640"
    assert chosen(choose(snapshot(prefill, **reads(0.4)), facts({}, stored=stored)))[0] == "p0", "243 + 32 + 400 > 640"


def test_a_handoff_reads_nothing_at_decode() -> None:
    """No grant waits for a disk: what decode has there draws only prompts that it may compute by itself."""
    alone = {"mixed_pool_tokens": PROMPT}
    able = [load(f"d{number}", prompt_steps=PromptSteps(64, 0.07)) for number in range(12)]
    steps = reads(0.1)
    told = facts({}, stored={"d9": 608})
    assert chosen(choose(snapshot(decode=able, **steps), told))[1:] == ("d0", Why.LOAD)
    told = facts({}, stored={"d9": 608}, **alone)
    route = choose(snapshot(decode=able, **steps), told)
    assert chosen(route) == (None, "d9", Why.PREFIX)
    shown = {candidate.worker.worker_id: candidate.num_stored_tokens for candidate in route.weighed}
    assert shown["d9"] == 608


def test_a_slow_disk_makes_no_decode_worker_compute_what_is_too_long_for_it() -> None:
    """It would find that computing is sooner, and that it may not."""
    able = [load(f"d{number}", prompt_steps=PromptSteps(64, 0.005)) for number in range(12)]
    told = facts({}, stored={"d9": 608}, mixed_pool_tokens=64)
    for cost, is_alone in ((30.0, False), (0.1, True)):
        route = choose(snapshot(decode=able, **reads(cost)), told)
        assert (route.prefill is None) == is_alone


def test_each_worker_reads_at_its_own_speed() -> None:
    each = {key("p3"): TierReads(0.00001, 0.00001), key("p5"): TierReads(0.1, 0.1)}
    quick_and_slow = {"tier_reads": each, "prefill_tokens_per_s": 1000.0}
    told = facts({}, stored={"p5": 608, "p3": 320})
    assert chosen(choose(snapshot(**quick_and_slow), told))[0] == "p3"
    assert chosen(choose(snapshot(**reads(0.1)), told))[0] == "p5"


def test_host_memory_and_a_disk_have_each_its_price() -> None:
    """Reading all 608 tokens from a disk costs 304, 288 of them from host memory 3; computing the rest of these is
    dearer, but for a disk that is slower than that."""
    prefill = [load("p3"), load("p5"), load("p7", num_queued_tokens=100)]
    told = facts({}, stored={"p3": 608, "p5": 608}, near={"p5": 288})
    costs = {}
    for name, figures in {"quick": reads(0.5, 0.01), "slow": reads(3.0, 0.01), "both slow": reads(3.0, 2.0)}.items():
        route = choose(snapshot(prefill, **figures), told)
        costs[name] = {candidate.worker.worker_id: candidate.cost for candidate in route.weighed}
        assert chosen(route)[0] == ("p5" if name != "both slow" else "p3")
    left = PROMPT - 608
    assert costs["quick"] == approx_in(costs["quick"], p3=left + 304, p5=left + 2.88 + 160, p7=PROMPT + 100)
    assert costs["slow"] == approx_in(costs["slow"], p3=PROMPT, p5=left + 2.88 + 320, p7=PROMPT + 100)
    assert costs["both slow"] == approx_in(costs["both slow"], p3=PROMPT, p5=PROMPT, p7=PROMPT + 100)


def approx_in(found: dict[str, float], **expected: float) -> dict[str, Any]:
    """The same, but for these, which are to be about that."""
    return found | {name: pytest.approx(value) for name, value in expected.items()}


def test_of_what_the_nearest_tier_has_the_pool_may_have_some() -> None:
    told = facts({"p5": 160}, stored={"p5": 320}, near={"p5": 224}).prefix
    assert (told.num_ready(key("p5")), told.num_stored(key("p5")), told.num_near(key("p5"))) == (160, 160, 64)
    told = facts({"p5": 320}, stored={"p5": 320}, near={"p5": 224}).prefix
    assert (told.num_stored(key("p5")), told.num_near(key("p5"))) == (0, 0)
