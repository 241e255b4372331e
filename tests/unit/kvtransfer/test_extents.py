"""Layouts, extents and digests."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from handoff_examples import LAYOUT
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.digest import digest_bytes, digests_of, read_from
from kvtransfer.extents import ArenaShape, Descriptor, PageArea, PageWrite, merge_extents
from kvtransfer.layout import KvFormat, LayoutId, check_compatible, differences, mismatch
from kvtransfer.wire import kv_format
from tandem.core.errors import IncompatibleError
from tandem.rpc.v1.common_pb2 import Layout, WorkerInfo

HERE = ArenaShape(num_layers=2, num_pages=8, extent_bytes=16)
THERE = ArenaShape(num_layers=2, num_pages=5, extent_bytes=16)


def test_neighbours_on_both_sides_become_one_descriptor() -> None:
    writes = [PageWrite(0, 2, 1), PageWrite(0, 3, 2), PageWrite(0, 4, 4), PageWrite(1, 2, 1)]
    assert merge_extents(writes, HERE, THERE) == [
        Descriptor(32, 16, 32),  # pages 2 and 3 to 1 and 2
        Descriptor(64, 64, 16),  # page 4 is no neighbour over there
        Descriptor(160, 96, 16),
    ]


def test_a_run_crosses_layers_where_both_arenas_allow_it() -> None:
    whole = [PageWrite(layer, page, page) for layer in range(2) for page in range(5)]
    assert merge_extents(whole, THERE, THERE) == [Descriptor(0, 0, THERE.num_bytes)]
    assert len(merge_extents(whole, HERE, THERE)) == 2


@pytest.mark.parametrize(
    ("writes", "local", "problem"),
    [
        ([PageWrite(0, 0, 0), PageWrite(0, 1, 0)], HERE, "same target"),
        ([PageWrite(0, 8, 0)], HERE, "no extent"),
        ([PageWrite(0, 0, 5)], HERE, "no extent"),
        ([PageWrite(2, 0, 0)], HERE, "no extent"),
        ([PageWrite(0, -1, 0)], HERE, "no extent"),
        ([PageWrite(0, 0, 0)], replace(HERE, extent_bytes=8), "extents differ"),
    ],
)
def test_writes_that_would_hit_other_pages_are_refused(
    writes: list[PageWrite], local: ArenaShape, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        merge_extents(writes, local, THERE)


PAIRS = st.integers(0, 5).flatmap(
    lambda n: st.tuples(st.permutations(range(8)), st.permutations(range(5))).map(
        lambda both: list(zip(both[0][:n], both[1][:n], strict=False))
    )
)


@pytest.mark.long
@given(PAIRS)
def test_merged_descriptors_move_exactly_the_extents_and_cannot_be_merged_further(
    pairs: list[tuple[int, int]],
) -> None:
    writes = [PageWrite(layer, here, there) for layer in range(2) for here, there in pairs]
    source = bytes(range(256))[: HERE.num_bytes]
    merged, plain = bytearray(THERE.num_bytes), bytearray(THERE.num_bytes)
    descriptors = merge_extents(writes, HERE, THERE)
    for d in descriptors:
        merged[d.remote_offset : d.remote_offset + d.num_bytes] = source[d.local_offset : d.local_offset + d.num_bytes]
    for w in writes:
        here, there = HERE.offset(w.layer, w.local_page), THERE.offset(w.layer, w.remote_page)
        plain[there : there + 16] = source[here : here + 16]
    assert merged == plain
    for a, b in pairwise(descriptors):
        assert (a.local_offset + a.num_bytes, a.remote_offset + a.num_bytes) != (b.local_offset, b.remote_offset)


@given(st.sets(st.integers(0, 4)), st.integers(-20, 170), st.integers(-5, 170))
def test_an_area_covers_what_lies_in_its_pages_in_any_layer(pages: set[int], offset: int, num_bytes: int) -> None:
    inside = {
        THERE.offset(layer, page) + byte for layer in range(THERE.num_layers) for page in pages for byte in range(16)
    }
    wanted = range(offset, offset + num_bytes)
    assert PageArea(pages, THERE).covers(offset, num_bytes) is (num_bytes > 0 and inside.issuperset(wanted))


def test_an_area_is_no_larger_in_many_layers() -> None:
    few, many = (PageArea(range(0, 4000, 2), ArenaShape(num_layers, 4000, 16)) for num_layers in (1, 80))
    assert len(pickle.dumps(many)) == len(pickle.dumps(few))
    assert many.covers(79 * 4000 * 16, 16)
    assert not many.covers(79 * 4000 * 16, 17)


@pytest.mark.parametrize("page", [-1, 5])
def test_an_area_outside_its_arena_is_refused(page: int) -> None:
    with pytest.raises(ValueError, match="no extent"):
        PageArea([0, page], THERE)


def test_different_layouts_are_named_with_both_sides_and_every_field() -> None:
    ours, other = KvFormat(LAYOUT, "ucx"), KvFormat(replace(LAYOUT, dtype="bfloat16", page_size=256), "ucx")
    check_compatible(ours, "prefill-0", KvFormat(LAYOUT, "ucx"), "decode-1")
    with pytest.raises(IncompatibleError) as caught:
        check_compatible(ours, "prefill-0", other, "decode-1")
    for part in ("prefill-0", "decode-1", "dtype", "'bfloat16'", "page_size", "256"):
        assert part in str(caught.value)
    assert "num_layers" not in str(caught.value)


def test_workers_on_another_transport_do_not_pair() -> None:
    ours, other = KvFormat(LAYOUT, "ucx"), KvFormat(LAYOUT, "nccl")
    assert mismatch(ours, "prefill-0", other, "decode-1") == ["transport: prefill-0 has 'ucx', decode-1 has 'nccl'"]
    with pytest.raises(IncompatibleError, match="transport: prefill-0 has 'ucx', decode-1 has 'nccl'"):
        check_compatible(ours, "prefill-0", other, "decode-1")


def test_what_a_worker_says_of_its_pages_has_every_field_of_the_wire() -> None:
    assert [f.name for f in fields(LayoutId)] == [f.name for f in Layout.DESCRIPTOR.fields]
    info = WorkerInfo(worker_id="x", transport="ucx", num_pages=5, version="1", layout=Layout(page_size=32))
    other = WorkerInfo(worker_id="y", transport="nccl", num_pages=7, version="2", layout=Layout(dtype="float32"))
    assert mismatch(kv_format(info), "x", kv_format(other), "y") == [
        "dtype: x has '', y has 'float32'",
        "page_size: x has 32, y has 0",
        "transport: x has 'ucx', y has 'nccl'",
    ]
    assert kv_format(info) == kv_format(WorkerInfo(transport="ucx", layout=Layout(page_size=32)))


@pytest.mark.parametrize("field", [f.name for f in fields(LayoutId)])
def test_every_field_of_a_layout_counts(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = replace(LAYOUT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert differences(LAYOUT, other) == [field]


def test_an_extent_is_k_and_v_of_one_page() -> None:
    assert LAYOUT.extent_bytes == 2 * 4 * 1 * 2 * 4
    assert replace(LAYOUT, dtype="bfloat16").extent_bytes == LAYOUT.extent_bytes // 2
    assert replace(LAYOUT, dtype="int8").extent_bytes == LAYOUT.extent_bytes // 4 + 2 * 4 * 1 * 4  # with scales
    with pytest.raises(IncompatibleError, match="int3"):
        _ = replace(LAYOUT, dtype="int3").extent_bytes


def test_digests_are_xxh3_64_of_one_extent_each() -> None:
    assert digest_bytes(b"") == 0x2D06800538D394C2  # the published test vector of the empty input
    arena = bytearray(range(THERE.num_bytes % 256)) + bytearray(THERE.num_bytes - THERE.num_bytes % 256)
    read = read_from(memoryview(arena), THERE)
    pages = (4, 1)
    take = digests_of(read)
    digests = take([(0, pages), (1, pages)])
    assert digests[1][1] == digest_bytes(arena[THERE.offset(1, 1) : THERE.offset(1, 2)])
    arena[THERE.offset(1, 4) + 15] ^= 1  # its last byte
    arena[THERE.offset(1, 3)] ^= 1  # another page
    assert take([(0, pages)]) == digests[:1]
    (found,) = take([(1, pages)])
    assert found[0] != digests[1][0]
    assert found[1] == digests[1][1]
