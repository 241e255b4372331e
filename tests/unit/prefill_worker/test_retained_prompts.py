"""What outlives a computed prompt: found by its own request as long as memory lasts, and never by another."""

from __future__ import annotations

from prefill_worker.retained_prompts import RetainedPrompts
from tandem.core.pages import PagePool
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.worker.sequence import Sequence

PAGE = 4
SALT = b"weights"
FIRST = {0: SampledToken(7, -0.5), 1: SampledToken(9, -0.7)}


def a_prompt(request_id: str, tokens: list[int], seed: int = 1) -> Sequence:
    return Sequence(request_id, 1, 0, 0, 0, tokens, len(tokens), SamplingParams(seed=seed))


def retain(
    retained: RetainedPrompts, pool: PagePool, request_id: str, tokens: list[int], session: int = 1
) -> list[int]:
    """Compute, keep and hand off a prompt; returns where it lay."""
    sequence = a_prompt(request_id, tokens)
    sequence.extend_keys(PAGE, SALT, len(tokens))
    sequence.pages = pool.allocate(-(-len(tokens) // PAGE)) or []
    retained.retain(session, sequence, FIRST)
    pool.release(sequence.pages)
    pool.check()
    return sequence.pages


def recall(retained: RetainedPrompts, sequence: Sequence) -> dict[int, SampledToken]:
    """Give a new attempt the pages, if all are there, and return the first tokens."""
    recalled = retained.recall(sequence)
    assert recalled is not None
    retained.give_pages(sequence, recalled)
    return recalled.first_tokens


def test_all_is_found_again() -> None:
    pool = PagePool(8, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=True)
    pages = retain(retained, pool, "r", list(range(10)))
    assert pool.counts().cached == 3
    again = a_prompt("r", list(range(10)))
    assert recall(retained, again) == FIRST
    assert list(again.pages) == pages
    assert (again.num_to_compute, again.num_cached) == (0, 10)
    assert pool.counts().used == 3


def test_nothing_is_given_where_one_page_is_missing() -> None:
    pool = PagePool(3, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=True)
    retain(retained, pool, "r", list(range(10)))
    pool.release(pool.allocate(1) or [])
    again = a_prompt("r", list(range(10)))
    assert recall(retained, again) == FIRST, "the tokens are remembered all the same"
    assert not again.pages
    assert pool.match(again.keys) == 2, "the partial page went first"
    assert pool.counts().used == 0


def test_other_tokens_or_other_sampling_under_the_same_id_find_nothing() -> None:
    pool = PagePool(8, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=True)
    retain(retained, pool, "r", list(range(10)))
    assert retained.recall(a_prompt("r", [*range(9), 42])) is None
    assert retained.recall(a_prompt("r", list(range(10)), seed=2)) is None
    assert retained.recall(a_prompt("other", list(range(10)))) is None


def test_what_is_dropped_is_free_where_nobody_else_can_find_it() -> None:
    for shares, num_left in ((True, 2), (False, 0)):
        pool = PagePool(8, PAGE)
        retained = RetainedPrompts(pool, SALT, shares=shares)
        retain(retained, pool, "r", list(range(10)))
        retained.drop("r")
        retained.drop("r")
        assert pool.counts().cached == num_left
        assert retained.recall(a_prompt("r", list(range(10)))) is None
        pool.check()


def test_the_end_of_a_session_drops_its_own() -> None:
    pool = PagePool(8, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=True)
    retain(retained, pool, "mine", [1, 2, 3], session=1)
    retain(retained, pool, "theirs", [4, 5, 6], session=2)
    retained.drop_session(1)
    assert len(retained) == 1
    assert pool.counts().cached == 1
    assert recall(retained, a_prompt("theirs", [4, 5, 6])) == FIRST


def test_the_number_is_bounded_and_the_oldest_go_first() -> None:
    pool = PagePool(8, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=True, bound=2)
    for n in range(3):
        retain(retained, pool, f"r{n}", [n, n, n])
    assert len(retained) == 2
    assert retained.recall(a_prompt("r0", [0, 0, 0])) is None
    assert pool.counts().cached == 2, "with it goes its page"


def test_no_more_private_keys_than_pages() -> None:
    pool = PagePool(6, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=False)
    for n in range(3):
        retain(retained, pool, f"r{n}", [n] * 10)
        assert retained.num_private_keys == 3 * min(n + 1, 2)
    assert retained.recall(a_prompt("r0", [0] * 10)) is None
    retained.drop("r1")
    assert retained.num_private_keys == 3


def test_a_newer_attempt_takes_the_older_ones_place() -> None:
    pool = PagePool(8, PAGE)
    retained = RetainedPrompts(pool, SALT, shares=True)
    retain(retained, pool, "r", [1, 2, 3])
    pages = retain(retained, pool, "r", [1, 2, 3])
    assert pool.counts().cached == 1
    again = a_prompt("r", [1, 2, 3])
    recall(retained, again)
    assert list(again.pages) == pages
