"""Digests that are taken on a GPU: the numbers that the CPU takes of the same bytes."""

from __future__ import annotations

import pytest
import torch

from kvtransfer.digest import digest_bytes
from tandem.engine.arena import KVArena
from tandem.engine.layout import KVLayout


def _arena(device: torch.device, page_size: int, head_dim: int, dtype: str, num_pages: int = 5) -> KVArena:
    """Random bytes, the same on each device."""
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype)
    arena = KVArena(layout, num_pages, device)
    random = torch.Generator().manual_seed(page_size * head_dim)
    content = torch.randint(0, 256, (arena.num_bytes,), dtype=torch.uint8, generator=random)
    arena.tensor.view(-1).view(torch.uint8).copy_(content)
    return arena


# By bytes of an extent: without whole blocks; whose last stripe is the last of a block, and not; pages as they are, and
# those with scales behind their heads.
SHAPES = {
    "256": (4, 8, "float32"), "320": (5, 8, "float32"), "1024": (16, 8, "float32"), "1152": (9, 16, "float32"),
    "2112": (33, 8, "bfloat16"), "8": (16, 64, "bfloat16"), "scaled": (16, 64, "int8"),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_digests_are_those_of_the_host(triton_device: torch.device, shape: tuple[int, int, str]) -> None:
    from tandem.engine.cuda.digests import DeviceDigests

    arena = _arena(triton_device, *shape)
    take = DeviceDigests(arena)
    parts = [(2, (4, 0, 1)), (0, ()), (1, (3,))]
    found = take(parts)
    assert found == [tuple(digest_bytes(arena.extent_view(layer, page)) for page in pages) for layer, pages in parts]
    assert max(found[0]) > 2**63 or max(found[2]) > 2**63 or min(found[0]) > 0
    before = found[0]
    arena.tensor.view(-1).view(torch.uint8)[arena.extent_offset(2, 1) - 1] ^= 1  # the last byte of page 0
    assert [a == b for a, b in zip(before, take(parts)[0], strict=True)] == [True, False, True]


def test_a_call_for_nothing_launches_nothing(triton_device: torch.device) -> None:
    from tandem.engine.cuda.digests import DeviceDigests

    assert DeviceDigests(_arena(triton_device, 16, 64, "bfloat16"))([(0, ()), (1, [])]) == [(), ()]


@pytest.mark.parametrize("page_size", [1, 3])
def test_extents_that_the_kernel_does_not_take_are_refused(triton_device: torch.device, page_size: int) -> None:
    from tandem.engine.cuda.digests import DeviceDigests

    arena = _arena(triton_device, page_size, 3, "bfloat16")
    assert not DeviceDigests.takes(arena)
    with pytest.raises(ValueError, match="whole words"):
        DeviceDigests(arena)
