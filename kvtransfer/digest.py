"""Digests of extents: xxh3_64, taken when a page is sealed and checked before it is admitted.

They catch wrong bytes (a late write, a mixed-up page, a broken path), not an adversary: peers on the KV plane are
trusted code in one security domain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from kvtransfer.extents import ArenaShape, TakeDigests

#: (layer, page) → the bytes of that extent, in host memory: a view, or a copy of what lies in a device's memory.
ReadExtent = Callable[[int, int], memoryview]


def digest_bytes(view: memoryview | bytes | bytearray) -> int:
    """xxh3_64 of a contiguous buffer, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(view)


def read_from(arena: memoryview, shape: ArenaShape) -> ReadExtent:
    """Read extents from host memory, without a copy; `arena` is all of it as bytes."""

    def read(layer: int, page: int) -> memoryview:
        at = shape.offset(layer, page)
        return arena[at : at + shape.extent_bytes]

    return read


def digests_of(read: ReadExtent) -> TakeDigests:
    """Take digests of what `read` reads, one extent after another."""

    def take(parts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, ...]]:
        return [tuple(digest_bytes(read(layer, page)) for page in pages) for layer, pages in parts]

    return take


def no_digests(parts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, ...]]:
    """For pages that nobody checks: their layout says so (`LayoutId.digest`), and both ends of a handoff have one."""
    return [(0,) * len(pages) for _, pages in parts]
