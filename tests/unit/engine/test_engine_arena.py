"""Every byte of the arena belongs to one extent, and the tensor and the bytes are the same memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tandem.core.errors import ConfigError
from tandem.engine.arena import KVArena
from tandem.engine.layout import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, dtype="float32")


def test_sizes() -> None:
    assert LAYOUT.extent_bytes == 2 * 4 * 2 * 8 * 4
    assert LAYOUT.page_bytes == 3 * LAYOUT.extent_bytes
    assert [LAYOUT.num_pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert KVLayout(3, 2, 8, 4, "bfloat16").extent_bytes == LAYOUT.extent_bytes // 2


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_layout_refuses_nothing_and_less(field: str) -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1} | {field: 0}
    with pytest.raises(ConfigError, match=field):
        KVLayout(dtype="float32", **sizes)


def test_layout_refuses_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="int4"):
        KVLayout(1, 1, 1, 1, "int4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_extents_tile_the_arena(dtype: str) -> None:
    layout = KVLayout(3, 2, 8, 4, dtype)
    arena = KVArena(layout, num_pages=5)
    owners = np.full(arena.num_bytes, -1)
    for layer in range(layout.num_layers):
        for page in range(arena.num_pages):
            begin = arena.extent_offset(layer, page)
            span = owners[begin : begin + layout.extent_bytes]
            assert (span == -1).all()
            span[:] = layer * arena.num_pages + page
    assert (owners >= 0).all()
    assert arena.num_bytes == 5 * layout.page_bytes


def test_extent_bytes_are_the_tensor() -> None:
    arena = KVArena(LAYOUT, num_pages=5)
    arena.tensor.copy_(torch.randn(arena.tensor.shape))
    for layer in range(LAYOUT.num_layers):
        for page in range(arena.num_pages):
            view = arena.extent_view(layer, page)
            assert view.nbytes == LAYOUT.extent_bytes
            assert not view.readonly
            assert bytes(view) == arena.tensor[layer, page].numpy().tobytes()
            address = arena.base_address + arena.extent_offset(layer, page)
            assert ctypes.string_at(address, view.nbytes) == bytes(view)
            assert address == arena.tensor[layer, page].data_ptr()
    written = np.arange(LAYOUT.extent_bytes // 4, dtype=np.float32)
    arena.extent_view(1, 2)[:] = written.tobytes()
    assert (arena.layer(1)[2].numpy().reshape(-1) == written).all()


def test_arena_begins_zeroed_and_aligned() -> None:
    arena = KVArena(LAYOUT, num_pages=5)
    assert arena.base_address % 4096 == 0
    assert not arena.tensor.any()


def test_keys_and_values_are_views() -> None:
    arena = KVArena(LAYOUT, num_pages=5)
    arena.keys(2)[3, 1] = 7
    arena.values(2)[3, 1] = 8
    assert (arena.tensor[2, 3, 0, 1] == 7).all()
    assert (arena.tensor[2, 3, 1, 1] == 8).all()
    assert int((arena.tensor != 0).sum()) == 2 * LAYOUT.num_kv_heads * LAYOUT.head_dim


def test_copy_page_copies_all_layers_and_nothing_else() -> None:
    arena = KVArena(LAYOUT, num_pages=5)
    arena.tensor.copy_(torch.randn(arena.tensor.shape))
    before = arena.tensor.clone()
    arena.copy_page(1, 4)
    assert torch.equal(arena.tensor[:, 4], before[:, 1])
    assert torch.equal(arena.tensor[:, :4], before[:, :4])


@pytest.mark.parametrize(("layer", "page"), [(-1, 0), (3, 0), (0, -1), (0, 5)])
def test_addresses_outside_are_refused(layer: int, page: int) -> None:
    arena = KVArena(LAYOUT, num_pages=5)
    with pytest.raises(IndexError):
        arena.extent_offset(layer, page)
    with pytest.raises(IndexError):
        arena.extent_view(layer, page)


def test_copy_page_refuses_pages_outside() -> None:
    arena = KVArena(LAYOUT, num_pages=5)
    for source, target in ((0, 5), (-1, 0)):
        with pytest.raises(IndexError):
            arena.copy_page(source, target)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        KVArena(LAYOUT, num_pages=0)
    with pytest.raises(ConfigError, match="cannot allocate"):
        KVArena(LAYOUT, num_pages=1 << 52)
