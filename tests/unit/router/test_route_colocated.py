"""Without prefill workers each prompt goes whole to the decode worker that has it computed soonest."""

from __future__ import annotations

import pytest

from kvtransfer.layout import KvFormat, LayoutId
from router.policy.choose import check_placeable, check_ready, choose, choose_prefill
from router.policy.prefix import HeldPrefix, KnownPrefix
from router.policy.route import RequestFacts, Route, Why, Wishes
from router.policy.snapshot import Snapshot
from router.policy.worker_load import WorkerLoad
from tandem.core.errors import NoWorkerError
from tandem.core.identity import WorkerKey
from tandem.core.step_times import PromptSteps


def load(
    name: str, *, active: int = 0, queued: int = 0, pages: int = 4000, layout: str = "a", step_tokens: int = 12
) -> WorkerLoad:
    kv_format = KvFormat(LayoutId("w", layout, num_layers=1, num_kv_heads=1, head_dim=8, page_size=16), "ucx")
    return WorkerLoad(WorkerKey(name, "1"), kv_format, 16, active, queued, pages, active, PromptSteps(step_tokens))


def colocated(*decodes: WorkerLoad, is_decode_coming: bool = False, is_prefill_coming: bool = False) -> Snapshot:
    return Snapshot.of(
        [], decodes, is_decode_coming=is_decode_coming, is_prefill_coming=is_prefill_coming, is_colocated=True
    )


def key(name: str) -> WorkerKey:
    return WorkerKey(name, "1")


def test_a_prompt_of_any_length_is_computed_whole_where_it_is_placed() -> None:
    """There is no such bound as for the mixed pool, which may be off, for retries and urgent requests too."""
    for num_tokens in (1, 2049, 32_000):
        for facts in (
            RequestFacts(num_tokens),
            RequestFacts(num_tokens, is_first_attempt=False),
            RequestFacts(num_tokens, priority=-1),
        ):
            route = choose(colocated(load("d0", step_tokens=0)), facts)
            assert route == Route(None, key("d0"), num_tokens, Why.COLOCATED, unpaced=True)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ({}, {}, "d0"),
        ({"queued": 1}, {}, "d1"),
        ({"active": 1}, {}, "d1"),
        ({"active": 4}, {"queued": 65}, "d0"),  # each row of a batch is worth 16 prompt tokens
        ({"active": 4}, {"queued": 63}, "d1"),
        ({"pages": 6}, {"queued": 99}, "d1"),  # no room: as much again as its own computation
        ({"pages": 6}, {"queued": 101}, "d0"),
    ],
)
def test_it_goes_where_prompt_tokens_in_front_and_the_batch_cost_least(
    first: dict[str, int], second: dict[str, int], chosen: str
) -> None:
    assert choose(colocated(load("d0", **first), load("d1", **second)), RequestFacts(100)).decode == key(chosen)


def test_a_holder_of_its_beginning_is_weighed_against_the_least_loaded() -> None:
    prefix = HeldPrefix(KnownPrefix(((5, 1),), {key("d9"): 1}, {0: key("d9")}, page_size=16))
    others = [load(f"d{n}") for n in range(9)]  # more than are weighed by load alone
    free = choose(colocated(*others, load("d9", queued=79)), RequestFacts(100, prefix=prefix))
    assert (free.decode, free.why, free.max_local_tokens) == (key("d9"), Why.PREFIX, 100)
    assert {candidate.worker: candidate.cost for candidate in free.weighed}[key("d9")] == 79 + 20
    busy = choose(colocated(*others, load("d9", queued=81)), RequestFacts(100, prefix=prefix))
    assert (busy.decode, busy.why) == (key("d0"), Why.COLOCATED)


def test_the_roomiest_is_weighed_where_the_least_loaded_have_no_room() -> None:
    full = [load(f"d{n}", pages=3) for n in range(9)]
    assert choose(colocated(*full, load("e", queued=90)), RequestFacts(100)).decode == key("e")


def test_recovery_keeps_away_from_who_failed_while_there_is_another() -> None:
    snapshot, facts = colocated(load("d0"), load("d1", queued=500)), RequestFacts(100, is_first_attempt=False)
    assert choose(snapshot, facts, Wishes(avoid=frozenset({key("d0")}))).decode == key("d1")
    alone = colocated(load("d0"))
    assert choose(alone, facts, Wishes(avoid=frozenset({key("d0")}))).decode == key("d0")
    with pytest.raises(NoWorkerError, match="no decode worker is ready"):
        choose(alone, facts, Wishes(exclude=frozenset({key("d0")})))


def test_a_wished_worker_is_kept_and_computes_all_of_it() -> None:
    """As after the loss of a prefill worker that was the last one."""
    snapshot, facts = colocated(load("d0"), load("d1", queued=500)), RequestFacts(1000, is_first_attempt=False)
    route = choose(snapshot, facts, Wishes(decode=key("d1"), max_local_tokens=512))
    assert route == Route(None, key("d1"), 1000, Why.KEPT, unpaced=True)
    assert choose(snapshot, facts, Wishes(decode=key("d1"), exclude=frozenset({key("d1")}))).decode == key("d0")


def test_workers_of_two_formats_both_count() -> None:
    """As while the cluster is upgraded: nothing is handed off between them."""
    snapshot = colocated(load("d0", queued=10, layout="a"), load("d1", layout="b"))
    assert choose(snapshot, RequestFacts(100)).decode == key("d1")


def test_it_is_ready_with_one_decode_worker_and_waits_for_one_that_comes() -> None:
    check_ready(colocated(load("d0")))
    assert colocated(load("d0")).may_get_better()
    check_placeable(colocated(is_decode_coming=True))
    for check in (check_ready, check_placeable):
        with pytest.raises(NoWorkerError, match="no decode worker is ready"):
            check(colocated())


def test_a_prompt_of_which_a_vector_is_wanted_is_refused_with_what_to_do() -> None:
    for check in (check_ready, check_placeable):
        with pytest.raises(NoWorkerError, match="tandem scale --prefill 1") as refused:
            check(colocated(load("d0")), pools=True)
        assert not refused.value.retryable
    with pytest.raises(NoWorkerError, match="tandem scale --prefill 1"):
        choose(colocated(load("d0")), RequestFacts(10, pools=True))
    check_placeable(colocated(load("d0"), is_prefill_coming=True), pools=True)  # it waits for that


def test_pages_that_were_granted_for_a_handoff_find_no_prefill_worker() -> None:
    d0 = load("d0")
    with pytest.raises(NoWorkerError, match="no prefill worker is ready"):
        choose_prefill(colocated(d0), RequestFacts(10), d0.key, d0.kv_format)
