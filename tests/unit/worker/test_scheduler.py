"""The batch scheduler, driven step by step without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import InvalidRequestError, OverloadedError
from tandem.core.pages import PagePool, page_keys, page_table, windowed_key
from tandem.core.sampling import SamplingParams
from tandem.core.token_ids import token_ids
from tandem.worker.batch import Batch, SchedulerLimits
from tandem.worker.scheduler import BatchScheduler
from tandem.worker.sequence import FinishReason, Sequence, finish_reason
from tandem.worker.turn import turn_of

PAGE = 4


def make_scheduler(
    num_pages: int = 64, *, seqs: int = 8, tokens: int = 32, chunk: int = 16, bound: int = 100, cache: bool = False
) -> BatchScheduler:
    limits = SchedulerLimits(seqs, tokens, chunk, bound)
    return BatchScheduler(PagePool(num_pages, PAGE), limits, salt=b"m", prefix_cache=cache)


def prompt(
    name: str, num_tokens: int, *, arrival: int = 0, priority: int = 0, first: int = 0, ageing_s: float = 1000.0
) -> Sequence:
    """`arrival`: its place in the order of arrival, and the second in which it came."""
    return Sequence(
        request_id=name,
        attempt=1,
        choice=0,
        turn=turn_of(priority, arrival, ageing_s),
        arrival=arrival,
        token_ids=token_ids((first + i) % 1000 for i in range(num_tokens)),
        num_prompt=num_tokens,
        params=SamplingParams(),
    )


def step(scheduler: BatchScheduler) -> Batch:
    """One step; every sampled token is 7."""
    batch = scheduler.schedule()
    scheduler.apply(batch, [[7]] * sum(item.samples for item in batch.items))
    scheduler.pool.check()
    return batch


def shape(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(i.sequence.request_id, i.start, i.num_tokens, i.samples) for i in batch.items]


def test_a_prompt_is_chunked_and_then_decodes() -> None:
    scheduler = make_scheduler()
    scheduler.add(prompt("a", 37))
    assert shape(step(scheduler)) == [("a", 0, 16, False)]
    assert shape(step(scheduler)) == [("a", 16, 16, False)]
    assert shape(step(scheduler)) == [("a", 32, 5, True)]
    assert shape(step(scheduler)) == [("a", 37, 1, True)]


def test_decodes_come_first_and_chunks_fill_what_is_left() -> None:
    scheduler = make_scheduler(tokens=18)
    for n in range(3):
        scheduler.add(prompt(f"d{n}", 4, arrival=n))
    step(scheduler)
    scheduler.add(prompt("late", 40, arrival=9))
    batch = step(scheduler)
    # 18 tokens less three decodes leave 15, of which whole pages are 12.
    assert shape(batch) == [("d0", 4, 1, True), ("d1", 4, 1, True), ("d2", 4, 1, True), ("late", 0, 12, False)]


def test_several_prompts_share_a_step_within_the_budget() -> None:
    scheduler = make_scheduler(tokens=32)
    for n in range(4):
        scheduler.add(prompt(f"p{n}", 12, arrival=n))
    assert shape(step(scheduler)) == [
        ("p0", 0, 12, True), ("p1", 0, 12, True), ("p2", 0, 8, False),
    ]  # fmt: skip


def chunks(batch: Batch) -> list[tuple[str, int]]:
    return [(item.sequence.request_id, item.num_tokens) for item in batch.items if item.num_tokens > 1]


def test_a_step_that_ends_enough_of_prompts_takes_no_more() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8)
    for arrival, (name, num_tokens) in enumerate({"a": 12, "b": 4, "c": 4, "d": 4}.items()):
        scheduler.add(prompt(name, num_tokens, arrival=arrival))
    steps = [chunks(step(scheduler)) for _ in range(4)]
    assert steps == [[("a", 12)], [("b", 4), ("c", 4)], [("d", 4)], []]  # small ones go together


def test_two_prompts_end_together_while_many_wait() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8, num_to_pair=4)
    for arrival, name in enumerate("abcdef"):
        scheduler.add(prompt(name, 12, arrival=arrival))
    steps = []
    for _ in range(5):
        batch = step(scheduler)
        for item in batch.items:
            scheduler.park(item.sequence)  # computed, as at prefill
        steps.append(chunks(batch))
    assert steps == [[("a", 12), ("b", 12)], [("c", 12), ("d", 12)], [("e", 12)], [("f", 12)], []]


def test_only_prompts_that_end_are_computed_in_twos() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8, num_to_pair=3)
    for arrival, name in enumerate("abc"):
        sequence = prompt(name, 28, arrival=arrival)
        scheduler.add(sequence)
        scheduler.promote(sequence)  # all are in the batch
    steps = [chunks(step(scheduler)) for _ in range(4)]
    assert steps == [[("a", 16)], [("a", 12)], [("b", 16)], [("b", 12)]]


def test_the_second_of_two_is_not_let_in_where_it_would_not_end() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8, num_to_pair=2)
    scheduler.add(prompt("a", 12, arrival=0))
    scheduler.add(prompt("long", 40, arrival=1))
    assert chunks(step(scheduler)) == [("a", 12)]
    assert [s.request_id for s in scheduler.waiting] == ["long"]  # it holds no pages while it waits


def test_beside_a_chunk_that_goes_on_only_one_prompt_ends() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8, num_to_pair=2)
    for arrival, (name, num_tokens) in enumerate({"long": 40, "a": 12, "b": 12}.items()):
        scheduler.add(prompt(name, num_tokens, arrival=arrival))
    assert chunks(step(scheduler)) == [("long", 16), ("a", 12)]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8)
    for arrival, (name, num_tokens) in enumerate({"long": 40, "long too": 40, "a": 8, "b": 8}.items()):
        sequence = prompt(name, num_tokens, arrival=arrival)
        scheduler.add(sequence)
        scheduler.promote(sequence)  # all are in the batch
    steps = [chunks(step(scheduler)) for _ in range(5)]
    assert steps[:2] == [[("long", 16), ("a", 8)], [("long", 16), ("b", 8)]]
    # Of two long ones the first is computed first.
    assert steps[2:] == [[("long", 8)], [("long too", 16)], [("long too", 16)]]


def test_beside_a_chunk_that_goes_on_one_that_ends_may_be_computed() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, saturating_tokens=8)
    for arrival, (name, num_tokens) in enumerate({"long": 40, "a": 8, "b": 8, "long too": 40, "c": 8}.items()):
        scheduler.add(prompt(name, num_tokens, arrival=arrival))
    steps = [chunks(step(scheduler)) for _ in range(7)]
    assert steps[:3] == [[("long", 16), ("a", 8)], [("long", 16), ("b", 8)], [("long", 8)]]
    assert steps[3:] == [[("long too", 16), ("c", 8)], [("long too", 16)], [("long too", 8)], []]


def test_what_the_last_page_of_each_in_the_batch_has_left_is_counted() -> None:
    scheduler = make_scheduler(tokens=16, seqs=2)
    assert scheduler.num_unfilled_slots == 0
    for arrival, num_tokens in enumerate((5, 8, 7)):  # the last one waits for a place
        scheduler.add(prompt(f"{num_tokens}", num_tokens, arrival=arrival))
    step(scheduler)
    assert scheduler.num_unfilled_slots == 3 + 0, "pages of four slots"
    step(scheduler)
    assert scheduler.num_unfilled_slots == 2 + 3
    scheduler.pool.release(scheduler.remove(scheduler.running[0]))
    assert scheduler.num_unfilled_slots == 3


def test_chunks_end_on_page_borders_unless_they_end_the_prompt() -> None:
    scheduler = make_scheduler(tokens=15, chunk=12)
    scheduler.add(prompt("a", 11, arrival=0))
    scheduler.add(prompt("b", 20, arrival=1))
    first = step(scheduler)
    assert shape(first) == [("a", 0, 11, True), ("b", 0, 4, False)]


def test_first_come_first_served_within_priority() -> None:
    scheduler = make_scheduler(seqs=1)
    scheduler.add(prompt("later", 4, arrival=2))
    scheduler.add(prompt("earlier", 4, arrival=1))
    scheduler.add(prompt("urgent", 4, arrival=3, priority=-1))
    assert [s.request_id for s in scheduler.waiting] == ["urgent", "earlier", "later"]
    assert shape(step(scheduler)) == [("urgent", 0, 4, True)]


def test_nobody_starves_however_many_urgent_ones_come() -> None:
    """One comes a second, and one is computed: three levels of ten seconds each are thirty before the low one."""
    scheduler = make_scheduler(seqs=1)
    scheduler.add(prompt("low", 4, priority=3, ageing_s=10.0))
    order = []
    for second in range(1, 60):
        scheduler.add(prompt("urgent", 4, arrival=second, ageing_s=10.0))
        step(scheduler)
        order.append(scheduler.running[0].request_id)
        scheduler.pool.release(scheduler.remove(scheduler.running[0]))
    assert order.index("low") == 29


@pytest.mark.parametrize(("came_s", "gives_way"), [(9, "low"), (11, "urgent")])
def test_who_has_waited_long_enough_gives_way_to_no_urgent_one(came_s: int, gives_way: str) -> None:
    scheduler = make_scheduler(num_pages=3, tokens=64)
    scheduler.add(prompt("low", 4, priority=1, ageing_s=10.0))
    step(scheduler)
    scheduler.add(prompt("urgent", 4, arrival=came_s, ageing_s=10.0))
    while not (batch := step(scheduler)).preempted:
        pass
    assert [s.request_id for s in batch.preempted] == [gives_way]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_pages=8, tokens=64, chunk=32)
    scheduler.add(prompt("a", 16, arrival=0))
    step(scheduler)
    scheduler.add(prompt("large", 28, arrival=1))
    scheduler.add(prompt("small", 4, arrival=2))
    assert shape(step(scheduler)) == [("a", 16, 1, True)]
    scheduler.pool.release(scheduler.remove(scheduler.running[0]))
    assert shape(step(scheduler))[0] == ("large", 0, 28, True)


def test_max_num_seqs_bounds_the_batch() -> None:
    scheduler = make_scheduler(seqs=2)
    for n in range(3):
        scheduler.add(prompt(f"p{n}", 4, arrival=n))
    assert len(step(scheduler).items) == 2


def test_the_queue_is_bounded_and_says_so() -> None:
    scheduler = make_scheduler(bound=1)
    scheduler.add(prompt("a", 4))
    with pytest.raises(OverloadedError, match="1 sequences wait here"):
        scheduler.add(prompt("b", 4))


def test_what_can_never_fit_is_refused_with_its_sizes() -> None:
    scheduler = make_scheduler(num_pages=4)
    with pytest.raises(InvalidRequestError, match="17 tokens need 5 pages, this worker has 4"):
        scheduler.add(prompt("a", 17))


def test_preemption_takes_the_last_in_the_order_and_never_the_first() -> None:
    scheduler = make_scheduler(num_pages=4, tokens=64)
    for n, name in enumerate(["old", "mid", "new"]):
        scheduler.add(prompt(name, 4, arrival=n, priority=1 if name == "mid" else 0))
    step(scheduler)  # three pages are full; each wants a second one
    batch = step(scheduler)
    # Order of worth: old, new, mid. One page is free: old takes it, new needs mid's.
    assert [s.request_id for s in batch.preempted] == ["mid"]
    assert [i[0] for i in shape(batch)] == ["old", "new"]
    assert not scheduler.waiting[0].pages
    assert scheduler.waiting[0].token_ids[-1] == 7, "the token that was given out is kept"


def test_a_preempted_sequence_is_replayed_from_its_first_token() -> None:
    scheduler = make_scheduler(num_pages=4, tokens=64)
    for n, name in enumerate(["a", "b"]):
        scheduler.add(prompt(name, 4, arrival=n))
    step(scheduler)
    b = scheduler.running[1]
    for _ in range(12):
        batch = step(scheduler)
        if batch.preempted:
            break
    assert batch.preempted == [b]
    known = list(b.token_ids)
    scheduler.pool.release(scheduler.remove(scheduler.running[0]))
    batch = step(scheduler)
    assert shape(batch) == [("b", 0, len(known), True)]
    assert list(b.token_ids) == [*known, 7]
    assert b.num_preemptions == 1


def test_the_oldest_stalls_on_reserved_pages_and_goes_on_when_they_return() -> None:
    scheduler = make_scheduler(num_pages=3)
    reserved = scheduler.pool.reserve(2)
    assert reserved is not None
    scheduler.add(prompt("only", 4))
    step(scheduler)
    batch = step(scheduler)
    assert batch.items == []
    assert batch.stalled == scheduler.running
    scheduler.pool.release(reserved)
    assert shape(step(scheduler)) == [("only", 4, 1, True)]


def test_shared_pages_are_copied_before_they_are_written() -> None:
    scheduler = make_scheduler()
    first = prompt("a", 6)
    first.pages = page_table(scheduler.pool.allocate(2) or [])
    first.num_computed = 6
    first.token_ids.append(5)
    second = prompt("a", 6)
    second.choice, second.num_computed, second.pages = 1, 6, page_table(first.pages)
    second.token_ids.append(9)
    scheduler.pool.share(second.pages)
    scheduler.enter(first)
    scheduler.enter(second)
    old = first.pages[1]
    batch = step(scheduler)
    assert batch.copies == [(old, first.pages[1])], "one copy: the last owner writes in place"
    assert second.pages[1] == old
    assert first.pages[0] == second.pages[0], "full prompt pages stay shared"


def test_a_page_that_a_step_copies_is_nobodys_before_the_step_has_ended() -> None:
    """Its other owner gives it up in the same step; whoever got it then could write to it before it is copied."""
    scheduler = make_scheduler(num_pages=3)
    first, second = (
        Sequence("a", 1, n, 0, n, token_ids([1] * 6), 5, SamplingParams(), num_computed=5) for n in range(2)
    )
    first.pages = page_table(scheduler.pool.allocate(2) or [])
    second.pages = page_table(first.pages)
    scheduler.pool.share(first.pages)
    for sequence in (first, second):
        scheduler.enter(sequence)
    old = first.pages[1]
    batch = scheduler.schedule()
    assert batch.copies == [(old, first.pages[1])]
    scheduler.pool.release(scheduler.remove(second))
    assert scheduler.pool.references(old) == 1
    scheduler.apply(batch, [[1], [1]])
    assert scheduler.pool.references(old) == 0
    scheduler.pool.check()


def test_a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest() -> None:
    scheduler = make_scheduler(cache=True)
    scheduler.add(prompt("a", 10))
    step(scheduler)
    scheduler.pool.release(scheduler.remove(scheduler.running[0]))
    scheduler.add(prompt("b", 10))
    assert shape(step(scheduler)) == [("b", 8, 2, True)]
    assert scheduler.running[0].num_cached == 8


def test_the_last_token_is_computed_even_when_all_pages_are_cached() -> None:
    scheduler = make_scheduler(cache=True)
    scheduler.add(prompt("a", 8))
    step(scheduler)
    scheduler.pool.release(scheduler.remove(scheduler.running[0]))
    scheduler.add(prompt("b", 8))
    assert shape(step(scheduler)) == [("b", 4, 4, True)]


def computed(scheduler: BatchScheduler, *names: str) -> list[Sequence]:
    """Prompts of two pages, computed and parked."""
    sequences = [prompt(name, 8, arrival=n) for n, name in enumerate(names)]
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)
    for sequence in sequences:
        del sequence.token_ids[8:]
        scheduler.park(sequence)
    return sequences


def test_a_parked_sequence_keeps_its_pages_and_takes_no_part() -> None:
    scheduler = make_scheduler(num_pages=4)
    (parked,) = computed(scheduler, "parked")
    assert step(scheduler).items == []
    assert scheduler.pool.counts().used == 2
    pages = scheduler.remove(parked)
    assert len(pages) == 2
    assert scheduler.parked == []


def test_a_promoted_one_takes_pages_from_the_last_that_is_not_and_from_no_more_than_it_needs() -> None:
    scheduler = make_scheduler(num_pages=6, tokens=64)
    first, second, third = computed(scheduler, "first", "second", "third")
    scheduler.promote(third)
    wanted = prompt("wanted", 8, arrival=9, priority=5)
    scheduler.add(wanted)
    assert step(scheduler).items == [], "it is not promoted yet"
    scheduler.promote(wanted)
    batch = step(scheduler)
    assert batch.preempted == [second]
    assert shape(batch) == [("wanted", 0, 8, True)]
    assert scheduler.parked == [third, first]
    assert scheduler.waiting == [second]


def test_nobody_gives_way_where_it_would_not_help() -> None:
    scheduler = make_scheduler(num_pages=6, tokens=64)
    first, second = computed(scheduler, "first", "second")
    scheduler.promote(first)
    wanted = prompt("wanted", 20, arrival=9)
    scheduler.add(wanted)
    scheduler.promote(wanted)
    batch = step(scheduler)
    assert batch.items == batch.preempted == []
    scheduler.pool.release(scheduler.remove(first))
    batch = step(scheduler)
    assert batch.preempted == [second]
    assert shape(batch) == [("wanted", 0, 16, False)]


def test_pages_that_others_hold_too_do_not_come_free() -> None:
    scheduler = make_scheduler(num_pages=4, cache=True)
    (first,) = computed(scheduler, "first")
    held = scheduler.pool.acquire(first.keys)
    assert len(held) == 2
    scheduler.add(prompt("wanted", 12, arrival=9, first=50))
    scheduler.promote(scheduler.waiting[0])
    batch = step(scheduler)
    assert batch.items == batch.preempted == []
    scheduler.pool.release(held)
    assert step(scheduler).preempted == [first]


def test_where_pages_are_free_nobody_looks_through_what_the_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are parked may hold half of a large pool."""
    scheduler = make_scheduler(num_pages=12, tokens=64)
    for arrival, name in enumerate(("first", "second")):
        scheduler.add(prompt(name, 12, arrival=arrival))
        scheduler.park(step(scheduler).items[0].sequence)
    wanted = prompt("wanted", 16, arrival=9)
    scheduler.promote(wanted)
    scheduler.add(wanted)
    looked_at: set[int] = set()
    references = scheduler.pool.references

    def noted(page: int) -> int:
        looked_at.add(page)
        return references(page)

    monkeypatch.setattr(scheduler.pool, "references", noted)
    batch = scheduler.schedule()
    assert chunks(batch) == [("wanted", 16)]
    held = {page for parked in scheduler.parked for page in parked.pages}
    assert len(held) >= 6
    assert not held & looked_at


def test_a_promoted_one_takes_a_place_too() -> None:
    scheduler = make_scheduler(seqs=2, tokens=8, chunk=4)
    for n, name in enumerate(["first", "second"]):
        scheduler.add(prompt(name, 40, arrival=n))
    step(scheduler)
    scheduler.promote(scheduler.running[1])
    scheduler.add(prompt("wanted", 4, arrival=9, priority=5))
    scheduler.promote(scheduler.waiting[0])
    batch = step(scheduler)
    assert [s.request_id for s in batch.preempted] == ["first"]
    assert [s.request_id for s in scheduler.running] == ["second", "wanted"], "a promoted one is not preempted"


def test_who_lacks_pages_does_not_look_through_its_cached_beginning_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(300, cache=True)
    pool, num_acquired = scheduler.pool, 0
    acquire = pool.acquire

    def counting(keys: Iterable[bytes]) -> list[int]:
        nonlocal num_acquired
        pages = acquire(keys)
        num_acquired += len(pages)
        return pages

    monkeypatch.setattr(pool, "acquire", counting)
    old = prompt("old", 200 * PAGE)
    held = pool.allocate(200) or []
    for page, key in zip(held, page_keys(old.token_ids, PAGE, b"m"), strict=True):
        pool.publish(page, key)
    pool.release(held)
    others = pool.allocate(90) or []
    scheduler.add(prompt("long", 250 * PAGE))
    for _ in range(39):  # each step makes a page available, and 50 are wanted
        assert not step(scheduler).items
        assert num_acquired == 200
        pool.release([others.pop()])
    assert not step(scheduler).items
    pool.release([others.pop()])
    assert [item.sequence.request_id for item in step(scheduler).items] == ["long"]
    assert num_acquired == 400


def test_pages_that_go_into_quarantine_are_used_by_nobody_that_a_prompt_waits_for() -> None:
    scheduler = make_scheduler(20)
    scheduler.limits = replace(scheduler.limits, unpromoted_share=0.5)
    scheduler.add(prompt("runs", 2 * PAGE))
    step(scheduler)
    written = scheduler.pool.allocate(6) or []
    scheduler.add(prompt("waits", 5 * PAGE, arrival=1))
    assert [item.sequence.request_id for item in step(scheduler).items] == ["runs"]
    scheduler.pool.quarantine(written)
    assert [item.sequence.request_id for item in step(scheduler).items] == ["runs", "waits"]


def test_where_tokens_see_a_window_pages_anywhere_in_it_end_a_shortage() -> None:
    """Those at its end are all that is seen: with them one more page is enough, and nobody has given any back."""
    scheduler = windowed(20, 2 * PAGE)
    others = scheduler.pool.allocate(18) or []
    scheduler.add(long := prompt("long", 10 * PAGE))
    assert not step(scheduler).items
    for page, key in zip(others, page_keys(long.token_ids, PAGE, b"m")[7:9], strict=False):
        scheduler.pool.publish(page, key)
    assert [item.sequence.request_id for item in step(scheduler).items] == ["long"]


def test_of_a_mixed_model_a_beginning_is_looked_through_again_only_where_it_may_be_longer() -> None:
    scheduler = windowed(300, 9, num_windowed=1)
    pool, looks = scheduler.pool, 0
    match = pool.match

    def counting(keys: Seq[bytes]) -> int:
        nonlocal looks
        looks += len(keys) > 100
        return match(keys)

    pool.match = counting  # type: ignore[assignment, method-assign]
    keys = page_keys(prompt("long", 250 * PAGE).token_ids, PAGE, b"m")
    begun = scheduler.groups.listed_keys(keys[:200], 198)  # its next token sees the last two places
    held = pool.allocate(len(begun)) or []
    for page, key in zip(held, begun, strict=True):
        pool.publish(page, key)
    pool.release(held)
    others = pool.allocate(90) or []
    scheduler.add(long := prompt("long", 250 * PAGE))
    while pool.num_available < len(begun) + 50 + 5:  # for 50 places, and a window and a chunk of the others
        assert not step(scheduler).items
        assert looks == 1
        pool.release([others.pop()])
    assert [item.sequence for item in step(scheduler).items] == [long]
    assert (looks, long.num_cached, long.num_hidden) == (2, 200 * PAGE, 200), "it has moved on by a chunk"
    scheduler.pool.release(scheduler.remove(long))
    # The 199th place lacks its page for layers with a window, and those before the 198th do: no beginning is of use.
    pool.discard([windowed_key(keys[198], 0)])
    others += pool.allocate(pool.num_available - 250) or []
    scheduler.add(long := prompt("long", 250 * PAGE, arrival=1))
    while pool.num_available < 250 + 5:
        assert not step(scheduler).items
        assert looks == 4, "to take it, and once more for what it lacks"
        pool.release([others.pop()])
    assert [item.sequence for item in step(scheduler).items] == [long]
    assert (long.num_cached, long.num_hidden) == (0, 0)


def test_nobody_overtakes_a_promoted_one_that_waits_for_pages() -> None:
    scheduler = make_scheduler(num_pages=6, tokens=64)
    (first,) = computed(scheduler, "first")
    scheduler.promote(first)
    scheduler.add(prompt("wanted", 20, arrival=9))
    scheduler.promote(scheduler.waiting[0])
    scheduler.add(prompt("small", 4, arrival=8, priority=-1))
    assert step(scheduler).items == []


def test_above_the_watermark_only_promoted_ones_are_admitted_or_one_alone() -> None:
    scheduler = make_scheduler(num_pages=10, tokens=64)
    scheduler.limits = replace(scheduler.limits, unpromoted_share=0.5)
    first, second = computed(scheduler, "first", "second")
    scheduler.add(prompt("third", 8, arrival=2))
    assert step(scheduler).items == [], "six of ten pages would be over the half"
    scheduler.promote(scheduler.waiting[0])
    assert shape(step(scheduler)) == [("third", 0, 8, True)]
    for sequence in (first, second, *scheduler.running):
        scheduler.pool.release(scheduler.remove(sequence))
    scheduler.add(prompt("large", 32, arrival=3))
    assert shape(step(scheduler)) == [("large", 0, 16, False)], "nothing else is here"


@pytest.mark.parametrize(
    ("params", "token", "num_output", "num_tokens", "expected"),
    [
        (SamplingParams(max_tokens=5), 2, 1, 9, FinishReason.STOP),
        (SamplingParams(max_tokens=5, ignore_eos=True), 2, 1, 9, None),
        (SamplingParams(max_tokens=5, stop_token_ids=(3,)), 3, 1, 9, FinishReason.STOP),
        (SamplingParams(max_tokens=5, stop_token_ids=(3,), ignore_eos=True), 3, 1, 9, FinishReason.STOP),
        (SamplingParams(max_tokens=5), 4, 5, 9, FinishReason.LENGTH),
        (SamplingParams(max_tokens=5), 4, 4, 9, None),
        (SamplingParams(max_tokens=50), 4, 4, 20, FinishReason.LENGTH),
    ],
)
def test_when_a_choice_ends(
    params: SamplingParams, token: int, num_output: int, num_tokens: int, expected: FinishReason | None
) -> None:
    assert finish_reason(params, token, num_output, num_tokens, frozenset({2}), 20) is expected


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), num_pages=st.integers(6, 20), cache=st.booleans())
def test_everybody_ends_whatever_the_memory(seed: int, num_pages: int, cache: bool) -> None:
    """Random prompts and lengths on tight pools: all get their tokens, in bounded steps, and no page is lost."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_pages, seqs=4, tokens=16, chunk=8, cache=cache)
    scheduler.limits = replace(
        scheduler.limits, saturating_tokens=rng.randint(1, 16), num_to_pair=rng.choice((0, 2, 4))
    )
    goal: dict[str, int] = {}
    coming = []
    for n in range(8):
        size = rng.randint(1, 12)
        goal[f"r{n}"] = size + rng.randint(1, 6 * PAGE - 12)
        coming.append(prompt(f"r{n}", size, arrival=n, priority=rng.randint(0, 1), first=rng.randint(0, 1)))
    for _ in range(2_000):
        if coming and rng.random() < 0.3:
            scheduler.add(coming.pop())
        step(scheduler)
        for sequence in list(scheduler.running):
            if len(sequence.token_ids) >= goal[sequence.request_id]:
                scheduler.pool.release(scheduler.remove(sequence))
                del goal[sequence.request_id]
        if not goal:
            break
    assert not goal, f"never ended: {goal}"
    counts = scheduler.pool.counts()
    assert counts.used == counts.reserved == 0
    assert counts.free + counts.cached == num_pages


# ---- paced prompts


def paced(name: str, num_tokens: int, *, arrival: int = 0) -> Sequence:
    sequence = prompt(name, num_tokens, arrival=arrival)
    sequence.paced = True
    return sequence


def test_a_paced_prompt_fills_steps_beside_decodes_and_no_more() -> None:
    scheduler = make_scheduler(tokens=64)
    scheduler.limits = replace(scheduler.limits, paced_tokens=6)
    scheduler.add(prompt("a", 4))
    scheduler.add(prompt("b", 4, arrival=1))
    step(scheduler)
    scheduler.add(paced("c", 13, arrival=2))
    assert [(s[0], s[2]) for s in shape(step(scheduler))] == [("a", 1), ("b", 1), ("c", 4)]
    assert shape(step(scheduler))[2:] == [("c", 4, 4, False)]
    assert shape(step(scheduler))[2:] == [("c", 8, 4, False)]
    assert shape(step(scheduler))[2:] == [("c", 12, 1, True)]


def test_paced_prompts_share_the_room_and_the_first_always_gets_a_page() -> None:
    scheduler = make_scheduler(tokens=64, seqs=20)
    scheduler.limits = replace(scheduler.limits, paced_tokens=11)
    for n in range(12):  # more decodes than a step takes tokens of prompts beside
        scheduler.add(prompt(f"d{n}", 2, arrival=n))
    step(scheduler)
    scheduler.add(paced("p", 10, arrival=50))
    scheduler.add(paced("q", 20, arrival=51))
    assert shape(step(scheduler))[12:] == [("p", 0, PAGE, False)]
    for sequence in scheduler.running[2:12]:
        scheduler.pool.release(scheduler.remove(sequence))
    assert shape(step(scheduler))[2:] == [("p", PAGE, 10 - PAGE, True), ("q", 0, 11 - 2 - (10 - PAGE), False)]


# ---- pages that came computed


def handed_off(scheduler: BatchScheduler, num_pages: int, arrival: int = 0) -> Sequence:
    """In the batch, with so many full pages and one token to compute."""
    sequence = prompt(f"h{arrival}", num_pages * PAGE, arrival=arrival, first=arrival)
    sequence.token_ids.append(7)
    sequence.pages = page_table(scheduler.pool.allocate(num_pages) or [])
    sequence.num_computed = num_pages * PAGE
    scheduler.enter(sequence)
    return sequence


def num_found(scheduler: BatchScheduler, sequence: Sequence) -> int:
    return scheduler.pool.match(page_keys(sequence.token_ids, PAGE, b"m"))


def test_a_step_publishes_what_it_fills_and_a_bounded_number_of_older_pages() -> None:
    scheduler = make_scheduler(2000, cache=True)
    first, second = handed_off(scheduler, 500), handed_off(scheduler, 300, arrival=1)
    step(scheduler)
    assert [num_found(scheduler, s) for s in (first, second)] == [500, 12], "512 of 800"
    for _ in range(PAGE - 1):
        step(scheduler)
    assert [num_found(scheduler, s) for s in (first, second)] == [501, 301], "and the page that both have filled since"


def test_all_pages_of_a_sequence_that_retires_are_found_and_of_one_that_is_removed_none() -> None:
    scheduler = make_scheduler(2000, cache=True)
    good, wrong = handed_off(scheduler, 600), handed_off(scheduler, 3, arrival=1)
    scheduler.pool.release(scheduler.retire(good))
    scheduler.pool.release(scheduler.remove(wrong))
    assert [num_found(scheduler, s) for s in (good, wrong)] == [600, 0]
    scheduler.pool.check()


def test_a_preempted_sequence_finds_all_its_pages_again() -> None:
    scheduler = make_scheduler(601, cache=True)
    handed_off(scheduler, 1)
    late = handed_off(scheduler, 599, arrival=1)
    batch = step(scheduler)  # one free page, and both need one
    assert batch.preempted == [late]
    assert num_found(scheduler, late) == 599


def test_a_handoff_in_a_worker_without_a_prefix_cache_publishes_nothing() -> None:
    scheduler = make_scheduler(2000)
    sequence = handed_off(scheduler, 600)
    step(scheduler)
    scheduler.pool.release(scheduler.retire(sequence))
    assert num_found(scheduler, sequence) == 0


def test_all_pages_that_one_long_chunk_fills_are_published_with_it() -> None:
    scheduler = make_scheduler(2000, tokens=4000, chunk=600 * PAGE, cache=True)
    sequence = prompt("long", 600 * PAGE)
    scheduler.add(sequence)
    step(scheduler)
    assert num_found(scheduler, sequence) == 600


# ---- windows


def windowed(
    num_pages: int, window: int, *, chunk: int = 8, cache: bool = True, num_windowed: int = 0
) -> BatchScheduler:
    limits = SchedulerLimits(8, 32, chunk, 100, window=window, num_windowed=num_windowed)
    return BatchScheduler(PagePool(num_pages, PAGE), limits, salt=b"m", prefix_cache=cache)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 17])
@pytest.mark.parametrize("cache", [True, False])
def test_a_sequence_holds_its_window_and_a_chunk_however_long_it_is(window: int, cache: bool) -> None:
    most = -(-(window + 8 - 2) // PAGE) + 1
    scheduler = windowed(most, window, cache=cache)  # the first prompt finds nothing in the cache
    long = prompt("long", 300)
    scheduler.limits = replace(scheduler.limits, queue_bound=10)
    scheduler.check_fits = lambda *_: None  # type: ignore[method-assign]  # it leaves room for cached pages, too
    scheduler.add(long)
    for _ in range(300):
        batch = step(scheduler)
        assert not batch.stalled
        assert not batch.preempted
        assert len(scheduler.held_pages(long)) == scheduler.pool.counts().used <= most
        assert long.num_hidden == max(0, long.num_computed - window + 1) // PAGE
    assert long.num_output > 200
    scheduler.pool.release(scheduler.retire(long))
    assert scheduler.pool.counts().used == 0


def test_what_fits_is_what_a_window_a_chunk_and_cached_pages_take() -> None:
    scheduler = windowed(7, 9)
    assert scheduler.most_pages(20) == 5
    assert scheduler.most_pages(10_000) == 3 + 5
    scheduler.check_fits(28, "a")
    with pytest.raises(InvalidRequestError, match="8 pages"):
        scheduler.check_fits(10_000, "a")


def test_a_beginning_is_found_by_what_its_next_token_sees() -> None:
    scheduler = windowed(64, 9)
    first = prompt("first", 40)
    scheduler.add(first)
    while first.num_computed < 40:
        step(scheduler)
    scheduler.pool.release(scheduler.retire(first))
    keys = first.keys

    def found_of(name: str) -> tuple[int, int]:
        sequence = prompt(name, 60)
        scheduler.add(sequence)
        scheduler.schedule()
        found = sequence.num_cached, sequence.num_hidden
        scheduler.abandon()
        scheduler.pool.release(scheduler.remove(sequence))
        return found

    scheduler.pool.discard(keys[:5])
    assert found_of("again") == (40, 8)
    scheduler.pool.discard(keys[8:9])  # the next token sees the seventh and the eighth page, and these are there
    assert found_of("third") == (32, 6)
    scheduler.pool.discard(keys[6:7])
    assert found_of("last") == (0, 0)


@pytest.mark.parametrize("num_windowed", [0, 2])
def test_a_long_text_leaves_in_the_cache_what_another_will_look_for(num_windowed: int) -> None:
    """It gives back many more pages behind its window than there are."""
    scheduler = windowed(20 + 60 * (num_windowed > 0), 9, num_windowed=num_windowed)
    turn = prompt("a turn", 24)
    scheduler.add(turn)
    while turn.num_computed < 24:
        step(scheduler)
    scheduler.pool.release(scheduler.retire(turn))
    long = prompt("long", 100, arrival=1, first=500)
    scheduler.add(long)
    while long.num_computed < 180:
        step(scheduler)
    scheduler.pool.release(scheduler.remove(long))
    scheduler.add(next_turn := prompt("a turn", 40))
    step(scheduler)
    assert next_turn.num_cached == 24
    assert scheduler.pool.counts().free < 5, "it could have been given to others"


def test_two_that_share_cached_pages_both_go_on_in_pools_without_another_page() -> None:
    """What one gives back the other may still have: each has enough of its own."""
    scheduler = windowed(2 + 2 * 5, 9)
    first = prompt("first", 24)
    scheduler.add(first)
    while first.num_computed < 24:
        step(scheduler)
    scheduler.pool.release(scheduler.retire(first))
    both = [prompt(name, 100, arrival=number) for number, name in enumerate("ab")]
    for sequence in both:
        scheduler.add(sequence)
    while any(sequence.num_computed < 100 for sequence in both):
        batch = step(scheduler)
        assert not batch.stalled
        assert not batch.preempted
    assert [sequence.num_cached for sequence in both] == [24, 24]


def handed_off_mixed(scheduler: BatchScheduler, num_prompt: int, output: int) -> Sequence:
    """In the batch, with the pages of its prompt that an output sees, and so many tokens of one to be replayed."""
    sequence, groups = prompt("h", num_prompt), scheduler.groups
    sequence.token_ids.extend(range(output))
    sequence.num_hidden = groups.num_hidden(num_prompt)
    pages = scheduler.pool.allocate(groups.num_seen(num_prompt)) or []
    sequence.pages, sequence.windowed = groups.tables(pages, sequence.num_hidden, -(-num_prompt // PAGE))
    sequence.num_computed = num_prompt
    scheduler.enter(sequence)
    return sequence


def test_of_a_mixed_model_a_replayed_output_holds_all_its_pages_wherever_it_ends() -> None:
    for num_steps in range(8):
        scheduler = windowed(100, 9, num_windowed=2)
        sequence = handed_off_mixed(scheduler, 20, 45)
        for _ in range(num_steps):
            step(scheduler)
            assert len(scheduler.held_pages(sequence)) == scheduler.pool.counts().used
        scheduler.pool.release(scheduler.remove(sequence))
        assert scheduler.pool.counts().used == 0


def test_of_a_mixed_model_pages_of_all_layers_are_discarded() -> None:
    """Else a prompt that is computed anew would leave the old ones in the cache, beside its own of the other layers."""
    scheduler = windowed(100, 9, num_windowed=2)
    first = prompt("first", 10 * PAGE)
    scheduler.add(first)
    while first.num_computed < first.num_prompt:
        step(scheduler)
    scheduler.pool.release(scheduler.retire(first))
    assert scheduler.pool.counts().cached == 3 * 10
    scheduler.discard(first.keys)
    assert scheduler.pool.counts().cached == 0


def test_of_a_mixed_model_a_step_publishes_a_bounded_number_of_pages_that_came_with_a_handoff() -> None:
    scheduler = windowed(3100, 9, num_windowed=1)
    pool, sequence = scheduler.pool, handed_off_mixed(scheduler, 3000 * PAGE, 1)
    keys = page_keys(sequence.token_ids, PAGE, b"m")
    found = []
    for _ in range(2 * PAGE):
        step(scheduler)
        found.append(pool.match(keys))
    assert found == [512, 1024, 1536, 2048, 2560, 2999, 2999, 3000]
    # One that was given back before those before it were published is found, too.
    assert pool.match([windowed_key(key, 0) for key in keys[2998:]]) == 2
    pool.release(scheduler.retire(sequence))
    assert scheduler.groups.acquire(pool, keys)[0] == 2998
