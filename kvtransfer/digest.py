"""Digests of extents: xxh3_64, taken when a page is sealed and checked before it is admitted.

They catch wrong bytes (a late write, a mixed-up page, a broken path), not an adversary: peers on the KV plane are
trusted code in one security domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from kvtransfer.extents import ArenaShape


def digest_bytes(view: memoryview | bytes | bytearray) -> int:
    """xxh3_64 of a contiguous buffer, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(view)


def digest_pages(arena: memoryview, shape: ArenaShape, layer: int, pages: Iterable[int]) -> tuple[int, ...]:
    """Digests of `pages` of one layer, in the order given.

    Args:
        arena: the whole arena as bytes (`memoryview.cast("B")`).
    """
    size = shape.extent_bytes
    offsets = (shape.offset(layer, page) for page in pages)
    return tuple(xxhash.xxh3_64_intdigest(arena[at : at + size]) for at in offsets)


def find_mismatches(
    arena: memoryview, shape: ArenaShape, pages: Sequence[int], digests: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], ...]:
    """Compare arrived pages with the digests of a commit.

    Args:
        pages: the receiver's pages, in the order of the grant.
        digests: `[layer][index into pages]`.

    Returns:
        `(layer, page)` of every extent whose bytes are not what its sender sealed.
    """
    return tuple(
        (layer, page)
        for layer, wanted in enumerate(digests)
        for page, expected, found in zip(pages, wanted, digest_pages(arena, shape, layer, pages), strict=True)
        if expected != found
    )
