"""What outlives a computed prompt: found by its own request as long as memory lasts, and never by another."""

from __future__ import annotations

from prefill_worker.kept import KeptPrompts
from tandem.core.pages import PagePool
from tandem.core.sampling import SampledToken, SamplingParams
from tandem.worker.sequence import Sequence

PAGE = 4
SALT = b"weights"
FIRST = {0: SampledToken(7, -0.5), 1: SampledToken(9, -0.7)}


def a_prompt(request_id: str, tokens: list[int], seed: int = 1) -> Sequence:
    return Sequence(request_id, 1, 0, 0, 0, tokens, len(tokens), SamplingParams(seed=seed))


def keep(kept: KeptPrompts, pool: PagePool, request_id: str, tokens: list[int], session: int = 1) -> list[int]:
    """Compute, keep and hand off a prompt; returns where it lay."""
    sequence = a_prompt(request_id, tokens)
    sequence.extend_keys(PAGE, SALT, len(tokens))
    sequence.pages = pool.allocate(-(-len(tokens) // PAGE)) or []
    kept.keep(session, sequence, FIRST)
    pool.release(sequence.pages)
    pool.check()
    return sequence.pages


def recall(kept: KeptPrompts, sequence: Sequence) -> dict[int, SampledToken]:
    """Give a new attempt the pages, if all are there, and return the first tokens."""
    recalled = kept.recall(sequence)
    assert recalled is not None
    kept.give_pages(sequence, recalled)
    return recalled.first_tokens


def test_all_is_found_again() -> None:
    pool = PagePool(8, PAGE)
    kept = KeptPrompts(pool, SALT, shares=True)
    pages = keep(kept, pool, "r", list(range(10)))
    assert pool.counts().cached == 3
    again = a_prompt("r", list(range(10)))
    assert recall(kept, again) == FIRST
    assert again.pages == pages
    assert (again.num_to_compute, again.num_cached) == (0, 10)
    assert pool.counts().used == 3


def test_nothing_is_given_where_one_page_is_missing() -> None:
    pool = PagePool(3, PAGE)
    kept = KeptPrompts(pool, SALT, shares=True)
    keep(kept, pool, "r", list(range(10)))
    pool.release(pool.allocate(1) or [])
    again = a_prompt("r", list(range(10)))
    assert recall(kept, again) == FIRST, "the tokens are remembered all the same"
    assert again.pages == []
    assert pool.match(again.keys) == 2, "the partial page went first"
    assert pool.counts().used == 0


def test_other_tokens_or_other_sampling_under_the_same_id_find_nothing() -> None:
    pool = PagePool(8, PAGE)
    kept = KeptPrompts(pool, SALT, shares=True)
    keep(kept, pool, "r", list(range(10)))
    assert kept.recall(a_prompt("r", [*range(9), 42])) is None
    assert kept.recall(a_prompt("r", list(range(10)), seed=2)) is None
    assert kept.recall(a_prompt("other", list(range(10)))) is None


def test_what_is_dropped_is_free_where_nobody_else_can_find_it() -> None:
    for shares, num_left in ((True, 2), (False, 0)):
        pool = PagePool(8, PAGE)
        kept = KeptPrompts(pool, SALT, shares=shares)
        keep(kept, pool, "r", list(range(10)))
        kept.drop("r")
        kept.drop("r")
        assert pool.counts().cached == num_left
        assert kept.recall(a_prompt("r", list(range(10)))) is None
        pool.check()


def test_the_end_of_a_session_drops_its_own() -> None:
    pool = PagePool(8, PAGE)
    kept = KeptPrompts(pool, SALT, shares=True)
    keep(kept, pool, "mine", [1, 2, 3], session=1)
    keep(kept, pool, "theirs", [4, 5, 6], session=2)
    kept.drop_session(1)
    assert len(kept) == 1
    assert pool.counts().cached == 1
    assert recall(kept, a_prompt("theirs", [4, 5, 6])) == FIRST


def test_the_number_is_bounded_and_the_oldest_go_first() -> None:
    pool = PagePool(8, PAGE)
    kept = KeptPrompts(pool, SALT, shares=True, bound=2)
    for n in range(3):
        keep(kept, pool, f"r{n}", [n, n, n])
    assert len(kept) == 2
    assert kept.recall(a_prompt("r0", [0, 0, 0])) is None
    assert pool.counts().cached == 2, "with it goes its page"


def test_no_more_private_keys_than_pages() -> None:
    pool = PagePool(6, PAGE)
    kept = KeptPrompts(pool, SALT, shares=False)
    for n in range(3):
        keep(kept, pool, f"r{n}", [n] * 10)
        assert kept.num_private_keys == 3 * min(n + 1, 2)
    assert kept.recall(a_prompt("r0", [0] * 10)) is None
    kept.drop("r1")
    assert kept.num_private_keys == 3


def test_a_newer_attempt_takes_the_older_ones_place() -> None:
    pool = PagePool(8, PAGE)
    kept = KeptPrompts(pool, SALT, shares=True)
    keep(kept, pool, "r", [1, 2, 3])
    pages = keep(kept, pool, "r", [1, 2, 3])
    assert pool.counts().cached == 1
    again = a_prompt("r", [1, 2, 3])
    recall(kept, again)
    assert again.pages == pages
