"""Tags of writes, and digests that are taken as they arrive: what is read when, and what counts in the end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from kvtransfer.protocol.arrivals import ArrivedDigests, ExtentRun, WriteTag
from kvtransfer.protocol.attempts import SealedExtents, UnpostedExtents, WrittenExtents

PAGES = (7, 3, 4)
RUNS = (ExtentRun(0, 0, 3), ExtentRun(1, 1, 2))


class Memory:
    """Two layers of pages; a digest is what stands there. Notes what was read."""

    def __init__(self) -> None:
        self.digests = {(layer, page): 100 * layer + page for layer in range(2) for page in PAGES}
        self.reads: list[tuple[int, int]] = []

    def take(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, ...]]:
        self.reads += [(layer, page) for layer, pages in parts for page in pages]
        return [tuple(self.digests[layer, page] for page in pages) for layer, pages in parts]

    @property
    def sealed(self) -> list[list[int]]:
        return [[100 * layer + page for page in PAGES] for layer in range(2)]


# ---- tags


def test_a_tag_comes_out_as_it_went_in() -> None:
    tag = WriteTag(2**40, 7, 2**33, RUNS)
    assert WriteTag.unpack(tag.pack()) == tag
    assert WriteTag.unpack(WriteTag(0, 0, 0, ()).pack()).runs == ()


def test_bytes_that_are_no_tag_are_refused_whatever_they_are() -> None:
    draw = random.Random(3)
    good = WriteTag(1, 2, 3, RUNS).pack()
    bad = [b"", b"x", good[:-1], good + b"x", good[:5], b"\xff" * len(good)]
    bad += [draw.randbytes(n) for n in range(200)]
    for tag in bad:
        with pytest.raises(ValueError, match="are no tag"):
            WriteTag.unpack(tag)


@pytest.mark.parametrize(
    "runs",
    [
        [ExtentRun(2, 0, 1)],
        [ExtentRun(0, 3, 1)],
        [ExtentRun(0, 0, 4)],
        [ExtentRun(0, 2**32 - 1, 2)],
        [ExtentRun(0, 0, 3)] * 3,  # more than there is to read
    ],
)
def test_what_is_not_of_the_grant_is_not_covered(runs: list[ExtentRun]) -> None:
    arrived = ArrivedDigests(PAGES, 2)
    assert arrived.covers(RUNS)
    assert not arrived.covers(runs)


# ---- digests


def test_what_has_arrived_is_read_once_and_the_rest_when_it_is_compared() -> None:
    memory, arrived = Memory(), ArrivedDigests(PAGES, 2)
    arrived.read(RUNS, memory.take)
    assert memory.reads == [(0, 7), (0, 3), (0, 4), (1, 3), (1, 4)]
    memory.reads.clear()
    assert arrived.find_mismatches(1, [row[1:] for row in memory.sealed], memory.take) == ()
    assert memory.reads == [], "a part is compared with numbers"
    assert arrived.find_mismatches(0, memory.sealed, memory.take) == ()
    assert memory.reads == [(1, 7)], "of that no write had told"


def test_a_number_that_was_taken_too_early_counts_for_nothing() -> None:
    memory, arrived = Memory(), ArrivedDigests(PAGES, 2)
    memory.digests[0, 3] = 0  # not written yet
    arrived.read(RUNS, memory.take)
    memory.digests[0, 3] = 3
    assert arrived.find_mismatches(0, memory.sealed, memory.take) == ()
    assert arrived.num_changed == 1


def test_a_write_that_comes_again_replaces_what_was_remembered() -> None:
    memory, arrived = Memory(), ArrivedDigests(PAGES, 2)
    arrived.read(RUNS, memory.take)
    memory.digests[1, 4] = 0
    arrived.read(RUNS, memory.take)
    assert arrived.find_mismatches(0, memory.sealed, memory.take) == ((1, 4),)


def test_where_one_extent_differs_all_are_read_again() -> None:
    memory, arrived = Memory(), ArrivedDigests(PAGES, 2)
    memory.digests[1, 4] = 0
    arrived.read((ExtentRun(0, 0, 3), ExtentRun(1, 0, 3)), memory.take)
    memory.digests[0, 7] = 0  # went wrong since, and no write has told
    assert arrived.find_mismatches(0, memory.sealed, memory.take) == ((0, 7), (1, 4))


def test_nothing_to_compare_is_nothing_wrong() -> None:
    assert ArrivedDigests((), 2).find_mismatches(0, ((), ()), Memory().take) == ()


# ---- batches


@pytest.mark.parametrize(
    ("num", "most", "least", "sizes"),
    [
        (0, 8, 2, []),
        (1, 8, 2, [1]),
        (3, 8, 2, [3]),
        (5, 8, 2, [2, 3]),
        (16, 8, 2, [8, 4, 2, 2]),
        (40, 8, 2, [8, 8, 8, 8, 4, 2, 2]),
        (9, 8, 2, [4, 2, 3]),
        (4, 1, 1, [1, 1, 1, 1]),
        (9, 4, 8, [4, 4, 1]),
    ],
)
def test_batches_carry_all_in_order_and_the_last_ones_are_small(
    num: int, most: int, least: int, sizes: list[int]
) -> None:
    layers = [ExtentRun(layer, 5, min(4, num - 4 * layer)) for layer in range(-(-num // 4))]
    unposted, batches = UnpostedExtents(layers), list[tuple[ExtentRun, ...]]()
    while unposted.num_extents:
        batches.append(unposted.cut(most, least))
    assert [sum(run.num_pages for run in batch) for batch in batches] == sizes
    assert [extent for batch in batches for extent in extents(batch)] == extents(layers)


def extents(runs: Iterable[ExtentRun]) -> list[tuple[int, int]]:
    return [(layer, first + n) for layer, first, num in runs for n in range(num)]


# ---- what is sealed and written


def test_only_what_is_new_is_sealed_and_a_gap_stays_one() -> None:
    sealed = SealedExtents(num_layers=3, num_pages=5)
    assert sealed.add(1, 1, (11, 12), ((1, 2),)) == [ExtentRun(1, 1, 2)]
    fresh = sealed.add(0, 0, (10, 11, 12, 13), ((5, 6, 7, 8), (0, 1, 2, 3)))
    assert fresh == [ExtentRun(0, 0, 4), ExtentRun(1, 0, 1), ExtentRun(1, 3, 1)]
    assert sealed.from_page(2) == [ExtentRun(0, 2, 2), ExtentRun(1, 2, 2)]
    assert sealed.local_pages(1, 2) == [11, 12]
    assert not sealed.is_complete
    assert sealed.add(2, 0, (10, 11, 12, 13), ((0,) * 4,)) == [ExtentRun(2, 0, 4)]
    sealed.add(0, 4, (14,), ((9,), (9,), (9,)))
    assert sealed.is_complete
    assert sealed.digests(2, 4) == ((7, 8), (2, 3), (0, 0))


@pytest.mark.parametrize(("pages", "digests"), [((11,), ((0,),)), ((12,), ((1,),)), ((11, 12), ((1,),))])
def test_what_was_sealed_with_other_contents_is_refused_and_changes_nothing(
    pages: tuple[int, ...], digests: tuple[tuple[int, ...], ...]
) -> None:
    sealed = SealedExtents(num_layers=1, num_pages=5)
    sealed.add(0, 1, (11,), ((1,),))
    with pytest.raises(ValueError, match="sealed before"):
        sealed.add(0, 1, pages, digests)
    assert sealed.from_page(0) == [ExtentRun(0, 1, 1)]
    assert sealed.digests(1, 2) == ((1,),)


def test_a_page_is_written_when_all_its_layers_are() -> None:
    written = WrittenExtents(num_layers=2, num_pages=4)
    written.add([ExtentRun(0, 0, 3), ExtentRun(1, 1, 2)])
    assert (written.end_of_run(0, 4), written.end_of_run(1, 4), written.end_of_run(1, 2)) == (0, 3, 2)
    assert written.missing(0, 4) == [(0, 3), (1, 0), (1, 3)]
    written.add([ExtentRun(1, 0, 2)])
    assert written.missing(0, 3) == []
