"""Digests of extents, taken where they lie: xxh3_64 as a Triton kernel, the numbers that a CPU takes of these bytes.

The algorithm is XXH3's for more than 240 bytes, with its own secret and seed 0
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Eight sums of 64 bits go over an extent in stripes of
64 bytes, and are mixed after every 16th.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice

import torch
import triton
import triton.language as tl

from tandem.engine.arena import KVArena

_WORD = 8  # bytes
_SHORTEST = 241  # in bytes: what is shorter has other algorithms

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
#: The eight sums as they begin.
_FIRST_SUMS = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip
#: Where in the kernel's table lie the keys of a block's stripes (23 words), its mixing, the last stripe, and the end.
_MIX_KEYS, _LAST_KEYS, _END_KEYS, _SUMS = (tl.constexpr(at) for at in (24, 32, 40, 48))
_BLOCK_WORDS, _STRIPE_WORDS = tl.constexpr(128), tl.constexpr(8)


@triton.jit
def _add_stripes(  # type: ignore[no-untyped-def]  # Triton would look the types up
    sums, words, swapped, keys
):  # fmt: skip
    """`[stripe][8]` words and their keys, added to the eight sums; `swapped` are the words by pairs the other way."""
    keyed = words ^ keys
    return sums + tl.sum(swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32), 0)


@triton.jit(do_not_specialize_on_alignment=("extents", "digests"))  # type: ignore[untyped-decorator]
def _digest_kernel(  # type: ignore[no-untyped-def]
    arena, extents, table, digests, EXTENT_WORDS: tl.constexpr
):  # fmt: skip
    """The digest of one extent, which begins at a number of words in the arena."""
    extent = arena + tl.load(extents + tl.program_id(0))
    stripe, lane = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    at, swapped_at = stripe * _STRIPE_WORDS + lane, stripe * _STRIPE_WORDS + (lane ^ 1)
    lanes = tl.arange(0, 8)
    keys = tl.load(table + stripe + lane).to(tl.uint64, bitcast=True)
    mix_keys = tl.load(table + _MIX_KEYS + lanes).to(tl.uint64, bitcast=True)
    sums = tl.load(table + _SUMS + lanes).to(tl.uint64, bitcast=True)
    num_blocks: tl.constexpr = (EXTENT_WORDS * 8 - 1) // 1024
    for block in range(num_blocks):
        begin = extent + block * _BLOCK_WORDS
        words = tl.load(begin + at).to(tl.uint64, bitcast=True)
        swapped = tl.load(begin + swapped_at).to(tl.uint64, bitcast=True)
        sums = _add_stripes(sums, words, swapped, keys)
        sums = (sums ^ (sums >> 47) ^ mix_keys) * 0x9E3779B1
    # What remains in whole stripes, but for the last byte; and the last 64 bytes, which may overlap with these.
    rest = extent + num_blocks * _BLOCK_WORDS
    is_there = (stripe < (EXTENT_WORDS * 8 - 1 - num_blocks * 1024) // 64) & (lane >= 0)
    words = tl.load(rest + at, mask=is_there, other=0).to(tl.uint64, bitcast=True)
    swapped = tl.load(rest + swapped_at, mask=is_there, other=0).to(tl.uint64, bitcast=True)
    sums = _add_stripes(sums, tl.where(is_there, words, keys), swapped, keys)
    last = extent + (EXTENT_WORDS - _STRIPE_WORDS)
    words = tl.load(last + lane).to(tl.uint64, bitcast=True)
    swapped = tl.load(last + (lane ^ 1)).to(tl.uint64, bitcast=True)
    last_keys = tl.load(table + _LAST_KEYS + lane).to(tl.uint64, bitcast=True)
    sums = _add_stripes(sums, words, swapped, last_keys)
    # The sums by pairs, each multiplied into 128 bits and folded.
    end_keys = tl.load(table + _END_KEYS + lanes).to(tl.uint64, bitcast=True)
    even, odd = tl.split(tl.reshape(sums ^ end_keys, (4, 2)))
    folded = tl.sum((even * odd) ^ tl.umulhi(even, odd), 0)
    digest = folded + tl.full((), EXTENT_WORDS * 8, tl.uint64) * 0x9E3779B185EBCA87
    digest = (digest ^ (digest >> 37)) * 0x165667919E3779F9
    digest = digest ^ (digest >> 32)
    tl.store(digests + tl.program_id(0), digest.to(tl.int64, bitcast=True))


class DeviceDigests:
    """Takes the digests of an arena's extents on its device: one launch a call, and one copy of numbers to the host.

    It works on a stream of its own, so that it waits for no work of later layers. The extents that it is asked for are
    complete, whatever the caller's stream does.

    Raises:
        ValueError: the arena's extents are of a size that the kernel does not take; see `takes`.
    """

    def __init__(self, arena: KVArena) -> None:
        if not self.takes(arena):
            raise ValueError(
                f"extents of {arena.layout.extent_bytes} bytes: at least {_SHORTEST} in whole words are needed"
            )
        self._arena = arena
        self._words = arena.tensor.view(-1).view(torch.int64)
        self._table = torch.tensor(list(_table()), dtype=torch.int64, device=arena.device)
        self._stream = torch.cuda.Stream(arena.device, priority=-1) if arena.device.type == "cuda" else None

    @staticmethod
    def takes(arena: KVArena) -> bool:
        """Whether extents have whole words of 8 bytes, and enough of them."""
        return arena.layout.extent_bytes >= _SHORTEST and arena.layout.extent_bytes % _WORD == 0

    def __call__(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, ...]]:
        """Of each `(layer, pages)`, the digests of these pages in that layer, in their order."""
        extents = [self._arena.extent_offset(layer, page) // _WORD for layer, pages in parts for page in pages]
        if not extents:
            return [() for _ in parts]
        with self._on_stream():
            begins = torch.tensor(extents, dtype=torch.int64, device=self._arena.device)
            digests = torch.empty_like(begins)
            words = self._arena.layout.extent_bytes // _WORD
            _digest_kernel[(len(extents),)](self._words, begins, self._table, digests, EXTENT_WORDS=words, num_warps=1)
            found = iter(digests.cpu().numpy().view("u8").tolist())
        return [tuple(islice(found, len(pages))) for _, pages in parts]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:  # interpreted
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def _table() -> Iterator[int]:
    """The words that the kernel looks up, signed: a tensor has no others."""
    keys = (struct.unpack_from(f"<{num}Q", _SECRET, at) for num, at in ((24, 0), (8, 128), (8, 121), (8, 11)))
    for word in chain(*keys, _FIRST_SUMS):
        yield word - (1 << 64) if word >> 63 else word
